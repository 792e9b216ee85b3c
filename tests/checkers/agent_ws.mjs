// A voice agent on Node's `ws`, without any code for the router. Usage: agent_ws.mjs PORT, with
// CHECKERS=directory of the packages. Echoes audio, describes its request in a first message,
// and ends the call on a key press.
import { createRequire } from 'node:module';

const require = createRequire(process.env.CHECKERS + '/');
const { WebSocketServer } = require('ws');

const SUBPROTOCOL = 'audio.jambonz.org';
const server = new WebSocketServer({
  host: '127.0.0.1',
  port: Number(process.argv[2]),
  handleProtocols: (offered) => (offered.has(SUBPROTOCOL) ? SUBPROTOCOL : false),
});

server.on('connection', (socket, request) => {
  const raw = request.rawHeaders;
  const headers = raw.flatMap((name, at) => (at % 2 === 0 ? [[name, raw[at + 1]]] : []));
  socket.send(JSON.stringify({ event: 'request', path: request.url, headers }));
  socket.on('message', (data, isBinary) => {
    const event = isBinary ? 'media' : JSON.parse(data).event;
    if (event === 'dtmf') socket.close(1000);
    if (event === 'media') socket.send(data, { binary: isBinary });
  });
  socket.on('error', () => {});
});

process.on('SIGTERM', () => {
  for (const socket of server.clients) socket.close(1001);
  server.close();
});
