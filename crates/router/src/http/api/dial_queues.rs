//! Long polls of diallers. Requests for the same merchant, number and accounts wait in one queue,
//! because the same limits refuse them. Only the first ones of a queue ask the store, so that its
//! load does not grow with the number of waiting diallers.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{pin, sync::Semaphore, time::Instant};

use crate::http::Context;
use fleet::{
    Reserve, Reserved,
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

type Key = (MerchantId, Option<PhoneNumber>, Vec<AccountName>);

/// The queues of waiting diallers.
#[derive(Default)]
pub struct DialQueues {
    queues: Mutex<HashMap<Key, (Arc<DialQueue>, usize)>>,
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
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DialQueues {
    fn join(&self, request: &Reserve) -> Place<'_> {
        let key = (request.merchant.clone(), request.number.clone(), request.accounts.clone());
        let new_queue = || {
            let (turns, refusal) = (Semaphore::new(TURNS), Mutex::default());
            (Arc::new(DialQueue { turns, refusal }), 0)
        };
        let mut queues = lock(&self.queues);
        let (queue, places) = queues.entry(key.clone()).or_insert_with(new_queue);
        *places += 1;
        Place { queues: self, key, queue: queue.clone() }
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
        if let Some((_, places)) = queues.get_mut(&self.key) {
            *places -= 1;
            if *places == 0 {
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
