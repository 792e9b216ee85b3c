"""Runs the cases of Autobahn's test suite against an echo agent, through the media gateway or
directly. Usage: autobahn_cases.py URL [CASE...]. URL is that of a router (http://…), which
allocates a call for every case, or of an echo server (ws://…). A CASE such as 6 or 6.4 selects
all cases below it; without any, every case except the compression cases (12, 13) runs. Prints the
verdicts other than OK and exits with an error if a case fails.

The suite is written for Python 2.7, which Debian no longer has. Only its driver needs it: the
cases, with expectations and verdicts, run on Python 3 after the changes in `Python2Cases`, and
the current autobahn package carries their frames."""

import asyncio
import binascii
import builtins
import collections
import importlib.abc
import importlib.metadata
import importlib.util
import json
import pathlib
import re
import sys
import types
import urllib.parse
import urllib.request

from autobahn.asyncio.websocket import WebSocketClientFactory, WebSocketClientProtocol
from autobahn.websocket.protocol import WebSocketProtocol

# asyncio rounds the delay of 10 µs between the parts of a chopped frame up to a millisecond.
WebSocketProtocol._QUEUED_WRITE_DELAY = 0

ACCEPTABLE = {"OK", "NON-STRICT", "INFORMATIONAL"}
# The cases have time limits of one second, which a busy machine may exceed. A case that fails
# is repeated; a violation of the protocol fails every time.
ATTEMPTS = 3
CASE_TIMEOUT = 120


def encoded(text):
    """Python 2's strings are bytes. The cases' strings map to bytes one to one."""
    return text.encode("latin-1") if isinstance(text, str) else text


class Python2Cases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the modules of the suite's directory `case` as Python 2 does."""

    # Case 9.9.1 is not part of the suite's list and needs Twisted. Compression is not offered.
    STUBS = {
        "case9_9_1": {},
        "case12_x_x": {
            "Case12_X_X": [],
            "Case12_X_X_CaseSubCategories": {},
            "Case13_X_X": [],
            "Case13_X_X_CaseSubCategories": {},
        },
    }

    REPLACEMENTS = {
        "(object, Case, )": "(Case, )",
        "len(self.payload) / ": "len(self.payload) // ",
        "v.validate(vss[:i])": "v.validate(vss[:i].encode('latin-1'))",
    }

    def __init__(self):
        suite = importlib.util.find_spec("autobahntestsuite").submodule_search_locations[0]
        self.directory = pathlib.Path(suite) / "case"
        builtins.xrange, builtins.unichr = range, chr
        b2a_hex = binascii.b2a_hex
        binascii.b2a_hex = lambda data, *rest: b2a_hex(encoded(data), *rest)

    def find_spec(self, name, path=None, target=None):
        file = self.directory / f"{name}.py"
        if name in self.STUBS or file.exists():
            return importlib.util.spec_from_file_location(name, file, loader=self)
        return None

    def exec_module(self, module):
        if module.__name__ in self.STUBS:
            vars(module).update(self.STUBS[module.__name__])
        else:
            self.execute(self.directory / f"{module.__name__}.py", module)

    def execute(self, file, module):
        # Decoded as Latin-1, a string literal has the bytes of the file, as in Python 2.
        source = file.read_text(encoding="latin-1")
        source = re.sub(r"^( *)print (.*)$", r"\1print(\2)", source, flags=re.MULTILINE)
        for old, new in self.REPLACEMENTS.items():
            source = source.replace(old, new)
        exec(compile(source, str(file), "exec"), vars(module))

    def load(self):
        """The case classes by id (`1.1.1`), in the suite's order."""
        package = types.ModuleType("cases")
        self.execute(self.directory / "__init__.py", package)
        # The suite compares pickles, which depend on the identity of equal strings.
        package.Case.compare = lambda case, left, right: left == right
        return {case.__name__[len("Case") :].replace("_", "."): case for case in package.Cases}


