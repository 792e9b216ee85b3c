//! Reservations, lines and accounts.

use std::collections::BTreeMap;

use super::{super::dial_limits::free_slots, *};
use crate::{
    names::{AccountName, PhoneNumber, ReservationId},
    rules::MAX_COUNTED_LOADS,
};

const TTL: Millis = 75_000;
const NUMBER: &str = "+14155550100";

fn id(number: usize) -> ReservationId {
    name(&format!("R{number:016x}"))
}

/// A request for reservations with the ids `first` and following.
fn request(first: usize, count: usize) -> Reserve {
    Reserve {
        ids: (first..first + count).map(id).collect(),
        merchant: name("m"),
        number: None,
        accounts: Vec::new(),
        ttl: TTL,
        miss_target: 0,
    }
}

fn numbered(first: usize, count: usize) -> Reserve {
    Reserve { number: Some(name(NUMBER)), ..request(first, count) }
}

/// How many of the reservations are granted, and the limit that refuses the others.
fn granted(fleet: &mut Fleet, request: &Reserve, now: Millis) -> (usize, Option<DialLimit>) {
    let reserved = fleet.reserve(request, now);
    (reserved.granted.len(), reserved.limit)
}

fn answer(call: &str, reservation: usize) -> Allocate {
    Allocate { reservation: Some(id(reservation)), ..plain_request(call) }
}

fn used() -> Option<ReservationUse> {
    Some(ReservationUse::Used { merchant: name("m") })
}

fn held(fleet: &Fleet) -> u64 {
    fleet.outbound_status().pools.first().map_or(0, |(_, dials)| dials.held)
}

