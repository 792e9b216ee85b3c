"""Signs requests to a running router with the SDKs of Twilio and Plivo, and compares its
documents with those of the SDKs. Usage: provider_sdks.py HOST:PORT SEED"""

import http.client
import random
import string
import sys
import xml.etree.ElementTree as ElementTree
from urllib.parse import urlencode

import plivo.utils.signature_v3 as plivo_v3
from plivo import plivoxml
from twilio.request_validator import RequestValidator
from twilio.twiml.voice_response import Connect, Stream, VoiceResponse

ADDRESS, SEED = sys.argv[1], int(sys.argv[2])
PUBLIC = "https://router.example.com"
TWILIO_TOKENS = ["old-token", "new-token"]
PLIVO_TOKEN = "plivo-token"
FORM = "application/x-www-form-urlencoded"
ROUNDS = 60

rng = random.Random(SEED)
calls = 0
checks = {"accepted": 0, "refused": 0, "documents": 0}


def send(method, target, body, headers):
    connection = http.client.HTTPConnection(ADDRESS, timeout=5)
    connection.request(method, target, body=body, headers=headers)
    response = connection.getresponse()
    result = (response.status, response.read().decode(), response.getheader("content-type"))
    connection.close()
    return result


def expect(status, method, target, body, headers):
    response = send(method, target, body, headers)
    if response[0] != status or (status == 403 and response[1]):
        raise SystemExit(f"seed {SEED}: expected {status}, got {response}: {method} {target} {body!r} {headers}")
    checks["accepted" if status == 200 else "refused"] += 1
    return response


def word(alphabet=string.ascii_letters + string.digits + "_.-", max_length=10):
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, max_length)))


ANY_TEXT = string.printable + "äßéñ中文العربية🙂\u202e\x00\x1b  &=+%"


def params(field):
    global calls
    calls += 1
    found = {word(): word(ANY_TEXT, 20) for _ in range(rng.randint(0, 8))}
    # The call id formats of Twilio and Plivo.
    formats = {"CallSid": f"CA{SEED:016x}{calls:016x}", "CallUUID": f"{SEED:08x}-0000-4000-8000-{calls:012x}"}
    found[field] = formats[field]
    return found


def alter(text):
    """Replaces one random alphanumeric character."""
    positions = [at for at, char in enumerate(text) if char.isalnum() and char.isascii()]
    at = rng.choice(positions)
    others = [c for c in string.ascii_letters + string.digits if c != text[at]]
    # Percent-encoding is case-insensitive, so its digits are replaced by digits.
    if at and "%" in text[max(0, at - 2) : at]:
        others = [c for c in "0123456789" if c != text[at]]
    return text[:at] + rng.choice(others) + text[at + 1 :]


def expect_refused_if_altered(method, target, body, headers, signature):
    path, _, query = target.partition("?")
    expect(403, method, f"{path}?{query}&x=1", body, headers)
    if query:
        expect(403, method, f"{path}?{alter(query)}", body, headers)
    if body and method == "POST":
        expect(403, method, target, alter(body), headers)
        expect(403, method, target, body + "&x=1", headers)
    given = headers[signature]
    expect(403, method, target, body, {**headers, signature: alter(given)})
    expect(403, method, target, body, {**headers, signature: given[:-2]})
    expect(403, method, target, body, {name: value for name, value in headers.items() if name != signature})


def expect_same_document(actual, expected):
    canonicalize = lambda text: ElementTree.canonicalize(text)
    if canonicalize(actual) != canonicalize(expected):
        raise SystemExit(f"seed {SEED}: the document\n{actual}\ndiffers from the SDK's\n{expected}")
    checks["documents"] += 1


def url_in(document):
    for element in ElementTree.fromstring(document).iter("Stream"):
        return element.get("url") or element.text
    raise SystemExit(f"no stream in {document}")


def redirect_in(document, path):
    url = ElementTree.fromstring(document).findtext("Redirect")
    if not url or not url.startswith(f"{PUBLIC}/api/v1/{path}"):
        raise SystemExit(f"no redirect in {document}")
    return url


class MultiDict(dict):
    """A form with repeated names, in the style of Flask."""

    def getlist(self, name):
        return self[name]


