//! Simulated operators, which drain pods, and a cluster, which removes and adds pods.

use std::{
    collections::BTreeMap,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use redis::Commands;
use serde_json::{Value, json};

use super::{
    callers::reply_status,
    deployment::{Deployment, ROUTERS},
    history::{Action, ReplyStatus},
    http,
};
use testkit::dice::Dice;

/// Drains and undrains pods until the run ends.
pub(crate) fn drain_pods(deployment: &Deployment, mut dice: Dice) {
    while !deployment.is_finished.load(Ordering::Relaxed) {
        let pods = deployment.pods();
        let pod = pods[dice.roll(pods.len())].clone();
        let began = deployment.history.now();
        let response = http::post(
            deployment.routers[dice.roll(ROUTERS)].address,
            "/api/v1/drain",
            &json!({"pod_name": pod}),
        );
        deployment
            .history
            .record(began, Action::Drain { pod: pod.clone(), status: reply_status(&response) });
        thread::sleep(Duration::from_millis(30 + dice.roll(150) as u64));
        undrain(deployment, &pod, &mut dice);
        thread::sleep(Duration::from_millis(dice.roll(60) as u64));
    }
}

pub(crate) fn undrain(deployment: &Deployment, pod: &str, dice: &mut Dice) {
    deployment.history.record(deployment.history.now(), Action::Undrain { pod: pod.into() });
    for _ in 0..20 {
        let to = deployment.routers[dice.roll(ROUTERS)].address;
        let response = http::post(to, "/api/v1/undrain", &json!({"pod_name": pod}));
        if matches!(reply_status(&response), ReplyStatus::Success | ReplyStatus::NotFound) {
            return;
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Removes and adds pods until the run ends.
pub(crate) fn churn(deployment: &Deployment, mut dice: Dice) {
    let mut number = 10;
    while !deployment.is_finished.load(Ordering::Relaxed) {
        let pods = deployment.pods();
        let pod = pods[dice.roll(pods.len())].clone();
        if dice.roll(3) == 0 {
            make_unready(deployment, &pod, &mut dice);
            continue;
        }
        if dice.roll(2) == 0 {
            // Graceful termination before the removal.
            deployment.kube.terminate(&pod);
            wait_out_of_service(deployment, &pod, "is_terminating", true);
            thread::sleep(Duration::from_millis(100 + dice.roll(200) as u64));
        }
        deployment.remove_pod(&pod);
        thread::sleep(Duration::from_millis(dice.roll(150) as u64));
        let tier = pod.split('-').next().unwrap();
        deployment.add_pod(&format!("{tier}-{number}"));
        number += 1;
        thread::sleep(Duration::from_millis(50 + dice.roll(150) as u64));
    }
}

/// Records when the store has a pod that replaces another of the same name.
pub(crate) fn record_replacements(deployment: &Deployment) {
    let mut recorded = BTreeMap::new();
    while !deployment.is_finished.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(10));
        let is_replacement = |pod: &String| deployment.generation(pod) > 0;
        for pod in deployment.pods().into_iter().filter(is_replacement) {
            let generation = deployment.generation(&pod);
            if recorded.get(&pod) == Some(&generation) {
                continue;
            }
            let uid = deployment.kube.uid(&pod);
            let redis = deployment.store().connection_with_timeout();
            let stored: Option<String> =
                redis.and_then(|mut redis| redis.hget(format!("voice:pod:{pod}"), "uid").ok()?);
            if uid.is_some() && stored == uid && deployment.generation(&pod) == generation {
                let now = deployment.history.now();
                deployment.history.record(now, Action::PodStored { pod: pod.clone() });
                recorded.insert(pod, generation);
            }
        }
    }
}

/// Makes a pod unready for a short time.
fn make_unready(deployment: &Deployment, pod: &str, dice: &mut Dice) {
    // Without this check, an outdated state from the last time could count as seen.
    let was_ready = pod_field_is(deployment, pod, "is_ready", true);
    deployment.set_ready(pod, false);
    if was_ready {
        wait_out_of_service(deployment, pod, "is_ready", false);
    }
    thread::sleep(Duration::from_millis(100 + dice.roll(200) as u64));
    deployment.history.record(deployment.history.now(), Action::PodInService { pod: pod.into() });
    deployment.set_ready(pod, true);
}

/// Whether a router reports this value for a pod.
fn pod_field_is(deployment: &Deployment, pod: &str, field: &str, value: bool) -> bool {
    deployment.routers.iter().any(|router| {
        let response = http::get(router.address, &format!("/api/v1/pod/{pod}"));
        let body = response.ok().and_then(|it| serde_json::from_str::<Value>(&it.body).ok());
        body.is_some_and(|body| body[field] == value)
    })
}

/// Waits until a router reports the pod as out of service, and records it.
fn wait_out_of_service(deployment: &Deployment, pod: &str, field: &str, value: bool) {
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        if pod_field_is(deployment, pod, field, value) {
            deployment
                .history
                .record(deployment.history.now(), Action::PodOutOfService { pod: pod.into() });
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
}