#[test]
fn a_batch_gets_as_many_reservations_as_pods_are_free() {
    let mut fleet = fleet(r#"{"gold": 3}"#, 3);
    assert_eq!(granted(&mut fleet, &request(0, 5), NOW), (3, Some(DialLimit::Capacity)));
    assert_eq!(held(&fleet), 3);
    assert_eq!(granted(&mut fleet, &request(9, 1), NOW), (0, Some(DialLimit::Capacity)));
}

#[test]
fn the_same_ids_are_one_request() {
    let mut fleet = fleet(r#"{"gold": 3}"#, 3);
    let first = fleet.reserve(&request(0, 2), NOW);
    let again = fleet.reserve(&request(0, 2), NOW + 10);
    assert_eq!((again.granted, again.until), (first.granted, NOW + TTL));
    assert_eq!(fleet.outbound_status().reservations, 2);
}

#[test]
fn a_call_without_a_reservation_leaves_the_held_pods() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    fleet.reserve(&request(0, 1), NOW);
    allocate(&mut fleet, &plain_request("c1"));
    let refusal = fleet.allocate(&plain_request("c2"), NOW).unwrap_err();
    assert_eq!(refusal.tried[0].reason, SkipReason::Held);
    let answered = fleet.allocate(&answer("c3", 0), NOW).unwrap();
    assert_eq!(answered.reservation, used());
    assert_eq!(fleet.call(&name("c3")).unwrap().merchant, Some(name("m")), "of the reservation");
    assert_eq!(held(&fleet), 0);
}

#[test]
fn a_reservation_is_used_once_and_by_its_merchant() {
    let mut fleet = fleet(r#"{"gold": 5}"#, 5);
    fleet.reserve(&request(0, 2), NOW);
    let other = Allocate { merchant: Some(name("x")), ..answer("c1", 0) };
    let other = fleet.allocate(&other, NOW).unwrap();
    assert_eq!(other.reservation, Some(ReservationUse::OtherMerchant));
    assert_eq!(fleet.allocate(&answer("c2", 0), NOW).unwrap().reservation, used());
    let repeated = fleet.allocate(&answer("c2", 0), NOW).unwrap();
    assert_eq!((repeated.was_existing, repeated.reservation), (true, None), "no second use");
    let second = fleet.allocate(&answer("c3", 0), NOW).unwrap();
    assert_eq!(second.reservation, Some(ReservationUse::Unknown));
    let late = fleet.allocate(&answer("c4", 1), NOW + TTL);
    assert_eq!(late.unwrap().reservation, Some(ReservationUse::Unknown), "expired");
}

#[test]
fn a_repeat_of_a_refused_answer_is_served_like_the_first() {
    let mut fleet = fleet(r#"{"gold": 3}"#, 3);
    fleet.set_merchant(&name("m"), Some(r#"{"max_calls": 2}"#), Edit::ANY).unwrap();
    fleet.set_number(&name(NUMBER), Some(2), "");
    fleet.reserve(&numbered(0, 2), NOW);
    for pod in ["p1", "p2", "p3"] {
        fleet.drain(&name(pod), 60_000, NOW).unwrap();
    }
    let repeated = Some(ReservationUse::Repeated { merchant: name("m") });
    assert_eq!(fleet.allocate(&answer("c1", 0), NOW).unwrap_err().reservation, used());
    assert_eq!(fleet.allocate(&answer("c1", 0), NOW).unwrap_err().reservation, repeated);
    let other = fleet.allocate(&answer("c2", 0), NOW).unwrap_err();
    assert_eq!(other.reservation, Some(ReservationUse::Unknown), "another call");
    let late = fleet.allocate(&answer("c1", 0), NOW + TTL).unwrap_err();
    assert_eq!(late.reservation, Some(ReservationUse::Unknown), "too late");

    // The merchant has a call and a dial, for which the only free pod is held.
    for pod in ["p1", "p2"] {
        fleet.undrain(&name(pod)).unwrap();
    }
    allocate(&mut fleet, &merchant_request("m", "c3"));
    let served = fleet.allocate(&answer("c1", 0), NOW).unwrap();
    assert_eq!((served.reservation, fleet.numbers()[0].lines), (repeated, 2));
    assert_eq!(fleet.allocate(&answer("c1", 0), NOW).unwrap().reservation, None);
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    let over = fleet.allocate(&answer("c1", 0), NOW).unwrap_err();
    assert_eq!(over.reservation, Some(ReservationUse::Unknown), "it was served");
}

#[test]
fn a_reservation_expires_and_its_slot_goes_to_a_waiting_call() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    fleet.reserve(&request(0, 1), NOW);
    assert!(fleet.allocate(&waiting_request("c1"), NOW).is_err());
    let until = fleet.dialed(&id(0), &name("CA1"), TTL, NOW + 1_000).unwrap();
    assert_eq!(until, NOW + 1_000 + TTL, "from the dial");
    fleet.extend_pending(2 * TTL, NOW);
    assert!(fleet.sweep(10, until - 1).reservations.is_empty());
    assert_eq!(pod_of(&fleet, "c1"), None);
    assert_eq!(fleet.sweep(10, until).reservations, [id(0)]);
    assert_eq!(pod_of(&fleet, "c1").as_deref(), Some("p1"));
    assert_eq!(fleet.dialed(&id(0), &name("CA1"), TTL, until), Err(ReservationNotFound.into()));
}

#[test]
fn a_call_is_the_dial_of_one_reservation() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    fleet.reserve(&request(0, 2), NOW);
    let until = fleet.dialed(&id(0), &name("CA1"), TTL, NOW + 1_000).unwrap();
    let repeated = fleet.dialed(&id(0), &name("CA1"), TTL, NOW + 2_000);
    assert_eq!(repeated, Ok(until), "a repeat does not extend it");
    let other = fleet.dialed(&id(1), &name("CA1"), TTL, NOW + 2_000);
    assert_eq!(other, Err(DialRefused::OtherReservation(id(0))));
    fleet.give_back(&id(0), NOW + 2_000).unwrap();
    assert!(fleet.dialed(&id(1), &name("CA1"), TTL, NOW + 2_000).is_ok());
}

#[test]
fn a_live_or_waiting_call_is_not_the_dial_of_another_reservation() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    fleet.reserve(&request(0, 2), NOW);
    allocate(&mut fleet, &answer("CA1", 0));
    assert!(fleet.allocate(&waiting_request("CA2"), NOW).is_err());
    for call in ["CA1", "CA2"] {
        let refused = fleet.dialed(&id(1), &name(call), TTL, NOW);
        assert_eq!(refused, Err(DialRefused::CallInProgress), "{call}");
    }
    end(&mut fleet, "CA1", EndCause::Provider, NOW);
    assert_eq!(fleet.outbound_status().reservations, 1);
    assert!(fleet.dialed(&id(1), &name("CA3"), TTL, NOW).is_ok());
}

#[test]
fn an_overdue_waiting_call_that_gets_the_slot_of_a_reservation_ends_with_the_next_sweep() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    fleet.reserve(&request(0, 1), NOW);
    for call in ["c1", "c2"] {
        assert!(fleet.allocate(&waiting_request(call), NOW).is_err());
    }
    let first = fleet.sweep(1, NOW + TTL);
    assert_eq!(first.abandoned.len(), 1, "the limit leaves one overdue call in the queue");
    assert_eq!((first.reservations.len(), first.expired.len()), (1, 0));
    assert_eq!(fleet.sweep(1, NOW + TTL).expired[0].cause, EndCause::Abandoned);
}

#[test]
fn waiting_callers_precede_diallers() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &plain_request("c1"));
    assert!(fleet.allocate(&waiting_request("c2"), NOW).is_err());
    observe(&mut fleet, "p2", PodFacts { ready: false, ..ready() });
    assert_eq!(granted(&mut fleet, &request(0, 1), NOW), (0, Some(DialLimit::Capacity)));
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    assert_eq!(pod_of(&fleet, "c2").as_deref(), Some("p1"));
}

