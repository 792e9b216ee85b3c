//! Replay protection: a signed webhook sent again, by its provider or by an attacker.

use std::time::Duration;

use data_encoding::{BASE64, HEXLOWER};
use serde_json::json;

use crate::signatures::{sha1, sha256};
use testkit::{
    HttpResponse, Router, eventually,
    provider::{CallDocument, PUBLIC_URL, pod_of},
    proxy::FaultProxy,
    redis::RedisServer,
    scratch,
};

/// The beginning of every stream URL.
const STREAM_URL: &str = "wss://r.example/media/";
const SECOND: Duration = Duration::from_secs(1);
const TOKEN: &str = "twilio-token";
const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");
const SETTINGS: [(&str, &str); 7] = [
    ("PUBLIC_URL", PUBLIC_URL),
    ("TWILIO_AUTH_TOKEN", TOKEN),
    ("SIGNALWIRE_AUTH_TOKEN", "signalwire-key"),
    ("PLIVO_AUTH_TOKEN", "plivo-token"),
    ("VONAGE_SIGNATURE_SECRET", "vonage-secret"),
    ("JAMBONZ_WEBHOOK_SECRET", "jambonz-secret"),
    ("LOG_LEVEL", "off"),
];

fn each_store(extra: &[(&str, &str)], test: impl Fn(&Router)) {
    testkit::each_store(&[&SETTINGS, extra].concat(), test);
}

fn sid(number: u32) -> String {
    format!("CA{number:032x}")
}

fn uuid(number: u32) -> String {
    format!("{number:08x}-1f5c-4f0f-9a3e-0c4a0b6d2e11")
}

/// A webhook signed like the provider does, which can be sent any number of times.
#[derive(Debug, Clone)]
struct SignedWebhook {
    path: String,
    headers: Vec<(&'static str, String)>,
    body: String,
}

impl SignedWebhook {
    fn twilio(path: &str, params: &[(&str, &str)]) -> Self {
        Self::like_twilio("x-twilio-signature", TOKEN, path, params)
    }

    fn like_twilio(header: &'static str, key: &str, path: &str, params: &[(&str, &str)]) -> Self {
        let mut sorted = params.to_vec();
        sorted.sort_unstable();
        let text: String = sorted.iter().map(|(name, value)| format!("{name}{value}")).collect();
        let signature = sha1(key, &format!("{PUBLIC_URL}{path}{text}"));
        let headers = vec![(FORM.0, FORM.1.to_owned()), (header, signature)];
        Self { path: path.into(), headers, body: form(params) }
    }

    fn plivo(path: &str, call: &str, nonce: &str) -> Self {
        let text = format!("{PUBLIC_URL}{path}?CallUUID{call}.{nonce}");
        let signature = BASE64.encode(&sha256("plivo-token", &text));
        let headers = vec![
            (FORM.0, FORM.1.to_owned()),
            ("x-plivo-signature-v3", signature),
            ("x-plivo-signature-v3-nonce", nonce.to_owned()),
        ];
        Self { path: path.into(), headers, body: format!("CallUUID={call}") }
    }

    fn jambonz(path: &str, body: &str) -> Self {
        let seconds = testkit::redis::unix_millis() / 1_000;
        let tag = HEXLOWER.encode(&sha256("jambonz-secret", &format!("{seconds}.{body}")));
        let headers = vec![
            ("content-type", "application/json".to_owned()),
            ("jambonz-signature", format!("t={seconds},v1={tag}")),
        ];
        Self { path: path.into(), headers, body: body.into() }
    }

