//! Long polls of diallers. Requests for the same merchant, number and accounts wait in one queue,
//! because the same limits refuse them. Only the first ones of a queue ask the store, so that its
//! load does not grow with the number of waiting diallers.

use std::{
    cmp::Reverse,
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{pin, sync::Semaphore, time::Instant};

use crate::http::Context;
use fleet::{
    DialLimit, Reserve, Reserved, WaitingDials,
    names::{AccountName, MerchantId, PhoneNumber, ReservationId},
};
use store::{Store, StoreError};

/// Requests of a queue that ask the store at the same time: with one, each grant would wait for the
/// round trip of the one before.
const TURNS: usize = 4;
/// Bounds of the pause between two requests to the store.
const MIN_PAUSE: Duration = Duration::from_millis(5);
const MAX_PAUSE: Duration = Duration::from_millis(500);
/// Shortest pause per queue: all queues of a router together ask the store at most 2,000 times per
/// second.
const PAUSE_PER_QUEUE: Duration = Duration::from_millis(2);

/// Combinations of merchant and number that a report has at most: the ones with most dials.
const MAX_REPORTED: usize = 1_000;

type Key = (MerchantId, Option<PhoneNumber>, Vec<AccountName>);

/// The queues of waiting diallers.
#[derive(Default)]
pub(crate) struct DialQueues {
    queues: Mutex<HashMap<Key, Members>>,
}

/// A queue with the number of its requests, and of the dials that these ask for.
struct Members {
    queue: Arc<DialQueue>,
    requests: usize,
    dials: usize,
}

/// Waiting requests that the same limits refuse, in order of arrival.
struct DialQueue {
    turns: Semaphore,
    /// The latest refusal: the response to a request whose time is over before its turn.
    refusal: Mutex<Option<Reserved>>,
}

/// A place in a queue. A queue without places is removed.
struct Place<'a> {
    queues: &'a DialQueues,
    key: Key,
    queue: Arc<DialQueue>,
    dials: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DialQueues {
    fn join(&self, request: &Reserve) -> Place<'_> {
        let key = (request.merchant.clone(), request.number.clone(), request.accounts.clone());
        let new_queue = || {
            let (turns, refusal) = (Semaphore::new(TURNS), Mutex::default());
            Members { queue: Arc::new(DialQueue { turns, refusal }), requests: 0, dials: 0 }
        };
        let dials = request.ids.len();
        let mut queues = lock(&self.queues);
        let members = queues.entry(key.clone()).or_insert_with(new_queue);
        members.requests += 1;
        members.dials += dials;
        Place { queues: self, key, queue: members.queue.clone(), dials }
    }

    /// The dials whose last refusal was for lack of a pod.
    pub(crate) fn waiting_for_pods(&self) -> Vec<WaitingDials> {
        let mut waiting: HashMap<(MerchantId, Option<PhoneNumber>), u64> = HashMap::new();
        for ((merchant, number, _), members) in &*lock(&self.queues) {
            let limit = lock(&members.queue.refusal).as_ref().and_then(|refusal| refusal.limit);
            if matches!(limit, Some(DialLimit::Capacity | DialLimit::InboundReserve)) {
                let dials = waiting.entry((merchant.clone(), number.clone())).or_default();
                *dials += members.dials as u64;
            }
        }
        let reported = waiting.into_iter();
        let mut reported: Vec<WaitingDials> = reported
            .map(|((merchant, number), dials)| WaitingDials { merchant, number, dials })
            .collect();
        reported.sort_by_key(|waiting| Reverse(waiting.dials));
        reported.truncate(MAX_REPORTED);
        reported
    }

    fn len(&self) -> usize {
        lock(&self.queues).len()
    }
}

impl Place<'_> {
    /// The pause after a refusal, or after a request that the store shed.
    fn pause(&self, refusal: Option<&Reserved>) -> Duration {
        let retry_after = refusal.map_or(MAX_PAUSE, |it| Duration::from_millis(it.retry_after));
        let shortest = PAUSE_PER_QUEUE * self.queues.len() as u32;
        retry_after.clamp(MIN_PAUSE, MAX_PAUSE).max(shortest)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut queues = lock(&self.queues.queues);
        if let Some(members) = queues.get_mut(&self.key) {
            members.requests -= 1;
            members.dials -= self.dials;
            if members.requests == 0 {
                queues.remove(&self.key);
            }
        }
    }
}

/// A request whose outcome may be unknown: the caller disconnected, or the store's reply was lost.
/// When it is dropped then, its reservations are given back, because the dialler does not know of
/// them. Otherwise they would be held until they expire.
struct Pending<'a> {
    store: &'a Arc<dyn Store>,
    request: &'a Reserve,
    is_unknown: bool,
}

impl Pending<'_> {
    /// Asks the store. The same ids again are a repeat of the same request.
    async fn ask(&mut self) -> Result<Reserved, StoreError> {
        self.is_unknown = true;
        let reserved = self.store.reserve(self.request).await?;
        self.is_unknown = false;
        Ok(reserved)
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if self.is_unknown {
            tokio::spawn(give_back(self.store.clone(), self.request.ids.clone()));
        }
    }
}

async fn give_back(store: Arc<dyn Store>, ids: Vec<ReservationId>) {
    for id in ids {
        if let Err(error) = store.give_back(&id).await {
            tracing::warn!(
                reservation = %id, %error,
                "an unanswered request may have left a reservation; it expires"
            );
            return;
        }
    }
}