#[test]
fn an_answered_dial_waits_before_all_calls_without_a_reservation() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    fleet.set_merchant(&name("vip"), Some(r#"{"priority": 100}"#), Edit::ANY).unwrap();
    fleet.reserve(&request(0, 1), NOW);
    let drain = fleet.drain(&name("p1"), 1_000, NOW);
    assert!(drain.is_ok());
    let vip = Allocate { merchant: Some(name("vip")), ..waiting_request("c1") };
    assert!(fleet.allocate(&vip, NOW).is_err());
    let dialed = Allocate { reservation: Some(id(0)), ..waiting_request("c2") };
    let refusal = fleet.allocate(&dialed, NOW).unwrap_err();
    assert_eq!(refusal.reservation, used(), "answered without a pod");
    fleet.undrain(&name("p1")).unwrap();
    assert_eq!(pod_of(&fleet, "c2").as_deref(), Some("p1"));
}

#[test]
fn the_provider_ends_a_dial_without_an_answer() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    fleet.reserve(&numbered(0, 1), NOW);
    fleet.dialed(&id(0), &name("CA1"), TTL, NOW).unwrap();
    let callback = Release { cause: EndCause::Provider, ..Release::new(name("CA1"), None) };
    assert_eq!(fleet.release(&callback, NOW), Err(NotReleased::WasDialed));
    assert_eq!(fleet.release(&callback, NOW), Err(NotReleased::NotFound));
    assert_eq!(fleet.outbound_status().reservations, 0);
    assert!(fleet.line_holders().is_empty(), "its line is free");
    assert_eq!(fleet.give_back(&id(0), NOW), Err(ReservationNotFound));
}

