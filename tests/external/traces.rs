//! Traces: exported spans, trace context in responses and documents, and failing collectors.

use std::{fs::File, path::PathBuf, process::Stdio, time::Duration};

use serde_json::{Value, json};

use testkit::{
    Connection, HttpResponse, Router,
    certificates::Authority,
    collector::{Collector, CollectorMode},
    eventually, free_port,
    nginx::Nginx,
    program,
    redis::RedisServer,
    scratch,
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

fn parent(flags: &str) -> String {
    format!("00-{TRACE}-{PARENT}-{flags}")
}

fn allocate(router: &Router, call: &str, headers: &[(&str, &str)]) -> HttpResponse {
    let headers = [&[("content-type", "application/json")], headers].concat();
    let body = json!({"call_sid": call}).to_string();
    let response = router.connect().send("POST", "/api/v1/allocate", &headers, body.as_bytes());
    assert_eq!(response.status, 200, "{}", response.text());
    response
}

/// Trace, span and flags of a response's `traceparent`.
fn trace_context(response: &HttpResponse) -> (String, String, String) {
    let parts: Vec<&str> = response.header("traceparent").unwrap().split('-').collect();
    assert_eq!((parts.len(), parts[0]), (4, "00"));
    (parts[1].into(), parts[2].into(), parts[3].into())
}

fn of_kind<'a>(spans: &'a [Value], kind: &str) -> Vec<&'a Value> {
    spans.iter().filter(|span| span["kind"] == kind).collect()
}

/// The value of a counter; without labels in the name, the sum over all labels.
fn counter(router: &Router, name: &str) -> u64 {
    let text = Connection::open(router.metrics).get("/metrics").text();
    let lines = text.lines().filter(|line| line.starts_with(name));
    lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
}

const SENT: &str = "smart_router_spans_sent_total";
const DROPPED: &str = "smart_router_spans_dropped_total";

#[test]
fn an_allocation_has_a_server_span_and_a_redis_span_in_the_callers_trace() {
    let (redis, collector) = (RedisServer::start(&[]), Collector::start(CollectorMode::Accept));
    let router = Router::start(&[
        ("REDIS_URL", &redis.url()),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url()),
        ("OTEL_SERVICE_NAME", "router-of-tests"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=a%2Cb,service.name=other"),
        ("POD_NAME", "replica-1"),
    ]);
    let response =
        allocate(&router, "CA1", &[("traceparent", &parent("01")), ("tracestate", "v=1")]);
    let (trace, span, flags) = trace_context(&response);
    assert_eq!((trace.as_str(), flags.as_str()), (TRACE, "01"));
    assert_ne!(span, PARENT);

    let spans = collector.spans(2);
    assert_eq!(spans.len(), 2, "{spans:?}");
    let (request, call) = (of_kind(&spans, "server")[0], of_kind(&spans, "client")[0]);
    for (name, value) in [
        ("trace", json!(TRACE)),
        ("span", json!(span)),
        ("parent", json!(PARENT)),
        ("state", json!("v=1")),
        ("name", json!("POST /api/v1/allocate")),
        ("failed", json!(false)),
        ("http.request.method", json!("POST")),
        ("http.route", json!("/api/v1/allocate")),
        ("http.response.status_code", json!(200)),
        ("url.path", json!("/api/v1/allocate")),
        ("url.scheme", json!("http")),
        ("network.peer.address", json!("127.0.0.1")),
        ("call_sid", json!("CA1")),
        ("pod", json!("voice-agent-0")),
        ("pool", json!("pool:gold")),
        ("outcome", json!("success")),
    ] {
        assert_eq!(request[name], value, "{name}: {request}");
    }
    let resource = &request["resource"];
    assert_eq!(resource["service.name"], "router-of-tests");
    assert_eq!(resource["service.instance.id"], "replica-1");
    assert_eq!(resource["deployment.environment.name"], "a,b");
    for (name, value) in [
        ("trace", json!(TRACE)),
        ("parent", json!(span)),
        ("name", json!("allocate")),
        ("failed", json!(false)),
        ("db.system.name", json!("redis")),
        ("db.operation.name", json!("allocate")),
        ("server.address", json!("127.0.0.1")),
        ("server.port", json!(redis.port)),
    ] {
        assert_eq!(call[name], value, "{name}: {call}");
    }
    let head = &collector.accepted()[0].head;
    assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("content-type: application/json"), "{head}");
    assert_eq!(counter(&router, SENT), 2);
}

