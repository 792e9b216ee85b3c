//! Pods and tables come and go, by the word of a leader.

use super::*;

fn gold_and_tin(pods: usize) -> Fleet {
    fleet(
        r#"{"tiers": {"gold": {"target": 9}, "tin": {}, "acme": {}}, "default_chain": ["gold", "tin"]}"#,
        pods,
    )
}

fn renewed_pod(uid: &str, restarts: u32) -> PodFacts {
    PodFacts { uid: uid.into(), restarts, ..ready() }
}

/// No write of this writer changes anything.
fn refuses(fleet: &mut Fleet, writer: PodWriter<'_>, why: &WriteRefused) {
    let refused = Err(why.clone());
    assert_eq!(fleet.observe_pod(&name("p2"), &ready(), writer, NOW).map(drop), refused);
    let removed = fleet.remove_pod(&name("p1"), "u1", Departure::Now, writer, NOW);
    assert_eq!(removed.map(drop), refused);
    let moved = fleet.move_pod(&name("p1"), "u1", &name("tin"), writer);
    assert_eq!(moved, Err(why.clone().into()));
    assert_eq!(fleet.take_changes(), []);
}

#[test]
fn a_leader_that_was_replaced_writes_nothing() {
    let mut fleet = gold_and_tin(1);
    assert_eq!(leads(&mut fleet, None), Ok(0));
    assert_eq!(leads(&mut fleet, Some(3)), Ok(3));
    assert_eq!(leads(&mut fleet, Some(3)), Ok(3));
    assert_eq!(fleet.take_changes(), [Change::Epoch { epoch: 3 }]);
    let fenced = WriteRefused::Fenced { epoch: 2, current: 3 };
    assert_eq!(leads(&mut fleet, Some(2)), Err(fenced.clone().into()));
    refuses(&mut fleet, PodWriter { epoch: 2, ..WRITER }, &fenced);
    assert_eq!(leads(&mut fleet, None), Ok(3));
}

#[test]
fn another_uid_is_another_pod() {
    let mut fleet = gold_and_tin(0);
    assert!(see(&mut fleet, "p1", ready()).joined);
    assert!(!see(&mut fleet, "p1", ready()).joined);
    give(&mut fleet, &ask("c1"));
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    let observed = fleet.observe_pod(&name("p1"), &renewed_pod("u2", 0), WRITER, NOW + 5).unwrap();
    assert!(observed.joined);
    let ended = EndedCall {
        call: name("c1"),
        pod: name("p1"),
        source_pool: name("gold"),
        lasted: 5,
        cause: Cause::PodGone,
    };
    assert_eq!(observed.ended, [ended]);
    assert_eq!(fleet.pod(&name("p1")).unwrap().draining_until, None);
}

#[test]
fn a_restarted_agent_has_lost_its_calls_and_stays_where_it_was() {
    let mut fleet = gold_and_tin(1);
    give(&mut fleet, &ask("c1"));
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    let observed = see(&mut fleet, "p1", renewed_pod("u1", 2));
    assert_eq!((observed.joined, observed.ended.len()), (false, 1));
    assert!(fleet.pod(&name("p1")).unwrap().draining_until.is_some());
    fleet.undrain(&name("p1")).unwrap();
    give(&mut fleet, &ask("c2"));
    // A status may come without a count, and later with the same.
    assert_eq!(see(&mut fleet, "p1", renewed_pod("u1", 0)).ended, []);
    assert_eq!(see(&mut fleet, "p1", renewed_pod("u1", 2)).ended, []);
    assert_eq!(see(&mut fleet, "p1", renewed_pod("u1", 3)).ended.len(), 1);
    // Another pod counts from the beginning.
    see(&mut fleet, "p1", renewed_pod("u2", 0));
    assert_eq!(fleet.pod(&name("p1")).unwrap().facts.restarts, 0);
}

#[test]
fn what_is_no_news_is_not_written_down() {
    let mut fleet = gold_and_tin(1);
    let pinned = PodFacts { pin: Some(name("tin")), ..ready() };
    see(&mut fleet, "p2", pinned.clone());
    fleet.take_changes();
    see(&mut fleet, "p1", ready());
    see(&mut fleet, "p2", pinned);
    fleet.apply_tiers(&fleet.tiers().clone(), Edit::ANY).unwrap();
    fleet.undrain(&name("p1")).unwrap();
    assert_eq!(fleet.take_changes(), []);
}

