"""Optional requests of an agent to the router; copy what you need. README.md has the details."""

import json
import os
from urllib.error import HTTPError
from urllib.request import Request, urlopen

URL = os.environ.get("SMART_ROUTER_URL", "http://localhost:8080")
TOKEN = os.environ.get("SMART_ROUTER_TOKEN")
POD = os.environ.get("POD_NAME")


def post(path: str, body: dict, timeout: float = 5) -> dict:
    """Sends a request; raises HTTPError for a refusal, OSError if no router responds."""
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {TOKEN}"} if TOKEN else {}
    request = Request(f"{URL}/api/v1/{path}", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=timeout) as response:
        return json.load(response)


def renew(calls: list[str]) -> list[str]:
    """Extends the leases of this pod's calls. Returns the calls that are over."""
    return post("renew", {"pod_name": POD, "call_sids": calls})["unknown"]


def release(call: str) -> bool:
    """Ends a call on this pod. False if it is over already."""
    try:
        return post("release", {"call_sid": call, "pod_name": POD})["success"]
    except HTTPError as error:
        if error.code == 404:
            return False
        raise


def drain(seconds: int = 300) -> bool:
    """Takes this pod out of service and waits for its calls. False if calls are left."""
    return post("drain", {"pod_name": POD, "wait": f"{seconds}s"}, timeout=seconds + 5)["drained"]
