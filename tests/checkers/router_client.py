"""Checks examples/router_client.py with a router. Usage: router_client.py, with the settings of
the module, and CALLS=two calls on this pod."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import router_client as router  # noqa: E402

first, second = os.environ["CALLS"].split(",")
assert router.renew([first, second]) == []
assert router.renew([first, "CAunknown"]) == ["CAunknown"]
assert router.release(first) is True
assert router.release(first) is False, "released twice"
assert router.renew([first, second]) == [first]
assert router.drain(1) is False, "the second call is left"
assert router.release(second) is True
assert router.drain(1) is True
router.TOKEN = "wrong"
try:
    router.release(second)
    raise AssertionError("a wrong token was accepted")
except router.HTTPError as error:
    assert error.code == 401, error
