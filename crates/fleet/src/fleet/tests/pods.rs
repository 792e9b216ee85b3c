//! Writes of pods, tiers and merchants.

use super::*;
use crate::rules::LIST_TTL;

fn gold_and_tin(pods: usize) -> Fleet {
    fleet(
        r#"{"tiers": {"gold": {"target": 9}, "tin": {}, "acme": {}}, "default_chain": ["gold", "tin"]}"#,
        pods,
    )
}

fn restarted_pod(uid: &str, restarts: u32) -> PodFacts {
    PodFacts { uid: uid.into(), restarts, ..ready() }
}

/// Checks that every write of this writer is refused without effect.
fn assert_refused(fleet: &mut Fleet, writer: PodWriter<'_>, reason: &WriteRefused) {
    let refused = Err(reason.clone());
    assert_eq!(fleet.observe_pod(&name("p2"), &ready(), writer, NOW).map(drop), refused);
    let removed = fleet.remove_pod(&name("p1"), "u1", RemovalMode::Immediate, writer, NOW);
    assert_eq!(removed.map(drop), refused);
    let moved = fleet.move_pod(&name("p1"), "u1", &name("tin"), writer);
    assert_eq!(moved, Err(reason.clone().into()));
    assert_eq!(fleet.take_changes(), []);
}

#[test]
fn writes_of_a_replaced_leader_are_fenced() {
    let mut fleet = gold_and_tin(1);
    assert_eq!(claim_as_leader(&mut fleet, None), Ok(0));
    assert_eq!(claim_as_leader(&mut fleet, Some(3)), Ok(3));
    assert_eq!(claim_as_leader(&mut fleet, Some(3)), Ok(3));
    assert_eq!(fleet.take_changes(), [Change::Epoch { epoch: 3 }]);
    let fenced = WriteRefused::Fenced { epoch: 2, current: 3 };
    assert_eq!(claim_as_leader(&mut fleet, Some(2)), Err(fenced.clone().into()));
    assert_refused(&mut fleet, PodWriter { epoch: 2, ..WRITER }, &fenced);
    assert_eq!(claim_as_leader(&mut fleet, None), Ok(3));
}

#[test]
fn a_different_uid_replaces_the_pod() {
    let mut fleet = gold_and_tin(0);
    assert!(observe(&mut fleet, "p1", ready()).joined);
    assert!(!observe(&mut fleet, "p1", ready()).joined);
    allocate(&mut fleet, &plain_request("c1"));
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    let observed =
        fleet.observe_pod(&name("p1"), &restarted_pod("u2", 0), WRITER, NOW + 5).unwrap();
    assert!(observed.joined);
    let ended = EndedCall {
        call: name("c1"),
        pod: name("p1"),
        source_pool: name("gold"),
        lasted: 5,
        cause: EndCause::PodGone,
    };
    assert_eq!(observed.ended, [ended]);
    assert_eq!(fleet.pod(&name("p1")).unwrap().draining_until, None);
}

#[test]
fn a_restart_ends_the_calls_and_keeps_the_drain() {
    let mut fleet = gold_and_tin(1);
    allocate(&mut fleet, &plain_request("c1"));
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    let observed = observe(&mut fleet, "p1", restarted_pod("u1", 2));
    assert_eq!((observed.joined, observed.ended.len()), (false, 1));
    assert!(fleet.pod(&name("p1")).unwrap().draining_until.is_some());
    fleet.undrain(&name("p1")).unwrap();
    allocate(&mut fleet, &plain_request("c2"));
    // A status without a restart count is no restart, nor is the same count later.
    assert_eq!(observe(&mut fleet, "p1", restarted_pod("u1", 0)).ended, []);
    assert_eq!(observe(&mut fleet, "p1", restarted_pod("u1", 2)).ended, []);
    assert_eq!(observe(&mut fleet, "p1", restarted_pod("u1", 3)).ended.len(), 1);
    // A replaced pod starts at its own count.
    observe(&mut fleet, "p1", restarted_pod("u2", 0));
    assert_eq!(fleet.pod(&name("p1")).unwrap().facts.restarts, 0);
}

