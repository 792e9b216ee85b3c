//! A thousand waiting and a thousand provisional calls, milliseconds from Redis.

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::{
    deployment::{Deployment, ROUTERS},
    faults::Scene,
    http,
};

/// With a pool that takes all provisional calls of the crowd on one pod.
pub(crate) const TIERS: &str = r#"{"tiers": {"gold": {"target": 4}, "basic": {"type": "shared", "target": 2, "max_concurrent": 3}, "acme": {"target": 1}, "crowd": {"type": "shared", "target": 1, "max_concurrent": 1000}}, "default_chain": ["gold", "basic"]}"#;
const CALLS: usize = 1_000;
const POD: &str = "crowd-0";
/// Merchants whose calls go to the pod of the crowd, or wait for a pool without pods.
const MERCHANTS: [(&str, &str); 2] = [
    ("crowd", r#"{"fallback": ["crowd"]}"#),
    ("patient", r#"{"pool": "nowhere", "dedicated_only": true}"#),
];

/// Stalls Redis while the crowd is there, and sends the crowd home.
pub(crate) fn stall(scene: &Scene) {
    let deployment = scene.deployment;
    for seat in &deployment.seats {
        let limits = (Duration::from_millis(1), Duration::from_millis(3));
        seat.to_redis.set(|faults| faults.delay = Some(limits));
    }
    deployment.kube.add_with(POD, |pod| {
        pod["metadata"]["labels"]["smart-router/tier"] = json!("crowd");
    });
    for (merchant, document) in MERCHANTS {
        let path = format!("/api/v1/merchants/{merchant}");
        let put = http::ask(
            deployment.seats[0].address,
            "PUT",
            &path,
            "application/json",
            document.as_bytes(),
        );
        scene.expect(put.is_ok_and(|answer| answer.status == 200), "the merchants of the crowd");
    }
    gather(deployment);
    let counts = counts(deployment);
    scene.expect(counts == Some((CALLS, CALLS)), &format!("a crowd, not {counts:?}"));
    deployment.history.fault("Redis stalls");
    deployment.store().servers[0].signal("STOP");
    scene.pause(1_200, 1_800);
    deployment.store().servers[0].signal("CONT");
    scene.pause(300, 500);
    deployment.kube.delete(POD);
    send_home(deployment);
}

/// Calls `merchant-0` and on, as Twilio places them, by eight callers.
fn gather(deployment: &Deployment) {
    let until = Instant::now() + Duration::from_secs(20);
    thread::scope(|scope| {
        for caller in 0..8 {
            scope.spawn(move || {
                for number in (caller..CALLS).step_by(8) {
                    for (merchant, _) in MERCHANTS {
                        let path = format!("/api/v1/twilio/allocate?merchant_id={merchant}");
                        let form = format!("CallSid={merchant}-{number}");
                        let is_in = |router: usize| {
                            let to = deployment.seats[router % ROUTERS].address;
                            let kind = "application/x-www-form-urlencoded";
                            let answer = http::ask(to, "POST", &path, kind, form.as_bytes());
                            answer.is_ok_and(|answer| !answer.body.contains("<Hangup/>"))
                        };
                        let mut router = number;
                        while !is_in(router) && Instant::now() < until {
                            router += 1;
                            thread::sleep(Duration::from_millis(20));
                        }
                    }
                }
            });
        }
    });
}

/// The provisional and the waiting calls of the crowd, as the store counts them.
fn counts(deployment: &Deployment) -> Option<(usize, usize)> {
    let mut redis = deployment.store().connection()?;
    let count = |redis: &mut redis::Connection, key: &str| {
        redis::cmd("ZCARD").arg(key).query::<usize>(redis).ok()
    };
    let provisional = count(&mut redis, &format!("voice:pod:calls:{POD}"))?;
    Some((provisional, count(&mut redis, "voice:merchant:patient:waiting")?))
}

fn send_home(deployment: &Deployment) {
    let until = Instant::now() + Duration::from_secs(10);
    thread::scope(|scope| {
        for caller in 0..8 {
            scope.spawn(move || {
                for number in (caller..CALLS).step_by(8) {
                    let call = json!({"call_sid": format!("patient-{number}")});
                    let is_gone = |router: usize| {
                        let to = deployment.seats[router % ROUTERS].address;
                        let answer = http::post(to, "/api/v1/release", &call);
                        answer.is_ok_and(|answer| matches!(answer.status, 200 | 404))
                    };
                    let mut router = number;
                    while !is_gone(router) && Instant::now() < until {
                        router += 1;
                        thread::sleep(Duration::from_millis(20));
                    }
                }
            });
        }
    });
}