#[test]
fn unsampled_traces_are_not_recorded_and_invalid_ones_start_a_new_trace() {
    let collector = Collector::start(CollectorMode::Accept);
    let router = Router::start(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())]);
    let unsampled = trace_context(&allocate(&router, "CA1", &[("traceparent", &parent("00"))]));
    assert_eq!((unsampled.0.as_str(), unsampled.2.as_str()), (TRACE, "00"));
    let twice = [("traceparent", &*parent("01")), ("traceparent", &*parent("01"))];
    let long = format!("{}-{}", parent("01"), "x".repeat(4_000));
    for headers in [&twice[..], &[("traceparent", "nonsense")], &[("traceparent", &long)], &[]] {
        let (trace, _, flags) = trace_context(&allocate(&router, "CA1", headers));
        assert!(trace != TRACE && flags == "01", "{headers:?}: {trace}");
    }
    let later = parent("01").replacen("00", "01", 1) + "-more";
    assert_eq!(trace_context(&allocate(&router, "CA1", &[("traceparent", &later)])).0, TRACE);
    assert!(router.connect().get("/health").header("traceparent").is_none());
    let spans = collector.spans(10);
    assert_eq!(of_kind(&spans, "server").len(), 5, "{spans:?}");
    let calls = of_kind(&spans, "client");
    assert!(calls.len() == 5 && calls.iter().all(|call| call["db.system.name"] == "embedded"));
}

#[test]
fn ratio_sampling_records_a_share_and_ignores_the_parent() {
    let collector = Collector::start(CollectorMode::Accept);
    let router = Router::start(&[
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", &format!("{}/mine", collector.url())),
        ("OTEL_TRACES_SAMPLER", "traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "0.5"),
    ]);
    let mut connection = router.connect();
    let sampled = (0..200).filter(|_| trace_context(&connection.get("/api/v1/tiers")).2 == "01");
    let sampled = sampled.count();
    assert!((50..150).contains(&sampled), "{sampled}");
    let spans = collector.spans(2 * sampled);
    assert_eq!(of_kind(&spans, "server").len(), sampled);
    assert!(collector.accepted()[0].head.starts_with("POST /mine HTTP/1.1"));
    drop(router);
    let router = Router::start(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url()),
        ("OTEL_TRACES_SAMPLER", "always_off"),
    ]);
    let (trace, _, flags) =
        trace_context(&allocate(&router, "CA1", &[("traceparent", &parent("01"))]));
    assert_eq!((trace.as_str(), flags.as_str()), (TRACE, "00"));
}

#[test]
fn documents_carry_the_trace_context_only_if_tracing_is_on() {
    let collector = Collector::start(CollectorMode::Accept);
    let router = Router::start(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())]);
    let response = router.connect().form("/api/v1/twilio/allocate", "CallSid=CA1");
    let (trace, span, _) = trace_context(&response);
    let parameter = format!(r#"<Parameter name="traceparent" value="00-{trace}-{span}-01"/>"#);
    assert!(response.text().contains(&parameter), "{}", response.text());
    let untraced = Router::start(&[]);
    let response = untraced.connect().form("/api/v1/twilio/allocate", "CallSid=CA1");
    assert_eq!(response.header("traceparent"), None);
    assert!(response.text().contains("<Stream") && !response.text().contains("Parameter"));
}

#[test]
fn an_unavailable_store_shows_as_failed_spans() {
    let (mut redis, collector) = (RedisServer::start(&[]), Collector::start(CollectorMode::Accept));
    let router = Router::start(&[
        ("REDIS_URL", &redis.url()),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url()),
    ]);
    redis.kill();
    let response = router.connect().post("/api/v1/allocate", &json!({"call_sid": "CA1"}));
    assert_eq!(response.status, 503);
    let trace = trace_context(&response).0;
    let spans = collector.spans(2);
    let spans: Vec<&Value> = spans.iter().filter(|span| span["trace"] == *trace).collect();
    assert!(spans.len() == 2 && spans.iter().all(|span| span["failed"] == true), "{spans:?}");
    assert!(spans.iter().any(|span| span["error.type"] == "503"));
    assert!(spans.iter().any(|span| span["error.type"] == "unavailable"));
    redis.restart_empty();
    eventually(Duration::from_secs(10), "Redis is used again", || {
        router.get("/api/v1/status").0 == 200
    });
}

