//! Who looks after the pods: operators who drain them, a cluster that takes and brings them.

use std::{
    collections::BTreeMap,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use redis::Commands;
use serde_json::{Value, json};

use super::{
    callers::said,
    deployment::{Deployment, ROUTERS},
    history::{Said, What},
    http,
};
use testkit::dice::Dice;

/// Drains pods and takes that back, until the run is over.
pub(crate) fn operate(deployment: &Deployment, mut dice: Dice) {
    while !deployment.is_over.load(Ordering::Relaxed) {
        let pods = deployment.pods();
        let pod = pods[dice.roll(pods.len())].clone();
        let began = deployment.history.now();
        let answer = http::post(
            deployment.seats[dice.roll(ROUTERS)].address,
            "/api/v1/drain",
            &json!({"pod_name": pod}),
        );
        deployment.history.note(began, What::Drain { pod: pod.clone(), said: said(&answer) });
        thread::sleep(Duration::from_millis(30 + dice.roll(150) as u64));
        undrain(deployment, &pod, &mut dice);
        thread::sleep(Duration::from_millis(dice.roll(60) as u64));
    }
}

pub(crate) fn undrain(deployment: &Deployment, pod: &str, dice: &mut Dice) {
    deployment.history.note(deployment.history.now(), What::Undrain { pod: pod.into() });
    for _ in 0..20 {
        let to = deployment.seats[dice.roll(ROUTERS)].address;
        let answer = http::post(to, "/api/v1/undrain", &json!({"pod_name": pod}));
        if matches!(said(&answer), Said::Yes | Said::Unknown) {
            return;
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Takes pods away and brings others, until the run is over.
pub(crate) fn churn(deployment: &Deployment, mut dice: Dice) {
    let mut number = 10;
    while !deployment.is_over.load(Ordering::Relaxed) {
        let pods = deployment.pods();
        let pod = pods[dice.roll(pods.len())].clone();
        if dice.roll(3) == 0 {
            rest(deployment, &pod, &mut dice);
            continue;
        }
        if dice.roll(2) == 0 {
            // It is asked to go first.
            deployment.kube.terminate(&pod);
            see(deployment, &pod, "is_terminating", true);
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

/// Notes when the store knows pods that took the place of others of their names.
pub(crate) fn watch_names(deployment: &Deployment) {
    let mut known = BTreeMap::new();
    while !deployment.is_over.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(10));
        let of_old_names = |pod: &String| deployment.generation(pod) > 0;
        for pod in deployment.pods().into_iter().filter(of_old_names) {
            let generation = deployment.generation(&pod);
            if known.get(&pod) == Some(&generation) {
                continue;
            }
            let uid = deployment.kube.uid(&pod);
            let redis = deployment.store().hurried_connection();
            let told: Option<String> =
                redis.and_then(|mut redis| redis.hget(format!("voice:pod:{pod}"), "uid").ok()?);
            if uid.is_some() && told == uid && deployment.generation(&pod) == generation {
                let now = deployment.history.now();
                deployment.history.note(now, What::PodKnown { pod: pod.clone() });
                known.insert(pod, generation);
            }
        }
    }
}

/// A pod is not ready for a while.
fn rest(deployment: &Deployment, pod: &str, dice: &mut Dice) {
    // (what a store that lags still knows of the last time is not this time)
    let is_known = says(deployment, pod, "is_ready", true);
    deployment.set_ready(pod, false);
    if is_known {
        see(deployment, pod, "is_ready", false);
    }
    thread::sleep(Duration::from_millis(100 + dice.roll(200) as u64));
    deployment.history.note(deployment.history.now(), What::PodServes { pod: pod.into() });
    deployment.set_ready(pod, true);
}

/// Whether a router says so of a pod.
fn says(deployment: &Deployment, pod: &str, field: &str, value: bool) -> bool {
    deployment.seats.iter().any(|seat| {
        let answer = http::get(seat.address, &format!("/api/v1/pod/{pod}"));
        let body = answer.ok().and_then(|it| serde_json::from_str::<Value>(&it.body).ok());
        body.is_some_and(|body| body[field] == value)
    })
}

/// Waits until the routers know that a pod takes no calls, and notes it.
fn see(deployment: &Deployment, pod: &str, field: &str, value: bool) {
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        if says(deployment, pod, field, value) {
            deployment.history.note(deployment.history.now(), What::PodRests { pod: pod.into() });
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
}
