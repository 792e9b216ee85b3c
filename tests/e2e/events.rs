//! Events, call history, paged lists and dashboard data, on both stores.

use std::time::Duration;

use serde_json::{Value, json};

use testkit::{Connection, Router, redis::RedisServer, scratch};

const TIERS: &str = r#"{"gold": {"type": "exclusive", "target": 1}, "basic": {"type": "shared", "target": 1, "max_concurrent": 2}}"#;

const URL: (&str, &str) = ("VOICE_AGENT_BASE_URL", "wss://voice.example.com");

fn each_store(check: impl Fn(&Router)) {
    testkit::each_store(&[("TIER_CONFIG", TIERS), ("PODS", "a=h:1,b=h:2"), URL], check);
}

fn kinds(response: &Value) -> Vec<String> {
    let events = response["events"].as_array().expect("events");
    events.iter().map(|event| event["event"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_call_lookup_lists_the_events_of_the_call() {
    each_store(|router| {
        router.allocate("CA1");
        router.allocate("CA2");
        let (_, call) = router.get("/api/v1/calls/CA2");
        assert_eq!(call["state"], "live");
        let event = &call["events"][0];
        assert_eq!(event["event"], "allocated");
        assert_eq!(event["call_sid"], "CA2");
        assert_eq!(event["pod_name"], call["pod_name"]);
        assert_eq!(event["pool"], "pool:basic");
        assert_eq!(event["detail"], "gold=at_capacity");
        router.release("CA2");
        let (status, ended) = router.get("/api/v1/calls/CA2");
        assert_eq!(status, 404);
        assert_eq!(ended["details"]["state"], "ended");
        assert_eq!(kinds(&ended["details"]), ["allocated", "ended"]);
        let end = ended["details"]["events"][1]["detail"].as_str().unwrap();
        assert!(end.starts_with("agent "), "{end}");
        let (status, unknown) = router.get("/api/v1/calls/CA99");
        assert_eq!((status, &unknown["details"]), (404, &Value::Null));
    });
}

#[test]
fn a_release_by_an_operator_has_its_own_end_cause() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let tokens = "agent:agent-token,admin:admin-token,viewer:viewer-token";
    let router = Router::start(&[("REDIS_URL", &url), ("API_TOKENS", tokens)]);
    for (token, cause) in [("agent-token", "agent "), ("admin-token", "operator ")] {
        let mut connection = router.connect();
        connection.token = Some(token.into());
        let call = json!({"call_sid": "CA1"});
        assert_eq!(connection.post("/api/v1/allocate", &call).status, 200);
        assert_eq!(connection.post("/api/v1/release", &call).status, 200);
        connection.token = Some("viewer-token".into());
        let call = connection.get("/api/v1/calls/CA1").json().1;
        let event = call["details"]["events"].as_array().unwrap().last().unwrap();
        assert!(event["detail"].as_str().unwrap().starts_with(cause), "{event}");
    }
}

#[test]
fn if_match_rejects_a_stale_version() {
    each_store(|router| {
        let send = |method: &str, path: &str, body: &str, tag: &str| {
            let head = [("content-type", "application/json"), ("if-match", tag)];
            router.connect().send(method, path, &head, body.as_bytes())
        };
        for (path, first, second) in [
            ("/api/v1/tiers", r#"{"gold": 1, "basic": 1}"#, r#"{"gold": 2, "basic": 1}"#),
            ("/api/v1/merchants/acme", r#"{"max_calls": 1}"#, r#"{"max_calls": 2}"#),
        ] {
            assert_eq!(router.put(path, first).0, 200);
            let stale = router.connect().get(path).header("etag").unwrap().to_owned();
            let changed = send("PUT", path, second, &stale);
            assert_eq!(changed.status, 200);
            let fresh = router.connect().get(path).header("etag").unwrap().to_owned();
            assert_eq!(changed.header("etag"), Some(fresh.as_str()));
            assert_ne!(stale, fresh);
            let late = send("PUT", path, first, &stale);
            assert_eq!(late.status, 412, "{}", late.text());
            assert!(late.text().contains("changed by another request"), "{}", late.text());
            assert_eq!(router.connect().get(path).header("etag"), Some(fresh.as_str()));
            assert_eq!(send("PUT", path, second, &format!("\"x\", {fresh}")).status, 200);
            assert_eq!(send("PUT", path, second, "*").status, 200);
        }
        let (acme, unknown) = ("/api/v1/merchants/acme", "/api/v1/merchants/unknown");
        assert_eq!(send("PUT", unknown, "{}", "*").status, 412, "the merchant does not exist");
        let head = [("content-type", "application/json"), ("if-none-match", "*")];
        let mut connection = router.connect();
        assert_eq!(connection.send("PUT", acme, &head, b"{}").status, 412, "the merchant exists");
        assert_eq!(connection.send("PUT", unknown, &head, b"{}").status, 200);
        assert_eq!(send("DELETE", acme, "", "\"x\"").status, 412);
        assert_eq!(send("DELETE", acme, "", "*").status, 200);
    });
}

#[test]
fn events_name_the_token_of_an_administrative_change() {
    let tokens = "viewer:viewer-token,admin:admin-token";
    let server = RedisServer::start(&[]);
    let url = server.url();
    let embedded = [("API_TOKENS", tokens)];
    for settings in [&embedded[..], &[embedded[0], ("REDIS_URL", &url)]] {
        let router = Router::start(settings);
        let mut admin = router.connect_as_admin();
        let put = |admin: &mut Connection, path: &str, body: &str| {
            let head = [("content-type", "application/json")];
            admin.send("PUT", path, &head, body.as_bytes()).status
        };
        assert_eq!(put(&mut admin, "/api/v1/tiers", r#"{"gold": 9}"#), 200);
        assert_eq!(put(&mut admin, "/api/v1/merchants/acme", "{}"), 200);
        assert_eq!(admin.send("DELETE", "/api/v1/merchants/acme", &[], b"").status, 200);
        let events = admin.get("/api/v1/events").json().1;
        for kind in ["tiers", "merchant_set", "merchant_deleted"] {
            let event = events["events"].as_array().unwrap().iter().find(|it| it["event"] == kind);
            assert_eq!(event.unwrap()["detail"], "admin (token 2)", "{kind}");
        }
    }
}

#[test]
fn refusals_and_changes_are_recorded_as_events() {
    each_store(|router| {
        for number in 1..=4 {
            router.post("/api/v1/allocate", json!({"call_sid": format!("CA{number}")}));
        }
        router.post("/api/v1/drain", json!({"pod_name": "a"}));
        router.post("/api/v1/undrain", json!({"pod_name": "a"}));
        router.put("/api/v1/merchants/acme", r#"{"max_calls": 3}"#);
        let (_, response) = router.get("/api/v1/events?limit=6");
        let expected =
            ["merchant_set", "undrained", "drained", "refused", "allocated", "allocated"];
        assert_eq!(kinds(&response), expected, "the newest event comes first");
        let refused = &response["events"][3];
        assert_eq!(refused["detail"], "no_pods gold=at_capacity basic=at_capacity");
        let (_, of_pod) = router.get("/api/v1/events?pod=a&event=drained");
        assert_eq!(kinds(&of_pod), ["drained"]);
        // Paging backwards and forwards gives the same events.
        let (_, all) = router.get("/api/v1/events");
        let mut paged = Vec::new();
        let mut path = "/api/v1/events?limit=3".to_owned();
        loop {
            let (_, page) = router.get(&path);
            paged.extend(page["events"].as_array().unwrap().clone());
            let Some(next) = page["next"].as_str() else { break };
            path = format!("/api/v1/events?limit=3&before={next}");
        }
        assert_eq!(json!(paged), all["events"]);
        let oldest = paged.last().unwrap()["id"].as_str().unwrap();
        let (_, after) = router.get(&format!("/api/v1/events?after={oldest}"));
        paged.reverse();
        assert_eq!(json!(paged[1..]), after["events"]);
    });
}

#[test]
fn an_event_stream_shows_the_events_of_every_replica() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let settings = [("TIER_CONFIG", TIERS), ("PODS", "a=h:1,b=h:2"), URL, ("REDIS_URL", &url)];
    let (one, other) = (Router::start(&settings), Router::start(&settings));
    let mut stream = one.connect();
    stream.open_stream("/api/v1/events?event=allocated");
    stream.read_until("text/event-stream", Duration::from_secs(2));
    other.allocate("CA1");
    let text = stream.read_until("CA1", Duration::from_secs(2));
    assert!(text.contains("event: allocated"), "{text}");
    assert!(text.contains("id: "), "{text}");
    // The live stream of the dashboard includes them, too.
    let mut live = one.connect();
    live.open_stream("/api/v1/live");
    live.read_until("\"is_full\":true", Duration::from_secs(2));
    other.allocate("CA2");
    live.read_until("CA2", Duration::from_secs(1));
    live.read_until("event: state", Duration::from_secs(2));
    // A router that shuts down ends its streams.
    one.signal("TERM");
    stream.read_to_end(Duration::from_secs(3));
}

#[test]
fn calls_are_listed_page_by_page() {
    let pods: Vec<String> = (0..30).map(|number| format!("p{number}=h:1")).collect();
    let server = RedisServer::start(&[]);
    let url = server.url();
    for redis in [None, Some(url.as_str())] {
        let pods = pods.join(",");
        let mut settings =
            vec![("TIER_CONFIG", r#"{"gold": 20, "basic": 10}"#), ("PODS", &pods), URL];
        settings.extend(redis.map(|url| ("REDIS_URL", url)));
        let router = Router::start(&settings);
        for number in 0..25 {
            let merchant = if number % 5 == 0 { "acme" } else { "other" };
            let call = json!({"call_sid": format!("CA{number}"), "merchant_id": merchant});
            assert_eq!(router.post("/api/v1/allocate", call).0, 200);
        }
        let all = |query: &str| {
            let (mut found, mut cursor) = (Vec::new(), String::new());
            loop {
                let (status, page) = router.get(&format!("/api/v1/calls?{query}{cursor}"));
                assert_eq!(status, 200, "{page}");
                let calls = page["calls"].as_array().unwrap();
                found
                    .extend(calls.iter().map(|call| call["call_sid"].as_str().unwrap().to_owned()));
                match page["next"].as_str() {
                    Some(next) => cursor = format!("&cursor={next}"),
                    None => return found,
                }
            }
        };
        assert_eq!(all("limit=4").len(), 25);
        assert_eq!(all("limit=2&merchant=acme").len(), 5);
        assert_eq!(all("limit=3&pool=basic").len(), 10);
        assert_eq!(all("pool=pool:gold").len(), 15);
        assert_eq!(all("state=waiting").len(), 0);
        let (_, page) = router.get("/api/v1/calls?limit=4");
        let next = page["next"].as_str().unwrap();
        let (status, refused) = router.get(&format!("/api/v1/calls?pool=gold&cursor={next}"));
        assert_eq!(status, 400);
        assert!(refused["error"].as_str().unwrap().contains("other filters"), "{refused}");
        let (_, pods) = router.get("/api/v1/pods?state=busy&limit=1000");
        assert_eq!(pods["pods"].as_array().unwrap().len(), 25);
        let (_, page) = router.get("/api/v1/pods?pool=basic&limit=6");
        assert_eq!(page["pods"].as_array().unwrap().len(), 6);
        let next = page["next"].as_str().unwrap();
        let (_, rest) = router.get(&format!("/api/v1/pods?pool=basic&limit=6&cursor={next}"));
        assert_eq!(rest["pods"].as_array().unwrap().len(), 4);
        assert_eq!(rest["next"], Value::Null);
    }
}

#[test]
fn invalid_query_parameters_are_rejected_with_a_reason() {
    each_store(|router| {
        for (path, expected) in [
            ("calls?limit=0", "limit=0: expected a number from 1 to 500"),
            ("calls?limit=x", "limit=x: expected a number"),
            ("events?limit=", "limit=: expected a number"),
            ("calls?state=dead", "state: expected live or waiting"),
            ("calls?cursor=abc", "cursor: expected `next` of a previous page"),
            ("calls?colour=red", "unknown parameter \"colour\""),
            ("calls?pod=A_B", "pod=A_B: expected the name of a pod"),
            ("calls?state=waiting&pod=a", "waiting calls have no pool"),
            ("events?event=exploded", "expected one of allocated"),
            ("events?before=1-1&after=1-1", "can't be combined"),
            ("events?before=yesterday", "expected the id of an event"),
            ("pods?state=tired", "state: expected one of available"),
            ("merchants?cursor=%20", "cursor: expected `next` of a previous page"),
        ] {
            let (status, response) = router.get(&format!("/api/v1/{path}"));
            let error = response["error"].as_str().unwrap_or_default();
            assert!(status == 400 && error.contains(expected), "{path}: {status} {response}");
        }
        let last = [("last-event-id", "yesterday")];
        let response = router.connect_as_admin().send("GET", "/api/v1/events", &last, b"");
        assert_eq!(response.status, 400);
        let page = [("accept", "text/event-stream;q=0, application/json")];
        let response = router.connect_as_admin().send("GET", "/api/v1/events?limit=1", &page, b"");
        assert_eq!(response.header("content-type"), Some("application/json"));
        let stream = [("accept", "text/event-stream")];
        let response =
            router.connect_as_admin().send("GET", "/api/v1/events?limit=1", &stream, b"");
        assert_eq!(response.status, 400, "{}", response.text());
    });
}

#[test]
fn events_can_be_disabled() {
    let router =
        Router::start(&[("TIER_CONFIG", TIERS), ("PODS", "a=h:1"), URL, ("EVENTS", "off")]);
    router.allocate("CA1");
    let (status, response) = router.get("/api/v1/events");
    assert_eq!((status, &response["error"]), (404, &json!("events are disabled (EVENTS=off)")));
    assert_eq!(kinds(&router.get("/api/v1/calls/CA1").1), [""; 0]);
}

#[test]
fn events_survive_a_restart_with_the_journal() {
    let directory = scratch();
    let router = Router::start(&[
        ("TIER_CONFIG", TIERS),
        ("PODS", "a=h:1,b=h:2"),
        URL,
        ("DATA_DIR", directory.to_str().unwrap()),
    ]);
    router.allocate("CA1");
    router.release("CA1");
    let (_, before) = router.get("/api/v1/calls/CA1");
    let router = router.kill_and_restart();
    let (_, after) = router.get("/api/v1/calls/CA1");
    assert_eq!(kinds(&after["details"]), ["allocated", "ended"]);
    assert_eq!(before["details"]["events"][0]["at"], after["details"]["events"][0]["at"]);
}

#[test]
fn a_dry_run_reports_moves_and_changes_nothing() {
    each_store(|router| {
        router.allocate("CA1");
        let next = r#"{"silver": {"type": "exclusive", "target": 1}, "basic": {"type": "shared", "target": 1, "max_concurrent": 2}}"#;
        let (status, response) = router.put("/api/v1/tiers?dry_run=true", next);
        assert_eq!(status, 200, "{response}");
        let moves = response["moves"].as_array().unwrap();
        assert_eq!(moves.len(), 1, "{response}");
        assert_eq!(moves[0]["from"], "gold");
        assert_eq!(moves[0]["to"], "silver");
        assert_eq!(moves[0]["is_busy"], true);
        assert_eq!(response["warnings"][0], "1 busy pod moves when its calls end");
        assert!(
            router.get("/api/v1/tiers").1.to_string().contains("gold"),
            "the tiers are unchanged"
        );
        router.allocate("CA2");
        router.allocate("CA3");
        let next = r#"{"gold": {"type": "exclusive", "target": 1}, "basic": {"type": "shared", "target": 1, "max_concurrent": 1}}"#;
        let warnings = router.put("/api/v1/tiers?dry_run=true", next).1["warnings"].to_string();
        assert!(warnings.contains("1 pod has more calls than the new limit"), "{warnings}");
        let (status, refused) = router.put("/api/v1/merchants/acme", r#"{"fallback": ["plaid"]}"#);
        assert_eq!(status, 400);
        assert!(refused["error"].as_str().unwrap().contains("unknown tier plaid"));
        assert_eq!(router.get("/api/v1/merchants/acme").0, 404);
        for id in ["acme", "zeta"] {
            assert_eq!(router.put(&format!("/api/v1/merchants/{id}"), "{}").0, 200);
        }
        let (_, page) = router.get("/api/v1/merchants?limit=1");
        assert_eq!(page["merchants"][0], json!({"merchant_id": "acme", "document": {}}));
        let next = page["next"].as_str().unwrap();
        let (_, page) = router.get(&format!("/api/v1/merchants?limit=1&cursor={next}"));
        assert_eq!(page["merchants"][0]["merchant_id"], "zeta");
        assert_eq!(page["next"], Value::Null);
    });
}

#[test]
fn the_dashboard_data_requires_a_viewer_token() {
    let tokens = "viewer:v1,agent:g1,admin:a1";
    let router = Router::start(&[("TIER_CONFIG", TIERS), ("API_TOKENS", tokens)]);
    let page = router.connect().get("/");
    assert_eq!(page.status, 200);
    assert!(page.text().contains("/page/page.js"));
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'"), "{policy}");
    assert_eq!(router.connect().get("/page/page.js").status, 200);
    assert_eq!(router.connect().get("/page/none.js").status, 404);
    for path in ["whoami", "live", "events", "calls", "pods", "merchants"] {
        assert_eq!(router.connect().get(&format!("/api/v1/{path}")).status, 401, "{path}");
    }
    let get = |path: &str, token: &str| {
        let header = format!("Bearer {token}");
        let path = format!("/api/v1/{path}");
        router.connect().send("GET", &path, &[("authorization", &header)], b"").json()
    };
    assert_eq!(get("whoami", "a1"), (200, json!({"role": "admin", "needs_token": true})));
    assert_eq!(get("whoami", "v1").1["role"], "viewer");
    assert_eq!(get("whoami", "x").0, 401);
    assert_eq!(get("events", "v1").0, 200);
    assert_eq!(get("events", "g1").0, 403);
}
