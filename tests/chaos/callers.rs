//! Simulated callers: providers with their calls, and agents on the pods.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    deployment::{Deployment, ROUTERS},
    history::{Action, Outcome, ReplyStatus},
    http::{self, Failure, Response},
};
use testkit::dice::Dice;

/// Wait time of waiting callers.
pub(crate) const WAIT: Duration = Duration::from_secs(1);

/// The workload of the callers. Plain numbers are percentages of calls.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Workload {
    pub clients: usize,
    /// Requested several times concurrently.
    pub concurrent: usize,
    /// Requested again, and released again after their end.
    pub repeats: usize,
    /// Released before their request, with the name of another call's pod.
    pub early_releases: usize,
    /// Released after the end of their lease.
    pub late_releases: usize,
    /// Invalid requests that accompany each call.
    pub bad_requests: Option<BadRequest>,
    pub drains: bool,
    pub churn: bool,
    /// Range of call durations.
    pub call_ms: (u64, u64),
    /// Calls that last for seconds instead.
    pub long_calls: usize,
    /// Whether agents renew leases.
    pub renews: bool,
    /// Callers that disconnect before the response arrives.
    pub disconnects: usize,
    /// Whether callers wait while all pods are busy.
    pub waits: bool,
    /// Number of retries of a failed request.
    pub retries: usize,
    /// Maximum pause of a client between calls.
    pub pause_ms: usize,
    /// Diallers beside the callers.
    pub diallers: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadRequest {
    Slow,
    Huge,
    Malformed,
}

pub(crate) const DEFAULT_WORKLOAD: Workload = Workload {
    clients: 8,
    concurrent: 5,
    repeats: 5,
    early_releases: 0,
    late_releases: 0,
    bad_requests: None,
    drains: false,
    churn: false,
    call_ms: (5, 150),
    long_calls: 10,
    renews: true,
    disconnects: 0,
    waits: false,
    retries: 2,
    pause_ms: 20,
    diallers: 0,
};

impl Workload {
    /// Combines the special cases of two workloads.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            clients: self.clients.max(other.clients),
            concurrent: self.concurrent.max(other.concurrent.min(50)),
            repeats: self.repeats.max(other.repeats),
            early_releases: self.early_releases.max(other.early_releases),
            late_releases: self.late_releases.max(other.late_releases),
            bad_requests: self.bad_requests.or(other.bad_requests),
            disconnects: self.disconnects.max(other.disconnects),
            ..self
        }
    }
}

const LONG_CALL_MS: (u64, u64) = (1_500, 3_500);
const MAX_RENEWAL_INTERVAL: Duration = Duration::from_millis(400);
/// Number of request formats: JSON, Twilio, Plivo, Exotel.
const FORMAT_COUNT: usize = 4;

pub(crate) struct Caller<'a> {
    pub deployment: &'a Deployment,
    pub workload: Workload,
    pub dice: Dice,
    /// Sends only requests that the baseline supports.
    pub is_baseline: bool,
    /// Whether a lost response may have allocated a pod for this call.
    pub may_be_allocated: bool,
}

