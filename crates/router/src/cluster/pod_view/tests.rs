//! Events, lists and namespaces of the view.

use super::*;

fn name(text: &str) -> PodName {
    text.parse().unwrap()
}

fn present(uid: &str) -> PodState {
    PodState::Present(PodFacts {
        uid: uid.into(),
        address: "a:1".into(),
        ready: true,
        terminating: false,
        at_risk: false,
        restarts: 0,
        pin: None,
    })
}

fn gone(uid: &str) -> PodState {
    PodState::Gone { uid: uid.into() }
}

fn seen(state: PodState, version: Option<u64>) -> Sighting {
    Sighting { state, version, details: PodDetails::default() }
}

fn list(pods: &[(&str, &str, u64)]) -> HashMap<PodName, Sighting> {
    pods.iter().map(|(pod, uid, at)| (name(pod), seen(present(uid), Some(*at)))).collect()
}

fn empty() -> PodView {
    PodView::new(vec!["default".into()])
}

/// A view after one list, without pending changes.
fn view(pods: &[(&str, &str, u64)]) -> PodView {
    let view = empty();
    view.replace(0, list(pods), &HashSet::new());
    view.all();
    view
}

fn reason(view: &PodView, pod: &str) -> Option<StaleReason> {
    view.staleness(&name(pod)).map(|stale| stale.reason)
}

#[test]
fn an_event_no_newer_than_the_pods_last_one_is_ignored() {
    let view = view(&[("a", "u1", 100)]);
    assert!(view.apply(0, &name("a"), seen(gone("u1"), Some(105))));
    for version in [100, 104, 105] {
        assert!(!view.apply(0, &name("a"), seen(present("u1"), Some(version))), "{version}");
    }
    assert_eq!(view.take_changes(), [(name("a"), gone("u1"))]);
    // The same pod is selected again.
    assert!(view.apply(0, &name("a"), seen(present("u1"), Some(106))));
    assert_eq!(view.take_changes(), [(name("a"), present("u1"))]);
    // Versions that are not numbers can't be compared.
    assert!(view.apply(0, &name("a"), seen(gone("u1"), None)));
    assert!(view.apply(0, &name("a"), seen(present("u1"), Some(1))));
}

#[test]
fn a_list_does_not_undo_newer_events_of_the_watch() {
    let view = view(&[("deleted", "u1", 90), ("changed", "u2", 91), ("lost", "u3", 92)]);
    let mut touched = HashSet::new();
    for (pod, state, version) in
        [("deleted", gone("u1"), 105), ("changed", present("u4"), 101), ("new", present("u5"), 106)]
    {
        assert!(view.apply(0, &name(pod), seen(state, Some(version))));
        touched.insert(name(pod));
    }
    view.all();
    // Read at version 103: older than two of the events, newer than one.
    view.replace(0, list(&[("deleted", "u1", 90), ("changed", "u6", 103)]), &touched);
    let pods = view.all();
    assert_eq!(pods[&name("deleted")], gone("u1"));
    assert_eq!(pods[&name("changed")], present("u6"));
    assert_eq!(pods[&name("new")], present("u5"));
    assert_eq!(pods[&name("lost")], gone("u3"));
    assert_eq!(view.in_service(), 2);
}

#[test]
fn a_pod_missing_from_a_list_newer_than_its_last_event_is_gone() {
    let view = view(&[("a", "u1", 90), ("b", "u2", 91)]);
    assert!(view.apply(0, &name("a"), seen(present("u1"), Some(100))));
    view.replace(0, list(&[("b", "u2", 101)]), &HashSet::from([name("a")]));
    assert_eq!(view.all()[&name("a")], gone("u1"));
}

#[test]
fn a_list_with_smaller_versions_replaces_the_view() {
    // The cluster was restored from a backup.
    let view = view(&[("a", "u1", 1_000)]);
    view.replace(0, list(&[("a", "u1", 10), ("b", "u2", 11)]), &HashSet::new());
    assert!(view.apply(0, &name("a"), seen(gone("u1"), Some(12))));
    assert_eq!((reason(&view, "a"), reason(&view, "b")), (Some(StaleReason::Gone), None));
}

