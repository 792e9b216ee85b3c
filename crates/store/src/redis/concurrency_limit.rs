//! How much Redis is asked at a time: as much as it answers within a moment, so that
//! what it can't take is refused at once instead of late.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use super::functions::Script;
use crate::is_observing;

/// How long a request may have to wait for those before it.
const WAIT: Duration = Duration::from_millis(100);
/// How long it is watched how much Redis does.
const WATCH: Duration = Duration::from_millis(50);
/// So much is always asked: more than that takes on a slow line what it takes.
const LEAST: usize = 32;
const MOST: usize = 4_096;
/// Observers have one slot for so many of calls, on top of those: they never take the room of an
/// allocation, and always have some.
const OBSERVER_SHARE: usize = 4;

pub(super) struct Gate {
    /// Requests with Redis, but for those of observers.
    inside: AtomicUsize,
    observers: AtomicUsize,
    /// Those whose callers have hung up are still with Redis: until when they count.
    abandoned: Mutex<VecDeque<(Instant, Priority)>>,
    bound: AtomicUsize,
    watched: Mutex<Watched>,
}

/// What Redis has done lately.
struct Watched {
    since: Instant,
    answers: usize,
    /// There was a moment with nothing left to do.
    was_idle: bool,
}

/// The order in which requests are shed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Priority {
    /// Reads for people and monitoring: shed first.
    Observer,
    /// A call that wants a pod, or a read on its behalf.
    Sheddable,
    /// Gives back what callers have. It may wait: if shed, it is deferred.
    Deferrable,
    /// Keeps what callers have, and the store true. Bounded by the number of calls and pods,
    /// and done by nothing else: never shed.
    Essential,
}

impl Priority {
    /// The priority of a function for the present task.
    pub(super) fn of(script: &Script) -> Self {
        if script.is_reading() && is_observing() { Self::Observer } else { script.priority }
    }
}

/// A request that was let in. Who waits for it says what became of it.
pub(super) struct Inside<'a> {
    gate: &'a Gate,
    priority: Priority,
    is_over: bool,
}

impl Gate {
    pub(super) fn new() -> Self {
        let watched = Watched { since: Instant::now(), answers: 0, was_idle: true };
        Self {
            inside: AtomicUsize::new(0),
            observers: AtomicUsize::new(0),
            abandoned: Mutex::default(),
            bound: AtomicUsize::new(MOST),
            watched: Mutex::new(watched),
        }
    }

    /// Lets a request in unless it would have to wait for longer than it may.
    pub(super) fn enter(&self, priority: Priority) -> Option<Inside<'_>> {
        let before = self.count(priority).fetch_add(1, Ordering::Relaxed);
        let bound = self.bound.load(Ordering::Relaxed);
        let has_room = match priority {
            Priority::Observer => before < bound / OBSERVER_SHARE,
            Priority::Sheddable => before < bound,
            Priority::Deferrable => before < 2 * bound,
            Priority::Essential => true,
        };
        if has_room {
            return Some(Inside { gate: self, priority, is_over: false });
        }
        self.count(priority).fetch_sub(1, Ordering::Relaxed);
        self.watch(Instant::now(), 0, false);
        None
    }

    fn count(&self, priority: Priority) -> &AtomicUsize {
        if priority == Priority::Observer { &self.observers } else { &self.inside }
    }

    /// Whether a request that is answered now is the only one with Redis.
    fn is_idle(&self) -> bool {
        self.inside.load(Ordering::Relaxed) + self.observers.load(Ordering::Relaxed) <= 1
    }

    /// What callers asked for who have hung up is done after a while.
    fn forget_abandoned(&self, now: Instant) {
        let mut abandoned = self.abandoned.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((_, priority)) = abandoned.pop_front_if(|(until, _)| *until <= now) {
            self.count(priority).fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// How much may be asked at once.
    pub(super) fn bound(&self) -> usize {
        self.bound.load(Ordering::Relaxed)
    }

    fn watch(&self, now: Instant, answers: usize, is_idle: bool) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.answers += answers;
        watched.was_idle |= is_idle;
        let time = now.saturating_duration_since(watched.since);
        if time < WATCH {
            return;
        }
        self.forget_abandoned(now);
        let bound = if watched.was_idle {
            // It keeps up.
            2 * self.bound.load(Ordering::Relaxed)
        } else {
            (watched.answers as f64 * (WAIT.as_secs_f64() / time.as_secs_f64())) as usize
        };
        self.bound.store(bound.clamp(LEAST, MOST), Ordering::Relaxed);
        *watched = Watched { since: now, answers: 0, was_idle: is_idle };
    }
}

