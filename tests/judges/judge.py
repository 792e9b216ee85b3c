"""Twilio's and Plivo's own SDKs sign requests to a running router and build the
documents it should answer. Usage: judge.py HOST:PORT SEED"""

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

dice = random.Random(SEED)
calls = 0
checks = {"accepted": 0, "refused": 0, "documents": 0}


def send(method, target, body, headers):
    connection = http.client.HTTPConnection(ADDRESS, timeout=5)
    connection.request(method, target, body=body, headers=headers)
    response = connection.getresponse()
    answer = (response.status, response.read().decode(), response.getheader("content-type"))
    connection.close()
    return answer


def expect(status, method, target, body, headers):
    answer = send(method, target, body, headers)
    if answer[0] != status or (status == 403 and answer[1]):
        raise SystemExit(f"seed {SEED}: expected {status}, got {answer}: {method} {target} {body!r} {headers}")
    checks["accepted" if status == 200 else "refused"] += 1
    return answer


def word(alphabet=string.ascii_letters + string.digits + "_.-", longest=10):
    return "".join(dice.choice(alphabet) for _ in range(dice.randint(1, longest)))


ANY = string.printable + "äßéñ中文العربية🙂\u202e\x00\x1b  &=+%"


def params(field):
    global calls
    calls += 1
    found = {word(): word(ANY, 20) for _ in range(dice.randint(0, 8))}
    # As Twilio and Plivo name calls.
    formats = {"CallSid": f"CA{SEED:016x}{calls:016x}", "CallUUID": f"{SEED:08x}-0000-4000-8000-{calls:012x}"}
    found[field] = formats[field]
    return found


def change(text):
    """One character exchanged for another of its kind."""
    places = [at for at, char in enumerate(text) if char.isalnum() and char.isascii()]
    at = dice.choice(places)
    others = [c for c in string.ascii_letters + string.digits if c != text[at]]
    # Percent-encoding is the same in small and in capital letters.
    if at and "%" in text[max(0, at - 2) : at]:
        others = [c for c in "0123456789" if c != text[at]]
    return text[:at] + dice.choice(others) + text[at + 1 :]


def refused_when_changed(method, target, body, headers, signature):
    path, _, query = target.partition("?")
    expect(403, method, f"{path}?{query}&x=1", body, headers)
    if query:
        expect(403, method, f"{path}?{change(query)}", body, headers)
    if body and method == "POST":
        expect(403, method, target, change(body), headers)
        expect(403, method, target, body + "&x=1", headers)
    given = headers[signature]
    expect(403, method, target, body, {**headers, signature: change(given)})
    expect(403, method, target, body, {**headers, signature: given[:-2]})
    expect(403, method, target, body, {name: value for name, value in headers.items() if name != signature})


def same_document(ours, theirs):
    strip = lambda text: ElementTree.canonicalize(text)
    if strip(ours) != strip(theirs):
        raise SystemExit(f"seed {SEED}: our document\n{ours}\nis not the SDK's\n{theirs}")
    checks["documents"] += 1


def url_in(document):
    for element in ElementTree.fromstring(document).iter("Stream"):
        return element.get("url") or element.text
    raise SystemExit(f"no stream in {document}")


def redirect_in(document, path):
    url = ElementTree.fromstring(document).findtext("Redirect")
    if not url or not url.startswith(f"{PUBLIC}/api/v1/{path}"):
        raise SystemExit(f"no way back in {document}")
    return url


class Many(dict):
    """A form in which a name may stand more than once, as Flask shows it."""

    def getlist(self, name):
        return self[name]


def twilio():
    token = dice.choice(TWILIO_TOKENS)
    validator = RequestValidator(token)
    sent = params("CallSid")
    query = dice.choice(["", "?merchant_id=acme&flow=v2&template=hello", "?" + urlencode({word(): word(ANY)})])
    kind = dice.choice(["form", "repeated", "get", "port"])
    target = "/api/v1/twilio/allocate" + query
    url = PUBLIC + target
    headers = {"Content-Type": FORM}
    if kind == "get":
        target += ("&" if query else "?") + urlencode(sent)
        headers["X-Twilio-Signature"] = validator.compute_signature(PUBLIC + target, {})
        method, body = "GET", None
    elif kind == "repeated":
        several = Many({name: [value, value, value + "2"] for name, value in sent.items()})
        several["CallSid"] = [sent["CallSid"]]
        headers["X-Twilio-Signature"] = validator.compute_signature(url, several)
        method, body = "POST", urlencode([(n, v) for n, values in several.items() for v in values])
    else:
        signed = url.replace(PUBLIC, PUBLIC + ":443") if kind == "port" else url
        headers["X-Twilio-Signature"] = validator.compute_signature(signed, sent)
        method, body = "POST", urlencode(sent)
        assert validator.validate(url, sent, headers["X-Twilio-Signature"])
    _, document, content_type = expect(200, method, target, body, headers)
    assert content_type.startswith("text/xml"), content_type
    wanted = VoiceResponse()
    connect = Connect()
    pod = url_in(document).split("/ws/pod/")[1].split("/")[0]
    status = f"{PUBLIC}/api/v1/twilio/stream-status?pod_name={pod}&attempt=1"
    connect.append(Stream(url=url_in(document), status_callback=status, status_callback_method="POST"))
    wanted.append(connect)
    wanted.redirect(redirect_in(document, "twilio/after-stream?"), method="POST")
    same_document(document, str(wanted))
    refused_when_changed(method, target, body, headers, "X-Twilio-Signature")
    # The end of the call, in JSON: the hash of the body stands in the URL.
    body = '{"CallSid": "%s", "CallStatus": "completed", "x": "ä"}' % sent["CallSid"]
    target = "/api/v1/twilio/call-status?bodySHA256=" + validator.compute_hash(body)
    signature = validator.compute_signature(PUBLIC + target, {})
    assert validator.validate(PUBLIC + target, body, signature)
    headers = {"Content-Type": "application/json", "X-Twilio-Signature": signature}
    expect(403, "POST", target, change(body).encode(), headers)
    expect(200, "POST", target, body.encode(), headers)


