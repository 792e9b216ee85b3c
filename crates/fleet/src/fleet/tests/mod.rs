//! The rules of the fleet, one at a time.

mod calls;
mod clock_shift;
mod health;
mod journal;
mod limits;
mod pods;
mod queries;
mod renew;
mod rescue;
mod signed_requests;
mod waiting;

use std::{fmt::Debug, str::FromStr};

use super::*;
use crate::tiers::Origin;

const NOW: Millis = 1_000_000;
const LEASE: Millis = 60_000;

/// The writer of pods in tests that are not about fencing.
pub(super) const WRITER: PodWriter = PodWriter { origin: &PodOrigin::List, epoch: 0 };

fn leads(fleet: &mut Fleet, epoch: Option<u64>) -> Result<u64, ClaimRefused> {
    let by = Claimant::Leader { epoch };
    fleet.claim_pods(&Claim { origin: PodOrigin::List, by, force: false }, NOW)
}

fn name<T: FromStr<Err: Debug>>(text: &str) -> T {
    text.parse().unwrap()
}

fn table(text: &str) -> Tiers {
    Tiers::parse(text, Origin::Settings).unwrap().0
}

/// A pod in service.
fn ready() -> PodFacts {
    PodFacts {
        uid: "u1".into(),
        address: "a:1".into(),
        ready: true,
        terminating: false,
        restarts: 0,
        pin: None,
    }
}

/// So many pods in service, `p1` and on.
fn fleet(tiers: &str, pods: usize) -> Fleet {
    let mut fleet = Fleet::new(table(tiers), 0);
    leads(&mut fleet, Some(0)).unwrap();
    for number in 1..=pods {
        see(&mut fleet, &format!("p{number}"), ready());
    }
    fleet.keep_changes();
    fleet
}

fn see(fleet: &mut Fleet, pod: &str, facts: PodFacts) -> Observed {
    fleet.observe_pod(&name(pod), &facts, WRITER, NOW).unwrap()
}

fn ask(call: &str) -> Allocate {
    Allocate::new(name(call), None, LEASE)
}

fn ask_for(merchant: &str, call: &str) -> Allocate {
    Allocate::new(name(call), Some(name(merchant)), LEASE)
}

/// A call that comes back when its stream is gone.
fn ask_returning(call: &str) -> Allocate {
    Allocate { returns: true, ..ask(call) }
}

/// A call whose stream has to start.
fn ask_provisional(call: &str) -> Allocate {
    Allocate { provisional: true, ..ask(call) }
}

fn ask_patient(call: &str) -> Allocate {
    let hold = Hold { time: 30_000, patience: 3_000, most: 10, most_per_merchant: 5 };
    Allocate { hold: Some(hold), ..ask(call) }
}

fn after(pod: &str, attempt: u32) -> After {
    After { pod: name(pod), attempt, is_final: true, retries: 2 }
}

/// The pod a call is given.
fn give(fleet: &mut Fleet, request: &Allocate) -> String {
    fleet.allocate(request, NOW).unwrap().pod.to_string()
}

/// The same, where it has to be this pod.
fn give_on(fleet: &mut Fleet, request: &Allocate, pod: &str) {
    fleet.favour([(request.call.clone(), name(pod))].into());
    assert_eq!(give(fleet, request), pod);
}

fn why(fleet: &mut Fleet, request: &Allocate, now: Millis) -> Why {
    fleet.allocate(request, now).unwrap_err().why
}

fn pod_of(fleet: &Fleet, call: &str) -> Option<String> {
    fleet.call(&name(call)).map(|call| call.pod.to_string())
}

/// Ends a call as somebody tells it.
fn end(fleet: &mut Fleet, call: &str, cause: Cause, now: Millis) {
    let release = Release { cause, ..Release::new(name(call), None) };
    fleet.release(&release, now).unwrap();
}
