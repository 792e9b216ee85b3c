//! Unit tests of the fleet, one rule at a time.

mod at_risk;
mod calls;
mod clock_shift;
mod events;
mod failover;
mod gateways;
mod health;
mod journal;
mod limits;
mod outbound;
mod pods;
mod queries;
mod reconnect;
mod renew;
mod signed_requests;
mod streams;
mod waiting;

use std::{fmt::Debug, str::FromStr};

use super::*;
use crate::tiers::DocumentSource;

const NOW: Millis = 1_000_000;
const LEASE_TTL: Millis = 60_000;

/// The writer of pods in tests that are not about fencing.
pub(super) const WRITER: PodWriter = PodWriter { origin: &PodOrigin::List, epoch: 0 };

fn claim_as_leader(fleet: &mut Fleet, epoch: Option<u64>) -> Result<u64, ClaimRefused> {
    let by = Claimant::Leader { epoch };
    fleet.claim_pods(&Claim { origin: PodOrigin::List, by, force: false }, NOW)
}

fn name<T: FromStr<Err: Debug>>(text: &str) -> T {
    text.parse().unwrap()
}

fn table(text: &str) -> Tiers {
    Tiers::parse(text, DocumentSource::Settings).unwrap().0
}

/// A pod in service.
fn ready() -> PodFacts {
    PodFacts {
        uid: "u1".into(),
        address: "a:1".into(),
        ready: true,
        terminating: false,
        at_risk: false,
        restarts: 0,
        pin: None,
    }
}

/// A fleet with this number of pods in service: `p1`, `p2` and so on.
fn fleet(tiers: &str, pods: usize) -> Fleet {
    let mut fleet = Fleet::new(table(tiers), 0);
    claim_as_leader(&mut fleet, Some(0)).unwrap();
    for number in 1..=pods {
        observe(&mut fleet, &format!("p{number}"), ready());
    }
    fleet.enable_change_log();
    fleet
}

fn observe(fleet: &mut Fleet, pod: &str, facts: PodFacts) -> Observed {
    fleet.observe_pod(&name(pod), &facts, WRITER, NOW).unwrap()
}

fn plain_request(call: &str) -> Allocate {
    Allocate::new(name(call), None, LEASE_TTL)
}

fn merchant_request(merchant: &str, call: &str) -> Allocate {
    Allocate::new(name(call), Some(name(merchant)), LEASE_TTL)
}

/// A request of a call that may reconnect.
fn returning_request(call: &str) -> Allocate {
    Allocate { may_return: true, ..plain_request(call) }
}

/// A request for a provisional allocation.
fn provisional_request(call: &str) -> Allocate {
    Allocate { provisional: true, ..plain_request(call) }
}

/// A request of a call that may wait.
fn waiting_request(call: &str) -> Allocate {
    let hold =
        Hold { time: 30_000, poll_timeout: 3_000, max_waiting: 10, max_waiting_per_merchant: 5 };
    Allocate { hold: Some(hold), ..plain_request(call) }
}

fn previous_pod(pod: &str, pod_attempt: u32) -> PreviousPod {
    PreviousPod { pod: name(pod), pod_attempt, is_settled: true, max_retries: 2 }
}

/// Allocates a pod and returns its name.
fn allocate(fleet: &mut Fleet, request: &Allocate) -> String {
    fleet.allocate(request, NOW).unwrap().pod.to_string()
}

/// Allocates this pod.
fn allocate_on(fleet: &mut Fleet, request: &Allocate, pod: &str) {
    fleet.prefer([(request.call.clone(), name(pod))].into());
    assert_eq!(allocate(fleet, request), pod);
}

fn refusal_reason(fleet: &mut Fleet, request: &Allocate, now: Millis) -> RefusalReason {
    fleet.allocate(request, now).unwrap_err().reason
}

fn pod_of(fleet: &Fleet, call: &str) -> Option<String> {
    fleet.call(&name(call)).map(|call| call.pod.to_string())
}

/// Releases a call with a cause.
fn end(fleet: &mut Fleet, call: &str, cause: EndCause, now: Millis) {
    let release = Release { cause, ..Release::new(name(call), None) };
    fleet.release(&release, now).unwrap();
}