/// Reserves, or waits until at least one reservation is granted or the time is over. A request that
/// the store sheds keeps waiting.
pub(super) async fn reserve(
    context: &Context,
    request: &Reserve,
    wait: Duration,
) -> Result<Reserved, StoreError> {
    let mut pending = Pending { store: &context.store, request, is_unknown: false };
    if wait.is_zero() {
        return pending.ask().await;
    }
    let until = Instant::now() + wait;
    let over = async {
        tokio::select! {
            () = tokio::time::sleep_until(until) => {}
            () = context.lifecycle.stopping.cancelled() => {}
        }
    };
    pin!(over);
    let place = context.dial_queues.join(request);
    let turn = tokio::select! {
        turn = place.queue.turns.acquire() => Some(turn),
        () = &mut over => None,
    };
    while turn.is_some() {
        let refusal = match pending.ask().await {
            Ok(reserved) if !reserved.granted.is_empty() => return Ok(reserved),
            Ok(refused) => Some(refused),
            Err(StoreError::Busy) => None,
            Err(error) => return Err(error),
        };
        let pause = place.pause(refusal.as_ref());
        if refusal.is_some() {
            *lock(&place.queue.refusal) = refusal;
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = &mut over => break,
        }
    }
    let refusal = lock(&place.queue.refusal).clone();
    match refusal {
        Some(refused) => Ok(refused),
        None => pending.ask().await,
    }
}

#[cfg(test)]
mod tests {
    use fleet::DialLimit;

    use super::*;

    fn request(merchant: &str) -> Reserve {
        Reserve {
            ids: vec!["R5f3a09c2b1d4e687".parse().unwrap()],
            merchant: merchant.parse().unwrap(),
            number: None,
            accounts: Vec::new(),
            ttl: 75_000,
            miss_target: 10_000,
        }
    }

    #[tokio::test]
    async fn a_queue_exists_while_requests_wait_in_it() {
        let queues = DialQueues::default();
        let (first, second) = (queues.join(&request("a")), queues.join(&request("a")));
        let other = queues.join(&request("b"));
        assert!(Arc::ptr_eq(&first.queue, &second.queue));
        assert!(!Arc::ptr_eq(&first.queue, &other.queue));
        drop((first, other));
        assert_eq!(queues.len(), 1);
        drop(second);
        assert_eq!(queues.len(), 0);
    }

    fn refused(limit: DialLimit) -> Option<Reserved> {
        let (granted, malformed_merchant) = (Vec::new(), None);
        let (until, retry_after) = (0, 1_000);
        Some(Reserved { granted, until, limit: Some(limit), retry_after, malformed_merchant })
    }

    #[tokio::test]
    async fn dials_wait_for_pods_if_pods_refused_them() {
        let queues = DialQueues::default();
        let number: Option<PhoneNumber> = "+14155550100".parse().ok();
        let with_number = Reserve { number: number.clone(), ..request("a") };
        let with_account =
            Reserve { accounts: vec!["twilio".parse().unwrap()], ..with_number.clone() };
        let batch = Reserve { ids: vec![with_number.ids[0].clone(); 3], ..with_number.clone() };
        let place = queues.join(&batch);
        assert_eq!(queues.waiting_for_pods(), [], "no refusal yet");
        *lock(&place.queue.refusal) = refused(DialLimit::Capacity);
        let other = queues.join(&with_account);
        *lock(&other.queue.refusal) = refused(DialLimit::InboundReserve);
        let second = queues.join(&with_number);
        let reported = |dials| {
            [WaitingDials { merchant: "a".parse().unwrap(), number: number.clone(), dials }]
        };
        assert_eq!(queues.waiting_for_pods(), reported(5));
        for limit in [DialLimit::MaxCalls, DialLimit::MaxLines, DialLimit::MaxCps] {
            *lock(&other.queue.refusal) = refused(limit);
            assert_eq!(queues.waiting_for_pods(), reported(4), "{limit:?}");
        }
        drop(place);
        assert_eq!(queues.waiting_for_pods(), reported(1));
        drop((second, other));
        assert_eq!(queues.waiting_for_pods(), []);
    }

    #[tokio::test]
    async fn a_report_of_many_queues_has_the_largest_ones() {
        let queues = DialQueues::default();
        let places: Vec<_> = (0..=MAX_REPORTED)
            .map(|it| {
                let mut request = request(&format!("m{it}"));
                let ids = if it == 700 { 9 } else { 1 };
                request.ids = vec![request.ids[0].clone(); ids];
                let place = queues.join(&request);
                *lock(&place.queue.refusal) = refused(DialLimit::Capacity);
                place
            })
            .collect();
        let reported = queues.waiting_for_pods();
        assert_eq!((reported.len(), reported[0].dials), (MAX_REPORTED, 9));
        drop(places);
    }

    #[tokio::test]
    async fn many_queues_ask_less_often() {
        let queues = DialQueues::default();
        let places: Vec<_> =
            (0..1_000).map(|it| queues.join(&request(&format!("m{it}")))).collect();
        assert_eq!(places[0].pause(None), Duration::from_secs(2));
        drop(places);
        assert_eq!(queues.join(&request("a")).pause(None), MAX_PAUSE);
    }

    #[tokio::test]
    async fn a_stop_of_the_router_ends_every_wait() {
        let context = Context::for_tests();
        let waiting = (0..20).map(|_| {
            let context = context.clone();
            tokio::spawn(
                async move { reserve(&context, &request("a"), Duration::from_secs(600)).await },
            )
        });
        let waiting: Vec<_> = waiting.collect();
        context.lifecycle.stopping.cancel();
        for wait in waiting {
            let refused = wait.await.unwrap().unwrap();
            assert_eq!((refused.granted, refused.limit), (Vec::new(), Some(DialLimit::Capacity)));
        }
        assert_eq!(context.dial_queues.len(), 0);
    }
}