#[test]
fn a_removal_is_for_the_pod_it_names() {
    let mut fleet = gold_and_tin(2);
    give_on(&mut fleet, &ask("c1"), "p1");
    let mut remove = |pod: &str, uid: &str, departure| match fleet
        .remove_pod(&name(pod), uid, departure, WRITER, NOW)
        .unwrap()
    {
        Removed::Gone { ended } => format!("gone, {} ended", ended.len()),
        other => format!("{other:?}"),
    };
    assert_eq!(remove("p1", "u2", Departure::Now), "NotThere");
    assert_eq!(remove("p9", "u1", Departure::Now), "NotThere");
    assert_eq!(remove("p1", "u1", Departure::WhenIdle), "Busy");
    assert_eq!(remove("p2", "u1", Departure::WhenIdle), "gone, 0 ended");
    assert_eq!(remove("p1", "u1", Departure::Now), "gone, 1 ended");
    assert_eq!(fleet.status().pools.iter().map(|pool| pool.assigned).sum::<usize>(), 0);
}

#[test]
fn idle_pods_may_be_moved_and_others_not() {
    let mut fleet = gold_and_tin(4);
    give_on(&mut fleet, &ask("c1"), "p1");
    fleet.drain(&name("p2"), 1_000, NOW).unwrap();
    see(&mut fleet, "p3", PodFacts { ready: false, ..ready() });
    see(&mut fleet, "p5", PodFacts { pin: Some(name("gold")), ..ready() });
    let next = Tiers::parse(r#"{"gold": 0, "tin": 9}"#, Origin::Settings).unwrap().0;
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
    assert_eq!(moves("p4", "u2", "tin"), Err(MoveRefused::NotThere));
    assert_eq!(moves("p4", "u1", "nowhere"), Err(MoveRefused::UnknownPool));
    assert_eq!(moves("p4", "u1", "merchant:other"), Err(MoveRefused::UnknownPool));
    assert!(moves("p4", "u1", "tin").is_ok());
    assert_eq!(moves("p4", "u1", "tin"), Ok(0), "it is there");
    assert_eq!(moves("p4", "u1", "merchant:acme"), Ok(1));
    assert_eq!(fleet.pod(&name("p4")).unwrap().pool, Some(name("merchant:acme")));
    see(&mut fleet, "p6", ready());
    see(&mut fleet, "p7", ready());
}

#[test]
fn another_table_gives_pods_another_pool_once_they_are_idle() {
    let mut fleet = gold_and_tin(2);
    give_on(&mut fleet, &ask("c1"), "p1");
    fleet.apply_tiers(&table(r#"{"iron": 9}"#), Edit::ANY).unwrap();
    let pool = |fleet: &Fleet, pod: &str| fleet.pod(&name(pod)).unwrap().pool.unwrap().to_string();
    assert_eq!((pool(&fleet, "p1"), pool(&fleet, "p2")), ("pool:gold".into(), "pool:iron".into()));
    end(&mut fleet, "c1", Cause::Agent, NOW);
    assert_eq!(pool(&fleet, "p1"), "pool:iron");
}

#[test]
fn a_drain_is_never_made_shorter() {
    let mut fleet = gold_and_tin(1);
    give(&mut fleet, &ask("c1"));
    let mut drain = |ttl, now| fleet.drain(&name("p1"), ttl, now).unwrap();
    assert_eq!(drain(1_000, NOW), Drained { active_calls: 1, until: NOW + 1_000 });
    assert_eq!(drain(10, NOW + 5).until, NOW + 1_000);
    assert_eq!(drain(2_000, NOW + 5).until, NOW + 2_005);
    assert_eq!(fleet.sweep(9, NOW + 2_004).undrained, []);
    assert_eq!(fleet.sweep(9, NOW + 2_005).undrained, [name("p1")]);
    assert_eq!(fleet.drain(&name("p9"), 1, NOW), Err(UnknownPod));
}

#[test]
fn an_undrained_pod_that_terminates_stays_out() {
    let mut fleet = gold_and_tin(1);
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    see(&mut fleet, "p1", PodFacts { terminating: true, ..ready() });
    let undrained = fleet.undrain(&name("p1")).unwrap();
    assert!(undrained.was_draining && undrained.is_terminating && !undrained.was_quarantined);
    assert_eq!(undrained.pool, Some(name("gold")));
    assert_eq!(why(&mut fleet, &ask("c1"), NOW), Why::NoPods);
}

#[test]
fn what_somebody_has_changed_meanwhile_is_not_replaced() {
    let mut fleet = gold_and_tin(1);
    let (present, next) = (fleet.tiers().clone(), table(r#"{"x": 1}"#));
    let edit = |instead_of| Edit { instead_of: Some(instead_of), by: "me" };
    assert_eq!(fleet.apply_tiers(&next, edit(&next)), Err(Changed));
    assert_eq!(fleet.take_changes(), []);
    assert_eq!(fleet.apply_tiers(&next, edit(&present)), Ok(()));
    // Once more: its answer may have been lost.
    assert_eq!(fleet.apply_tiers(&next, edit(&present)), Ok(()));
    let (id, edit) = (name("m"), |instead_of| Edit { instead_of: Some(instead_of), by: "me" });
    assert_eq!(fleet.set_merchant(&id, Some("{}"), edit("{ }")), Err(Changed));
    assert_eq!(fleet.set_merchant(&id, Some("{}"), edit("")), Ok(()));
    assert_eq!(fleet.set_merchant(&id, Some("{}"), edit("")), Ok(()));
    assert_eq!(fleet.set_merchant(&id, None, edit("")), Err(Changed));
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
            fleet.keep_changes();
            let writer = PodWriter { origin: owner, epoch: 1 };
            fleet.observe_pod(&name("p1"), &ready(), writer, NOW).unwrap();
            fleet.take_changes();
            let foreign = WriteRefused::Foreign { owner: owner.to_string() };
            refuses(&mut fleet, PodWriter { origin: other, epoch: 9 }, &foreign);
            let by = Claimant::List { digest: "d".into(), is_new: true };
            let mut claim = Claim { origin: other.clone(), by, force: false };
            assert_eq!(fleet.claim_pods(&claim, NOW), Err(foreign.into()));
            claim.force = true;
            assert_eq!(fleet.claim_pods(&claim, NOW), Ok(2), "{other} takes over from {owner}");
            let foreign = WriteRefused::Foreign { owner: other.to_string() };
            fleet.take_changes();
            refuses(&mut fleet, writer, &foreign);
        }
    }
}

#[test]
fn a_store_of_an_earlier_leader_belongs_to_its_cluster() {
    let mut fleet = Fleet::new(table(r#"{"gold": 9, "tin": 0}"#), 0);
    fleet.replay(Change::Epoch { epoch: 7 });
    fleet.keep_changes();
    let foreign = WriteRefused::Foreign { owner: "kubernetes".into() };
    refuses(&mut fleet, PodWriter { epoch: 8, ..WRITER }, &foreign);
    let (origin, epoch) = (&kubernetes("prod"), 8);
    fleet.observe_pod(&name("p1"), &ready(), PodWriter { origin, epoch }, NOW).unwrap();
}

#[test]
fn a_namespace_without_a_cluster_goes_to_the_first_that_comes() {
    let mut fleet = Fleet::new(table(r#"{"gold": 9, "tin": 0}"#), 0);
    fleet.replay(Change::Origin { origin: "kubernetes/prod".parse().unwrap() });
    fleet.keep_changes();
    let foreign = WriteRefused::Foreign { owner: "kubernetes/prod".into() };
    refuses(&mut fleet, PodWriter { origin: &kubernetes("test"), epoch: 8 }, &foreign);
    let (origin, epoch) = (&kubernetes("prod"), 8);
    fleet.observe_pod(&name("p1"), &ready(), PodWriter { origin, epoch }, NOW).unwrap();
    fleet.take_changes();
    let foreign = WriteRefused::Foreign { owner: origin.to_string() };
    let other = &"kubernetes/prod/other".parse().unwrap();
    refuses(&mut fleet, PodWriter { origin: other, epoch: 9 }, &foreign);
}

#[test]
fn the_list_that_was_read_last_is_in_force_while_it_is_followed() {
    let mut fleet = Fleet::new(table(r#"{"gold": 9}"#), 0);
    assert_eq!(claim_list(&mut fleet, "a", true, NOW), Ok(0));
    assert_eq!(claim_list(&mut fleet, "a", true, NOW), Ok(0), "a second replica joins");
    assert_eq!(claim_list(&mut fleet, "b", true, NOW), Ok(1));
    assert_eq!(claim_list(&mut fleet, "a", false, NOW), Err(ClaimRefused::Superseded));
    let fenced = WriteRefused::Fenced { epoch: 0, current: 1 };
    fleet.keep_changes();
    assert_eq!(fleet.observe_pod(&name("p1"), &ready(), WRITER, NOW).map(drop), Err(fenced));
    assert_eq!(claim_list(&mut fleet, "b", false, NOW + 20_000), Ok(1));
    let refused = claim_list(&mut fleet, "a", false, NOW + 20_000 + LIST_TTL - 1);
    assert_eq!(refused, Err(ClaimRefused::Superseded));
    assert_eq!(claim_list(&mut fleet, "a", false, NOW + 20_000 + LIST_TTL), Ok(2));
}