#[test]
fn unchanged_facts_are_not_journaled() {
    let mut fleet = gold_and_tin(1);
    let pinned = PodFacts { pin: Some(name("tin")), ..ready() };
    observe(&mut fleet, "p2", pinned.clone());
    fleet.take_changes();
    observe(&mut fleet, "p1", ready());
    observe(&mut fleet, "p2", pinned);
    fleet.apply_tiers(&fleet.tiers().clone(), Edit::ANY).unwrap();
    fleet.undrain(&name("p1")).unwrap();
    assert_eq!(fleet.take_changes(), []);
}

#[test]
fn a_removal_applies_only_to_the_named_uid() {
    let mut fleet = gold_and_tin(2);
    allocate_on(&mut fleet, &plain_request("c1"), "p1");
    let mut remove = |pod: &str, uid: &str, mode| match fleet
        .remove_pod(&name(pod), uid, mode, WRITER, NOW)
        .unwrap()
    {
        Removed::Gone { ended } => format!("gone, {} ended", ended.len()),
        other => format!("{other:?}"),
    };
    assert_eq!(remove("p1", "u2", RemovalMode::Immediate), "NotFound");
    assert_eq!(remove("p9", "u1", RemovalMode::Immediate), "NotFound");
    assert_eq!(remove("p1", "u1", RemovalMode::WhenIdle), "Busy");
    assert_eq!(remove("p2", "u1", RemovalMode::WhenIdle), "gone, 0 ended");
    assert_eq!(remove("p1", "u1", RemovalMode::Immediate), "gone, 1 ended");
    assert_eq!(fleet.status().pools.iter().map(|pool| pool.assigned).sum::<usize>(), 0);
}

