//! Connection limit. At the limit a new connection replaces one that is idle, so that clients
//! that open connections and send nothing (slow-loris) keep no others out.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use prometheus_client::metrics::counter::Counter;
use tokio_util::sync::CancellationToken;

/// Time until a new connection without a response counts as idle.
const NEW_CONNECTION_GRACE: Duration = Duration::from_secs(2);
const LOG_INTERVAL: Duration = Duration::from_secs(60);

pub(crate) struct ConnectionLimiter {
    limit: usize,
    /// Counts connections that were closed or refused because of the limit.
    turned_away: Counter,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    slots: HashMap<u64, Arc<Slot>>,
    last_id: u64,
    logged_at: Option<Instant>,
}

/// Which side a connection waits for, and for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The client has not begun its next request.
    Idle,
    /// The client sends the head of a request, since then.
    Head(Instant),
    /// The handler waits for more of the request's body.
    Body,
    /// The handler runs, or the response is being sent.
    Response,
}

/// The slot of a connection within the limit.
pub(crate) struct Slot {
    id: u64,
    state: Mutex<State>,
    /// Cancelled when a new connection takes the slot.
    pub(crate) evicted: CancellationToken,
}

struct State {
    phase: Phase,
    opened_at: Instant,
    active_at: Instant,
    has_responded: bool,
}

/// Frees the slot of a connection when dropped.
pub(crate) struct SlotGuard {
    pub(crate) slot: Arc<Slot>,
    limiter: Arc<ConnectionLimiter>,
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        lock(&self.limiter.open).slots.remove(&self.slot.id);
    }
}

impl ConnectionLimiter {
    pub(crate) fn new(limit: usize, turned_away: Counter) -> Arc<Self> {
        Arc::new(Self { limit, turned_away, open: Mutex::default() })
    }

    /// A slot for a new connection, taken from an idle one at the limit; `None` if no
    /// connection is idle.
    pub(crate) fn acquire(self: &Arc<Self>) -> Option<SlotGuard> {
        let now = Instant::now();
        let mut open = lock(&self.open);
        if open.slots.len() >= self.limit {
            self.turned_away.inc();
            if open.logged_at.is_none_or(|logged| now - logged > LOG_INTERVAL) {
                open.logged_at = Some(now);
                tracing::warn!(
                    limit = self.limit,
                    "connection limit reached; each new connection closes the longest-idle one"
                );
            }
            let ranks =
                open.slots.values().filter_map(|slot| Some((slot.eviction_rank(now)?, slot.id)));
            let (_, evicted) = ranks.min()?;
            open.slots.remove(&evicted)?.evicted.cancel();
        }
        open.last_id += 1;
        let state =
            State { phase: Phase::Head(now), opened_at: now, active_at: now, has_responded: false };
        let id = open.last_id;
        let evicted = CancellationToken::new();
        let slot = Arc::new(Slot { id, state: Mutex::new(state), evicted });
        open.slots.insert(id, slot.clone());
        Some(SlotGuard { slot, limiter: self.clone() })
    }
}

impl Slot {
    pub(super) fn phase(&self) -> Phase {
        lock(&self.state).phase
    }

    pub(crate) fn enter(&self, phase: Phase) {
        lock(&self.state).phase = phase;
    }

    pub(crate) fn end_response(&self) {
        let mut state = lock(&self.state);
        (state.phase, state.has_responded) = (Phase::Idle, true);
    }

    /// Whether the handler of the current request waits for its body. (A handler may drop the
    /// body after the response.)
    pub(crate) fn await_body(&self, is_pending: bool) {
        let mut state = lock(&self.state);
        match (state.phase, is_pending) {
            (Phase::Response, true) => state.phase = Phase::Body,
            (Phase::Body, false) => state.phase = Phase::Response,
            _ => {}
        }
    }

    /// Bytes were sent or received.
    pub(super) fn mark_active(&self) {
        lock(&self.state).active_at = Instant::now();
    }

    /// The order of eviction, lowest first: connections without a response after the grace
    /// period, then those with one, then new ones; within each, the longest idle. `None` while
    /// the client waits for the router.
    fn eviction_rank(&self, now: Instant) -> Option<(u8, Instant)> {
        let state = lock(&self.state);
        let is_new = now.saturating_duration_since(state.opened_at) < NEW_CONNECTION_GRACE;
        let class = match (state.phase, state.has_responded, is_new) {
            (Phase::Response, ..) => return None,
            (_, false, false) => 0,
            (_, true, _) => 1,
            (_, false, true) => 2,
        };
        Some((class, state.active_at))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three connections past the grace period, at a limit of three.
    fn three() -> (Arc<ConnectionLimiter>, [SlotGuard; 3]) {
        let limiter = ConnectionLimiter::new(3, Counter::default());
        let open = [(); 3].map(|()| {
            let guard = limiter.acquire().unwrap();
            lock(&guard.slot.state).opened_at -= 2 * NEW_CONNECTION_GRACE;
            guard
        });
        (limiter, open)
    }

    fn respond(guard: &SlotGuard) {
        guard.slot.enter(Phase::Response);
        guard.slot.end_response();
    }

    fn is_evicted(guard: &SlotGuard) -> bool {
        guard.slot.evicted.is_cancelled()
    }

    #[test]
    fn at_the_limit_a_new_connection_evicts_an_idle_one() {
        let (limiter, [first, second, third]) = three();
        first.slot.enter(Phase::Response);
        respond(&second);
        let fourth = limiter.acquire().unwrap();
        assert!(is_evicted(&third), "it never had a response");
        let fifth = limiter.acquire().unwrap();
        assert!(is_evicted(&second), "it is idle; the fourth is within the grace period");
        first.slot.await_body(true);
        let sixth = limiter.acquire().unwrap();
        assert!(is_evicted(&first), "it never had a response, and its body is pending");
        [&fourth, &fifth, &sixth].iter().for_each(|guard| guard.slot.enter(Phase::Response));
        assert!(limiter.acquire().is_none(), "all clients wait for a response");
        assert_eq!(limiter.turned_away.get(), 4);
        drop(fourth);
        assert!(limiter.acquire().is_some());
    }

    #[test]
    fn the_longest_idle_connection_is_evicted_first() {
        let (limiter, open) = three();
        open.iter().for_each(respond);
        open[0].slot.mark_active();
        let _fourth = limiter.acquire().unwrap();
        assert_eq!(open.each_ref().map(is_evicted), [false, true, false]);
    }

    #[test]
    fn a_body_that_outlives_its_response_leaves_the_connection_idle() {
        let (_limiter, [first, ..]) = three();
        first.slot.enter(Phase::Response);
        first.slot.await_body(true);
        assert_eq!(first.slot.phase(), Phase::Body);
        first.slot.end_response();
        first.slot.await_body(false);
        assert_eq!(first.slot.phase(), Phase::Idle);
    }

    #[test]
    fn new_connections_evict_idle_ones_before_each_other() {
        let (limiter, idle) = three();
        idle.iter().for_each(respond);
        let new = [(); 3].map(|()| limiter.acquire().unwrap());
        assert!(idle.iter().all(is_evicted));
        assert!(!new.iter().any(is_evicted));
        let _seventh = limiter.acquire().unwrap();
        assert_eq!(new.iter().filter(|guard| is_evicted(guard)).count(), 1, "no idle one is left");
    }
}
