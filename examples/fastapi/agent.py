"""A voice agent on FastAPI that echoes the caller, for calls of every provider.

It has no code for the router. Usage: python agent.py PORT
"""

import json
import sys

import uvicorn
from fastapi import FastAPI, WebSocket

# jambonz offers this subprotocol and expects the agent to choose it.
JAMBONZ = "audio.jambonz.org"
app = FastAPI()


def played(message: dict) -> dict:
    """The agent's form of the caller's audio, as each provider defines it."""
    media = {"payload": message["media"]["payload"]}
    if "streamSid" in message:  # Twilio, SignalWire
        return {"event": "media", "streamSid": message["streamSid"], "media": media}
    if "stream_sid" in message:  # Exotel
        return {"event": "media", "stream_sid": message["stream_sid"], "media": media}
    if "streamId" in message:  # Plivo
        return {"event": "playAudio", "media": {"contentType": "audio/x-mulaw", "sampleRate": 8000, **media}}
    return {"event": "media", "media": media}  # Telnyx


@app.websocket("/{path:path}")
async def converse(socket: WebSocket):
    await socket.accept(JAMBONZ if JAMBONZ in socket.scope["subprotocols"] else None)
    print("call", socket.headers.get("x-call-sid"), flush=True)
    while (message := await socket.receive())["type"] != "websocket.disconnect":
        if message.get("bytes"):  # Vonage, jambonz: the audio itself
            await socket.send_bytes(message["bytes"])
        elif (text := json.loads(message["text"])).get("event") == "media":
            await socket.send_json(played(text))


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))
