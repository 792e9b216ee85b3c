"""A Pipecat bot that echoes the caller, for calls of Twilio, SignalWire, Plivo, Exotel and Telnyx.

It needs no account, and has no code for the router. In a real bot, speech recognition, a language
model and speech synthesis take the place of Echo. Usage: python bot.py PORT
"""

import sys

import uvicorn
from fastapi import FastAPI, WebSocket
from pipecat.frames.frames import Frame, InputAudioRawFrame, OutputAudioRawFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.runner.utils import parse_telephony_websocket
from pipecat.serializers.exotel import ExotelFrameSerializer
from pipecat.serializers.plivo import PlivoFrameSerializer
from pipecat.serializers.telnyx import TelnyxFrameSerializer
from pipecat.serializers.twilio import TwilioFrameSerializer
from pipecat.transports.websocket.fastapi import FastAPIWebsocketParams, FastAPIWebsocketTransport
from pipecat.workers.runner import WorkerRunner

app = FastAPI()


class Echo(FrameProcessor):
    """Plays the caller's audio back."""

    async def process_frame(self, frame: Frame, direction: FrameDirection):
        await super().process_frame(frame, direction)
        if isinstance(frame, InputAudioRawFrame):
            frame = OutputAudioRawFrame(frame.audio, frame.sample_rate, frame.num_channels)
        await self.push_frame(frame, direction)


def serializer_for(provider: str, call):
    """The messages of the provider. Without credentials the bot cannot hang up by the provider's
    API; it hangs up by closing the WebSocket."""
    match provider:
        case "twilio":
            params = TwilioFrameSerializer.InputParams(auto_hang_up=False)
            return TwilioFrameSerializer(call["stream_id"], call["call_id"], params=params)
        case "plivo":
            params = PlivoFrameSerializer.InputParams(auto_hang_up=False)
            return PlivoFrameSerializer(call["stream_id"], call["call_id"], params=params)
        case "telnyx":
            params = TelnyxFrameSerializer.InputParams(auto_hang_up=False)
            return TelnyxFrameSerializer(call["stream_id"], "PCMU", "PCMU", call["call_id"], params=params)
        case "exotel":
            return ExotelFrameSerializer(call["stream_id"], call["call_id"])
        case _:
            raise ValueError(f"no serializer for {provider}")


@app.websocket("/{path:path}")
async def converse(websocket: WebSocket):
    await websocket.accept()
    provider, call = await parse_telephony_websocket(websocket)
    transport = FastAPIWebsocketTransport(
        websocket,
        FastAPIWebsocketParams(
            audio_in_enabled=True, audio_out_enabled=True, serializer=serializer_for(provider, call)
        ),
    )
    worker = PipelineWorker(
        Pipeline([transport.input(), Echo(), transport.output()]),
        params=PipelineParams(audio_in_sample_rate=8000, audio_out_sample_rate=8000),
        enable_rtvi=False,
    )

    @transport.event_handler("on_client_disconnected")
    async def hang_up(transport, websocket):
        await worker.cancel()

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await runner.run()


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))
