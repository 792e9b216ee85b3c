// The SDKs of Telnyx, Vonage and SignalWire say what is genuine; a running router
// must agree. Usage: judge.mjs HOST:PORT SEED, with NODE_PATH to the SDKs.
import crypto from 'node:crypto';
import http from 'node:http';
import { createRequire } from 'node:module';

const [address, seed] = process.argv.slice(2);
const require = createRequire(process.env.JUDGES + '/');
const { TelnyxWebhook } = require('telnyx/lib/webhooks');
const { verifySignature } = require('@vonage/jwt');
const jsonwebtoken = createRequire(require.resolve('@vonage/jwt'))('jsonwebtoken');
const { RestClient } = require('@signalwire/compatibility-api');
const [host, port] = address.split(':');
const PUBLIC = 'https://router.example.com';
let [accepted, refused, calls] = [0, 0, 0];

function send(method, path, headers, body) {
  return new Promise((done, failed) => {
    const request = http.request({ host, port, method, path, headers }, (response) => {
      let text = '';
      response.on('data', (some) => (text += some));
      response.on('end', () => done({ status: response.statusCode, text }));
    });
    request.on('error', failed);
    request.end(body);
  });
}

async function agree(isGenuine, method, path, headers, body) {
  const { status, text } = await send(method, path, headers, body);
  if (status !== (isGenuine ? 200 : 403) || (!isGenuine && text)) {
    throw new Error(`the SDK says ${isGenuine}, the router ${status} ${text}: ${method} ${path} ${JSON.stringify(headers)} ${body}`);
  }
  if (isGenuine) accepted += 1;
  else refused += 1;
}

const changed = (text, at) => text.slice(0, at) + (text[at] === 'x' ? 'y' : 'x') + text.slice(at + 1);
const some = (text) => [0, 1, text.length >> 1, text.length - 2, text.length - 1].filter((at) => at >= 0);

// As Vonage and SignalWire name calls.
const uuid = `00000000-0000-4000-8000-${String(seed).padStart(12, "0")}`;

async function telnyx() {
  const pkcs8 = Buffer.concat([Buffer.from('302e020100300506032b657004220420', 'hex'), Buffer.alloc(32, 7)]);
  const key = crypto.createPrivateKey({ key: pkcs8, format: 'der', type: 'pkcs8' });
  const publicKey = crypto.createPublicKey(key).export({ format: 'der', type: 'spki' }).subarray(-32);
  const judge = new TelnyxWebhook(publicKey.toString('base64'));
  const form = 'application/x-www-form-urlencoded';
  const path = '/api/v1/telnyx/allocate?merchant_id=acme';
  async function tell(at, body, signature) {
    const headers = { 'telnyx-timestamp': String(at), 'telnyx-signature-ed25519': signature };
    const isGenuine = await judge.verify(body, headers).then(() => true, () => false);
    await agree(isGenuine, 'POST', path, { ...headers, 'content-type': form }, body);
    return isGenuine;
  }
  const now = Math.floor(Date.now() / 1000);
  const sign = (at, body) => crypto.sign(null, Buffer.from(`${at}|${body}`), key).toString('base64');
  const body = `CallSid=v3%3A${seed}-t&From=%2B1&x=%C3%A4`;
  if (!(await tell(now, body, sign(now, body)))) throw new Error('what we sign is not genuine');
  for (const at of [now - 290, now + 290]) await tell(at, body, sign(at, body));
  for (const at of [now - 310, now + 310, '', 'x', '-1', '1e9']) await tell(at, body, sign(at, body));
  for (const at of some(body)) await tell(now, changed(body, at), sign(now, body));
  for (const at of some(sign(now, body))) await tell(now, body, changed(sign(now, body), at));
  await tell(now, body, sign(now, body).slice(0, -4));
  await tell(now, body, '');
}

async function vonage() {
  const path = '/api/v1/vonage/call-status';
  async function tell(token, body) {
    let isGenuine = false;
    try {
      isGenuine = verifySignature(token, 'vonage-secret');
      const { payload_hash } = JSON.parse(Buffer.from(token.split('.')[1], 'base64url'));
      isGenuine &&= crypto.createHash('sha256').update(body).digest('hex') === payload_hash;
    } catch {
      isGenuine = false;
    }
    await agree(isGenuine, 'POST', path, { authorization: `Bearer ${token}`, 'content-type': 'application/json' }, body);
    return isGenuine;
  }
  const body = JSON.stringify({ uuid, status: 'completed' });
  const payload_hash = crypto.createHash('sha256').update(body).digest('hex');
  const claims = { jti: crypto.randomUUID(), iss: 'Vonage', payload_hash, api_key: 'a1', application_id: 'b2' };
  const token = jsonwebtoken.sign(claims, 'vonage-secret', { algorithm: 'HS256' });
  if (!(await tell(token, body))) throw new Error('what we sign is not genuine');
  for (const at of some(body)) await tell(token, changed(body, at));
  for (const at of [40, 80, token.length - 20]) await tell(changed(token, at), body);
  await tell(jsonwebtoken.sign(claims, 'other-secret'), body);
  await tell(jsonwebtoken.sign({ ...claims, exp: 1 }, 'vonage-secret'), body);
}

async function signalwire() {
  const judge = (signature, url, params) => RestClient.validateRequest('signalwire-key', signature, url, params);
  async function tell(path, params, signature) {
    const isGenuine = judge(signature, PUBLIC + path, params);
    const body = new URLSearchParams(params).toString();
    const headers = { 'x-signalwire-signature': signature, 'content-type': 'application/x-www-form-urlencoded' };
    await agree(isGenuine, 'POST', path, headers, body);
    return isGenuine;
  }
  const params = { CallSid: uuid, From: '+1 2', CallStatus: 'completed' };
  const path = '/api/v1/signalwire/call-status?merchant_id=acme';
  const text = PUBLIC + path + Object.keys(params).sort().map((name) => name + params[name]).join('');
  const signature = crypto.createHmac('sha1', 'signalwire-key').update(text).digest('base64');
  if (!(await tell(path, params, signature))) throw new Error('what we sign is not genuine');
  await tell(path + '2', params, signature);
  await tell(path, { ...params, From: '+1 3' }, signature);
  for (const at of some(signature)) await tell(path, params, changed(signature, at));
}

await telnyx();
await vonage();
await signalwire();
console.log(`seed ${seed}: accepted ${accepted}, refused ${refused}`);