#[test]
fn staleness_names_the_reason_and_the_uid() {
    assert_eq!(empty().staleness(&name("a")), None, "nothing is known yet");
    let view = view(&[("a", "u1", 1)]);
    assert_eq!((reason(&view, "a"), reason(&view, "b")), (None, Some(StaleReason::Unknown)));
    let with = |change: fn(&mut PodFacts)| {
        let PodState::Present(mut facts) = present("u1") else { unreachable!() };
        change(&mut facts);
        PodState::Present(facts)
    };
    view.apply(0, &name("a"), seen(with(|facts| facts.ready = false), Some(2)));
    assert_eq!((reason(&view, "a"), view.in_service()), (Some(StaleReason::NotReady), 0));
    view.apply(0, &name("a"), seen(with(|facts| facts.terminating = true), Some(3)));
    assert_eq!(reason(&view, "a"), Some(StaleReason::Terminating));
    view.apply(0, &name("a"), seen(PodState::Unreadable, Some(4)));
    assert_eq!(reason(&view, "a"), None);
    view.apply(0, &name("a"), seen(gone("u1"), Some(5)));
    let stale = view.staleness(&name("a")).unwrap();
    assert_eq!(
        (stale.reason, stale.applies_to("u1"), stale.applies_to("u2")),
        (StaleReason::Gone, true, false)
    );
    let reasons =
        [StaleReason::Gone, StaleReason::Terminating, StaleReason::NotReady, StaleReason::Unknown];
    assert_eq!(reasons.map(StaleReason::is_permanent), [true, true, false, false]);
}

#[test]
fn deleted_pods_leave_the_view_after_the_tombstone_age() {
    let view = view(&[("a", "u1", 1), ("b", "u2", 2)]);
    view.apply(0, &name("a"), seen(gone("u1"), Some(3)));
    let past = Instant::now() - TOMBSTONE_AGE - Duration::from_secs(1);
    let mut inner = view.inner();
    inner.tombstones[0].0 = past;
    inner.pods.get_mut(&name("a")).unwrap()[0].at = past;
    drop(inner);
    view.apply(0, &name("b"), seen(gone("u2"), Some(4)));
    let pods = view.all();
    assert_eq!((pods.contains_key(&name("a")), pods.len()), (false, 1));
}

fn created(state: PodState, at: i64, node: &str) -> Sighting {
    let details =
        PodDetails { created: Some(at), node: Some(node.into()), ..PodDetails::default() };
    Sighting { state, version: None, details }
}

fn two_namespaces() -> PodView {
    PodView::new(vec!["a".into(), "b".into()])
}

fn listed(pods: &[(&str, &str, i64)]) -> HashMap<PodName, Sighting> {
    let pod = |(pod, uid, at): &(&str, &str, i64)| (name(pod), created(present(uid), *at, "n1"));
    pods.iter().map(pod).collect()
}

#[test]
fn the_older_pod_of_a_name_is_used_whatever_the_order_of_events() {
    for order in [[0, 1], [1, 0]] {
        let view = two_namespaces();
        for namespace in order {
            let pods = [("x", ["ua", "ub"][namespace], [20, 10][namespace])];
            view.replace(namespace, listed(&pods), &HashSet::new());
        }
        assert_eq!(view.all()[&name("x")], present("ub"));
        assert_eq!(
            (view.in_service(), view.reference(&name("x"))),
            (1, Some(("b".into(), "ub".into())))
        );
        let conflict = view.name_conflict().unwrap();
        assert!(conflict.contains("the pod x of the namespace a is ignored"), "{conflict}");
        // The deletion of the ignored pod changes nothing, that of the other one promotes it.
        view.apply(0, &name("x"), seen(gone("ua"), None));
        assert_eq!(view.take_changes(), [(name("x"), present("ub"))]);
        assert_eq!(view.name_conflict(), None);
        view.apply(0, &name("x"), created(present("ua2"), 30, "n1"));
        view.apply(1, &name("x"), seen(gone("ub"), None));
        assert_eq!(view.take_changes(), [(name("x"), present("ua2"))]);
        assert_eq!((view.in_service(), reason(&view, "x")), (1, None));
        view.replace(0, HashMap::new(), &HashSet::new());
        assert_eq!(view.in_service(), 0);
        assert!(matches!(&view.take_changes()[..], [(_, PodState::Gone { .. })]));
    }
}

