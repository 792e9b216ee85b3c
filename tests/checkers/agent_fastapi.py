"""A voice agent on FastAPI and uvicorn, without any code for the router. Usage:
agent_fastapi.py PORT. Echoes audio, describes its request in a first message, and ends the call
on a key press. At shutdown, uvicorn closes its connections with 1012."""

import json
import sys

import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

SUBPROTOCOL = "audio.jambonz.org"
app = FastAPI()


@app.websocket("/{path:path}")
async def converse(socket: WebSocket):
    await socket.accept(SUBPROTOCOL if SUBPROTOCOL in socket.scope["subprotocols"] else None)
    query = f"?{socket.url.query}" if socket.url.query else ""
    await socket.send_json({"event": "request", "path": socket.url.path + query, "headers": socket.headers.items()})
    try:
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text, binary = message.get("text"), message.get("bytes")
            if text is not None and json.loads(text)["event"] == "dtmf":
                return await socket.close(1000)
            if text is not None and json.loads(text)["event"] == "media":
                await socket.send_text(text)
            if binary is not None:
                await socket.send_bytes(binary)
    except WebSocketDisconnect:
        pass


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
