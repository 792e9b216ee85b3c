//! An adaptive concurrency limit: as many requests in flight as Redis answers within
//! [`MAX_QUEUE_TIME`]. Load beyond it is shed at once instead of timing out.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use super::functions::Function;
use crate::is_observing;

/// Time that a request may spend behind the requests in flight.
const MAX_QUEUE_TIME: Duration = Duration::from_millis(100);
/// Interval at which the reply rate is measured and the limit adjusted.
const SAMPLE_WINDOW: Duration = Duration::from_millis(50);
/// Lower bound: a slow connection would otherwise shrink the limit to nothing.
const MIN_LIMIT: usize = 32;
const MAX_LIMIT: usize = 4_096;
/// Observers have one additional permit per this many permits of calls: they never displace an
/// allocation, and calls never starve them.
const OBSERVER_SHARE: usize = 4;

pub(super) struct ConcurrencyLimit {
    /// Requests in flight, without those of observers.
    in_flight: AtomicUsize,
    observers: AtomicUsize,
    /// Requests in flight without a caller, and until when they count.
    orphaned: Mutex<VecDeque<(Instant, Priority)>>,
    current: AtomicUsize,
    sample: Mutex<Sample>,
}

/// Replies in the current window.
struct Sample {
    since: Instant,
    replies: usize,
    /// No request was in flight at some moment of the window.
    was_idle: bool,
}

/// The order in which requests are shed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Priority {
    /// Reads for people and monitoring: shed first.
    Observer,
    /// Allocations, and reads on behalf of a call.
    Sheddable,
    /// Releases, detaches and confirmations. They are deferred if shed.
    Deferrable,
    /// Attaches, heartbeats, renewals, sweeps and writes of pods. Their rate is bounded by the
    /// number of calls with a pod, gateways and pods: never shed.
    Essential,
}

impl Priority {
    /// The priority of a Redis function in the current task.
    pub(super) fn of(function: &Function) -> Self {
        if function.is_reading() && is_observing() { Self::Observer } else { function.priority }
    }
}

/// Admits one request. Dropped unfinished, it still counts for a while: Redis still works on a
/// request whose caller has gone.
pub(super) struct Permit<'a> {
    limit: &'a ConcurrencyLimit,
    priority: Priority,
    is_finished: bool,
}

impl ConcurrencyLimit {
    pub(super) fn new() -> Self {
        let sample = Sample { since: Instant::now(), replies: 0, was_idle: true };
        Self {
            in_flight: AtomicUsize::new(0),
            observers: AtomicUsize::new(0),
            orphaned: Mutex::default(),
            current: AtomicUsize::new(MAX_LIMIT),
            sample: Mutex::new(sample),
        }
    }

