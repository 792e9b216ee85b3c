//! Who uses the routers: providers with their calls, agents on their pods.

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
    history::{Outcome, Said, What},
    http::{self, Answer, Failure},
};
use testkit::dice::Dice;

/// How long callers wait for a pod, where they do.
pub(crate) const WAIT: Duration = Duration::from_secs(1);

/// How callers behave; percentages of calls.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Style {
    pub clients: usize,
    /// Asked for several times at once.
    pub twins: usize,
    /// Asked for again, and released again when they are over.
    pub replays: usize,
    /// Released before they were asked for, in the name of a pod of others.
    pub early: usize,
    /// Released long after their lease has ended.
    pub late: usize,
    /// Requests that make no sense, beside each call.
    pub odd: Option<Odd>,
    pub drains: bool,
    pub churn: bool,
    /// How long calls last (ms).
    pub hold: (u64, u64),
    /// Which last for seconds instead.
    pub long: usize,
    /// Whether agents prolong leases.
    pub renews: bool,
    /// Asked for by somebody who hangs up before the answer is there.
    pub impatient: usize,
    /// Whether callers wait where all pods are taken.
    pub waits: bool,
    /// How often a request that fails is tried again.
    pub retries: usize,
    /// How long clients rest between calls (ms).
    pub rest: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Odd {
    Slow,
    Huge,
    Malformed,
}

pub(crate) const USUAL: Style = Style {
    clients: 8,
    twins: 5,
    replays: 5,
    early: 0,
    late: 0,
    odd: None,
    drains: false,
    churn: false,
    hold: (5, 150),
    long: 10,
    renews: true,
    impatient: 0,
    waits: false,
    retries: 2,
    rest: 20,
};

impl Style {
    /// As odd as both of them.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            clients: self.clients.max(other.clients),
            twins: self.twins.max(other.twins.min(50)),
            replays: self.replays.max(other.replays),
            early: self.early.max(other.early),
            late: self.late.max(other.late),
            odd: self.odd.or(other.odd),
            impatient: self.impatient.max(other.impatient),
            ..self
        }
    }
}

/// How long calls last that last long (ms).
const LONG: (u64, u64) = (1_500, 3_500);
/// Agents prolong leases at least so often.
const RENEWAL: Duration = Duration::from_millis(400);
/// The ways to ask for a pod.
const FORMATS: usize = 4;

pub(crate) struct Caller<'a> {
    pub deployment: &'a Deployment,
    pub style: Style,
    pub dice: Dice,
    /// Only what the older procedure understands.
    pub is_plain: bool,
    /// Whether an answer to this call was not heard.
    pub is_unsure: bool,
}