#[test]
fn a_list_of_one_namespace_does_not_remove_the_pods_of_another() {
    let view = two_namespaces();
    view.replace(0, listed(&[("x", "u1", 1)]), &HashSet::new());
    assert_eq!(view.lists().1, None, "the other namespace may be slower");
    assert_eq!(reason(&view, "unknown"), None, "it may be in the other namespace");
    assert!(!view.list_failed(1), "one of two is not all");
    assert!(view.lists().1.is_some() && !view.is_complete());
    view.replace(1, listed(&[("y", "u2", 1)]), &HashSet::new());
    view.replace(0, listed(&[("x", "u1", 1)]), &HashSet::new());
    assert!(view.is_complete());
    assert_eq!((view.in_service(), reason(&view, "unknown")), (2, Some(StaleReason::Unknown)));
    assert!(!view.list_failed(0) && view.list_failed(1));
}

#[test]
fn pods_on_cordoned_nodes_are_at_risk() {
    let view = empty();
    view.apply(0, &name("x"), created(present("u1"), 1, "n1"));
    view.apply(0, &name("y"), created(present("u2"), 1, "n2"));
    view.take_changes();
    let is_at_risk = |state: &PodState| matches!(state, PodState::Present(it) if it.at_risk);
    view.set_cordoned(HashSet::from(["n1".into(), "n9".into()]));
    let changes = view.take_changes();
    assert!(matches!(&changes[..], [(pod, state)] if *pod == name("x") && is_at_risk(state)));
    view.set_cordoned(HashSet::new());
    let changes = view.take_changes();
    assert!(matches!(&changes[..], [(pod, state)] if *pod == name("x") && !is_at_risk(state)));
}

#[test]
fn an_observed_transition_counts_by_the_local_clock() {
    let ready = |ready_at: i64| {
        let details = PodDetails { ready_at: Some(ready_at), ..PodDetails::default() };
        Sighting { state: present("u1"), version: None, details }
    };
    let not_ready = || {
        let PodState::Present(facts) = present("u1") else { unreachable!() };
        seen(PodState::Present(PodFacts { ready: false, ..facts }), None)
    };
    let (view, pod) = (empty(), name("x"));
    let age = |view: &PodView| view.ready_since(&pod).unwrap().elapsed();
    let hour = Duration::from_secs(3_600);
    // Seen for the first time: by the clock of its node.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let now = now.as_secs() as i64;
    view.apply(0, &pod, ready(now - 3_600));
    assert!(age(&view) >= hour && age(&view) < hour * 2);
    // Observed: now, although the clock of its node is an hour behind.
    view.apply(0, &pod, not_ready());
    assert_eq!(view.ready_since(&pod), None);
    view.apply(0, &pod, ready(now - 3_600));
    assert!(age(&view) < hour);
    // Another event of the same transition changes nothing; a time in the future is now.
    let since = view.ready_since(&pod);
    view.apply(0, &pod, ready(now - 3_600));
    assert_eq!(view.ready_since(&pod), since);
    let future = empty();
    future.apply(0, &pod, ready(now + 3_600));
    assert!(age(&future) < hour);
}

#[test]
fn a_forgotten_namespace_is_unknown_until_it_is_listed_again() {
    let view = two_namespaces();
    view.replace(0, list(&[("a", "u1", 100)]), &HashSet::new());
    view.replace(1, list(&[("b", "u2", 101)]), &HashSet::new());
    let (before, _) = view.lists();
    view.list_failed(1);
    assert!(view.forget(1));
    assert_eq!((view.in_service(), view.is_complete()), (1, false));
    assert_eq!(view.all().into_keys().collect::<Vec<_>>(), [name("a")]);
    assert_eq!(reason(&view, "b"), None, "it may exist");
    assert!(view.lists().0 > before, "the leader compares again");
    assert!(view.take_departed().is_empty());
    assert!(!view.forget(1), "once");
    view.replace(1, list(&[("b", "u2", 101)]), &HashSet::new());
    assert!(view.is_complete() && view.in_service() == 2);
}

#[test]
fn the_last_namespace_that_can_be_read_is_not_forgotten() {
    let view = view(&[("a", "u1", 100)]);
    view.list_failed(0);
    assert!(!view.forget(0), "the only one");
    let view = two_namespaces();
    for namespace in [0, 1] {
        view.replace(namespace, list(&[]), &HashSet::new());
        view.list_failed(namespace);
    }
    assert!(!view.forget(0) && !view.forget(1), "both fail");
    assert!(view.is_complete());
}
