//! A signed webhook that is sent again, by its provider or by somebody who has seen it.

use std::time::Duration;

use data_encoding::{BASE64, HEXLOWER};
use serde_json::json;

use crate::signatures::{sha1, sha256};
use testkit::{
    Answer, Router, eventually,
    provider::{Heard, PUBLIC_URL},
    proxy::Proxy,
    redis::RedisServer,
    scratch,
};

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

/// The same for both stores.
fn each_store(extra: &[(&str, &str)], test: impl Fn(&Router)) {
    let mut settings = SETTINGS.to_vec();
    settings.extend(extra);
    test(&Router::start(&settings));
    let server = RedisServer::start(&[]);
    let url = server.url();
    settings.push(("REDIS_URL", &url));
    test(&Router::start(&settings));
}

fn sid(number: u32) -> String {
    format!("CA{number:032x}")
}

fn uuid(number: u32) -> String {
    format!("{number:08x}-1f5c-4f0f-9a3e-0c4a0b6d2e11")
}

/// A request as a provider signs it, which can be sent any number of times.
#[derive(Debug, Clone)]
struct Signed {
    path: String,
    headers: Vec<(&'static str, String)>,
    body: String,
}

impl Signed {
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

    /// A GET with a token that covers nothing but its time, and has an id of its own.
    fn vonage(path: &str, id: &str) -> Self {
        let seconds = testkit::redis::unix_millis() / 1_000;
        let part = |text: String| data_encoding::BASE64URL_NOPAD.encode(text.as_bytes());
        let claims = format!(r#"{{"iat":{seconds},"jti":"{id}"}}"#);
        let signed = format!("{}.{}", part(r#"{"alg":"HS256"}"#.into()), part(claims));
        let tag = data_encoding::BASE64URL_NOPAD.encode(&sha256("vonage-secret", &signed));
        let headers = vec![("authorization", format!("Bearer {signed}.{tag}"))];
        Self { path: path.into(), headers, body: String::new() }
    }

    fn send(&self, router: &Router) -> Answer {
        let headers: Vec<(&str, &str)> =
            self.headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let method = if self.body.is_empty() { "GET" } else { "POST" };
        let answer = router.connect().send(method, &self.path, &headers, self.body.as_bytes());
        assert_eq!(answer.status, 200, "{self:?}: {}", answer.text());
        answer
    }

    fn heard(&self, router: &Router) -> Heard {
        Heard::read(&self.send(router).text())
    }

    /// Sends it, and expects a hang-up without a word.
    fn is_over(&self, router: &Router) {
        assert_eq!(self.heard(router), Heard::HangUp(String::new()), "{self:?}");
        assert_eq!(router.status()["active_calls"], 0, "{self:?}");
        assert_eq!(router.status()["waiting"], 0, "{self:?}");
    }
}

fn form(params: &[(&str, &str)]) -> String {
    let encode = |text: &str| text.replace('+', "%2B");
    let pairs = params.iter().map(|(name, value)| format!("{name}={}", encode(value)));
    pairs.collect::<Vec<_>>().join("&")
}

/// The request of a call at the path that a document gave, or at the first one.
fn of_call(call: &str, path: &str) -> Signed {
    Signed::twilio(path, &[("CallSid", call), ("From", "+1"), ("CallStatus", "in-progress")])
}

const ALLOCATE: &str = "/api/v1/twilio/allocate";

#[test]
fn a_signed_request_names_its_call_as_the_provider_does() {
    each_store(&[], |router| {
        let before = router.status();
        let hangs_up = |signed: Signed, is: &str| {
            let text = signed.send(router).text();
            assert!(text.contains(is) && !text.contains("/ws/pod/"), "{signed:?}: {text}");
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
                hangs_up(Signed::twilio(&path, &[("CallSid", bad)]), "<Hangup/>");
            }
            let path = "/api/v1/twilio/after-stream?pod_name=a&attempt=1";
            hangs_up(Signed::twilio(path, &[("CallSid", bad)]), "<Hangup/>");
        }
        let call = uuid(1);
        for bad in ["SW1", &call[1..], &format!("{call}0"), &call.replace('-', "."), &good] {
            let path = "/api/v1/signalwire/allocate";
            let params = [("CallSid", bad)];
            let header = "x-signalwire-signature";
            hangs_up(Signed::like_twilio(header, "signalwire-key", path, &params), "<Hangup/>");
            hangs_up(Signed::plivo("/api/v1/plivo/allocate", bad, "n1"), "<Hangup/>");
            let body = json!({"call_sid": bad}).to_string();
            hangs_up(Signed::jambonz("/api/v1/jambonz/allocate", &body), "hangup");
            let path = format!("/api/v1/vonage/allocate?uuid={bad}");
            hangs_up(Signed::vonage(&path, "j1"), "talk");
        }
        assert_eq!(router.status(), before);
        let body = json!({"call_sid": call}).to_string();
        let text = Signed::jambonz("/api/v1/jambonz/allocate", &body).send(router).text();
        assert!(text.contains("/ws/pod/"), "{text}");
    });
}

#[test]
fn a_signature_is_of_one_call_however_its_text_is_divided() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 5}"#)], |router| {
        let (call, parent) = (sid(1), sid(2));
        let params =
            [("AccountSid", "AC1"), ("CallSid", &call), ("From", "+1"), ("ParentCallSid", &parent)];
        let genuine = Signed::twilio(ALLOCATE, &params);
        let pod = genuine.heard(router).pod().unwrap();
        // Each has the same text when names and values stand in a row, and so verifies.
        let (longer, rest) = (format!("{call}F"), format!("+1ParentCallSid{parent}"));
        let account = format!("AC1CallSid{call}From+1Parent");
        for params in [
            &[("AccountSid", "AC1"), ("CallSid", longer.as_str()), ("rom", &rest)][..],
            &[("AccountSid", &account), ("CallSid", &parent)],
        ] {
            let text = Signed { body: form(params), ..genuine.clone() }.send(router).text();
            assert!(text.contains("<Hangup/>") && !text.contains("/ws/pod/"), "{params:?}: {text}");
        }
        assert_eq!(router.status()["active_calls"], 1);
        assert_eq!(genuine.heard(router).pod(), Some(pod), "a repeat is a repeat");
        assert_eq!(router.release(&call).0, 200);
    });
}

