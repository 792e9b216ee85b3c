//! Bounds, orders, and pods that do not become ready.

use super::*;
use crate::{
    capacity::{Bounds, Prescale, Reason},
    tiers::InboundReserve,
};

fn decide(bounds: Bounds, live: u64) -> Decision {
    let settings = Settings { bounds, ..Settings::default() };
    let seen = Observation { at: MONDAY * 1_000, live, ready: live, ..Observation::default() };
    Policy::new(settings).step(&seen)
}

#[test]
fn the_number_stays_between_min_and_max() {
    let bounds = Bounds { min: 25, max: 30, ..Bounds::default() };
    let decision = decide(bounds.clone(), 0);
    assert_eq!((decision.desired, decision.reason), (25, Reason::Min));
    let decision = decide(bounds, 50);
    assert_eq!((decision.desired, decision.reason), (30, Reason::Max));
    assert!(decision.needed > 50);
}

#[test]
fn a_min_above_max_gives_way() {
    assert_eq!(decide(Bounds { min: 50, max: 5, ..Bounds::default() }, 0).desired, 5);
}

#[test]
fn the_inbound_reserve_stays_free() {
    let decision =
        decide(Bounds { inbound_reserve: InboundReserve::Slots(500), ..Bounds::default() }, 100);
    assert_eq!((decision.desired, decision.reason), (600, Reason::Reserve));
}

#[test]
fn dials_need_slots_beside_calls_and_reserve() {
    let decide = |dial_slots, calls_per_pod, max| {
        let inbound_reserve = InboundReserve::Slots(50);
        let bounds = Bounds { max, inbound_reserve, ..Bounds::default() };
        let settings = Settings { bounds, calls_per_pod, ..Settings::default() };
        let (at, live, waiting) = (MONDAY * 1_000, 100, 10);
        let seen =
            Observation { at, live, waiting, dial_slots, ready: 100, ..Observation::default() };
        let decision = Policy::new(settings).step(&seen);
        (decision.desired, decision.reason)
    };
    assert_eq!(decide(500, 1, 1_000), (660, Reason::Reserve));
    assert_eq!(decide(500, 4, 1_000), (165, Reason::Reserve));
    assert_eq!(decide(500, 1, 300), (300, Reason::Max));
    assert_eq!(decide(u64::MAX, 1, 300), (300, Reason::Max));
}

#[test]
fn the_policy_learns_nothing_from_dials() {
    let state = |dial_slots| {
        let mut policy = Policy::new(Settings::default());
        for step in 0..100 {
            let (at, arrivals) = ((MONDAY + step * 5) * 1_000, step % 3);
            policy.step(&Observation {
                at,
                arrivals,
                live: 9,
                ready: 20,
                dial_slots,
                ..Observation::default()
            });
        }
        policy.state().clone()
    };
    assert_eq!(state(0), state(300));
}

#[test]
fn a_prescale_order_holds_until_it_expires() {
    let order =
        |until| Bounds { prescale: vec![Prescale { pods: 40, until }], ..Bounds::default() };
    let decision = decide(order(MONDAY * 1_000 + 1), 0);
    assert_eq!((decision.desired, decision.reason), (40, Reason::Prescale));
    assert!(decide(order(MONDAY * 1_000), 0).desired < 40);
}

#[test]
fn pods_that_never_become_ready_end_the_scale_up() {
    let mut pool = pool();
    pool.pods_start = false;
    pool.run(20 * 60, 0.5);
    let decision = pool.run(HOUR, 2.0);
    assert_eq!(decision.reason, Reason::PodsNotReady);
    let bound = decision.desired;
    assert!(bound < 250, "{decision:?}");
    let decision = pool.run(4 * HOUR, 5.0);
    assert_eq!(decision.reason, Reason::PodsNotReady);
    assert!((bound..bound + 4).contains(&decision.desired), "{decision:?} after {bound}");
    assert!(decision.needed > bound + 4);
    pool.pods_start = true;
    let decision = pool.run(HOUR, 5.0);
    assert_ne!(decision.reason, Reason::PodsNotReady);
    assert!(decision.desired > bound + 4);
}

#[test]
fn pods_that_never_become_ready_are_reported_within_the_bounds() {
    let bounds = Bounds { min: 8, ..Bounds::default() };
    let mut pool = Pool::new(Settings { bounds, ..Settings::default() });
    (pool.ready, pool.pods_start) = (4, false);
    let decision = pool.run(20 * 60, 0.0);
    assert_eq!(decision.reason, Reason::PodsNotReady);
    assert!((8..12).contains(&decision.desired), "{decision:?}");
    assert!(decision.needed <= 4, "{decision:?}");
    // The ready pods suffice: the starting ones are not kept.
    pool.policy.settings.bounds.min = 0;
    let decision = pool.run(60, 0.0);
    assert!(decision.desired <= 4 && decision.reason != Reason::PodsNotReady, "{decision:?}");
}

#[test]
fn a_pod_that_never_becomes_ready_is_replaced_and_does_not_stop_the_scale_up() {
    for is_order in [false, true] {
        let mut pool = pool();
        let bounds = &mut pool.policy.settings.bounds;
        match is_order {
            true => bounds.prescale.push(Prescale { pods: 11, until: u64::MAX }),
            false => bounds.min = 11,
        }
        pool.ready = 10;
        pool.starting.push(u64::MAX);
        let decision = pool.run(20 * 60, 4.0 / DURATION);
        assert_eq!((pool.ready, decision.desired), (11, 12), "{decision:?}");
        pool.missed = 0.0;
        let decision = pool.run(20 * 60, 8.0 / DURATION);
        assert!(pool.missed == 0.0, "{} missed: {decision:?}", pool.missed);
        let decision = pool.run(20 * 60, 40.0 / DURATION);
        assert_ne!(decision.reason, Reason::PodsNotReady);
        assert!(pool.ready > 45, "{} ready: {decision:?}", pool.ready);
    }
}

#[test]
fn failed_starts_among_others_are_replaced() {
    let mut pool = pool();
    pool.run(HOUR, 10.0 / DURATION);
    pool.policy.settings.bounds.min = 60;
    pool.step(10.0 / DURATION);
    let starting = pool.starting.len();
    pool.starting.iter_mut().step_by(3).for_each(|ready_at| *ready_at = u64::MAX);
    let failed = starting.div_ceil(3);
    assert!(failed > 5, "{failed}");
    let decision = pool.run(15 * 60, 10.0 / DURATION);
    assert_eq!((pool.ready, pool.starting.len()), (60, failed), "{decision:?}");
    assert_eq!(decision.reason, Reason::Min);
    // The upper bound limits replacements as well.
    pool.policy.settings.bounds.max = 61;
    assert_eq!(pool.run(60, 10.0 / DURATION).desired, 61);
}