    /// A GET with a token that covers only its time and its own id.
    fn vonage(path: &str, id: &str) -> Self {
        let seconds = testkit::redis::unix_millis() / 1_000;
        let part = |text: String| data_encoding::BASE64URL_NOPAD.encode(text.as_bytes());
        let claims = format!(r#"{{"iat":{seconds},"jti":"{id}"}}"#);
        let signed = format!("{}.{}", part(r#"{"alg":"HS256"}"#.into()), part(claims));
        let tag = data_encoding::BASE64URL_NOPAD.encode(&sha256("vonage-secret", &signed));
        let headers = vec![("authorization", format!("Bearer {signed}.{tag}"))];
        Self { path: path.into(), headers, body: String::new() }
    }

    fn send(&self, router: &Router) -> HttpResponse {
        let headers: Vec<(&str, &str)> =
            self.headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let method = if self.body.is_empty() { "GET" } else { "POST" };
        let response = router.connect().send(method, &self.path, &headers, self.body.as_bytes());
        assert_eq!(response.status, 200, "{self:?}: {}", response.text());
        response
    }

    fn request(&self, router: &Router) -> CallDocument {
        CallDocument::read(&self.send(router).text())
    }

    /// Sends it and expects a stream. Returns the pod of the call.
    fn request_pod(&self, router: &Router, call: &str) -> String {
        let document = self.request(router);
        assert!(document.is_stream(), "{self:?}: {document:?}");
        pod_of(router, call).expect("a connected call has a pod")
    }

    /// Sends it and expects a hang-up without a message.
    fn assert_hang_up(&self, router: &Router) {
        assert_eq!(self.request(router), CallDocument::HangUp(String::new()), "{self:?}");
        assert_eq!(router.status()["active_calls"], 0, "{self:?}");
        assert_eq!(router.status()["waiting"], 0, "{self:?}");
    }
}

fn form(params: &[(&str, &str)]) -> String {
    let encode = |text: &str| text.replace('+', "%2B");
    let pairs = params.iter().map(|(name, value)| format!("{name}={}", encode(value)));
    pairs.collect::<Vec<_>>().join("&")
}

/// A signed Twilio webhook for a call.
fn webhook_of(call: &str, path: &str) -> SignedWebhook {
    SignedWebhook::twilio(path, &[("CallSid", call), ("From", "+1"), ("CallStatus", "in-progress")])
}

const ALLOCATE: &str = "/api/v1/twilio/allocate";

#[test]
fn a_signed_webhook_needs_a_call_id_in_the_providers_format() {
    each_store(&[], |router| {
        let before = router.status();
        let assert_rejected = |signed: SignedWebhook, part: &str| {
            let text = signed.send(router).text();
            assert!(text.contains(part) && !text.contains(STREAM_URL), "{signed:?}: {text}");
        };
        let good = sid(1);
        for bad in [
            "CA9",
            "CA9F",
            &good[..33],
            &format!("{good}0"),
            &good.replace("CA", "AC"),
            &good.replace("00", "0g"),
            &uuid(1),
        ] {
            for path in ["allocate", "call-status", "stream-status"] {
                let path = format!("/api/v1/twilio/{path}");
                assert_rejected(SignedWebhook::twilio(&path, &[("CallSid", bad)]), "<Hangup/>");
            }
            let path = "/api/v1/twilio/after-stream?pod_name=a&attempt=1";
            assert_rejected(SignedWebhook::twilio(path, &[("CallSid", bad)]), "<Hangup/>");
        }
        let call = uuid(1);
        for bad in ["SW1", &call[1..], &format!("{call}0"), &call.replace('-', "."), &good] {
            let path = "/api/v1/signalwire/allocate";
            let params = [("CallSid", bad)];
            let header = "x-signalwire-signature";
            assert_rejected(
                SignedWebhook::like_twilio(header, "signalwire-key", path, &params),
                "<Hangup/>",
            );
            assert_rejected(SignedWebhook::plivo("/api/v1/plivo/allocate", bad, "n1"), "<Hangup/>");
            let body = json!({"call_sid": bad}).to_string();
            assert_rejected(SignedWebhook::jambonz("/api/v1/jambonz/allocate", &body), "hangup");
            let path = format!("/api/v1/vonage/allocate?uuid={bad}");
            assert_rejected(SignedWebhook::vonage(&path, "j1"), "talk");
        }
        assert_eq!(router.status(), before);
        let body = json!({"call_sid": call}).to_string();
        let text = SignedWebhook::jambonz("/api/v1/jambonz/allocate", &body).send(router).text();
        assert!(text.contains(STREAM_URL), "{text}");
    });
}

#[test]
fn a_signature_cannot_be_reused_by_splitting_parameters_differently() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 5}"#)], |router| {
        let (call, parent) = (sid(1), sid(2));
        let params =
            [("AccountSid", "AC1"), ("CallSid", &call), ("From", "+1"), ("ParentCallSid", &parent)];
        let genuine = SignedWebhook::twilio(ALLOCATE, &params);
        let pod = genuine.request_pod(router, &call);
        // The concatenated names and values are the same, so each signature is valid.
        let (longer, rest) = (format!("{call}F"), format!("+1ParentCallSid{parent}"));
        let account = format!("AC1CallSid{call}From+1Parent");
        for params in [
            &[("AccountSid", "AC1"), ("CallSid", longer.as_str()), ("rom", &rest)][..],
            &[("AccountSid", &account), ("CallSid", &parent)],
        ] {
            let text = SignedWebhook { body: form(params), ..genuine.clone() }.send(router).text();
            assert!(text.contains("<Hangup/>") && !text.contains(STREAM_URL), "{params:?}: {text}");
        }
        assert_eq!(router.status()["active_calls"], 1);
        assert_eq!(genuine.request_pod(router, &call), pod, "an idempotent repeat");
        assert_eq!(router.release(&call).0, 200);
    });
}