def plivo():
    sent = params("CallUUID")
    nonce = word(string.digits, 20)
    query = dice.choice(["", "?merchant_id=acme&template=hello", "?" + urlencode({"b": "x y", "a": word(string.printable.strip() + " ")})])
    method = dice.choice(["GET", "POST", "POST", "EMPTY"])
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
    name = dice.choice(["X-Plivo-Signature-V3", "X-Plivo-Signature-Ma-V3"])
    headers[name] = signature if dice.random() < 0.5 else f"{'A' * 43}=,{signature}"
    _, document, content_type = expect(200, real, target, body, headers)
    assert content_type.startswith("text/xml"), content_type
    pod = url_in(document).split("/ws/pod/")[1].split("/")[0]
    wanted = plivoxml.ResponseElement().add(
        plivoxml.StreamElement(
            content=url_in(document),
            bidirectional=True,
            keepCallAlive=True,
            contentType="audio/x-mulaw;rate=8000",
            statusCallbackUrl=f"{PUBLIC}/api/v1/plivo/stream-status?pod_name={pod}&attempt=1",
            statusCallbackMethod="POST",
        )
    )
    wanted.add(plivoxml.RedirectElement(redirect_in(document, "plivo/after-stream?"), method="POST"))
    same_document(document, wanted.to_string(pretty=False))
    headers[name] = signature
    refused_when_changed(real, target, body, headers, name)
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
    """A call for which there is no pod: what it hears, and that it can come back."""
    sent = params("CallSid")
    document = signed_twilio("/api/v1/twilio/allocate?merchant_id=nobody", sent)
    back = redirect_in(document, "twilio/allocate?waiting_since=")
    wanted = VoiceResponse()
    wanted.say(BUSY)
    wanted.redirect(back, method="POST")
    same_document(document, str(wanted))
    document = signed_twilio(back.removeprefix(PUBLIC), sent)
    wanted = VoiceResponse()
    wanted.pause(length=5)
    wanted.redirect(redirect_in(document, "twilio/allocate?waiting_since="), method="POST")
    same_document(document, str(wanted))
    signed_twilio("/api/v1/twilio/call-status", {**sent, "CallStatus": "completed"})

    sent = params("CallUUID")
    document = signed_plivo("/api/v1/plivo/allocate?merchant_id=nobody", sent)
    back = redirect_in(document, "plivo/allocate?waiting_since=")
    wanted = plivoxml.ResponseElement().add(plivoxml.SpeakElement(BUSY))
    wanted.add(plivoxml.RedirectElement(back, method="POST"))
    same_document(document, wanted.to_string(pretty=False))
    document = signed_plivo(back.removeprefix(PUBLIC), sent)
    wanted = plivoxml.ResponseElement().add(plivoxml.WaitElement(length=5))
    wanted.add(plivoxml.RedirectElement(redirect_in(document, "plivo/allocate?waiting_since="), method="POST"))
    same_document(document, wanted.to_string(pretty=False))
    signed_plivo("/api/v1/plivo/call-status", {**sent, "HangupCause": "NORMAL_CLEARING"})


def coming_back():
    """A call that its provider ended is hung up on when it comes back."""
    sent = params("CallSid")
    document = signed_twilio("/api/v1/twilio/allocate", sent)
    back = redirect_in(document, "twilio/after-stream?").removeprefix(PUBLIC)
    signed_twilio("/api/v1/twilio/call-status", {**sent, "CallStatus": "completed"})
    wanted = VoiceResponse()
    wanted.hangup()
    same_document(signed_twilio(back, sent), str(wanted))


for _ in range(ROUNDS):
    twilio()
    plivo()
    waiting()
    coming_back()
print(f"seed {SEED}: {checks}")
