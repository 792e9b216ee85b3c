// A strict WebSocket echo server without limits, for Autobahn's test suite. Usage: echo.mjs PORT,
// with CHECKERS=directory of the packages.
import { createRequire } from 'node:module';

const require = createRequire(process.env.CHECKERS + '/');
const { WebSocketServer } = require('ws');

const server = new WebSocketServer({
  host: '127.0.0.1',
  port: Number(process.argv[2]),
  maxPayload: 0,
  maxFragments: 0,
  maxBufferedChunks: 0,
});
server.on('connection', (socket) => {
  socket.on('message', (data, isBinary) => socket.send(data, { binary: isBinary }));
  // `ws` reports violations here and closes the connection with the matching code.
  socket.on('error', () => {});
});