def twilio():
    token = rng.choice(TWILIO_TOKENS)
    validator = RequestValidator(token)
    sent = params("CallSid")
    query = rng.choice(["", "?merchant_id=acme&flow=v2&template=hello", "?" + urlencode({word(): word(ANY_TEXT)})])
    kind = rng.choice(["form", "repeated", "get", "port"])
    target = "/api/v1/twilio/allocate" + query
    url = PUBLIC + target
    headers = {"Content-Type": FORM}
    if kind == "get":
        target += ("&" if query else "?") + urlencode(sent)
        headers["X-Twilio-Signature"] = validator.compute_signature(PUBLIC + target, {})
        method, body = "GET", None
    elif kind == "repeated":
        repeated = MultiDict({name: [value, value, value + "2"] for name, value in sent.items()})
        repeated["CallSid"] = [sent["CallSid"]]
        headers["X-Twilio-Signature"] = validator.compute_signature(url, repeated)
        method, body = "POST", urlencode([(n, v) for n, values in repeated.items() for v in values])
    else:
        signed = url.replace(PUBLIC, PUBLIC + ":443") if kind == "port" else url
        headers["X-Twilio-Signature"] = validator.compute_signature(signed, sent)
        method, body = "POST", urlencode(sent)
        assert validator.validate(url, sent, headers["X-Twilio-Signature"])
    _, document, content_type = expect(200, method, target, body, headers)
    assert content_type.startswith("text/xml"), content_type
    expected = VoiceResponse()
    connect = Connect()
    pod = url_in(document).split("/ws/pod/")[1].split("/")[0]
    status = f"{PUBLIC}/api/v1/twilio/stream-status?pod_name={pod}&attempt=1"
    connect.append(Stream(url=url_in(document), status_callback=status, status_callback_method="POST"))
    expected.append(connect)
    expected.redirect(redirect_in(document, "twilio/after-stream?"), method="POST")
    expect_same_document(document, str(expected))
    expect_refused_if_altered(method, target, body, headers, "X-Twilio-Signature")
    # The end of the call in JSON: the URL contains the hash of the body.
    body = '{"CallSid": "%s", "CallStatus": "completed", "x": "ä"}' % sent["CallSid"]
    target = "/api/v1/twilio/call-status?bodySHA256=" + validator.compute_hash(body)
    signature = validator.compute_signature(PUBLIC + target, {})
    assert validator.validate(PUBLIC + target, body, signature)
    headers = {"Content-Type": "application/json", "X-Twilio-Signature": signature}
    expect(403, "POST", target, alter(body).encode(), headers)
    expect(200, "POST", target, body.encode(), headers)


def plivo():
    sent = params("CallUUID")
    nonce = word(string.digits, 20)
    query = rng.choice(["", "?merchant_id=acme&template=hello", "?" + urlencode({"b": "x y", "a": word(string.printable.strip() + " ")})])
    method = rng.choice(["GET", "POST", "POST", "EMPTY"])
    target, body, form = "/api/v1/plivo/allocate" + query, None, {}
    headers = {"Content-Type": FORM, "X-Plivo-Signature-V3-Nonce": nonce}
    if method == "POST":
        body, form = urlencode(sent), dict(sent)
    else:
        ascii_only = {name: value for name, value in sent.items() if value.isascii()}
        target += ("&" if query else "?") + urlencode(ascii_only)
    real = "GET" if method == "GET" else "POST"
    url = PUBLIC + target
    base = (
        plivo_v3.construct_get_url(url, {}).decode()
        if real == "GET"
        else plivo_v3.construct_post_url(url, form).decode()
    )
    signature = plivo_v3.get_signature_v3(PLIVO_TOKEN, base, nonce).decode()
    assert plivo_v3.validate_v3_signature(real, url, nonce, PLIVO_TOKEN, signature, dict(form))
    name = rng.choice(["X-Plivo-Signature-V3", "X-Plivo-Signature-Ma-V3"])
    headers[name] = signature if rng.random() < 0.5 else f"{'A' * 43}=,{signature}"
    _, document, content_type = expect(200, real, target, body, headers)
    assert content_type.startswith("text/xml"), content_type
    pod = url_in(document).split("/ws/pod/")[1].split("/")[0]
    expected = plivoxml.ResponseElement().add(
        plivoxml.StreamElement(
            content=url_in(document),
            bidirectional=True,
            keepCallAlive=True,
            contentType="audio/x-mulaw;rate=8000",
            statusCallbackUrl=f"{PUBLIC}/api/v1/plivo/stream-status?pod_name={pod}&attempt=1",
            statusCallbackMethod="POST",
        )
    )
    expected.add(plivoxml.RedirectElement(redirect_in(document, "plivo/after-stream?"), method="POST"))
    expect_same_document(document, expected.to_string(pretty=False))
    headers[name] = signature
    expect_refused_if_altered(real, target, body, headers, name)
    form = {"CallUUID": sent["CallUUID"], "HangupCause": "NORMAL_CLEARING"}
    target = "/api/v1/plivo/call-status"
    base = plivo_v3.construct_post_url(PUBLIC + target, form).decode()
    headers = {
        "Content-Type": FORM,
        "X-Plivo-Signature-V3-Nonce": nonce,
        "X-Plivo-Signature-V3": plivo_v3.get_signature_v3(PLIVO_TOKEN, base, nonce).decode(),
    }
    expect(200, "POST", target, urlencode(form), headers)