#[test]
fn only_reported_dials_lower_the_answer_rate() {
    let mut fleet = fleet(r#"{"gold": 50}"#, 50);
    let probability = |fleet: &Fleet| fleet.answer_probability(&name("m"), NOW);
    assert_eq!(probability(&fleet), 1_024, "starts at 1");
    fleet.reserve(&request(0, 20), NOW);
    (0..10).for_each(|number| fleet.give_back(&id(number), NOW).unwrap());
    assert_eq!(probability(&fleet), 1_024);
    for number in 10..20 {
        fleet.dialed(&id(number), &name(&format!("CA{number}")), TTL, NOW).unwrap();
        fleet.give_back(&id(number), NOW).unwrap();
    }
    let learned = probability(&fleet);
    assert!(learned < 800, "{learned}");
    fleet.reserve(&Reserve { miss_target: 10_000, ..request(30, 40) }, NOW);
    assert!(held(&fleet) < 40, "{} slots for 40 dials", held(&fleet));
    let next = fleet.reserve(&Reserve { miss_target: 0, ..request(90, 1) }, NOW);
    assert_eq!(next.granted.len(), 1);
    assert_eq!(held(&fleet), 41, "a target of 0 holds a slot per dial");
}

#[test]
fn lines_are_shared_with_inbound_calls_and_held_until_the_call_is_over() {
    let mut fleet = fleet(r#"{"gold": 9}"#, 9);
    let number: PhoneNumber = name(NUMBER);
    fleet.set_number(&number, Some(2), "");
    let inbound = |call| Allocate { numbers: vec![name(NUMBER)], ..plain_request(call) };
    allocate(&mut fleet, &inbound("c1"));
    assert_eq!(granted(&mut fleet, &numbered(0, 3), NOW), (1, Some(DialLimit::MaxLines)));
    allocate(&mut fleet, &inbound("c2"));
    assert_eq!(fleet.numbers()[0].lines, 3, "an inbound call is never refused for lines");
    allocate(&mut fleet, &answer("c3", 0));
    assert_eq!(fleet.numbers()[0].lines, 3, "the line of the dial is that of the call");
    for call in ["c1", "c2"] {
        end(&mut fleet, call, EndCause::Agent, NOW);
    }
    assert_eq!(granted(&mut fleet, &numbered(5, 3), NOW), (1, Some(DialLimit::MaxLines)));
    end(&mut fleet, "c3", EndCause::Agent, NOW);
    fleet.set_number(&number, Some(0), "");
    assert_eq!(
        granted(&mut fleet, &numbered(9, 1), NOW),
        (0, Some(DialLimit::MaxLines)),
        "lowered"
    );
}

#[test]
fn a_reconnecting_call_keeps_its_line() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    fleet.set_number(&name(NUMBER), Some(1), "");
    fleet.reserve(&numbered(0, 1), NOW);
    let first = Allocate { may_return: true, ..answer("c1", 0) };
    let pod = allocate(&mut fleet, &first);
    let again = Allocate { previous: Some(previous_pod(&pod, 1)), ..returning_request("c1") };
    fleet.allocate(&again, NOW).unwrap();
    assert_eq!(fleet.numbers()[0].lines, 1);
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    assert_eq!(fleet.numbers()[0].lines, 0);
}

#[test]
fn grants_of_an_account_are_evenly_spaced() {
    let mut fleet = fleet(r#"{"gold": 90}"#, 90);
    let account: AccountName = name("twilio");
    fleet.set_account(&account, Some(3), "");
    let dial =
        |first| Reserve { accounts: vec![name("twilio:AC1"), name("twilio")], ..request(first, 2) };
    let mut times = Vec::new();
    for at in 0..5_000 {
        let reserved = fleet.reserve(&dial(2 * at as usize), NOW + at);
        times.extend(reserved.granted.iter().map(|_| at));
        assert_eq!(reserved.limit, Some(DialLimit::MaxCps));
        assert!((1..=334).contains(&reserved.retry_after));
    }
    assert_eq!(times.len(), 15);
    for window in times.windows(4) {
        assert!(window[3] - window[0] >= 1_000, "four dials in a second: {window:?}");
    }
    fleet.set_account(&account, None, "");
    fleet.set_account(&account, Some(1), "");
    let last = times.last().unwrap();
    assert!(fleet.reserve(&dial(20_000), NOW + last + 999).granted.is_empty(), "lowered");
    fleet.set_account(&account, Some(0), "");
    assert!(fleet.reserve(&dial(20_002), NOW + 60_000).granted.is_empty());
}

#[test]
fn dials_count_as_calls_of_their_merchant() {
    let mut fleet = fleet(r#"{"gold": 9}"#, 9);
    fleet.set_merchant(&name("m"), Some(r#"{"max_calls": 2}"#), Edit::ANY).unwrap();
    allocate(&mut fleet, &merchant_request("m", "c1"));
    assert_eq!(granted(&mut fleet, &request(0, 3), NOW), (1, Some(DialLimit::MaxCalls)));
    assert!(fleet.allocate(&merchant_request("m", "c2"), NOW).is_err());
    assert!(fleet.allocate(&answer("c3", 0), NOW).is_ok(), "its limits were checked before");
}

#[test]
fn dials_leave_the_inbound_reserve() {
    let tiers = r#"{"tiers": {"gold": {"target": 5, "inbound_reserve": 2}}}"#;
    let mut fleet_1 = fleet(tiers, 5);
    assert_eq!(granted(&mut fleet_1, &request(0, 9), NOW), (3, Some(DialLimit::InboundReserve)));
    let tiers = r#"{"tiers": {"basic": {"type": "shared", "target": 2, "max_concurrent": 5,
        "inbound_reserve": "30%"}}}"#;
    let mut fleet_2 = fleet(tiers, 2);
    assert_eq!(granted(&mut fleet_2, &request(0, 9), NOW), (7, Some(DialLimit::InboundReserve)));
    for number in 0..3 {
        allocate(&mut fleet_2, &plain_request(&format!("c{number}")));
    }
    assert!(fleet_2.allocate(&plain_request("c9"), NOW).is_err(), "the rest is held");
}

#[test]
fn all_free_slots_of_a_pod_with_many_count() {
    let tiers = r#"{"tiers": {"deep": {"type": "shared", "target": 2, "max_concurrent": 300,
        "inbound_reserve": "50%"}}}"#;
    let mut fleet = fleet(tiers, 2);
    assert_eq!(granted(&mut fleet, &request(0, 301), NOW), (300, Some(DialLimit::InboundReserve)));
    for number in 0..300 {
        allocate(&mut fleet, &plain_request(&format!("c{number}")));
    }
    assert!(fleet.allocate(&plain_request("c300"), NOW).is_err(), "the rest is held");
}

