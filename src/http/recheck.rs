//! Checks the pod that the store gives a call against this replica's own view of the cluster.
//! The store learns of pods from the leader; without a leader it goes on handing out pods that
//! are gone. Decision 0022 says why it is done here.

use super::Context;
use crate::{
    cluster::Doubt,
    domain::{
        Millis,
        fleet::{After, Allocate, Allocation, Cause, Refusal, Release},
    },
    store::StoreError,
};

/// How long a pod that is gone or out of service is kept out of its pool. The leader knows
/// better by then; if there is still none, the next call that meets the pod marks it again.
const MARK: Millis = 15_000;
/// How many pods are given up for one call.
const MOST: usize = 16;

type Outcome = Result<Result<Allocation, Refusal>, StoreError>;

/// Asks the store for a pod, and for another one if this replica sees that it can't serve.
/// Where nothing speaks against the pod, that is one round trip.
pub async fn allocate(context: &Context, mut request: Allocate) -> Outcome {
    let mut outcome = context.store.allocate(&request).await;
    let Some(view) = &context.view else { return outcome };
    for _ in 0..MOST {
        let Ok(Ok(given)) = &outcome else { break };
        let Some(doubt) = view.doubt(&given.pod) else { break };
        if !is_stale(context, given, &doubt).await {
            break;
        }
        let (pod, reason) = (&given.pod, doubt.reason.as_str());
        tracing::warn!(call_sid = %request.call, %pod, reason, "this replica sees that the pod can't serve; the call gets another");
        context.metrics.stale_allocations.inc();
        let given = given.clone();
        request.after = Some(After {
            pod: given.pod.clone(),
            attempt: given.attempt,
            is_final: true,
            retries: u32::MAX,
        });
        // The signature was accepted with the first pod: this is no replay.
        request.signed = None;
        outcome = context.store.allocate(&request).await;
        match &mut outcome {
            Ok(Ok(other)) => other.waited = other.waited.or(given.waited),
            Ok(Err(_)) => {}
            Err(_) => {
                // The caller is refused: what the call had is given back, later if need be.
                let pod = Some(given.pod);
                let (call, attempt) = (request.call.clone(), None);
                let release = Release { call, pod, attempt, cause: Cause::PodGone };
                let _ = context.store.release(&release).await;
            }
        }
    }
    outcome
}