#[test]
fn a_request_for_a_call_that_has_ended_gives_no_other_pod() {
    each_store(&[], |router| {
        let call = sid(1);
        let request = of_call(&call, ALLOCATE);
        let pod = request.heard(router).pod().unwrap();
        for _ in 0..3 {
            assert_eq!(request.heard(router).pod().as_ref(), Some(&pod), "it lives: a repeat");
        }
        // A repeat under another signature is one of the same call, and good for no more.
        let repeat = of_call(&call, &format!("{ALLOCATE}?template=again"));
        assert_eq!(repeat.heard(router).pod().as_ref(), Some(&pod));
        assert_eq!(router.release(&call).0, 200);
        for _ in 0..3 {
            request.is_over(router);
            repeat.is_over(router);
        }
        let (_, events) = router.get(&format!("/api/v1/events?call={call}&event=refused"));
        assert_eq!(events["events"][0]["detail"], "replayed", "{events}");
        let metrics = router.connect_as_admin().get("/metrics").text();
        let line = "smart_router_allocations_total{source_pool=\"\",result=\"replayed\"} 6";
        assert!(metrics.contains(line), "{metrics}");
        // Without a signature ids are anybody's: JSON callers use them again.
        router.allocate(&call);
        assert_eq!(router.release(&call).0, 200);
        // Another call of the same caller is another request.
        let other = of_call(&sid(2), ALLOCATE);
        assert!(other.heard(router).pod().is_some());
        assert_eq!(router.release(&sid(2)).0, 200);
    });
}

#[test]
fn nonces_and_tokens_are_good_for_one_call() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 5}"#)], |router| {
        let path = "/api/v1/plivo/allocate";
        let (first, second) =
            (Signed::plivo(path, &uuid(1), "n1"), Signed::plivo(path, &uuid(1), "n2"));
        assert!(first.send(router).text().contains("</Stream>"));
        assert_eq!(router.release(&uuid(1)).0, 200);
        assert!(!first.send(router).text().contains("</Stream>"));
        assert!(second.send(router).text().contains("</Stream>"), "it was not sent before");
        assert_eq!(router.release(&uuid(1)).0, 200);
        // A token of Vonage that covers nothing fits any call, but only one.
        let path = |number| format!("/api/v1/vonage/allocate?uuid={}", uuid(number));
        let genuine = Signed::vonage(&path(3), "j1");
        assert!(genuine.send(router).text().contains("/ws/pod/"));
        let other = Signed { path: path(4), ..genuine.clone() };
        assert_eq!(other.send(router).text(), "[]");
        assert!(genuine.send(router).text().contains("/ws/pod/"), "a repeat");
        assert_eq!(router.release(&uuid(3)).0, 200);
        assert_eq!(genuine.send(router).text(), "[]");
        let path = "/api/v1/jambonz/allocate";
        let body = json!({"call_sid": uuid(5)}).to_string();
        let genuine = Signed::jambonz(path, &body);
        assert!(genuine.send(router).text().contains("/ws/pod/"));
        assert_eq!(router.release(&uuid(5)).0, 200);
        // The signature does not cover the URL: what ended a call does not begin it again.
        let ended = json!({"call_sid": uuid(5), "call_status": "completed"}).to_string();
        let text = Signed::jambonz(path, &ended).send(router).text();
        assert!(text.contains("hangup") && !text.contains("/ws/pod/"), "{text}");
        for path in [path, "/api/v1/jambonz/allocate?template=other"] {
            let again = Signed { path: path.into(), ..genuine.clone() };
            assert_eq!(again.send(router).text(), r#"[{"verb":"hangup"}]"#);
        }
    });
}

