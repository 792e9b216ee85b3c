// Compares the signature checks of a running router with those of the SDKs of Telnyx, Vonage and
// SignalWire. Usage: provider_sdks.mjs HOST:PORT SEED, with CHECKERS=directory of the SDKs.
import crypto from 'node:crypto';
import http from 'node:http';
import { createRequire } from 'node:module';

const [address, seed] = process.argv.slice(2);
const require = createRequire(process.env.CHECKERS + '/');
const { TelnyxWebhook } = require('telnyx/lib/webhooks');
const { verifySignature } = require('@vonage/jwt');
const jsonwebtoken = createRequire(require.resolve('@vonage/jwt'))('jsonwebtoken');
const { RestClient } = require('@signalwire/compatibility-api');
const [host, port] = address.split(':');
const PUBLIC = 'https://router.example.com';
let [accepted, refused, calls] = [0, 0, 0];

function send(method, path, headers, body) {
  return new Promise((resolve, reject) => {
    const request = http.request({ host, port, method, path, headers }, (response) => {
      let text = '';
      response.on('data', (chunk) => (text += chunk));
      response.on('end', () => resolve({ status: response.statusCode, text }));
    });
    request.on('error', reject);
    request.end(body);
  });
}

async function expectSame(isValid, method, path, headers, body) {
  const { status, text } = await send(method, path, headers, body);
  if (status !== (isValid ? 200 : 403) || (!isValid && text)) {
    throw new Error(`the SDK returns ${isValid}, the router ${status} ${text}: ${method} ${path} ${JSON.stringify(headers)} ${body}`);
  }
  if (isValid) accepted += 1;
  else refused += 1;
}

const altered = (text, at) => text.slice(0, at) + (text[at] === 'x' ? 'y' : 'x') + text.slice(at + 1);
const positions = (text) => [0, 1, text.length >> 1, text.length - 2, text.length - 1].filter((at) => at >= 0);

// The call id format of Vonage and SignalWire.
const uuid = `00000000-0000-4000-8000-${String(seed).padStart(12, "0")}`;

async function telnyx() {
  const pkcs8 = Buffer.concat([Buffer.from('302e020100300506032b657004220420', 'hex'), Buffer.alloc(32, 7)]);
  const key = crypto.createPrivateKey({ key: pkcs8, format: 'der', type: 'pkcs8' });
  const publicKey = crypto.createPublicKey(key).export({ format: 'der', type: 'spki' }).subarray(-32);
  const validator = new TelnyxWebhook(publicKey.toString('base64'));
  const form = 'application/x-www-form-urlencoded';
  const path = '/api/v1/telnyx/allocate?merchant_id=acme';
  async function compare(at, body, signature) {
    const headers = { 'telnyx-timestamp': String(at), 'telnyx-signature-ed25519': signature };
    const isValid = await validator.verify(body, headers).then(() => true, () => false);
    await expectSame(isValid, 'POST', path, { ...headers, 'content-type': form }, body);
    return isValid;
  }
  const now = Math.floor(Date.now() / 1000);
  const sign = (at, body) => crypto.sign(null, Buffer.from(`${at}|${body}`), key).toString('base64');
  const body = `CallSid=v3%3A${seed}-t&From=%2B1&x=%C3%A4`;
  if (!(await compare(now, body, sign(now, body)))) throw new Error('the SDK rejects a correct signature');
  for (const at of [now - 290, now + 290]) await compare(at, body, sign(at, body));
  for (const at of [now - 310, now + 310, '', 'x', '-1', '1e9']) await compare(at, body, sign(at, body));
  for (const at of positions(body)) await compare(now, altered(body, at), sign(now, body));
  for (const at of positions(sign(now, body))) await compare(now, body, altered(sign(now, body), at));
  await compare(now, body, sign(now, body).slice(0, -4));
  await compare(now, body, '');
}

async function vonage() {
  const path = '/api/v1/vonage/call-status';
  async function compare(token, body) {
    let isValid = false;
    try {
      isValid = verifySignature(token, 'vonage-secret');
      const { payload_hash } = JSON.parse(Buffer.from(token.split('.')[1], 'base64url'));
      isValid &&= crypto.createHash('sha256').update(body).digest('hex') === payload_hash;
    } catch {
      isValid = false;
    }
    await expectSame(isValid, 'POST', path, { authorization: `Bearer ${token}`, 'content-type': 'application/json' }, body);
    return isValid;
  }
  const body = JSON.stringify({ uuid, status: 'completed' });
  const payload_hash = crypto.createHash('sha256').update(body).digest('hex');
  const claims = { jti: crypto.randomUUID(), iss: 'Vonage', payload_hash, api_key: 'a1', application_id: 'b2' };
  const token = jsonwebtoken.sign(claims, 'vonage-secret', { algorithm: 'HS256' });
  if (!(await compare(token, body))) throw new Error('the SDK rejects a correct signature');
  for (const at of positions(body)) await compare(token, altered(body, at));
  for (const at of [40, 80, token.length - 20]) await compare(altered(token, at), body);
  await compare(jsonwebtoken.sign(claims, 'other-secret'), body);
  await compare(jsonwebtoken.sign({ ...claims, exp: 1 }, 'vonage-secret'), body);
}

async function signalwire() {
  const validate = (signature, url, params) => RestClient.validateRequest('signalwire-key', signature, url, params);
  async function compare(path, params, signature) {
    const isValid = validate(signature, PUBLIC + path, params);
    const body = new URLSearchParams(params).toString();
    const headers = { 'x-signalwire-signature': signature, 'content-type': 'application/x-www-form-urlencoded' };
    await expectSame(isValid, 'POST', path, headers, body);
    return isValid;
  }
  const params = { CallSid: uuid, From: '+1 2', CallStatus: 'completed' };
  const path = '/api/v1/signalwire/call-status?merchant_id=acme';
  const text = PUBLIC + path + Object.keys(params).sort().map((name) => name + params[name]).join('');
  const signature = crypto.createHmac('sha1', 'signalwire-key').update(text).digest('base64');
  if (!(await compare(path, params, signature))) throw new Error('the SDK rejects a correct signature');
  await compare(path + '2', params, signature);
  await compare(path, { ...params, From: '+1 3' }, signature);
  for (const at of positions(signature)) await compare(path, params, altered(signature, at));
}

await telnyx();
await vonage();
await signalwire();
console.log(`seed ${seed}: accepted ${accepted}, refused ${refused}`);
