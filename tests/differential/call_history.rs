//! The end of the call history, to the millisecond. Random operations rarely reach it.

use fleet::{
    Allocate, EndCause, PodFacts, PreviousPod, Release,
    names::{CallSid, PodName},
    rules::CALL_HISTORY_TTL,
};
use store::{Functions, Store};
use testkit::{
    operations::{LEASE_TTL, Operation},
    redis::{WRITER, ready_pod},
};

use super::compare::{Pair, Schema};

/// Redis keeps a key through the millisecond of its expiry; the model has to agree.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_history_ends_in_the_same_millisecond_in_both_stores() {
    let mut pair = Pair::new(Functions::default(), Schema::Two).await;
    let (pod, call): (PodName, CallSid) = ("p1".parse().unwrap(), "c1".parse().unwrap());
    let facts = PodFacts { pin: Some("gold".parse().unwrap()), ..ready_pod() };
    pair.store.observe_pod(&pod, &facts, WRITER).await.unwrap().unwrap();
    pair.fleet.observe_pod(&pod, &facts, WRITER, pair.now).unwrap();
    let mut request = Allocate::new(call.clone(), None, LEASE_TTL);
    request.may_return = true;
    pair.run(&Operation::Allocate(request.clone())).await.unwrap();
    let ended =
        Release { pod_attempt: Some(1), cause: EndCause::Stream, ..Release::new(call, None) };
    pair.run(&Operation::Release(ended)).await.unwrap();
    let previous = PreviousPod { pod, pod_attempt: 1, is_settled: false, max_retries: 2 };
    request.previous = Some(previous);
    for later in [CALL_HISTORY_TTL - 1, 1, 1] {
        pair.now += later;
        pair.server.set_time(pair.now);
        pair.run(&Operation::Allocate(request.clone())).await.unwrap();
    }
    pair.store.close().await;
}