#[test]
fn only_idle_pods_may_be_moved() {
    let mut fleet = gold_and_tin(4);
    allocate_on(&mut fleet, &plain_request("c1"), "p1");
    fleet.drain(&name("p2"), 1_000, NOW).unwrap();
    observe(&mut fleet, "p3", PodFacts { ready: false, ..ready() });
    observe(&mut fleet, "p5", PodFacts { pin: Some(name("gold")), ..ready() });
    let next = Tiers::parse(r#"{"gold": 0, "tin": 9}"#, DocumentSource::Settings).unwrap().0;
    let pods = fleet.pods();
    let moved: Vec<_> =
        rebalance(&next, &pods).into_iter().map(|(pod, to)| (pod.name.clone(), to)).collect();
    assert_eq!(moved, [(name("p4"), name("tin"))]);
    let mut moves = |pod: &str, uid: &str, to: &str| {
        fleet.move_pod(&name(pod), uid, &name(to), WRITER).map(|()| fleet.take_changes().len())
    };
    for pod in ["p1", "p2", "p3", "p5"] {
        assert_eq!(moves(pod, "u1", "tin"), Err(MoveRefused::NotIdle), "{pod}");
    }
    assert_eq!(moves("p4", "u2", "tin"), Err(MoveRefused::NotFound));
    assert_eq!(moves("p4", "u1", "nowhere"), Err(MoveRefused::UnknownPool));
    assert_eq!(moves("p4", "u1", "merchant:other"), Err(MoveRefused::UnknownPool));
    assert!(moves("p4", "u1", "tin").is_ok());
    assert_eq!(moves("p4", "u1", "tin"), Ok(0), "already in the pool");
    assert_eq!(moves("p4", "u1", "merchant:acme"), Ok(1));
    assert_eq!(fleet.pod(&name("p4")).unwrap().pool, Some(name("merchant:acme")));
    observe(&mut fleet, "p6", ready());
    observe(&mut fleet, "p7", ready());
}

#[test]
fn a_new_table_reassigns_pods_once_they_are_idle() {
    let mut fleet = gold_and_tin(2);
    allocate_on(&mut fleet, &plain_request("c1"), "p1");
    fleet.apply_tiers(&table(r#"{"iron": 9}"#), Edit::ANY).unwrap();
    let pool = |fleet: &Fleet, pod: &str| fleet.pod(&name(pod)).unwrap().pool.unwrap().to_string();
    assert_eq!((pool(&fleet, "p1"), pool(&fleet, "p2")), ("pool:gold".into(), "pool:iron".into()));
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    assert_eq!(pool(&fleet, "p1"), "pool:iron");
}

#[test]
fn a_drain_is_never_shortened() {
    let mut fleet = gold_and_tin(1);
    allocate(&mut fleet, &plain_request("c1"));
    let mut drain = |ttl, now| fleet.drain(&name("p1"), ttl, now).unwrap();
    assert_eq!(drain(1_000, NOW), Drained { active_calls: 1, until: NOW + 1_000 });
    assert_eq!(drain(10, NOW + 5).until, NOW + 1_000);
    assert_eq!(drain(2_000, NOW + 5).until, NOW + 2_005);
    assert_eq!(fleet.sweep(9, NOW + 2_004).undrained, []);
    assert_eq!(fleet.sweep(9, NOW + 2_005).undrained, [name("p1")]);
    assert_eq!(fleet.drain(&name("p9"), 1, NOW), Err(UnknownPod));
}

#[test]
fn an_undrained_terminating_pod_takes_no_calls() {
    let mut fleet = gold_and_tin(1);
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    observe(&mut fleet, "p1", PodFacts { terminating: true, ..ready() });
    let undrained = fleet.undrain(&name("p1")).unwrap();
    assert!(undrained.was_draining && undrained.is_terminating && !undrained.was_quarantined);
    assert_eq!(undrained.pool, Some(name("gold")));
    assert_eq!(refusal_reason(&mut fleet, &plain_request("c1"), NOW), RefusalReason::NoPods);
}

#[test]
fn a_write_with_an_outdated_expected_value_conflicts() {
    let mut fleet = gold_and_tin(1);
    let (present, next) = (fleet.tiers().clone(), table(r#"{"x": 1}"#));
    let edit = |expected| Edit { expected: Some(expected), by: "me" };
    assert_eq!(fleet.apply_tiers(&next, edit(&next)), Err(Conflict));
    assert_eq!(fleet.take_changes(), []);
    assert_eq!(fleet.apply_tiers(&next, edit(&present)), Ok(()));
    // A repeat succeeds: the first response may have been lost.
    assert_eq!(fleet.apply_tiers(&next, edit(&present)), Ok(()));
    let (id, edit) = (name("m"), |expected| Edit { expected: Some(expected), by: "me" });
    assert_eq!(fleet.set_merchant(&id, Some("{}"), edit("{ }")), Err(Conflict));
    assert_eq!(fleet.set_merchant(&id, Some("{}"), edit("")), Ok(()));
    assert_eq!(fleet.set_merchant(&id, Some("{}"), edit("")), Ok(()));
    assert_eq!(fleet.set_merchant(&id, None, edit("")), Err(Conflict));
    assert_eq!(fleet.set_merchant(&id, None, edit("{}")), Ok(()));
}

fn kubernetes(namespace: &str) -> PodOrigin {
    PodOrigin::Kubernetes { namespace: namespace.into(), cluster: format!("uid-of-{namespace}") }
}

fn claim_list(
    fleet: &mut Fleet,
    digest: &str,
    is_new: bool,
    now: Millis,
) -> Result<u64, ClaimRefused> {
    let by = Claimant::List { digest: digest.into(), is_new };
    fleet.claim_pods(&Claim { origin: PodOrigin::List, by, force: false }, now)
}

#[test]
fn pods_of_another_origin_are_not_written() {
    let origins = [PodOrigin::Simulated, PodOrigin::List, kubernetes("a"), kubernetes("b")];
    for owner in &origins {
        for other in origins.iter().filter(|other| *other != owner) {
            let mut fleet = Fleet::new(table(r#"{"gold": 9, "tin": 0}"#), 0);
            fleet.enable_change_log();
            let writer = PodWriter { origin: owner, epoch: 1 };
            fleet.observe_pod(&name("p1"), &ready(), writer, NOW).unwrap();
            fleet.take_changes();
            let foreign = WriteRefused::Foreign { owner: owner.to_string() };
            assert_refused(&mut fleet, PodWriter { origin: other, epoch: 9 }, &foreign);
            let by = Claimant::List { digest: "d".into(), is_new: true };
            let mut claim = Claim { origin: other.clone(), by, force: false };
            assert_eq!(fleet.claim_pods(&claim, NOW), Err(foreign.into()));
            claim.force = true;
            assert_eq!(fleet.claim_pods(&claim, NOW), Ok(2), "{other} takes over from {owner}");
            let foreign = WriteRefused::Foreign { owner: other.to_string() };
            fleet.take_changes();
            assert_refused(&mut fleet, writer, &foreign);
        }
    }
}

#[test]
fn a_store_of_an_earlier_leader_is_taken_over_by_a_cluster_only() {
    let mut fleet = Fleet::new(table(r#"{"gold": 9, "tin": 0}"#), 0);
    fleet.apply(Change::Epoch { epoch: 7 });
    fleet.enable_change_log();
    let foreign = WriteRefused::Foreign { owner: "kubernetes".into() };
    assert_refused(&mut fleet, PodWriter { epoch: 8, ..WRITER }, &foreign);
    let (origin, epoch) = (&kubernetes("prod"), 8);
    fleet.observe_pod(&name("p1"), &ready(), PodWriter { origin, epoch }, NOW).unwrap();
}

#[test]
fn an_origin_without_cluster_uid_is_taken_over_by_the_first_cluster() {
    let mut fleet = Fleet::new(table(r#"{"gold": 9, "tin": 0}"#), 0);
    fleet.apply(Change::Origin { origin: "kubernetes/prod".parse().unwrap() });
    fleet.enable_change_log();
    let foreign = WriteRefused::Foreign { owner: "kubernetes/prod".into() };
    assert_refused(&mut fleet, PodWriter { origin: &kubernetes("test"), epoch: 8 }, &foreign);
    let (origin, epoch) = (&kubernetes("prod"), 8);
    fleet.observe_pod(&name("p1"), &ready(), PodWriter { origin, epoch }, NOW).unwrap();
    fleet.take_changes();
    let foreign = WriteRefused::Foreign { owner: origin.to_string() };
    let other = &"kubernetes/prod/other".parse().unwrap();
    assert_refused(&mut fleet, PodWriter { origin: other, epoch: 9 }, &foreign);
}

#[test]
fn the_latest_list_is_in_force_while_replicas_follow_it() {
    let mut fleet = Fleet::new(table(r#"{"gold": 9}"#), 0);
    assert_eq!(claim_list(&mut fleet, "a", true, NOW), Ok(0));
    assert_eq!(claim_list(&mut fleet, "a", true, NOW), Ok(0), "a second replica joins");
    assert_eq!(claim_list(&mut fleet, "b", true, NOW), Ok(1));
    assert_eq!(claim_list(&mut fleet, "a", false, NOW), Err(ClaimRefused::Superseded));
    let fenced = WriteRefused::Fenced { epoch: 0, current: 1 };
    fleet.enable_change_log();
    assert_eq!(fleet.observe_pod(&name("p1"), &ready(), WRITER, NOW).map(drop), Err(fenced));
    assert_eq!(claim_list(&mut fleet, "b", false, NOW + 20_000), Ok(1));
    let refused = claim_list(&mut fleet, "a", false, NOW + 20_000 + LIST_TTL - 1);
    assert_eq!(refused, Err(ClaimRefused::Superseded));
    assert_eq!(claim_list(&mut fleet, "a", false, NOW + 20_000 + LIST_TTL), Ok(2));
}
