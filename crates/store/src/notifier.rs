//! Wakes tasks that wait for a change of one call or pod.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

/// Notifies listeners by key. Delivery is best effort: a listener also polls, at long intervals,
/// because a notification from another replica can be lost.
pub struct Notifier<K>(Mutex<Listeners<K>>);

/// The number of listeners of each key, and their notification.
type Listeners<K> = HashMap<K, (usize, Arc<Notify>)>;

/// Listens for one key until it is dropped.
pub struct Listener<'a, K: Eq + Hash> {
    notifier: &'a Notifier<K>,
    key: K,
    notify: Arc<Notify>,
}

impl<K> Default for Notifier<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K> Notifier<K> {
    fn listeners(&self) -> MutexGuard<'_, Listeners<K>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all listeners, after notifications may have been lost.
    pub(crate) fn notify_all(&self) {
        self.listeners().values().for_each(|(_, notify)| notify.notify_waiters());
    }
}

impl<K: Clone + Eq + Hash> Notifier<K> {
    pub fn listen(&self, key: &K) -> Listener<'_, K> {
        let mut listeners = self.listeners();
        let (count, notify) = listeners.entry(key.clone()).or_default();
        *count += 1;
        Listener { notifier: self, key: key.clone(), notify: notify.clone() }
    }

    pub(crate) fn notify(&self, key: &K) {
        if let Some((_, notify)) = self.listeners().get(key) {
            notify.notify_waiters();
        }
    }
}

impl<K: Eq + Hash> Listener<'_, K> {
    /// Resolves at the next notification. Enable it before reading the store: a change between
    /// the two is then not missed.
    pub fn notified(&self) -> tokio::sync::futures::Notified<'_> {
        self.notify.notified()
    }
}

impl<K: Eq + Hash> Drop for Listener<'_, K> {
    fn drop(&mut self) {
        let mut listeners = self.notifier.listeners();
        if let Some((count, _)) = listeners.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                listeners.remove(&self.key);
            }
        }
    }
}
