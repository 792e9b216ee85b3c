"""A voice agent on Python's `websockets`, without any code for the router. Usage:
agent_websockets.py PORT. Echoes audio, describes its request in a first message, and ends the
call on a key press."""

import asyncio
import json
import signal
import sys

from websockets.asyncio.server import serve

SUBPROTOCOL = "audio.jambonz.org"


async def converse(socket):
    request = socket.request
    await socket.send(json.dumps({"event": "request", "path": request.path, "headers": list(request.headers.raw_items())}))
    async for message in socket:
        if isinstance(message, str) and json.loads(message)["event"] == "dtmf":
            return await socket.close(1000)
        if isinstance(message, bytes) or json.loads(message)["event"] == "media":
            await socket.send(message)


def choose(socket, offered):
    return SUBPROTOCOL if SUBPROTOCOL in offered else None


async def main(port):
    async with serve(converse, "127.0.0.1", port, select_subprotocol=choose) as server:
        # At shutdown, `websockets` closes its connections with 1001.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.close)
        await server.wait_closed()


asyncio.run(main(int(sys.argv[1])))