#[test]
fn a_replayed_webhook_of_an_ended_call_gets_no_pod() {
    each_store(&[], |router| {
        let call = sid(1);
        let request = webhook_of(&call, ALLOCATE);
        let pod = request.request_pod(router, &call);
        for _ in 0..3 {
            let repeated = request.request_pod(router, &call);
            assert_eq!(repeated, pod, "an idempotent repeat of a live call");
        }
        // A repeat with another signature belongs to the same call and ends with it.
        let repeat = webhook_of(&call, &format!("{ALLOCATE}?template=again"));
        assert_eq!(repeat.request_pod(router, &call), pod);
        assert_eq!(router.release(&call).0, 200);
        for _ in 0..3 {
            request.assert_hang_up(router);
            repeat.assert_hang_up(router);
        }
        let (_, events) = router.get(&format!("/api/v1/events?call={call}&event=refused"));
        assert_eq!(events["events"][0]["detail"], "replayed", "{events}");
        let metrics = router.connect_as_admin().get("/metrics").text();
        let line = "smart_router_allocations_total{source_pool=\"\",result=\"replayed\"} 6";
        assert!(metrics.contains(line), "{metrics}");
        // JSON requests are not signed, so clients may reuse call ids.
        router.allocate(&call);
        assert_eq!(router.release(&call).0, 200);
        // Another call of the same caller is no replay.
        let other = webhook_of(&sid(2), ALLOCATE);
        assert!(other.request(router).is_stream());
        assert_eq!(router.release(&sid(2)).0, 200);
    });
}

#[test]
fn a_nonce_or_token_is_valid_for_one_call() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 5}"#)], |router| {
        let path = "/api/v1/plivo/allocate";
        let (first, second) = (
            SignedWebhook::plivo(path, &uuid(1), "n1"),
            SignedWebhook::plivo(path, &uuid(1), "n2"),
        );
        assert!(first.send(router).text().contains("</Stream>"));
        assert_eq!(router.release(&uuid(1)).0, 200);
        assert!(!first.send(router).text().contains("</Stream>"));
        assert!(second.send(router).text().contains("</Stream>"), "a new nonce is no replay");
        assert_eq!(router.release(&uuid(1)).0, 200);
        // A Vonage token that covers no call id is valid for one call only.
        let path = |number| format!("/api/v1/vonage/allocate?uuid={}", uuid(number));
        let genuine = SignedWebhook::vonage(&path(3), "j1");
        assert!(genuine.send(router).text().contains(STREAM_URL));
        let other = SignedWebhook { path: path(4), ..genuine.clone() };
        assert_eq!(other.send(router).text(), "[]");
        assert!(genuine.send(router).text().contains(STREAM_URL), "an idempotent repeat");
        assert_eq!(router.release(&uuid(3)).0, 200);
        assert_eq!(genuine.send(router).text(), "[]");
        let path = "/api/v1/jambonz/allocate";
        let body = json!({"call_sid": uuid(5)}).to_string();
        let genuine = SignedWebhook::jambonz(path, &body);
        assert!(genuine.send(router).text().contains(STREAM_URL));
        assert_eq!(router.release(&uuid(5)).0, 200);
        // The signature does not cover the URL: a status callback cannot allocate.
        let ended = json!({"call_sid": uuid(5), "call_status": "completed"}).to_string();
        let text = SignedWebhook::jambonz(path, &ended).send(router).text();
        assert!(text.contains("hangup") && !text.contains(STREAM_URL), "{text}");
        for path in [path, "/api/v1/jambonz/allocate?template=other"] {
            let again = SignedWebhook { path: path.into(), ..genuine.clone() };
            assert_eq!(again.send(router).text(), r#"[{"verb":"hangup"}]"#);
        }
    });
}