    /// Admits a request, or returns `None` to shed it.
    pub(super) fn acquire(&self, priority: Priority) -> Option<Permit<'_>> {
        let before = self.count(priority).fetch_add(1, Ordering::Relaxed);
        let limit = self.current.load(Ordering::Relaxed);
        let is_admitted = match priority {
            Priority::Observer => before < limit / OBSERVER_SHARE,
            Priority::Sheddable => before < limit,
            Priority::Deferrable => before < 2 * limit,
            Priority::Essential => true,
        };
        if is_admitted {
            return Some(Permit { limit: self, priority, is_finished: false });
        }
        self.count(priority).fetch_sub(1, Ordering::Relaxed);
        self.record_replies(Instant::now(), 0, false);
        None
    }

    fn count(&self, priority: Priority) -> &AtomicUsize {
        if priority == Priority::Observer { &self.observers } else { &self.in_flight }
    }

    /// Whether the request that finishes now is the only one in flight.
    fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) + self.observers.load(Ordering::Relaxed) <= 1
    }

    /// Frees the permits of orphaned requests that Redis has completed by now.
    fn expire_orphaned(&self, now: Instant) {
        let mut orphaned = self.orphaned.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((_, priority)) = orphaned.pop_front_if(|(until, _)| *until <= now) {
            self.count(priority).fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The limit for requests of calls.
    pub(super) fn current(&self) -> usize {
        self.current.load(Ordering::Relaxed)
    }

    fn record_replies(&self, now: Instant, replies: usize, is_idle: bool) {
        let mut sample = self.sample.lock().unwrap_or_else(PoisonError::into_inner);
        sample.replies += replies;
        sample.was_idle |= is_idle;
        let time = now.saturating_duration_since(sample.since);
        if time < SAMPLE_WINDOW {
            return;
        }
        self.expire_orphaned(now);
        let limit = if sample.was_idle {
            // Redis keeps up.
            2 * self.current.load(Ordering::Relaxed)
        } else {
            (sample.replies as f64 * (MAX_QUEUE_TIME.as_secs_f64() / time.as_secs_f64())) as usize
        };
        self.current.store(limit.clamp(MIN_LIMIT, MAX_LIMIT), Ordering::Relaxed);
        *sample = Sample { since: now, replies: 0, was_idle: is_idle };
    }
}

impl Permit<'_> {
    /// Frees the permit after a reply or a failure.
    pub(super) fn finish(mut self, has_reply: bool) {
        if has_reply {
            self.limit.record_replies(Instant::now(), 1, self.limit.is_idle());
        }
        self.is_finished = true;
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if self.is_finished {
            self.limit.count(self.priority).fetch_sub(1, Ordering::Relaxed);
        } else {
            let mut orphaned = self.limit.orphaned.lock().unwrap_or_else(PoisonError::into_inner);
            orphaned.push_back((Instant::now() + MAX_QUEUE_TIME, self.priority));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends `arriving` requests per millisecond to a Redis that answers `served` per millisecond.
    /// Returns the number admitted, the number shed, and the longest queue.
    fn flood(
        limit: &ConcurrencyLimit,
        millis: u64,
        arriving: usize,
        served: usize,
        now: &mut Instant,
    ) -> [usize; 3] {
        let mut queue = VecDeque::new();
        let (mut shed, mut admitted, mut longest) = (0, 0, 0);
        for _ in 0..millis {
            *now += Duration::from_millis(1);
            for _ in 0..arriving {
                match limit.acquire(Priority::Sheddable) {
                    Some(permit) => {
                        queue.push_back(permit);
                        admitted += 1;
                    }
                    None => {
                        limit.record_replies(*now, 0, false);
                        shed += 1;
                    }
                }
            }
            longest = longest.max(queue.len());
            for permit in queue.drain(..served.min(queue.len())) {
                limit.record_replies(*now, 1, limit.is_idle());
                permit.finish(false);
            }
        }
        queue.into_iter().for_each(|permit| permit.finish(false));
        [admitted, shed, longest]
    }

    #[test]
    fn load_that_redis_can_serve_is_admitted() {
        let (limit, mut now) = (ConcurrencyLimit::new(), Instant::now());
        let [_, shed, _] = flood(&limit, 1_000, 10, 10, &mut now);
        assert_eq!(shed, 0);
        // A burst that Redis serves in time.
        let [_, shed, _] = flood(&limit, 1, 3_000, 30, &mut now);
        assert_eq!(shed, 0);
    }

    #[test]
    fn tenfold_load_is_mostly_shed_and_the_queue_stays_short() {
        let (limit, mut now) = (ConcurrencyLimit::new(), Instant::now());
        flood(&limit, 200, 10, 1, &mut now);
        let [admitted, shed, longest] = flood(&limit, 1_000, 10, 1, &mut now);
        assert!((950..=1_100).contains(&admitted), "{admitted} admitted");
        assert!(shed >= 8_900, "{shed} shed");
        assert!(longest <= 130, "{longest} in the queue");
    }

    #[test]
    fn essential_requests_are_never_shed() {
        let (limit, mut now) = (ConcurrencyLimit::new(), Instant::now());
        flood(&limit, 200, 10, 1, &mut now);
        let new: Vec<_> = (0..1_000).map_while(|_| limit.acquire(Priority::Sheddable)).collect();
        assert!(new.len() < 1_000, "the limit is reached");
        let freed: Vec<_> =
            (0..10_000).map_while(|_| limit.acquire(Priority::Deferrable)).collect();
        assert!((1..10_000).contains(&freed.len()), "deferrable requests have twice the limit");
        assert!((0..1_000).all(|_| limit.acquire(Priority::Essential).is_some()));
    }

    #[test]
    fn observers_never_displace_calls_and_never_starve() {
        let (limit, mut now) = (ConcurrencyLimit::new(), Instant::now());
        flood(&limit, 200, 10, 1, &mut now);
        let free = (0..1_000).map_while(|_| limit.acquire(Priority::Sheddable)).collect::<Vec<_>>();
        let permits = free.len();
        free.into_iter().for_each(|permit| permit.finish(false));
        let observers: Vec<_> =
            (0..1_000).map_while(|_| limit.acquire(Priority::Observer)).collect();
        assert!((1..permits).contains(&observers.len()), "{} of {permits}", observers.len());
        let new: Vec<_> = (0..1_000).map_while(|_| limit.acquire(Priority::Sheddable)).collect();
        assert_eq!(new.len(), permits, "observers took permits of calls");
        observers.into_iter().for_each(|permit| permit.finish(false));
        assert!(limit.acquire(Priority::Observer).is_some(), "calls took the permits of observers");
    }

    #[test]
    fn an_abandoned_request_keeps_its_permit_for_a_while() {
        let limit = ConcurrencyLimit::new();
        let is_admitted = |_: &usize| limit.acquire(Priority::Sheddable).is_some();
        let started = Instant::now();
        let abandoned = (0..20_000).filter(is_admitted).count();
        assert!(
            abandoned <= MAX_LIMIT || started.elapsed() > MAX_QUEUE_TIME,
            "{abandoned} admitted"
        );
        std::thread::sleep(MAX_QUEUE_TIME);
        assert!(
            limit.acquire(Priority::Sheddable).is_none(),
            "the shed request frees the expired permits"
        );
        assert!(limit.acquire(Priority::Sheddable).is_some());
    }

    #[test]
    fn the_limit_recovers_at_once_after_overload() {
        let (limit, mut now) = (ConcurrencyLimit::new(), Instant::now());
        flood(&limit, 1_000, 10, 1, &mut now);
        flood(&limit, 100, 1, 20, &mut now);
        let [_, shed, _] = flood(&limit, 1_000, 15, 20, &mut now);
        assert_eq!(shed, 0);
    }

    #[test]
    fn a_slow_but_idle_connection_admits_all_requests() {
        let (limit, mut now) = (ConcurrencyLimit::new(), Instant::now());
        let mut in_flight = VecDeque::new();
        let mut shed = 0;
        for time in 0..5_000 {
            now += Duration::from_millis(1);
            // One request per millisecond, each with a latency of 60 ms.
            match limit.acquire(Priority::Sheddable) {
                Some(permit) => in_flight.push_back((time + 60, permit)),
                None => shed += 1,
            }
            while let Some((_, permit)) = in_flight.pop_front_if(|(due, _)| *due <= time) {
                permit.finish(false);
                limit.record_replies(now, 1, false);
            }
        }
        assert_eq!(shed, 0);
    }
}