impl Caller<'_> {
    /// Places calls until the run ends.
    pub(crate) fn run(&mut self) {
        while !self.deployment.is_finished.load(Ordering::Relaxed) {
            self.place_call();
            let pause = self.dice.roll(self.workload.pause_ms + 1) as u64;
            thread::sleep(Duration::from_millis(pause));
        }
    }

    fn happens(&mut self, percent: usize) -> bool {
        self.dice.roll(100) < percent
    }

    fn place_call(&mut self) {
        let call = self.deployment.new_call();
        if let Some(kind) = self.workload.bad_requests {
            self.send_bad_request(kind);
        }
        if self.happens(self.workload.early_releases) {
            let pods = self.deployment.pods();
            let pod = pods[self.dice.roll(pods.len())].clone();
            self.release_once(&call, Some(&pod));
        }
        if self.happens(self.workload.disconnects) && self.deployment.is_slow() {
            self.send_and_disconnect(&call);
            return;
        }
        self.may_be_allocated = false;
        let merchant = !self.is_baseline && self.happens(15);
        let is_concurrent = self.happens(self.workload.concurrent);
        let pod = if is_concurrent {
            self.allocate_concurrently(&call)
        } else {
            self.allocate(&call, merchant)
        };
        let Some(pod) = pod else {
            if std::mem::take(&mut self.may_be_allocated) {
                self.end_call(&call);
            }
            return;
        };
        let generation = self.deployment.generation(&pod);
        let is_repeated = self.happens(self.workload.repeats);
        if is_repeated {
            self.request_pod(&call, false);
        }
        if self.happens(self.workload.late_releases) {
            // The agent releases the call after its lease has ended.
            thread::sleep(self.deployment.setting("LEASE_TTL") + Duration::from_millis(1_200));
            self.release_once(&call, Some(&pod));
            return;
        }
        self.run_call(&call, &pod);
        if self.deployment.generation(&pod) != generation {
            // The pod was removed. A repeated request may have allocated another.
            if is_concurrent || is_repeated {
                self.end_call(&call);
            }
            return;
        }
        self.release(&call, &pod);
        if std::mem::take(&mut self.may_be_allocated) {
            self.end_call(&call);
        }
        if is_repeated {
            self.look_up(&call);
            thread::sleep(Duration::from_millis(self.dice.roll(100) as u64));
            self.release_once(&call, Some(&pod));
        }
    }

    /// Holds a call for its duration, with renewals and lookups.
    fn run_call(&mut self, call: &str, pod: &str) {
        let (min, max) = if self.happens(self.workload.long_calls) {
            LONG_CALL_MS
        } else {
            self.workload.call_ms
        };
        let time = Duration::from_millis(min + self.dice.roll((max - min + 1) as usize) as u64);
        let (began, mut renewed) = (Instant::now(), Instant::now());
        let interval = (self.deployment.setting("LEASE_TTL") / 4).min(MAX_RENEWAL_INTERVAL);
        while began.elapsed() < time && !self.deployment.is_finished.load(Ordering::Relaxed) {
            thread::sleep((time - began.elapsed().min(time)).min(Duration::from_millis(50)));
            if self.workload.renews && renewed.elapsed() > interval && !self.is_baseline {
                renewed = Instant::now();
                let at = self.deployment.history.now();
                let pod = self.happens(50).then(|| pod.to_owned());
                let mut body = json!({"call_sid": call});
                if let Some(pod) = &pod {
                    body["pod_name"] = json!(pod);
                }
                let response = http::post(self.pick_address(), "/api/v1/renew", &body);
                let response = self.deployment.filter_unreplicated(at, response);
                let action =
                    Action::Renew { call: call.into(), pod, status: reply_status(&response) };
                self.deployment.history.record(at, action);
            }
            if self.happens(30) {
                self.look_up(call);
            }
        }
    }

    /// A random router that is not paused.
    fn pick_router(&mut self) -> usize {
        loop {
            let router = self.dice.roll(ROUTERS);
            if !self.deployment.is_paused(router) {
                return router;
            }
        }
    }

    fn pick_address(&mut self) -> SocketAddr {
        let router = self.pick_router();
        self.deployment.routers[router].address
    }

    /// Allocates with retries on other routers, as providers do.
    fn allocate(&mut self, call: &str, merchant: bool) -> Option<String> {
        for _ in 0..=self.workload.retries {
            match self.request_pod(call, merchant) {
                Outcome::Allocated { pod } => return Some(pod),
                Outcome::Failed(_) => thread::sleep(Duration::from_millis(20)),
                Outcome::Refused(_) | Outcome::Malformed(_) => return None,
            }
        }
        None
    }

    /// Sends concurrent requests for one call. Returns the pod of the first success.
    fn allocate_concurrently(&mut self, call: &str) -> Option<String> {
        let times = 2 + self.dice.roll(9);
        let seeds: Vec<u64> = (0..times).map(|_| self.dice.roll(usize::MAX) as u64).collect();
        let outcomes: Vec<Outcome> = thread::scope(|scope| {
            let request = |seed| {
                let mut client = Caller { dice: Dice(seed), ..*self };
                scope.spawn(move || client.request_pod(call, false))
            };
            let clients: Vec<_> = seeds.iter().map(|seed| request(*seed)).collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect()
        });
        let unreplicated =
            |outcome: &Outcome| matches!(outcome, Outcome::Failed(Failure::Unreplicated));
        self.may_be_allocated |= outcomes.iter().any(unreplicated);
        let mut pods = outcomes.into_iter().filter_map(|outcome| match outcome {
            Outcome::Allocated { pod } => Some(pod),
            _ => None,
        });
        let pod = pods.next();
        // A pod may have been removed meanwhile, and the call allocated on another.
        self.may_be_allocated |= pods.any(|other| Some(&other) != pod.as_ref());
        pod
    }

    /// Sends one allocate request in a random format.
    pub(crate) fn request_pod(&mut self, call: &str, merchant: bool) -> Outcome {
        let router = self.pick_router();
        let to = self.deployment.routers[router].address;
        let format =
            if self.is_baseline || self.workload.waits { 0 } else { self.dice.roll(FORMAT_COUNT) };
        let query = if merchant { "?merchant_id=acme" } else { "" };
        let began = self.deployment.history.now();
        let response = match format {
            0 if merchant => http::post(
                to,
                "/api/v1/allocate",
                &json!({"call_sid": call, "merchant_id": "acme"}),
            ),
            0 if self.workload.waits => {
                let wait = format!("{}ms", WAIT.as_millis());
                http::post(to, "/api/v1/allocate", &json!({"call_sid": call, "wait": wait}))
            }
            0 => http::post(to, "/api/v1/allocate", &json!({"call_sid": call})),
            1 => http::form(
                to,
                &format!("/api/v1/twilio/allocate{query}"),
                &format!("CallSid={call}&From=%2B1555"),
            ),
            2 => http::form(
                to,
                &format!("/api/v1/plivo/allocate{query}"),
                &format!("CallUUID={call}&From=1555"),
            ),
            _ => {
                let query = query.replace('?', "&");
                http::get(to, &format!("/api/v1/exotel/allocate?CallSid={call}{query}"))
            }
        };
        let outcome = match self.deployment.filter_unreplicated(began, response) {
            // The baseline refuses without a body.
            Ok(response) if self.is_baseline && response.status == 503 => Outcome::Refused(503),
            Ok(response) => read_outcome(format, &response),
            Err(failure) => Outcome::Failed(failure),
        };
        self.may_be_allocated |= matches!(outcome, Outcome::Failed(Failure::Unreplicated));
        let action = Action::Allocate { call: call.into(), router, outcome: outcome.clone() };
        self.deployment.history.record(began, action);
        outcome
    }

    /// Sends an allocate request and disconnects before the response.
    fn send_and_disconnect(&mut self, call: &str) {
        let body = json!({"call_sid": call}).to_string();
        if let Ok(mut stream) = TcpStream::connect(self.pick_address()) {
            let head =
                "POST /api/v1/allocate HTTP/1.1\r\nhost: r\r\ncontent-type: application/json";
            let _ = write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            thread::sleep(Duration::from_millis(self.dice.roll(30) as u64));
            if !self.deployment.is_slow() {
                // The response may arrive before the disconnect, so the call must be ended.
                let _ = stream.read(&mut [0; 1]);
                self.end_call(call);
            }
        }
    }

    /// Releases a call on any pod, as a provider does.
    fn end_call(&mut self, call: &str) {
        for _ in 0..200 {
            if matches!(self.release_once(call, None), ReplyStatus::Success | ReplyStatus::NotFound)
            {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn look_up(&mut self, call: &str) {
        if self.is_baseline {
            return;
        }
        let began = self.deployment.history.now();
        let response = http::get(self.pick_address(), &format!("/api/v1/calls/{call}"));
        if let Ok(response) = self.deployment.filter_unreplicated(began, response) {
            let found: Value = serde_json::from_str(&response.body).unwrap_or_default();
            let found = match response.status {
                200 => found["pod_name"].as_str().map(str::to_owned),
                404 => None,
                _ => return,
            };
            self.deployment.history.record(began, Action::Lookup { call: call.into(), found });
        }
    }

    /// Releases with retries until a router acknowledges, as agents do.
    pub(crate) fn release(&mut self, call: &str, pod: &str) {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(8) {
            let pod = self.happens(50).then_some(pod);
            if matches!(self.release_once(call, pod), ReplyStatus::Success | ReplyStatus::NotFound)
            {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn release_once(&mut self, call: &str, pod: Option<&str>) -> ReplyStatus {
        let began = self.deployment.history.now();
        let mut body = json!({"call_sid": call});
        if let Some(pod) = pod {
            body["pod_name"] = json!(pod);
        }
        let response = http::post(self.pick_address(), "/api/v1/release", &body);
        let status = reply_status(&self.deployment.filter_unreplicated(began, response));
        self.deployment.history.record(began, Action::Release { call: call.into(), status });
        status
    }

    /// Sends an invalid request, which must be refused properly and in time.
    fn send_bad_request(&mut self, kind: BadRequest) {
        let router = self.pick_router();
        let to = self.deployment.routers[router].address;
        let began = self.deployment.history.now();
        let call = self.deployment.new_call();
        let error = match kind {
            BadRequest::Malformed => {
                let bodies: [&[u8]; 6] = [
                    b"{",
                    b"[]",
                    b"{\"call_sid\": 7}",
                    b"\xff\xfe",
                    b"{\"call_sid\": \"a b\"}",
                    b"",
                ];
                let body = bodies[self.dice.roll(bodies.len())];
                if self.happens(50) {
                    // Providers get an error or a document.
                    let (path, content_type) = ("/api/v1/twilio/allocate", "text/plain");
                    let response = http::send(to, "POST", path, content_type, body);
                    response.map_or_else(
                        |failure| Some(format!("{failure:?}")),
                        |response| (response.status >= 500).then(|| response.status.to_string()),
                    )
                } else {
                    let path = "/api/v1/allocate";
                    refused_in_json(http::send(to, "POST", path, "application/json", body))
                }
            }
            BadRequest::Huge => {
                let filler = "x".repeat(100 << 10);
                let body = json!({"call_sid": call, "filler": filler}).to_string();
                match http::send(
                    to,
                    "POST",
                    "/api/v1/allocate",
                    "application/json",
                    body.as_bytes(),
                ) {
                    // The router may close the connection before it has read the body.
                    Err(Failure::Broken) => None,
                    response => refused_in_json(response),
                }
            }
            BadRequest::Slow => {
                let send_slowly = || -> Option<()> {
                    let mut stream = TcpStream::connect(to).ok()?;
                    stream.write_all(b"POST /api/v1/allocate HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ncontent-length: 400\r\n\r\n").ok()?;
                    let until = Instant::now() + Duration::from_millis(1_900);
                    while Instant::now() < until {
                        stream.write_all(b" ").ok()?;
                        stream.set_read_timeout(Some(Duration::from_millis(100))).ok()?;
                        let mut some = [0; 256];
                        match stream.read(&mut some) {
                            Ok(_) => return None,
                            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                            Err(_) => return None,
                        }
                    }
                    Some(())
                };
                send_slowly().map(|()| "a slow-loris request is still being read".to_owned())
            }
        };
        let (name, router) = (format!("{kind:?} request"), Some(router));
        self.deployment.history.record(began, Action::Probe { name, router, error });
    }
}

/// Checks for a JSON error with a 4xx status. Returns the deviation.
fn refused_in_json(response: Result<Response, Failure>) -> Option<String> {
    let response = match response {
        Ok(response) => response,
        Err(failure) => return Some(format!("{failure:?}")),
    };
    let body: Value = serde_json::from_str(&response.body).unwrap_or_default();
    let is_refused = (400..500).contains(&response.status) && body["error"].is_string();
    (!is_refused).then(|| format!("{} {}", response.status, response.body))
}

pub(crate) fn reply_status(response: &Result<Response, Failure>) -> ReplyStatus {
    match response {
        Ok(Response { status: 200, .. }) => ReplyStatus::Success,
        Ok(Response { status: 404, .. }) => ReplyStatus::NotFound,
        Ok(_) => ReplyStatus::Refused,
        Err(failure) => ReplyStatus::Failed(*failure),
    }
}

/// Interprets a response in the format of its request.
fn read_outcome(format: usize, response: &Response) -> Outcome {
    let body = &response.body;
    let pod = || {
        let rest = &body[body.find("/pod/")? + 5..];
        Some(rest[..rest.find('/')?].to_owned())
    };
    let malformed = || Outcome::Malformed(format!("{} {body}", response.status));
    let allocated = || pod().map_or_else(malformed, |pod| Outcome::Allocated { pod });
    let has_error =
        || serde_json::from_str::<Value>(body).is_ok_and(|body| body["error"].is_string());
    match (format, response.status) {
        (0 | 3, 200) => allocated(),
        (0 | 3, 500 | 503) if has_error() => Outcome::Refused(response.status),
        (1 | 2, 200) if body.contains("<Stream") => allocated(),
        (1 | 2, 200) if body.contains("<Response>") && body.contains("<Hangup") => {
            Outcome::Refused(503)
        }
        _ => malformed(),
    }
}
