//! Executes the walk-through and the dialler of `docs/outbound.md`.

use std::{
    collections::HashMap,
    fs,
    io::Write,
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, channel},
    },
    thread,
    time::Duration,
};

use axum::{http::StatusCode, routing::post};
use percent_encoding::percent_decode_str;
use serde_json::json;

use testkit::{Connection, Router, eventually, scratch};

use crate::tutorial::{commands, execute};

const SECOND: Duration = Duration::from_secs(1);
/// Longer than the dialler takes for a step on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

fn page() -> String {
    fs::read_to_string(Path::new(testkit::ROOT).join("docs/outbound.md")).unwrap()
}

#[test]
fn every_command_of_the_outbound_walk_through_succeeds() {
    let (blocks, skipped) = commands(&page());
    assert_eq!((blocks.len() > 5, skipped), (true, 0));
    let (directory, printed) = execute(&blocks);
    assert!(printed.contains("<Stream url="), "{printed}");
    let one_line = r#""number":"+14155550100","max_lines":20,"lines":1"#;
    let is_found = printed.replace(": ", ":").replace(", ", ",").contains(one_line);
    assert!(is_found, "only the answered call uses a line: {printed}");
    fs::remove_dir_all(&directory).unwrap();
}

/// Status and warning of the response to a webhook.
type Response = (u16, Option<String>);

/// A number that the provider refuses to call.
const REFUSED: &str = "+100";
/// A number of which the first request is one too many.
const THROTTLED: &str = "+107";
/// A number that the provider calls, and responds with an error.
const LOST: &str = "+108";
/// The time of a request to the provider. All requests together take longer than a reservation
/// lasts.
const REQUEST_TIME: Duration = Duration::from_millis(700);
const RESERVATION_TTL: &str = "6s";
/// The dialler's margin, for that lifetime.
const MARGIN: &str = "BATCH, MARGIN = 10, 3\n";

/// A provider that answers calls to even numbers.
struct Twilio {
    address: SocketAddr,
    responses: Receiver<Response>,
    _runtime: tokio::runtime::Runtime,
}

fn form(body: &str) -> HashMap<String, String> {
    let decode = |text: &str| percent_decode_str(text).decode_utf8().expect("UTF-8").into_owned();
    let pairs = body.split('&').filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (decode(name), decode(value))).collect()
}

/// Calls a number: the webhook of an answer, or of none. It follows the dialler's report, or its
/// next request if the dialler does not know the call.
fn ring(
    router: SocketAddr,
    call: &str,
    form: &HashMap<String, String>,
    requests: &AtomicUsize,
) -> Response {
    let path = |field: &str| form[field].split_once("voice.example.com").unwrap().1.to_owned();
    let (answer, callback) = (path("Url"), path("StatusCallback"));
    let (_, reservation) = answer.split_once("reservation=").unwrap();
    let known = requests.load(Ordering::Relaxed);
    eventually(PATIENCE, "the dialler has gone on", || {
        if form["To"] == LOST {
            return requests.load(Ordering::Relaxed) > known;
        }
        let found = Connection::open(router).get(&format!("/api/v1/reservations/{reservation}"));
        found.json().1["call_sid"] == call
    });
    let mut connection = Connection::open(router);
    let response = if form["To"].ends_with(['0', '2', '4', '6', '8']) {
        connection.form(&answer, &format!("CallSid={call}"))
    } else {
        connection.form(&callback, &format!("CallSid={call}&CallStatus=no-answer"))
    };
    (response.status, response.header("x-warning").map(str::to_owned))
}

fn start_twilio(router: SocketAddr) -> Twilio {
    static REQUESTS: AtomicUsize = AtomicUsize::new(0);
    static THROTTLED_REQUESTS: AtomicUsize = AtomicUsize::new(0);
    let (sender, responses) = channel();
    let place_call = move |body: String| async move {
        tokio::time::sleep(REQUEST_TIME).await;
        let form = form(&body);
        let number = REQUESTS.fetch_add(1, Ordering::Relaxed);
        if form["To"] == REFUSED {
            return (StatusCode::BAD_REQUEST, axum::Json(json!({"code": 21211})));
        }
        if form["To"] == THROTTLED && THROTTLED_REQUESTS.fetch_add(1, Ordering::Relaxed) == 0 {
            return (StatusCode::TOO_MANY_REQUESTS, axum::Json(json!({"code": 20429})));
        }
        let is_lost = form["To"] == LOST;
        let call = format!("CA{number}");
        let sid = call.clone();
        thread::spawn(move || sender.send(ring(router, &call, &form, &REQUESTS)));
        if is_lost {
            return (StatusCode::BAD_GATEWAY, axum::Json(json!({"code": 20500})));
        }
        (StatusCode::CREATED, axum::Json(json!({"sid": sid})))
    };
    let routes = axum::Router::new().route("/2010-04-01/Accounts/AC1/Calls.json", post(place_call));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    runtime.spawn(async move { axum::serve(listener, routes).await });
    Twilio { address, responses, _runtime: runtime }
}

#[test]
fn the_dialler_of_the_page_calls_every_number() {
    let page = page();
    let (_, program) = page.split_once("```python\n").expect("the page has a program");
    let (program, _) = program.split_once("\n```").expect("the program has an end");
    let router =
        Router::start(&[("TIER_CONFIG", r#"{"gold": 20}"#), ("RESERVATION_TTL", RESERVATION_TTL)]);
    let margin = program.find("BATCH, MARGIN = ").expect("the program has a margin");
    let end = margin + program[margin..].find('\n').expect("a line") + 1;
    let program = format!("{}{MARGIN}{}", &program[..margin], &program[end..]);
    router.put("/api/v1/numbers/+14155550100", r#"{"max_lines": 20}"#);
    router.put("/api/v1/accounts/twilio", r#"{"max_cps": 50}"#);
    let twilio = start_twilio(router.address);
    let directory = scratch();
    fs::write(directory.join("dialler.py"), program).unwrap();
    let mut dialler = Command::new("python3")
        .arg("dialler.py")
        .current_dir(&directory)
        .env("SMART_ROUTER_URL", format!("http://{}", router.address))
        .env("PUBLIC_URL", "https://voice.example.com")
        .env("TWILIO_API", format!("http://{}", twilio.address))
        .envs([("TWILIO_ACCOUNT_SID", "AC1"), ("TWILIO_AUTH_TOKEN", "secret")])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("python3 is installed");
    let numbers = "+100 +101 +102 +103 +104 +105 +106 +107 +108 +109 +111 +113 +115";
    dialler.stdin.take().unwrap().write_all(numbers.as_bytes()).unwrap();
    let output = dialler.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.contains("+100: HTTP Error 400"), "{errors}");
    for _ in 0..12 {
        let response = twilio.responses.recv_timeout(60 * SECOND).expect("a webhook");
        assert_eq!(response, (200, None));
    }
    eventually(PATIENCE, "all dials have ended", || {
        router.get("/api/v1/reservations").1["reservations"] == json!([])
    });
    let answered = "+102, +104, +106 and +108 have answered";
    assert_eq!(router.status()["active_calls"], 4, "{answered}");
    assert_eq!(router.get("/api/v1/numbers/+14155550100").1["lines"], 4);
    fs::remove_dir_all(&directory).unwrap();
}