#[test]
fn pods_beyond_many_different_loads_count_as_one_free_slot_each() {
    let levels: BTreeMap<usize, usize> = (0..200).map(|calls| (calls, 2)).collect();
    let exact: usize = (0..MAX_COUNTED_LOADS).map(|calls| 2 * (100 - calls)).sum();
    let others = 2 * (100 - MAX_COUNTED_LOADS);
    assert_eq!(free_slots(&levels, 100), (exact + others) as u64);
    assert_eq!(free_slots(&[(3, 5), (9, 1)].into(), 300), 5 * 297 + 291);
}

#[test]
fn a_chain_is_filled_in_order() {
    let tiers = r#"{"tiers": {"gold": {"target": 1}, "basic": {"type": "shared", "target": 1,
        "max_concurrent": 2}}, "default_chain": ["gold", "basic"]}"#;
    let mut fleet = fleet(tiers, 2);
    fleet.reserve(&request(0, 9), NOW);
    let pools = fleet.outbound_status().pools;
    let held: Vec<(String, u64)> =
        pools.iter().map(|(pool, dials)| (pool.as_tier_value(), dials.held)).collect();
    assert_eq!(held, [("basic".into(), 2), ("gold".into(), 1)]);
    // The slot of gold is held for another dial: the call takes its own in basic.
    let got = fleet.allocate(&answer("c1", 2), NOW).unwrap();
    assert_eq!(got.pool, name("pool:basic"));
}

#[test]
fn reservations_move_with_the_clock_and_survive_a_restart() {
    let mut before = fleet(r#"{"gold": 3}"#, 3);
    before.set_account(&name("twilio"), Some(1), "");
    let accounts = vec![name("twilio")];
    before.reserve(&Reserve { accounts: accounts.clone(), ..numbered(0, 1) }, NOW);
    before.dialed(&id(0), &name("CA1"), TTL, NOW).unwrap();
    before.set_account(&name("twilio"), None, "");
    before.shift(-500_000);
    let mut after = Fleet::new(table(r#"{"gold": 3}"#), 0);
    before.facts().into_iter().for_each(|change| after.apply(change));
    assert_eq!(after.reservation(&id(0)), before.reservation(&id(0)));
    let now = NOW - 500_000;
    assert_eq!(after.reservation(&id(0)).unwrap().facts.until, now + TTL);
    after.set_account(&name("twilio"), Some(1), "");
    let next = Reserve { accounts, ..request(1, 1) };
    assert_eq!(granted(&mut after, &next, now + 999), (0, Some(DialLimit::MaxCps)));
    let callback = Release { cause: EndCause::Provider, ..Release::new(name("CA1"), None) };
    assert_eq!(after.release(&callback, now), Err(NotReleased::WasDialed));
}