#[test]
fn redirects_of_the_routers_documents_are_not_replays() {
    let settings = [
        ("HOLD_TIME", "60s"),
        ("HOLD_POLL", "1s"),
        ("RETRY_ON_DISCONNECT", "2"),
        ("TIER_CONFIG", r#"{"gold": 1}"#),
    ];
    each_store(&settings, |router| {
        router.allocate("busy");
        let call = sid(1);
        let mut sent = vec![webhook_of(&call, ALLOCATE)];
        let follow = |sent: &mut Vec<SignedWebhook>, document: &CallDocument| {
            sent.push(webhook_of(&call, document.next().expect("the document has a next URL")));
            sent.last().unwrap().request(router)
        };
        // The call waits and polls at the redirect URL of each document.
        let mut document = sent[0].request(router);
        for _ in 0..3 {
            assert!(document.is_hold(), "{document:?}");
            document = follow(&mut sent, &document);
        }
        // It polls too late, loses its queue entry and gets a new one.
        eventually(10 * SECOND, "its queue entry expires", || router.status()["waiting"] == 0);
        document = follow(&mut sent, &document);
        assert!(document.is_hold(), "{document:?}");
        assert_eq!(router.release("busy").0, 200);
        document = follow(&mut sent, &document);
        assert!(document.is_stream(), "{document:?}");
        let pod = pod_of(router, &call);
        // Its stream breaks twice, and the call reconnects.
        for _ in 0..2 {
            document = follow(&mut sent, &document);
            assert!(document.is_stream(), "{document:?}");
            assert_eq!(pod_of(router, &call), pod);
        }
        assert_eq!(router.release(&call).0, 200);
        document = follow(&mut sent, &document);
        assert_eq!(
            document,
            CallDocument::HangUp(String::new()),
            "the agent has released the call"
        );
        for request in &sent {
            request.assert_hang_up(router);
        }
    });
}

#[test]
fn a_refused_webhook_may_be_repeated() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 1}"#)], |router| {
        router.allocate("busy");
        let request = webhook_of(&sid(1), ALLOCATE);
        assert!(!request.request(router).is_stream());
        assert_eq!(router.release("busy").0, 200);
        assert!(request.request(router).is_stream(), "the refused call never had a pod");
        assert_eq!(router.release(&sid(1)).0, 200);
        request.assert_hang_up(router);
    });
}

#[test]
fn replay_protection_spans_replicas_and_restarts() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut settings = SETTINGS.to_vec();
    settings.push(("REDIS_URL", &url));
    let routers = [Router::start(&settings), Router::start(&settings)];
    let request = webhook_of(&sid(1), ALLOCATE);
    assert!(request.request(&routers[0]).is_stream());
    assert_eq!(routers[1].release(&sid(1)).0, 200);
    request.assert_hang_up(&routers[1]);

    let directory = scratch();
    let mut settings = SETTINGS.to_vec();
    settings.push(("DATA_DIR", directory.to_str().unwrap()));
    let router = Router::start(&settings);
    assert!(request.request(&router).is_stream());
    assert_eq!(router.release(&sid(1)).0, 200);
    // The second restart begins with a compacted journal.
    let router = router.kill_and_restart();
    request.assert_hang_up(&router);
    let router = router.kill_and_restart();
    request.assert_hang_up(&router);
}

#[test]
fn replay_protection_ends_after_replay_window() {
    each_store(&[("REPLAY_WINDOW", "3s")], |router| {
        let request = webhook_of(&sid(1), ALLOCATE);
        assert!(request.request(router).is_stream());
        assert_eq!(router.release(&sid(1)).0, 200);
        request.assert_hang_up(router);
        eventually(20 * SECOND, "the replay window ends", || request.request(router).is_stream());
        assert_eq!(router.release(&sid(1)).0, 200);
    });
}

/// The reply of Redis is lost and the webhook gets an error; a repeat by the provider must get a
/// pod.
#[test]
fn a_compensated_allocation_may_be_requested_again() {
    let server = RedisServer::start(&[]);
    let proxy = FaultProxy::to(server.port);
    let url = format!("redis://{}", proxy.address);
    let mut settings = SETTINGS.to_vec();
    settings.push(("REDIS_URL", &url));
    let router = Router::start(&settings);
    let request = webhook_of(&sid(1), ALLOCATE);
    proxy.drop_replies(true);
    assert!(!request.request(&router).is_stream());
    proxy.drop_replies(false);
    let mut connection = server.connection();
    eventually(10 * SECOND, "the allocation is compensated", || {
        redis::cmd("ZCARD").arg("voice:calls").query::<u32>(&mut connection).unwrap() == 0
            && router.get("/api/v1/status").0 == 200
    });
    assert!(request.request(&router).is_stream());
    assert_eq!(router.release(&sid(1)).0, 200);
    request.assert_hang_up(&router);
}