impl Inside<'_> {
    /// Redis has answered, or failed to.
    pub(super) fn done(mut self, is_answered: bool) {
        if is_answered {
            self.gate.watch(Instant::now(), 1, self.gate.is_idle());
        }
        self.is_over = true;
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if self.is_over {
            self.gate.count(self.priority).fetch_sub(1, Ordering::Relaxed);
        } else {
            let mut abandoned = self.gate.abandoned.lock().unwrap_or_else(PoisonError::into_inner);
            abandoned.push_back((Instant::now() + WAIT, self.priority));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A gate, and what came of so many requests within so many milliseconds, of which
    /// Redis answers so many each millisecond: let in, refused, the longest queue.
    fn flood(gate: &Gate, time: u64, come: usize, done: usize, now: &mut Instant) -> [usize; 3] {
        let mut queue = VecDeque::new();
        let (mut refused, mut let_in, mut longest) = (0, 0, 0);
        for _ in 0..time {
            *now += Duration::from_millis(1);
            for _ in 0..come {
                match gate.enter(Priority::Sheddable) {
                    Some(inside) => {
                        queue.push_back(inside);
                        let_in += 1;
                    }
                    None => {
                        gate.watch(*now, 0, false);
                        refused += 1;
                    }
                }
            }
            longest = longest.max(queue.len());
            for inside in queue.drain(..done.min(queue.len())) {
                gate.watch(*now, 1, gate.is_idle());
                inside.done(false);
            }
        }
        queue.into_iter().for_each(|inside| inside.done(false));
        [let_in, refused, longest]
    }

    #[test]
    fn what_redis_can_do_is_let_in() {
        let (gate, mut now) = (Gate::new(), Instant::now());
        let [_, refused, _] = flood(&gate, 1_000, 10, 10, &mut now);
        assert_eq!(refused, 0);
        // A burst that it works off within the time.
        let [_, refused, _] = flood(&gate, 1, 3_000, 30, &mut now);
        assert_eq!(refused, 0);
    }

    #[test]
    fn ten_times_as_much_is_mostly_refused_and_the_rest_hardly_waits() {
        let (gate, mut now) = (Gate::new(), Instant::now());
        flood(&gate, 200, 10, 1, &mut now);
        let [let_in, refused, longest] = flood(&gate, 1_000, 10, 1, &mut now);
        assert!((950..=1_100).contains(&let_in), "{let_in} let in");
        assert!(refused >= 8_900, "{refused} refused");
        assert!(longest <= 130, "{longest} in the queue");
    }

    #[test]
    fn what_keeps_calls_is_never_refused() {
        let (gate, mut now) = (Gate::new(), Instant::now());
        flood(&gate, 200, 10, 1, &mut now);
        let new: Vec<_> = (0..1_000).map_while(|_| gate.enter(Priority::Sheddable)).collect();
        assert!(new.len() < 1_000, "it is full");
        let freed: Vec<_> = (0..10_000).map_while(|_| gate.enter(Priority::Deferrable)).collect();
        assert!((1..10_000).contains(&freed.len()), "what frees may wait, but not for ever");
        assert!((0..1_000).all(|_| gate.enter(Priority::Essential).is_some()));
    }

    #[test]
    fn observers_never_take_the_room_of_calls_and_always_have_some() {
        let (gate, mut now) = (Gate::new(), Instant::now());
        flood(&gate, 200, 10, 1, &mut now);
        let free = (0..1_000).map_while(|_| gate.enter(Priority::Sheddable)).collect::<Vec<_>>();
        let room = free.len();
        free.into_iter().for_each(|inside| inside.done(false));
        let looking: Vec<_> = (0..1_000).map_while(|_| gate.enter(Priority::Observer)).collect();
        assert!((1..room).contains(&looking.len()), "{} of {room}", looking.len());
        let new: Vec<_> = (0..1_000).map_while(|_| gate.enter(Priority::Sheddable)).collect();
        assert_eq!(new.len(), room, "as if nobody looked");
        looking.into_iter().for_each(|inside| inside.done(false));
        assert!(gate.enter(Priority::Observer).is_some(), "calls are as many as there may be");
    }

    #[test]
    fn callers_who_hang_up_make_no_room_for_others_at_once() {
        let gate = Gate::new();
        let let_in = |_: &usize| gate.enter(Priority::Sheddable).is_some();
        let started = Instant::now();
        let come_and_gone = (0..20_000).filter(let_in).count();
        assert!(come_and_gone <= MOST || started.elapsed() > WAIT, "{come_and_gone} were let in");
        std::thread::sleep(WAIT);
        assert!(
            gate.enter(Priority::Sheddable).is_none(),
            "who is refused finds out that there is room"
        );
        assert!(gate.enter(Priority::Sheddable).is_some());
    }

    #[test]
    fn when_it_is_over_everything_is_let_in_at_once() {
        let (gate, mut now) = (Gate::new(), Instant::now());
        flood(&gate, 1_000, 10, 1, &mut now);
        flood(&gate, 100, 1, 20, &mut now);
        let [_, refused, _] = flood(&gate, 1_000, 15, 20, &mut now);
        assert_eq!(refused, 0);
    }

    #[test]
    fn a_line_that_is_slow_but_not_full_lets_in_what_it_carries() {
        let (gate, mut now) = (Gate::new(), Instant::now());
        let mut on_their_way = VecDeque::new();
        let mut refused = 0;
        for time in 0..5_000 {
            now += Duration::from_millis(1);
            // One each millisecond, each takes 60 ms.
            match gate.enter(Priority::Sheddable) {
                Some(inside) => on_their_way.push_back((time + 60, inside)),
                None => refused += 1,
            }
            while let Some((_, inside)) = on_their_way.pop_front_if(|(due, _)| *due <= time) {
                inside.done(false);
                gate.watch(now, 1, false);
            }
        }
        assert_eq!(refused, 0);
    }
}