/// Whether the pod of a call can't serve it, by what the store and the view know of it. A pod
/// that can't is marked as draining for a while, so that other calls do not meet it.
async fn is_stale(context: &Context, given: &Allocation, doubt: &Doubt) -> bool {
    // A call that has its pod already keeps it for as long as there is that pod.
    if given.was_existing && !doubt.reason.is_gone() {
        return false;
    }
    // With a leader at work, the store is newer than a view that lags behind.
    if !doubt.reason.is_lasting() && !context.lifecycle.is_leader_silent() {
        return false;
    }
    match context.store.pod(&given.pod).await {
        Ok(Some(pod)) if doubt.concerns(&pod.facts.uid) => {
            context.store.drain(&given.pod, MARK).await.is_ok()
        }
        // The leader has removed it meanwhile, and ended the call.
        Ok(None) => true,
        Ok(Some(_)) | Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::{HashMap, HashSet},
        sync::Arc,
        time::{Duration, Instant},
    };

    use super::*;
    use crate::{
        cluster::{PodState, PodView},
        domain::{
            fleet::{PodFacts, PodOrigin, PodWriter},
            names::PodName,
        },
        lifecycle::LeaderTimes,
    };

    fn pod(name: &str) -> PodName {
        name.parse().unwrap()
    }

    fn facts(uid: &str) -> PodFacts {
        let (uid, address) = (uid.into(), "a:1".into());
        PodFacts { uid, address, ready: true, terminating: false, restarts: 0, pin: None }
    }

    const WRITER: PodWriter = PodWriter { origin: &PodOrigin::List, epoch: 0 };

    /// Two pods, in the store and in the view.
    async fn context() -> (Arc<Context>, Arc<PodView>) {
        let (mut context, view) = (Context::for_tests(), Arc::new(PodView::default()));
        let mut listed = HashMap::new();
        for name in ["a", "b"] {
            let seen = context.store.observe_pod(&pod(name), &facts(name), WRITER).await;
            seen.unwrap().unwrap();
            listed.insert(pod(name), (PodState::Present(facts(name)), Some(1)));
        }
        view.replace(listed, &HashSet::new());
        Arc::get_mut(&mut context).unwrap().view = Some(view.clone());
        let silence = Duration::from_secs(60);
        context.lifecycle.begin_election(LeaderTimes { silence, lease: silence });
        context.lifecycle.saw_lease(Instant::now());
        (context, view)
    }

    fn silence_leader(context: &Context) {
        let silence = Duration::from_millis(1);
        context.lifecycle.begin_election(LeaderTimes { silence, lease: silence });
    }

    async fn ask(context: &Context, call: &str) -> Result<Allocation, Refusal> {
        allocate(context, Allocate::new(call.parse().unwrap(), None, 60_000)).await.unwrap()
    }

    /// Gives `c1` a pod and answers it, with the other one.
    async fn first(context: &Context) -> (PodName, PodName) {
        let given = ask(context, "c1").await.unwrap().pod;
        let other = if given == pod("a") { pod("b") } else { pod("a") };
        (given, other)
    }

    /// Ends `c1`, so that its pod is the next that the store gives.
    async fn release(context: &Context) {
        let release = Release::new("c1".parse().unwrap(), None);
        context.store.release(&release).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_call_gets_another_pod_if_the_one_it_was_given_is_gone() {
        let (context, view) = context().await;
        for name in ["a", "b"] {
            view.apply(&pod(name), PodState::Gone { uid: name.into() }, Some(2));
        }
        view.apply(&pod("b"), PodState::Present(facts("b")), Some(3));
        for call in ["c1", "c2"] {
            let given = ask(&context, call).await;
            match call {
                "c1" => assert_eq!(given.unwrap().pod, pod("b")),
                _ => assert!(given.is_err(), "the pod that is gone is out of its pool"),
            }
        }
        assert!(context.store.pod(&pod("a")).await.unwrap().unwrap().calls.is_empty());
        assert_eq!(context.store.status().await.unwrap().active_calls, 1);
    }

    #[tokio::test]
    async fn a_pod_that_replaced_one_that_is_gone_keeps_its_call() {
        let (context, view) = context().await;
        for name in ["a", "b"] {
            view.apply(&pod(name), PodState::Gone { uid: "earlier".into() }, Some(2));
        }
        assert!(ask(&context, "c1").await.is_ok());
        assert_eq!(context.metrics.stale_allocations.get(), 0);
    }

    #[tokio::test]
    async fn a_pod_that_is_not_ready_is_refused_only_while_the_leader_is_silent() {
        let (context, view) = context().await;
        for name in ["a", "b"] {
            let facts = PodFacts { ready: false, ..facts(name) };
            view.apply(&pod(name), PodState::Present(facts), Some(2));
        }
        assert!(ask(&context, "c1").await.is_ok(), "the leader knows better");
        release(&context).await;
        silence_leader(&context);
        tokio::time::sleep(Duration::from_millis(5)).await;
        context.lifecycle.saw_lease(Instant::now() - Duration::from_secs(1));
        assert!(ask(&context, "c2").await.is_err());
        assert_eq!(context.metrics.stale_allocations.get(), 2);
    }

    #[tokio::test]
    async fn a_call_keeps_the_pod_it_has_until_that_is_gone() {
        let (context, view) = context().await;
        let (given, other) = first(&context).await;
        let leaving = PodFacts { terminating: true, ..facts(given.as_str()) };
        view.apply(&given, PodState::Present(leaving), Some(2));
        assert_eq!(ask(&context, "c1").await.unwrap().pod, given);
        view.apply(&given, PodState::Gone { uid: given.to_string() }, Some(3));
        assert_eq!(ask(&context, "c1").await.unwrap().pod, other);
    }
}