class CaseProtocol(WebSocketClientProtocol):
    """The functions of the suite's protocol that its cases use."""

    def __init__(self, case_class, ended):
        super().__init__()
        self.connectionWasOpen = False
        self.createWirelog = False
        self.txFrameStats = collections.Counter()
        self.ended = ended
        self.case = case_class(self)

    def enableWirelog(self, enable):
        pass

    def after(self, delay, action, *arguments):
        def act():
            if self.state != self.STATE_CLOSED:
                action(*arguments)

        self.factory.loop.call_later(delay, act)

    def continueLater(self, delay, action, tag=None):
        self.after(delay, action)

    def killAfter(self, delay):
        self.after(delay, self._fail_connection)

    def closeAfter(self, delay):
        self.after(delay, self.sendClose)

    def sendFrame(self, opcode, payload=b"", **options):
        super().sendFrame(opcode, encoded(payload), **options)

    def sendMessage(self, payload, *arguments, **options):
        super().sendMessage(encoded(payload), *arguments, **options)

    def sendMessageFrameData(self, payload, sync=False):
        return super().sendMessageFrameData(encoded(payload), sync)

    def sendCloseFrame(self, code=None, reasonUtf8=None, isReply=False):
        super().sendCloseFrame(code, encoded(reasonUtf8), isReply)

    def logTxFrame(self, header, *_):
        self.txFrameStats[header.opcode] += 1

    def logRxFrame(self, *_):
        pass

    def onOpen(self):
        self.connectionWasOpen = True
        self.case.onOpen()

    def onMessage(self, payload, isBinary):
        self.case.onMessage(payload.decode("latin-1"), isBinary)

    def onPing(self, payload):
        self.case.onPing(payload.decode("latin-1"))

    def onPong(self, payload):
        self.case.onPong(payload.decode("latin-1"))

    def onClose(self, wasClean, code, reason):
        self.case.onClose(wasClean, code, reason)

    def connection_lost(self, reason):
        super().connection_lost(reason)
        self.case.onConnectionLost(self.failedByMe)
        self.ended.set_result(None)


def stream_url(target, call):
    """The URL of a stream: that of a new call if `target` is a router."""
    if target.startswith("ws"):
        return target
    request = urllib.request.Request(
        f"{target}/api/v1/allocate",
        json.dumps({"call_sid": call}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["ws_url"]


async def run(case_class, url):
    """Runs a case; returns its verdicts on behaviour and close, and their explanation."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    factory = WebSocketClientFactory(url, loop=loop)
    # autobahn rounds the time for a close down to whole seconds, the suite's one second to none.
    factory.setProtocolOptions(failByDrop=False, openHandshakeTimeout=10, closeHandshakeTimeout=2)
    factory.logFrames = True
    factory.protocol = lambda: CaseProtocol(case_class, ended)
    address = urllib.parse.urlsplit(url)
    _, protocol = await loop.create_connection(factory, address.hostname, address.port)
    await asyncio.wait_for(ended, CASE_TIMEOUT)
    case = protocol.case
    closed = f"closed with {protocol.remoteCloseCode} {protocol.remoteCloseReason or ''}"
    explanation = f"{case.result} {case.resultClose}; {closed}; received {str(case.received)[:200]}"
    return case.behavior, case.behaviorClose, explanation


async def main(target, selected):
    cases = Python2Cases()
    sys.meta_path.insert(0, cases)
    verdicts, failed = collections.defaultdict(list), []
    for number, case_class in cases.load().items():
        if selected and not any(f"{number}.".startswith(f"{part}.") for part in selected):
            continue
        for attempt in range(1, ATTEMPTS + 1):
            url = stream_url(target, f"CA-{number}-{attempt}")
            behavior, close, explanation = await run(case_class, url)
            if {behavior, close} <= ACCEPTABLE:
                break
            print(f"{number}, attempt {attempt}: {behavior}, close {close}: {explanation}")
        else:
            failed.append(number)
        verdicts[behavior].append(number)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("autobahntestsuite", "autobahn")]
    counts = ", ".join(f"{len(numbers)} {verdict}" for verdict, numbers in verdicts.items())
    print(f"{', '.join(versions)}: {counts}")
    for verdict, numbers in verdicts.items():
        if verdict != "OK":
            print(f"{verdict}: {' '.join(numbers)}")
    if failed or not verdicts["OK"]:
        raise SystemExit(f"failed: {' '.join(failed) or 'no case ran'}")


asyncio.run(main(sys.argv[1], sys.argv[2:]))
