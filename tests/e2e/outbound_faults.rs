//! Outbound calls while routers and diallers are killed.

use std::{
    net::SocketAddr,
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};

use testkit::{Connection, Router, dice::Dice, eventually, redis::RedisServer};

const SECOND: Duration = Duration::from_secs(1);
const NUMBER: &str = "+14155550100";
const PODS: u64 = 30;
const MAX_LINES: u64 = 8;
const MAX_CPS: usize = 6;

/// Addresses of the routers, separated by commas, and the name of the dialler.
const ROUTERS: &str = "DIALLER_ROUTERS";
const NAME: &str = "DIALLER_NAME";

/// A dialler as a process of its own, which the test kills.
struct Dialler(Child);

impl Dialler {
    fn start(routers: &[Router], name: &str) -> Self {
        let addresses: Vec<String> = routers.iter().map(|it| it.address.to_string()).collect();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "outbound_faults::dialler"]);
        command.env(ROUTERS, addresses.join(",")).env(NAME, name).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Dialler {
    /// Kills the process, as `kill -9` does.
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Dials through any of the routers, and forgets every failure.
struct Campaign {
    routers: Vec<SocketAddr>,
    name: String,
    dice: Dice,
    dials: u64,
}

impl Campaign {
    fn connect(&mut self) -> Option<Connection> {
        let index = self.dice.roll(self.routers.len());
        Connection::try_open(self.routers[index])
    }

    fn post(&mut self, path: &str, body: Value) -> Option<Value> {
        let response = self.connect()?.try_post(path, &body)?;
        (response.status == 200).then(|| response.json().1)
    }

    fn reserve(&mut self) -> Option<Vec<String>> {
        let count = self.dice.between(1, 3);
        let body = json!({"merchant_id": "acme", "number": NUMBER, "provider": "twilio",
            "count": count, "wait": "1s"});
        let answer = self.post("/api/v1/reservations", body)?;
        let ids = answer["reservations"].as_array()?.iter();
        ids.map(|granted| Some(granted["id"].as_str()?.to_owned())).collect()
    }

    fn dial(&mut self, id: &str) -> Option<()> {
        self.dials += 1;
        let call = format!("CA{}{}", self.name, self.dials);
        if self.dice.percent(90) {
            self.post(&format!("/api/v1/reservations/{id}/dialed"), json!({"call_sid": call}));
        }
        match self.dice.roll(10) {
            0..4 => {
                let body = json!({"call_sid": call, "reservation_id": id});
                self.post("/api/v1/allocate", body)?;
                if self.dice.percent(50) {
                    self.post("/api/v1/release", json!({"call_sid": call}))?;
                }
            }
            4..7 => {
                let body = format!("CallSid={call}&CallStatus=no-answer");
                self.connect()?.try_form("/api/v1/twilio/call-status", &body)?;
            }
            7 => {
                let mut connection = self.connect()?;
                let path = format!("/api/v1/reservations/{id}");
                let head = testkit::http::request_head("DELETE", &path, &[], 0);
                connection.try_write(&head).then(|| connection.read_response())??;
            }
            // The dialler loses the call.
            _ => {}
        }
        Some(())
    }
}

#[test]
#[ignore = "the process of a dialler, which other tests start"]
fn dialler() {
    let (routers, name) = (std::env::var(ROUTERS).unwrap(), std::env::var(NAME).unwrap());
    let routers = routers.split(',').map(|address| address.parse().unwrap()).collect();
    let dice = Dice(name.bytes().map(u64::from).sum());
    let mut campaign = Campaign { routers, name, dice, dials: 0 };
    loop {
        for id in campaign.reserve().unwrap_or_default() {
            let _lost = campaign.dial(&id);
        }
    }
}

/// Times of grants, from the event log (ms).
fn grants(server: &RedisServer) -> Vec<u64> {
    type Entry = (String, Vec<(String, String)>);
    let entries: Vec<Entry> = redis::cmd("XRANGE")
        .arg("voice:events")
        .arg("-")
        .arg("+")
        .query(&mut server.connection())
        .unwrap();
    let granted = entries.iter().filter(|(_, fields)| fields[0].0 == "reserved");
    granted.map(|(id, _)| id.split_once('-').unwrap().0.parse().unwrap()).collect()
}

/// Waits for grants beyond `count`. The lines of the number must not exceed its limit meanwhile.
fn await_grants(server: &RedisServer, router: &Router, count: usize) {
    eventually(20 * SECOND, "reservations are granted", || {
        let (status, answer) = router.get(&format!("/api/v1/numbers/{NUMBER}"));
        if status == 200 {
            assert!(answer["lines"].as_u64().unwrap() <= MAX_LINES, "{answer}");
        }
        grants(server).len() > count
    });
}

#[test]
fn killed_routers_and_diallers_leak_nothing_and_exceed_no_limit() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let tiers = format!(r#"{{"gold": {PODS}}}"#);
    let settings = [
        ("REDIS_URL", url.as_str()),
        ("TIER_CONFIG", &tiers),
        ("RESERVATION_TTL", "3s"),
        ("CONNECT_TIMEOUT", "3s"),
    ];
    let mut routers: Vec<Router> = (0..3).map(|_| Router::start(&settings)).collect();
    let limits = [
        (format!("/api/v1/numbers/{NUMBER}"), format!(r#"{{"max_lines": {MAX_LINES}}}"#)),
        ("/api/v1/accounts/twilio".to_owned(), format!(r#"{{"max_cps": {MAX_CPS}}}"#)),
    ];
    for (path, body) in limits {
        assert_eq!(routers[0].put(&path, &body).0, 200);
    }

    let [first, second] = ["a", "b"].map(|name| Dialler::start(&routers, name));
    await_grants(&server, &routers[2], 15);
    let killed = routers.remove(0);
    routers.insert(0, killed.kill_and_restart());
    await_grants(&server, &routers[2], 30);
    drop(first);
    await_grants(&server, &routers[2], 45);
    let killed = routers.remove(1);
    routers.insert(1, killed.kill_and_restart());
    await_grants(&server, &routers[2], 60);
    drop(second);

    let grants = grants(&server);
    for window in grants.windows(MAX_CPS + 1) {
        let (from, to) = (window[0], window[MAX_CPS]);
        assert!(to - from >= 1_000, "more than {MAX_CPS} grants from {from} to {to}");
    }
    eventually(10 * SECOND, "reservations, lines and calls have ended", || {
        let path = format!("/api/v1/numbers/{NUMBER}");
        routers[0].get("/api/v1/reservations").1["reservations"] == json!([])
            && routers[1].get(&path).1["lines"] == 0
            && routers[2].get("/api/v1/status").1["active_calls"] == 0
    });
    let body = json!({"merchant_id": "other", "count": 100});
    let (_, answer) = routers[0].post("/api/v1/reservations", body);
    assert_eq!(answer["refused"], 100 - PODS, "every slot is free: {answer}");
}
