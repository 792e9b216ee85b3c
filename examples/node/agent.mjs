// A voice agent on Node's `ws` that echoes the caller, for calls of every provider. It has no
// code for the router. Usage: node agent.mjs PORT
import { WebSocketServer } from 'ws';

// jambonz offers this subprotocol and expects the agent to choose it.
const JAMBONZ = 'audio.jambonz.org';

// The agent's form of the caller's audio, as each provider defines it.
function played(message) {
  const media = { payload: message.media.payload };
  if (message.streamSid) return { event: 'media', streamSid: message.streamSid, media }; // Twilio, SignalWire
  if (message.stream_sid) return { event: 'media', stream_sid: message.stream_sid, media }; // Exotel
  if (message.streamId) { // Plivo
    return { event: 'playAudio', media: { contentType: 'audio/x-mulaw', sampleRate: 8000, ...media } };
  }
  return { event: 'media', media }; // Telnyx
}

const server = new WebSocketServer({
  host: '127.0.0.1',
  port: Number(process.argv[2]),
  handleProtocols: (offered) => (offered.has(JAMBONZ) ? JAMBONZ : false),
});

server.on('connection', (socket, request) => {
  console.log('call', request.headers['x-call-sid']);
  socket.on('message', (data, isBinary) => {
    if (isBinary) return socket.send(data); // Vonage, jambonz: the audio itself
    const message = JSON.parse(data);
    if (message.event === 'media') socket.send(JSON.stringify(played(message)));
  });
  socket.on('error', (error) => console.error(error.message));
});
