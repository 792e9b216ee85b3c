//! Readings of the whole fleet. Their cost grows with the number of pods, so requests share them:
//! one is under way at a time, and all of them together take a bounded part of the store's time,
//! however many requests come.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{sync::Mutex, time::Instant};

use fleet::{PodStatus, Status, tiers::Tiers};
use store::{Reply, Store, StoreError, observing};

/// How old gauges may be: whoever asks, they are read once in this time.
const MAX_AGE: Duration = Duration::from_secs(1);
/// How old gauges may become while the store is too busy for observers.
const LONGEST_STALE: Duration = Duration::from_secs(30);
/// A reading is followed by a pause of so many times its own length, but no longer than this.
const PAUSE_FACTOR: u32 = 9;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pub struct Snapshots {
    store: Arc<dyn Store>,
    status: Arc<Shared<Status>>,
    pods: Arc<Shared<Vec<PodStatus>>>,
    tiers: Arc<Shared<Tiers>>,
}

impl Snapshots {
    pub fn new(store: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self {
            store,
            status: Arc::default(),
            pods: Arc::default(),
            tiers: Arc::default(),
        })
    }

    /// How all pools stand, read after this was called: it has everything that was done before.
    pub async fn status(&self) -> Result<Arc<Status>, StoreError> {
        self.status.read(Duration::ZERO, self.store.clone(), |it| it.status()).await.outcome
    }

    pub async fn pods(&self) -> Result<Arc<Vec<PodStatus>>, StoreError> {
        self.pods_not_older_than(Duration::ZERO).await
    }

    /// All pods, read at most so long before this was called.
    pub async fn pods_not_older_than(
        &self,
        age: Duration,
    ) -> Result<Arc<Vec<PodStatus>>, StoreError> {
        self.pods.read(age, self.store.clone(), |it| it.pods()).await.outcome
    }

    pub async fn tiers(&self) -> Result<Arc<Tiers>, StoreError> {
        self.tiers.read(Duration::ZERO, self.store.clone(), |it| it.tiers()).await.outcome
    }

    /// How all pools stood at most a second ago, and when that was read. A store that is too busy
    /// for observers leaves the last reading in place for a while; one that is out has none.
    pub async fn recent_status(&self) -> Option<(Arc<Status>, SystemTime)> {
        let reading = self.status.read(MAX_AGE, self.store.clone(), |it| it.status()).await;
        let is_fresh = |(_, at): &(_, SystemTime)| at.elapsed().is_ok_and(|it| it < LONGEST_STALE);
        match reading.outcome {
            Ok(_) => reading.last_good,
            Err(StoreError::Busy) => reading.last_good.filter(is_fresh),
            Err(_) => None,
        }
    }
}

/// One reading at a time, for all who ask.
struct Shared<T>(Mutex<Option<Reading<T>>>);

struct Reading<T> {
    began: Instant,
    took: Duration,
    outcome: Result<Arc<T>, StoreError>,
    /// The last that the store gave, and when.
    last_good: Option<(Arc<T>, SystemTime)>,
}

impl<T> Default for Shared<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T> Clone for Reading<T> {
    fn clone(&self) -> Self {
        let Self { began, took, outcome, last_good } = self;
        let (outcome, last_good) = (outcome.clone(), last_good.clone());
        Self { began: *began, took: *took, outcome, last_good }
    }
}

impl<T: Send + Sync + 'static> Shared<T> {
    /// A reading that began at most `max_age` before this was called.
    async fn read(
        self: &Arc<Self>,
        max_age: Duration,
        store: Arc<dyn Store>,
        read: fn(&dyn Store) -> Reply<'_, T>,
    ) -> Reading<T> {
        let (this, asked) = (self.clone(), Instant::now());
        // In a task of its own: clients that hang up must not end a reading that others wait for,
        // and make each of them begin another.
        let reading = tokio::spawn(spans::carried(async move {
            let mut last = this.0.lock().await;
            if let Some(last) = last.as_ref().filter(|last| last.began + max_age >= asked) {
                return last.clone();
            }
            if let Some(last) = &*last {
                let pause = (PAUSE_FACTOR * last.took).min(LONGEST_PAUSE);
                tokio::time::sleep_until(last.began + last.took + pause).await;
            }
            let (began, at) = (Instant::now(), SystemTime::now());
            let outcome = observing(read(&*store)).await.map(Arc::new);
            let last_good = match &outcome {
                Ok(good) => Some((good.clone(), at)),
                Err(_) => last.take().and_then(|last| last.last_good),
            };
            let reading = Reading { began, took: began.elapsed(), outcome, last_good };
            *last = Some(reading.clone());
            reading
        }));
        reading.await.unwrap_or_else(|error| Reading {
            began: asked,
            took: Duration::ZERO,
            outcome: Err(StoreError::Unavailable(error.to_string())),
            last_good: None,
        })
    }
}
