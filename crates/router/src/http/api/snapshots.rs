//! Cached reads of the whole fleet. Their cost grows with the number of pods, so concurrent
//! requests share them: one read runs at a time, and pauses between reads bound the share of the
//! store's time that they take, whatever the request rate.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{sync::Mutex, time::Instant};

use fleet::{NumberStatus, PodStatus, Status, tiers::Tiers};
use store::{Outbound, Reply, Store, StoreError, observing};

/// Age up to which metrics reuse a read.
const MAX_AGE: Duration = Duration::from_secs(1);
/// Age up to which metrics reuse a read while the store sheds observers.
const MAX_STALE_AGE: Duration = Duration::from_secs(30);
/// Pause after a read, as a multiple of its duration.
const PAUSE_FACTOR: u32 = 9;
const MAX_PAUSE: Duration = Duration::from_secs(1);

pub(crate) struct Snapshots {
    store: Arc<dyn Store>,
    status: Arc<SharedRead<Status>>,
    pods: Arc<SharedRead<Vec<PodStatus>>>,
    tiers: Arc<SharedRead<Tiers>>,
    outbound: Arc<SharedRead<Outbound>>,
    numbers: Arc<SharedRead<Vec<NumberStatus>>>,
}

impl Snapshots {
    pub(crate) fn new(store: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self {
            store,
            status: Arc::default(),
            pods: Arc::default(),
            tiers: Arc::default(),
            outbound: Arc::default(),
            numbers: Arc::default(),
        })
    }

    /// Status of all pools. The read starts after the request, so it includes earlier changes.
    pub(super) async fn status(&self) -> Result<Arc<Status>, StoreError> {
        self.status.read(Duration::ZERO, self.store.clone(), |it| it.status()).await.outcome
    }

    pub(super) async fn pods(&self) -> Result<Arc<Vec<PodStatus>>, StoreError> {
        self.pods_not_older_than(Duration::ZERO).await
    }

    /// All pods, from a read that started at most `max_age` ago.
    pub(super) async fn pods_not_older_than(
        &self,
        max_age: Duration,
    ) -> Result<Arc<Vec<PodStatus>>, StoreError> {
        self.pods.read(max_age, self.store.clone(), |it| it.pods()).await.outcome
    }

    pub(super) async fn tiers(&self) -> Result<Arc<Tiers>, StoreError> {
        self.tiers.read(Duration::ZERO, self.store.clone(), |it| it.tiers()).await.outcome
    }

    /// Outstanding dials and accounts, from a read that started at most `MAX_AGE` ago.
    pub(super) async fn outbound(&self) -> Result<Arc<Outbound>, StoreError> {
        self.outbound.read(MAX_AGE, self.store.clone(), |it| it.outbound()).await.outcome
    }

    /// Numbers with a limit of lines, from a read that started at most `MAX_AGE` ago.
    pub(super) async fn numbers(&self) -> Result<Arc<Vec<NumberStatus>>, StoreError> {
        self.numbers.read(MAX_AGE, self.store.clone(), |it| it.numbers()).await.outcome
    }

    /// Status of all pools at most `MAX_AGE` ago, and the time of the read. A store that sheds
    /// observers extends that to `MAX_STALE_AGE`; an unavailable store gives `None`.
    pub(super) async fn recent_status(&self) -> Option<(Arc<Status>, SystemTime)> {
        let reading = self.status.read(MAX_AGE, self.store.clone(), |it| it.status()).await;
        let is_fresh = |(_, at): &(_, SystemTime)| at.elapsed().is_ok_and(|it| it < MAX_STALE_AGE);
        match reading.outcome {
            Ok(_) => reading.last_success,
            Err(StoreError::Busy) => reading.last_success.filter(is_fresh),
            Err(_) => None,
        }
    }
}

/// A read that concurrent requests share; one runs at a time.
struct SharedRead<T>(Mutex<Option<Reading<T>>>);

struct Reading<T> {
    started: Instant,
    took: Duration,
    outcome: Result<Arc<T>, StoreError>,
    last_success: Option<(Arc<T>, SystemTime)>,
}

impl<T> Default for SharedRead<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T> Clone for Reading<T> {
    fn clone(&self) -> Self {
        let Self { started, took, outcome, last_success } = self;
        let (outcome, last_success) = (outcome.clone(), last_success.clone());
        Self { started: *started, took: *took, outcome, last_success }
    }
}

impl<T: Send + Sync + 'static> SharedRead<T> {
    /// Returns a read that started at most `max_age` before this call.
    async fn read(
        self: &Arc<Self>,
        max_age: Duration,
        store: Arc<dyn Store>,
        read: fn(&dyn Store) -> Reply<'_, T>,
    ) -> Reading<T> {
        let (this, requested) = (self.clone(), Instant::now());
        // A separate task: a client that disconnects must not cancel a read that others await,
        // which would make each of them start another.
        let reading = tokio::spawn(spans::in_current_span(async move {
            let mut last = this.0.lock().await;
            if let Some(last) = last.as_ref().filter(|last| last.started + max_age >= requested) {
                return last.clone();
            }
            if let Some(last) = &*last {
                let pause = (PAUSE_FACTOR * last.took).min(MAX_PAUSE);
                tokio::time::sleep_until(last.started + last.took + pause).await;
            }
            let (started, at) = (Instant::now(), SystemTime::now());
            let outcome = observing(read(&*store)).await.map(Arc::new);
            let last_success = match &outcome {
                Ok(value) => Some((value.clone(), at)),
                Err(_) => last.take().and_then(|last| last.last_success),
            };
            let reading = Reading { started, took: started.elapsed(), outcome, last_success };
            *last = Some(reading.clone());
            reading
        }));
        reading.await.unwrap_or_else(|error| Reading {
            started: requested,
            took: Duration::ZERO,
            outcome: Err(StoreError::Unavailable(error.to_string())),
            last_success: None,
        })
    }
}
