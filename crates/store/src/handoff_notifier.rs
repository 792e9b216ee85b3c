//! Who waits to hear that a call has been handed a pod.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use fleet::names::CallSid;

/// Wakes those who listen for a call. What is not heard is no loss: they also ask
/// from time to time.
#[derive(Default)]
pub struct Wakes(Mutex<HashMap<CallSid, (usize, Arc<Notify>)>>);

/// Listens for one call, until it is dropped.
pub struct Listener<'a> {
    wakes: &'a Wakes,
    call: CallSid,
    notify: Arc<Notify>,
}

impl Wakes {
    pub fn listen(&self, call: &CallSid) -> Listener<'_> {
        let mut all = self.lock();
        let (listeners, notify) = all.entry(call.clone()).or_default();
        *listeners += 1;
        Listener { wakes: self, call: call.clone(), notify: notify.clone() }
    }

    pub fn wake(&self, call: &CallSid) {
        if let Some((_, notify)) = self.lock().get(call) {
            notify.notify_waiters();
        }
    }

    /// Wakes everybody: nobody knows what was missed.
    pub(crate) fn wake_all(&self) {
        self.lock().values().for_each(|(_, notify)| notify.notify_waiters());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<CallSid, (usize, Arc<Notify>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener<'_> {
    /// Resolves at the next wake after this was called; poll it once before you ask
    /// the store, or enable it.
    pub fn woken(&self) -> tokio::sync::futures::Notified<'_> {
        self.notify.notified()
    }
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        let mut all = self.wakes.lock();
        if let Some((listeners, _)) = all.get_mut(&self.call) {
            *listeners -= 1;
            if *listeners == 0 {
                all.remove(&self.call);
            }
        }
    }
}