#[test]
fn a_call_that_comes_back_through_our_own_documents_is_served() {
    let settings = [
        ("HOLD_TIME", "60s"),
        ("HOLD_POLL", "1s"),
        ("RETRY_ON_DISCONNECT", "2"),
        ("TIER_CONFIG", r#"{"gold": 1}"#),
    ];
    each_store(&settings, |router| {
        router.allocate("busy");
        let call = sid(1);
        let mut sent = vec![of_call(&call, ALLOCATE)];
        let ask = |sent: &mut Vec<Signed>, heard: &Heard| {
            sent.push(of_call(&call, heard.next().expect("the call goes on")));
            sent.last().unwrap().heard(router)
        };
        // It waits, and asks again as its documents say.
        let mut heard = sent[0].heard(router);
        for _ in 0..3 {
            assert!(heard.waits(), "{heard:?}");
            heard = ask(&mut sent, &heard);
        }
        // It has lost its place, because it asked too late, and has another.
        eventually(10 * SECOND, "its place is lost", || router.status()["waiting"] == 0);
        heard = ask(&mut sent, &heard);
        assert!(heard.waits(), "{heard:?}");
        assert_eq!(router.release("busy").0, 200);
        heard = ask(&mut sent, &heard);
        let pod = heard.pod().expect("a pod");
        // Its stream is gone, twice: it is rescued.
        for _ in 0..2 {
            heard = ask(&mut sent, &heard);
            assert_eq!(heard.pod().as_ref(), Some(&pod), "{heard:?}");
        }
        assert_eq!(router.release(&call).0, 200);
        heard = ask(&mut sent, &heard);
        assert_eq!(heard, Heard::HangUp(String::new()), "its agent has ended it");
        for request in &sent {
            request.is_over(router);
        }
    });
}

#[test]
fn a_refused_request_may_be_sent_again() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 1}"#)], |router| {
        router.allocate("busy");
        let request = of_call(&sid(1), ALLOCATE);
        assert!(request.heard(router).pod().is_none());
        assert_eq!(router.release("busy").0, 200);
        assert!(request.heard(router).pod().is_some(), "it never had a pod");
        assert_eq!(router.release(&sid(1)).0, 200);
        request.is_over(router);
    });
}

#[test]
fn what_was_seen_is_known_to_all_replicas_and_after_a_restart() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut settings = SETTINGS.to_vec();
    settings.push(("REDIS_URL", &url));
    let routers = [Router::start(&settings), Router::start(&settings)];
    let request = of_call(&sid(1), ALLOCATE);
    assert!(request.heard(&routers[0]).pod().is_some());
    assert_eq!(routers[1].release(&sid(1)).0, 200);
    request.is_over(&routers[1]);

    let directory = scratch();
    let mut settings = SETTINGS.to_vec();
    settings.push(("DATA_DIR", directory.to_str().unwrap()));
    let router = Router::start(&settings);
    assert!(request.heard(&router).pod().is_some());
    assert_eq!(router.release(&sid(1)).0, 200);
    // The second restart begins with a compacted journal.
    let router = router.kill_and_restart();
    request.is_over(&router);
    let router = router.kill_and_restart();
    request.is_over(&router);
}

#[test]
fn memory_of_requests_ends_with_its_time() {
    each_store(&[("REPLAY_WINDOW", "3s")], |router| {
        let request = of_call(&sid(1), ALLOCATE);
        assert!(request.heard(router).pod().is_some());
        assert_eq!(router.release(&sid(1)).0, 200);
        request.is_over(router);
        eventually(20 * SECOND, "it is forgotten", || request.heard(router).pod().is_some());
        assert_eq!(router.release(&sid(1)).0, 200);
    });
}

/// The answer of Redis is lost, and so the caller was told that there is no service: a
/// provider that tries again is served.
#[test]
fn an_allocation_that_was_taken_back_may_be_asked_for_again() {
    let server = RedisServer::start(&[]);
    let proxy = Proxy::to(server.port);
    let url = format!("redis://{}", proxy.address);
    let mut settings = SETTINGS.to_vec();
    settings.push(("REDIS_URL", &url));
    let router = Router::start(&settings);
    let request = of_call(&sid(1), ALLOCATE);
    proxy.lose_answers(true);
    assert!(request.heard(&router).pod().is_none());
    proxy.lose_answers(false);
    let mut connection = server.connection();
    eventually(10 * SECOND, "the call is taken back", || {
        redis::cmd("ZCARD").arg("voice:calls").query::<u32>(&mut connection).unwrap() == 0
            && router.get("/api/v1/status").0 == 200
    });
    assert!(request.heard(&router).pod().is_some());
    assert_eq!(router.release(&sid(1)).0, 200);
    request.is_over(&router);
}