impl Caller<'_> {
    /// Places calls until the run is over.
    pub(crate) fn run(&mut self) {
        while !self.deployment.is_over.load(Ordering::Relaxed) {
            self.one_call();
            let rest = self.dice.roll(self.style.rest + 1) as u64;
            thread::sleep(Duration::from_millis(rest));
        }
    }

    fn is_one_of(&mut self, percent: usize) -> bool {
        self.dice.roll(100) < percent
    }

    fn one_call(&mut self) {
        let call = self.deployment.new_call();
        if let Some(odd) = self.style.odd {
            self.odd_request(odd);
        }
        if self.is_one_of(self.style.early) {
            let pods = self.deployment.pods();
            let pod = pods[self.dice.roll(pods.len())].clone();
            self.release_once(&call, Some(&pod));
        }
        if self.is_one_of(self.style.impatient) && self.deployment.is_slow() {
            self.hang_up(&call);
            return;
        }
        self.is_unsure = false;
        let merchant = !self.is_plain && self.is_one_of(15);
        let is_twin = self.is_one_of(self.style.twins);
        let pod =
            if is_twin { self.allocate_at_once(&call) } else { self.allocate(&call, merchant) };
        let Some(pod) = pod else {
            // An answer that it did not hear may have given it one.
            if std::mem::take(&mut self.is_unsure) {
                self.hang_up_for_good(&call);
            }
            return;
        };
        let generation = self.deployment.generation(&pod);
        let is_replayed = self.is_one_of(self.style.replays);
        if is_replayed {
            self.ask(&call, false);
        }
        if self.is_one_of(self.style.late) {
            // Its agent has forgotten it, and remembers late.
            thread::sleep(self.deployment.setting("LEASE_TTL") + Duration::from_millis(1_200));
            self.release_once(&call, Some(&pod));
            return;
        }
        self.hold(&call, &pod);
        if self.deployment.generation(&pod) != generation {
            // Its agent has gone with its pod. Who asked again may have been given another.
            if is_twin || is_replayed {
                self.hang_up_for_good(&call);
            }
            return;
        }
        self.release(&call, &pod);
        if std::mem::take(&mut self.is_unsure) {
            self.hang_up_for_good(&call);
        }
        if is_replayed {
            self.look_up(&call);
            thread::sleep(Duration::from_millis(self.dice.roll(100) as u64));
            self.release_once(&call, Some(&pod));
        }
    }

    /// A call goes on; its agent prolongs its lease, somebody looks.
    fn hold(&mut self, call: &str, pod: &str) {
        let (least, most) = if self.is_one_of(self.style.long) { LONG } else { self.style.hold };
        let time =
            Duration::from_millis(least + self.dice.roll((most - least + 1) as usize) as u64);
        let (began, mut renewed) = (Instant::now(), Instant::now());
        let interval = (self.deployment.setting("LEASE_TTL") / 4).min(RENEWAL);
        while began.elapsed() < time && !self.deployment.is_over.load(Ordering::Relaxed) {
            thread::sleep((time - began.elapsed().min(time)).min(Duration::from_millis(50)));
            if self.style.renews && renewed.elapsed() > interval && !self.is_plain {
                renewed = Instant::now();
                let at = self.deployment.history.now();
                let pod = self.is_one_of(50).then(|| pod.to_owned());
                let mut body = json!({"call_sid": call});
                if let Some(pod) = &pod {
                    body["pod_name"] = json!(pod);
                }
                let answer = http::post(self.router(), "/api/v1/renew", &body);
                let answer = self.deployment.heard(at, answer);
                let what = What::Renew { call: call.into(), pod, said: said(&answer) };
                self.deployment.history.note(at, what);
            }
            if self.is_one_of(30) {
                self.look_up(call);
            }
        }
    }

    /// Some router that is awake.
    fn pick(&mut self) -> usize {
        loop {
            let router = self.dice.roll(ROUTERS);
            if !self.deployment.is_asleep(router) {
                return router;
            }
        }
    }

    fn router(&mut self) -> SocketAddr {
        let router = self.pick();
        self.deployment.seats[router].address
    }

    /// Asks as providers do: a failure is tried again elsewhere.
    fn allocate(&mut self, call: &str, merchant: bool) -> Option<String> {
        for _ in 0..=self.style.retries {
            match self.ask(call, merchant) {
                Outcome::Given { pod } => return Some(pod),
                Outcome::Failed(_) => thread::sleep(Duration::from_millis(20)),
                Outcome::Refused(_) | Outcome::Nonsense(_) => return None,
            }
        }
        None
    }

    /// Asks for one call in several places at once; a pod if any said so.
    fn allocate_at_once(&mut self, call: &str) -> Option<String> {
        let times = 2 + self.dice.roll(9);
        let seeds: Vec<u64> = (0..times).map(|_| self.dice.roll(usize::MAX) as u64).collect();
        let outcomes: Vec<Outcome> = thread::scope(|scope| {
            let ask = |seed| {
                let mut twin = Caller { dice: Dice(seed), ..*self };
                scope.spawn(move || twin.ask(call, false))
            };
            let twins: Vec<_> = seeds.iter().map(|seed| ask(*seed)).collect();
            twins.into_iter().map(|twin| twin.join().unwrap()).collect()
        });
        let unheard = |outcome: &Outcome| matches!(outcome, Outcome::Failed(Failure::Unheard));
        self.is_unsure |= outcomes.iter().any(unheard);
        let mut pods = outcomes.into_iter().filter_map(|outcome| match outcome {
            Outcome::Given { pod } => Some(pod),
            _ => None,
        });
        let pod = pods.next();
        // One of them may have gone meanwhile, and the call been given another.
        self.is_unsure |= pods.any(|other| Some(&other) != pod.as_ref());
        pod
    }

    /// Asks for a pod once, in some provider's way.
    pub(crate) fn ask(&mut self, call: &str, merchant: bool) -> Outcome {
        let router = self.pick();
        let to = self.deployment.seats[router].address;
        let format = if self.is_plain || self.style.waits { 0 } else { self.dice.roll(FORMATS) };
        let query = if merchant { "?merchant_id=acme" } else { "" };
        let began = self.deployment.history.now();
        let answer = match format {
            0 if merchant => http::post(
                to,
                "/api/v1/allocate",
                &json!({"call_sid": call, "merchant_id": "acme"}),
            ),
            0 if self.style.waits => {
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
        let outcome = match self.deployment.heard(began, answer) {
            // (the older procedure says no more when it has no pod)
            Ok(answer) if self.is_plain && answer.status == 503 => Outcome::Refused(503),
            Ok(answer) => read(format, &answer),
            Err(failure) => Outcome::Failed(failure),
        };
        self.is_unsure |= matches!(outcome, Outcome::Failed(Failure::Unheard));
        let what = What::Allocate { call: call.into(), router, outcome: outcome.clone() };
        self.deployment.history.note(began, what);
        outcome
    }

    /// Asks for a pod, and is gone before the answer is there.
    fn hang_up(&mut self, call: &str) {
        let body = json!({"call_sid": call}).to_string();
        if let Ok(mut line) = TcpStream::connect(self.router()) {
            let head =
                "POST /api/v1/allocate HTTP/1.1\r\nhost: r\r\ncontent-type: application/json";
            let _ = write!(line, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            thread::sleep(Duration::from_millis(self.dice.roll(30) as u64));
            if !self.deployment.is_slow() {
                // The answer may be there before we are gone; then it has to be heard.
                let _ = line.read(&mut [0; 1]);
                self.hang_up_for_good(call);
            }
        }
    }

    /// The provider says that a call is over, wherever it is.
    fn hang_up_for_good(&mut self, call: &str) {
        for _ in 0..200 {
            if matches!(self.release_once(call, None), Said::Yes | Said::Unknown) {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn look_up(&mut self, call: &str) {
        if self.is_plain {
            return;
        }
        let began = self.deployment.history.now();
        let answer = http::get(self.router(), &format!("/api/v1/calls/{call}"));
        if let Ok(answer) = self.deployment.heard(began, answer) {
            let found: Value = serde_json::from_str(&answer.body).unwrap_or_default();
            let found = match answer.status {
                200 => found["pod_name"].as_str().map(str::to_owned),
                404 => None,
                _ => return,
            };
            self.deployment.history.note(began, What::LookUp { call: call.into(), found });
        }
    }

    /// Releases as agents do: until somebody has heard it.
    pub(crate) fn release(&mut self, call: &str, pod: &str) {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(8) {
            let pod = self.is_one_of(50).then_some(pod);
            if matches!(self.release_once(call, pod), Said::Yes | Said::Unknown) {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn release_once(&mut self, call: &str, pod: Option<&str>) -> Said {
        let began = self.deployment.history.now();
        let mut body = json!({"call_sid": call});
        if let Some(pod) = pod {
            body["pod_name"] = json!(pod);
        }
        let answer = http::post(self.router(), "/api/v1/release", &body);
        let said = said(&self.deployment.heard(began, answer));
        self.deployment.history.note(began, What::Release { call: call.into(), said });
        said
    }

    /// A request that must be refused in good order, and soon.
    fn odd_request(&mut self, odd: Odd) {
        let router = self.pick();
        let to = self.deployment.seats[router].address;
        let began = self.deployment.history.now();
        let call = self.deployment.new_call();
        let wrong = match odd {
            Odd::Malformed => {
                let bodies: [&[u8]; 6] = [
                    b"{",
                    b"[]",
                    b"{\"call_sid\": 7}",
                    b"\xff\xfe",
                    b"{\"call_sid\": \"a b\"}",
                    b"",
                ];
                let body = bodies[self.dice.roll(bodies.len())];
                if self.is_one_of(50) {
                    // A provider that makes no sense is told so, in words or in a document.
                    let (path, kind) = ("/api/v1/twilio/allocate", "text/plain");
                    let answer = http::ask(to, "POST", path, kind, body);
                    answer.map_or_else(
                        |failure| Some(format!("{failure:?}")),
                        |answer| (answer.status >= 500).then(|| answer.status.to_string()),
                    )
                } else {
                    let path = "/api/v1/allocate";
                    refused_in_json(http::ask(to, "POST", path, "application/json", body))
                }
            }
            Odd::Huge => {
                let filler = "x".repeat(100 << 10);
                let body = json!({"call_sid": call, "filler": filler}).to_string();
                match http::ask(to, "POST", "/api/v1/allocate", "application/json", body.as_bytes())
                {
                    // Who has heard enough may close the door.
                    Err(Failure::Broken) => None,
                    answer => refused_in_json(answer),
                }
            }
            Odd::Slow => {
                let dribble = || -> Option<()> {
                    let mut line = TcpStream::connect(to).ok()?;
                    line.write_all(b"POST /api/v1/allocate HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ncontent-length: 400\r\n\r\n").ok()?;
                    let until = Instant::now() + Duration::from_millis(1_900);
                    while Instant::now() < until {
                        line.write_all(b" ").ok()?;
                        line.set_read_timeout(Some(Duration::from_millis(100))).ok()?;
                        let mut some = [0; 256];
                        match line.read(&mut some) {
                            Ok(_) => return None,
                            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                            Err(_) => return None,
                        }
                    }
                    Some(())
                };
                dribble()
                    .map(|()| "a request of one byte now and then is still listened to".to_owned())
            }
        };
        let (what, router) = (format!("{odd:?} request"), Some(router));
        self.deployment.history.note(began, What::Other { what, router, wrong });
    }
}

/// What is wrong with a refusal, if anything is.
fn refused_in_json(answer: Result<Answer, Failure>) -> Option<String> {
    let answer = match answer {
        Ok(answer) => answer,
        Err(failure) => return Some(format!("{failure:?}")),
    };
    let body: Value = serde_json::from_str(&answer.body).unwrap_or_default();
    let is_refused = (400..500).contains(&answer.status) && body["error"].is_string();
    (!is_refused).then(|| format!("{} {}", answer.status, answer.body))
}

pub(crate) fn said(answer: &Result<Answer, Failure>) -> Said {
    match answer {
        Ok(Answer { status: 200, .. }) => Said::Yes,
        Ok(Answer { status: 404, .. }) => Said::Unknown,
        Ok(_) => Said::No,
        Err(failure) => Said::Failed(*failure),
    }
}

/// What an answer means to the provider in whose format it is.
fn read(format: usize, answer: &Answer) -> Outcome {
    let body = &answer.body;
    let pod = || {
        let rest = &body[body.find("/pod/")? + 5..];
        Some(rest[..rest.find('/')?].to_owned())
    };
    let nonsense = || Outcome::Nonsense(format!("{} {body}", answer.status));
    let given = || pod().map_or_else(nonsense, |pod| Outcome::Given { pod });
    let has_error =
        || serde_json::from_str::<Value>(body).is_ok_and(|body| body["error"].is_string());
    match (format, answer.status) {
        (0 | 3, 200) => given(),
        (0 | 3, 500 | 503) if has_error() => Outcome::Refused(answer.status),
        (1 | 2, 200) if body.contains("<Stream") => given(),
        (1 | 2, 200) if body.contains("<Response>") && body.contains("<Hangup") => {
            Outcome::Refused(503)
        }
        _ => nonsense(),
    }
}
