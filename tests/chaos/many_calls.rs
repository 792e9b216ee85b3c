//! A stall of Redis with a thousand waiting and a thousand provisional calls and network latency.

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::{
    deployment::{Deployment, ROUTERS},
    faults::FaultContext,
    http,
};

/// The tiers of the deployment, and one for a pod that serves all provisional calls.
pub(crate) const TIERS: &str = r#"{"tiers": {"gold": {"target": 4}, "basic": {"type": "shared", "target": 2, "max_concurrent": 3}, "acme": {"target": 1}, "large": {"type": "shared", "target": 1, "max_concurrent": 1000}}, "default_chain": ["gold", "basic"]}"#;
const CALLS: usize = 1_000;
const POD: &str = "large-0";
/// Merchants whose calls go to the large pod, or wait for a pool without pods.
const MERCHANTS: [(&str, &str); 2] = [
    ("provisional", r#"{"fallback": ["large"]}"#),
    ("waiting", r#"{"pool": "nowhere", "dedicated_only": true}"#),
];

/// Starts the calls, stalls Redis, and ends the calls.
pub(crate) fn stall_redis(context: &FaultContext) {
    let deployment = context.deployment;
    for router in &deployment.routers {
        let limits = (Duration::from_millis(1), Duration::from_millis(3));
        router.redis_proxy.set_faults(|faults| faults.latency = Some(limits));
    }
    deployment.kube.add_with(POD, |pod| {
        pod["metadata"]["labels"]["smart-router/tier"] = json!("large");
    });
    for (merchant, document) in MERCHANTS {
        let path = format!("/api/v1/merchants/{merchant}");
        let put = http::send(
            deployment.routers[0].address,
            "PUT",
            &path,
            "application/json",
            document.as_bytes(),
        );
        context.expect(put.is_ok_and(|response| response.status == 200), "the merchants");
    }
    start_calls(deployment);
    let counts = counts(deployment);
    context.expect(counts == Some((CALLS, CALLS)), &format!("all calls, not {counts:?}"));
    deployment.history.fault("Redis stalls");
    deployment.store().servers[0].signal("STOP");
    context.pause(1_200, 1_800);
    deployment.store().servers[0].signal("CONT");
    context.pause(300, 500);
    deployment.kube.delete(POD);
    end_calls(deployment);
}

/// Starts the calls of both merchants by Twilio webhooks, from eight threads.
fn start_calls(deployment: &Deployment) {
    let until = Instant::now() + Duration::from_secs(20);
    thread::scope(|scope| {
        for caller in 0..8 {
            scope.spawn(move || {
                for number in (caller..CALLS).step_by(8) {
                    for (merchant, _) in MERCHANTS {
                        let path = format!("/api/v1/twilio/allocate?merchant_id={merchant}");
                        let form = format!("CallSid={merchant}-{number}");
                        let is_accepted = |router: usize| {
                            let to = deployment.routers[router % ROUTERS].address;
                            let content_type = "application/x-www-form-urlencoded";
                            let response =
                                http::send(to, "POST", &path, content_type, form.as_bytes());
                            response.is_ok_and(|response| !response.body.contains("<Hangup/>"))
                        };
                        let mut router = number;
                        while !is_accepted(router) && Instant::now() < until {
                            router += 1;
                            thread::sleep(Duration::from_millis(20));
                        }
                    }
                }
            });
        }
    });
}

/// The numbers of provisional and waiting calls in the store.
fn counts(deployment: &Deployment) -> Option<(usize, usize)> {
    let mut redis = deployment.store().connection()?;
    let count = |redis: &mut redis::Connection, key: &str| {
        redis::cmd("ZCARD").arg(key).query::<usize>(redis).ok()
    };
    let provisional = count(&mut redis, &format!("voice:pod:calls:{POD}"))?;
    Some((provisional, count(&mut redis, "voice:merchant:waiting:waiting")?))
}

fn end_calls(deployment: &Deployment) {
    let until = Instant::now() + Duration::from_secs(10);
    thread::scope(|scope| {
        for caller in 0..8 {
            scope.spawn(move || {
                for number in (caller..CALLS).step_by(8) {
                    let call = json!({"call_sid": format!("waiting-{number}")});
                    let is_released = |router: usize| {
                        let to = deployment.routers[router % ROUTERS].address;
                        let response = http::post(to, "/api/v1/release", &call);
                        response.is_ok_and(|response| matches!(response.status, 200 | 404))
                    };
                    let mut router = number;
                    while !is_released(router) && Instant::now() < until {
                        router += 1;
                        thread::sleep(Duration::from_millis(20));
                    }
                }
            });
        }
    });
}