BUSY = "All agents are busy. Please stay on the line."


def signed_twilio(target, sent):
    signature = RequestValidator(TWILIO_TOKENS[0]).compute_signature(PUBLIC + target, sent)
    headers = {"Content-Type": FORM, "X-Twilio-Signature": signature}
    return expect(200, "POST", target, urlencode(sent), headers)[1]


def signed_plivo(target, sent):
    nonce = word(string.digits, 20)
    base = plivo_v3.construct_post_url(PUBLIC + target, sent).decode()
    headers = {
        "Content-Type": FORM,
        "X-Plivo-Signature-V3-Nonce": nonce,
        "X-Plivo-Signature-V3": plivo_v3.get_signature_v3(PLIVO_TOKEN, base, nonce).decode(),
    }
    return expect(200, "POST", target, urlencode(sent), headers)[1]


def waiting():
    """A waiting call: its hold documents and their redirects."""
    sent = params("CallSid")
    document = signed_twilio("/api/v1/twilio/allocate?merchant_id=empty", sent)
    redirect = redirect_in(document, "twilio/allocate?waiting_since=")
    expected = VoiceResponse()
    expected.say(BUSY)
    expected.redirect(redirect, method="POST")
    expect_same_document(document, str(expected))
    document = signed_twilio(redirect.removeprefix(PUBLIC), sent)
    expected = VoiceResponse()
    expected.pause(length=5)
    expected.redirect(redirect_in(document, "twilio/allocate?waiting_since="), method="POST")
    expect_same_document(document, str(expected))
    signed_twilio("/api/v1/twilio/call-status", {**sent, "CallStatus": "completed"})

    sent = params("CallUUID")
    document = signed_plivo("/api/v1/plivo/allocate?merchant_id=empty", sent)
    redirect = redirect_in(document, "plivo/allocate?waiting_since=")
    expected = plivoxml.ResponseElement().add(plivoxml.SpeakElement(BUSY))
    expected.add(plivoxml.RedirectElement(redirect, method="POST"))
    expect_same_document(document, expected.to_string(pretty=False))
    document = signed_plivo(redirect.removeprefix(PUBLIC), sent)
    expected = plivoxml.ResponseElement().add(plivoxml.WaitElement(length=5))
    expected.add(plivoxml.RedirectElement(redirect_in(document, "plivo/allocate?waiting_since="), method="POST"))
    expect_same_document(document, expected.to_string(pretty=False))
    signed_plivo("/api/v1/plivo/call-status", {**sent, "HangupCause": "NORMAL_CLEARING"})


def after_stream():
    """An ended call is hung up after its stream."""
    sent = params("CallSid")
    document = signed_twilio("/api/v1/twilio/allocate", sent)
    redirect = redirect_in(document, "twilio/after-stream?").removeprefix(PUBLIC)
    signed_twilio("/api/v1/twilio/call-status", {**sent, "CallStatus": "completed"})
    expected = VoiceResponse()
    expected.hangup()
    expect_same_document(signed_twilio(redirect, sent), str(expected))


for _ in range(ROUNDS):
    twilio()
    plivo()
    waiting()
    after_stream()
print(f"seed {SEED}: {checks}")