/// A router with a log file.
fn start_with_log_file(settings: &[(&str, &str)]) -> (Router, PathBuf) {
    let path = scratch().join("log");
    let (api, metrics) = (free_port().to_string(), free_port().to_string());
    let mut all = vec![("HTTP_PORT", api.as_str()), ("METRICS_PORT", metrics.as_str())];
    all.extend(settings);
    (Router::start_with(&all, Stdio::from(File::create(&path).unwrap())), path)
}

/// Sends a hundred requests.
fn send_calls(router: &Router, name: &str) {
    let mut connection = router.connect();
    for number in 0..50 {
        let sid = json!({"call_sid": format!("{name}{number}")});
        assert_eq!(connection.post("/api/v1/allocate", &sid).status, 200);
        assert_eq!(connection.post("/api/v1/release", &sid).status, 200);
    }
}

fn fails_and_recovers(collector: &Collector, mode: CollectorMode) {
    let (router, log) = start_with_log_file(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url()),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "200"),
    ]);
    send_calls(&router, "before");
    collector.spans(200);
    collector.set_mode(mode);
    send_calls(&router, "meanwhile");
    eventually(Duration::from_secs(15), "spans are dropped", || counter(&router, DROPPED) >= 200);
    send_calls(&router, "again");
    collector.set_mode(CollectorMode::Accept);
    let before = counter(&router, SENT);
    eventually(Duration::from_secs(15), "the collector has spans again", || {
        send_calls(&router, "after");
        counter(&router, SENT) > before
    });
    drop(router);
    let log = std::fs::read_to_string(log).unwrap();
    assert_eq!(log.matches("the collector does not accept spans").count(), 1, "{mode:?}");
    assert_eq!(log.matches("the collector accepts spans again").count(), 1, "{mode:?}");
}

#[test]
fn a_hanging_collector_loses_spans_and_delays_no_request() {
    fails_and_recovers(&Collector::start(CollectorMode::Accept), CollectorMode::Hang);
    // Requests that waited for the collector would time out.
    let collector = Collector::start(CollectorMode::Hang);
    let router = Router::start(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url()),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "600000"),
    ]);
    for round in 0..10 {
        send_calls(&router, &format!("round-{round}-"));
    }
}

#[test]
fn a_failing_collector_loses_spans() {
    fails_and_recovers(&Collector::start(CollectorMode::Accept), CollectorMode::Respond(500));
}

#[test]
fn spans_are_retried_on_503_from_the_collector() {
    let collector = Collector::start(CollectorMode::Respond(503));
    let router = Router::start(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())]);
    send_calls(&router, "busy");
    eventually(Duration::from_secs(3), "the collector refuses", || collector.refused() > 0);
    collector.set_mode(CollectorMode::Accept);
    assert_eq!(collector.spans(200).len(), 200);
    assert_eq!(counter(&router, DROPPED), 0);
}

#[test]
fn export_starts_when_a_late_collector_starts() {
    let port = free_port();
    let url = format!("http://127.0.0.1:{port}");
    let router = Router::start(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &url)]);
    send_calls(&router, "before");
    eventually(Duration::from_secs(10), "spans are dropped", || counter(&router, DROPPED) >= 200);
    let collector = Collector::start_on(port, CollectorMode::Accept);
    eventually(Duration::from_secs(15), "the collector has spans", || {
        send_calls(&router, "after");
        collector.count() > 0
    });
}

#[test]
fn shutdown_exports_the_last_spans_without_waiting_for_a_hung_collector() {
    let collector = Collector::start(CollectorMode::Accept);
    for number in 1..=3 {
        let router = Router::start(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())]);
        let mut router = router;
        let mut connection = router.connect();
        router.signal("TERM");
        let sid = json!({"call_sid": "CA1"});
        assert_eq!(connection.post("/api/v1/allocate", &sid).status, 200);
        assert_eq!(router.wait_for_exit(Duration::from_secs(5)), Some(0));
        assert_eq!(collector.parsed_spans().len(), 2 * number);
    }
    collector.set_mode(CollectorMode::Hang);
    let mut router = Router::start(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url()),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "600000"),
    ]);
    allocate(&router, "CA2", &[]);
    router.signal("TERM");
    assert_eq!(router.wait_for_exit(Duration::from_secs(5)), Some(0));
}

#[test]
fn collector_headers_are_sent_and_redacted_in_output() {
    let collector = Collector::start(CollectorMode::Accept);
    let settings = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &*collector.url()),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20hunter2,x-team=voice-hunter2"),
        ("LOG_LEVEL", "trace"),
    ];
    let (router, log) = start_with_log_file(&settings);
    let trace = trace_context(&allocate(&router, "CA1", &[])).0;
    collector.spans(2);
    drop(router);
    let head = &collector.accepted()[0].head;
    assert!(head.contains("authorization: Bearer hunter2\r\n"), "{head}");
    assert!(head.contains("x-team: voice-hunter2"), "{head}");
    let log = std::fs::read_to_string(log).unwrap();
    assert!(!log.contains("hunter2"), "{log}");
    let line = log.lines().find(|line| line.contains("\"call_sid\":\"CA1\"")).unwrap();
    assert!(line.contains(&format!("\"trace_id\":\"{trace}\"")), "{line}");
    for argument in ["--help", "check-config"] {
        let output = program(&settings).arg(argument).output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && !printed.contains("hunter2"), "{printed}");
        let shown = argument == "check-config";
        assert_eq!(printed.contains("OTEL_EXPORTER_OTLP_HEADERS=(hidden)"), shown, "{printed}");
    }
}

#[test]
fn the_exporter_supports_tls_and_client_certificates() {
    let collector = Collector::start(CollectorMode::Accept);
    let authority = Authority::create();
    let (server, client) = (authority.sign("server"), authority.sign("client"));
    let front = Nginx::with_tls(&server, &authority.file(), collector.port);
    let url = format!("https://localhost:{}", front.port);
    let router = Router::start(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &url),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", &authority.file()),
        ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", &client.file),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", &client.key),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
    ]);
    router.allocate("CA1");
    assert!(collector.spans(2).len() >= 2);
    // A router that does not trust the authority, and one with tracing disabled.
    let before = collector.count();
    let untrusting = Router::start(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &url)]);
    untrusting.allocate("CA1");
    let plain = collector.url();
    let untraced =
        Router::start(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &plain), ("OTEL_SDK_DISABLED", "TRUE")]);
    untraced.allocate("CA1");
    eventually(Duration::from_secs(10), "spans are dropped", || counter(&untrusting, DROPPED) > 0);
    assert_eq!(collector.count(), before);
    let unsupported = [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_SDK_DISABLED", "true")];
    for settings in [
        &unsupported[..1],
        &[unsupported[0], unsupported[1], ("OTEL_EXPORTER_OTLP_ENDPOINT", &url)],
    ] {
        assert!(program(settings).arg("check-config").status().unwrap().success(), "{settings:?}");
    }
}

#[test]
fn an_invalid_trace_setting_prevents_the_start() {
    for (name, value, expected) in [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector", "=collector: expected a URL that begins"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://u:hunter2@c", "=http://***@c: expected a URL"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://", "=http://: expected a URL"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "hunter2", "=(hidden): expected name=value"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a b=hunter2", "=(hidden): expected name=value"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=hunter2%0a", "=(hidden): expected name=value"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1s", "=1s: expected milliseconds"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a", "=a: expected name=value"),
        ("OTEL_TRACES_SAMPLER", "xray", "=xray: expected one of always_on, always_off"),
        ("OTEL_TRACES_SAMPLER_ARG", "1.5", "=1.5: expected a number from 0 to 1"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "=grpc: expected http/json or http/protobuf"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere", "=/nowhere: expected usable certificate"),
    ] {
        // Some settings are checked only with a collector.
        let collector = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://c:4318");
        let settings = [collector, (name, value)];
        let output = program(&settings[usize::from(name == collector.0)..]);
        let output = { output }.arg("serve").output().unwrap();
        let printed = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{printed}");
        assert!(printed.contains(&format!("{name}{expected}")), "{printed}");
        assert!(!printed.contains("hunter2") && printed.lines().count() == 1, "{printed}");
    }
}

#[test]
fn a_command_continues_the_trace_of_its_environment() {
    let collector = Collector::start(CollectorMode::Accept);
    let router = Router::start(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())]);
    let url = format!("http://{}", router.address);
    for traceparent in [&*parent("01"), "nonsense"] {
        let mut status = program(&[("SMART_ROUTER_URL", &url), ("TRACEPARENT", traceparent)]);
        assert!(status.arg("status").output().unwrap().status.success());
    }
    let spans = collector.spans(4);
    let requests = of_kind(&spans, "server");
    let continued = requests.iter().filter(|span| span["trace"] == TRACE).collect::<Vec<_>>();
    assert_eq!((requests.len(), continued.len()), (2, 1), "{requests:?}");
    assert_eq!(continued[0]["parent"], PARENT);
}
