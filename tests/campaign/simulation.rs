//! A campaign as a discrete-event simulation: a dialler that dials whenever a reservation is
//! granted, and inbound calls beside it.

use std::{cmp::Reverse, collections::BinaryHeap};

use fleet::Millis;
use testkit::dice::Dice;

const SECOND: Millis = 1_000;
const HOUR: Millis = 3_600 * SECOND;
/// Bounds of uniform distributions.
pub(crate) const RING_TIME: (Millis, Millis) = (5 * SECOND, 30 * SECOND);
const CALL_TIME: (Millis, Millis) = (20 * SECOND, 400 * SECOND);
const SWEEP_INTERVAL: Millis = SECOND;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Campaign {
    pub(crate) pods: u64,
    /// The share of answered dials in the first and the second half.
    pub(crate) answer_rates: (f64, f64),
    /// Bounds of the ring time of dials without an answer.
    pub(crate) unanswered_ring_time: (Millis, Millis),
    /// Inbound calls that arrive per mean call time, as a share of the pods.
    pub(crate) inbound: f64,
    /// Percent of the pods.
    pub(crate) inbound_reserve: u32,
    pub(crate) hours: u64,
    /// Percent of the dials without an answer whose end no callback reports.
    pub(crate) lost_callbacks: usize,
    pub(crate) seed: u64,
}

/// Calls and reservations are numbered.
pub(crate) type Number = u64;

/// The dial was refused. Another one may be granted after this time, or after the next change.
pub(crate) struct Refused {
    pub(crate) retry_after: Option<Millis>,
}

/// The capacity of a campaign: grants dials, and serves calls.
pub(crate) trait Capacity {
    /// `is_answered` is for the clairvoyant only.
    fn reserve(&mut self, dial: Number, is_answered: bool, now: Millis) -> Result<(), Refused>;
    /// A dial is answered. Returns whether the call got a pod.
    fn answer(&mut self, dial: Number, now: Millis) -> bool;
    /// A dial ended without an answer.
    fn end_dial(&mut self, dial: Number, now: Millis);
    /// An inbound call arrives. Returns whether it got a pod.
    fn accept_inbound(&mut self, call: Number, now: Millis) -> bool;
    fn end_call(&mut self, call: Number, now: Millis);
    fn sweep(&mut self, now: Millis);
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Outcome {
    pub(crate) dials: u64,
    /// Answered dials with and without a pod.
    pub(crate) served: u64,
    pub(crate) missed: u64,
    pub(crate) inbound: u64,
    pub(crate) inbound_refused: u64,
}

impl Outcome {
    pub(crate) fn add(&mut self, other: Self) {
        self.dials += other.dials;
        self.served += other.served;
        self.missed += other.missed;
        self.inbound += other.inbound;
        self.inbound_refused += other.inbound_refused;
    }

    pub(crate) fn miss_share(self) -> f64 {
        self.missed as f64 / (self.served + self.missed).max(1) as f64
    }

    pub(crate) fn inbound_refused_share(self) -> f64 {
        self.inbound_refused as f64 / self.inbound.max(1) as f64
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Answer {
        dial: Number,
    },
    DialEnded {
        dial: Number,
    },
    CallEnded {
        call: Number,
    },
    Inbound,
    Sweep,
    /// The dialler asks again.
    Retry,
}

struct Simulation<'a, C> {
    campaign: Campaign,
    capacity: &'a mut C,
    /// By time, then in the order of their creation.
    events: BinaryHeap<Reverse<(Millis, u64, Event)>>,
    created: u64,
    /// Separate sequences: the same inbound calls arrive beside every dialler.
    dialler: Dice,
    inbound: Dice,
    retry_at: Option<Millis>,
    outcome: Outcome,
}

/// Returns a number between 0 and 1, exclusive.
fn uniform(dice: &mut Dice) -> f64 {
    const STEPS: u64 = 1 << 52;
    (dice.between(0, STEPS - 1) as f64 + 0.5) / STEPS as f64
}

/// Runs a campaign until its dials and calls have ended. The outcome counts until the end of the
/// last hour, at which dialler and inbound calls stop.
pub(crate) fn run(campaign: Campaign, capacity: &mut impl Capacity) -> Outcome {
    let mut simulation = Simulation {
        campaign,
        capacity,
        events: BinaryHeap::new(),
        created: 0,
        dialler: Dice(campaign.seed),
        inbound: Dice(campaign.seed ^ 0x0001_4b0d_4ca1_1500),
        retry_at: None,
        outcome: Outcome::default(),
    };
    simulation.schedule_inbound(0);
    simulation.schedule(0, Event::Sweep);
    let end = campaign.hours * HOUR;
    let mut outcome = None;
    while let Some(Reverse((now, _, event))) = simulation.events.pop() {
        if now >= end && outcome.is_none() {
            outcome = Some(simulation.outcome);
        }
        simulation.step(event, now);
        if now < end {
            simulation.dial(now);
        }
    }
    outcome.expect("sweeps continue past the end")
}

impl<C: Capacity> Simulation<'_, C> {
    fn schedule(&mut self, at: Millis, event: Event) {
        self.created += 1;
        self.events.push(Reverse((at, self.created, event)));
    }

    /// The end of the campaign, after all dials, reservations and calls.
    fn is_over(&self, now: Millis) -> bool {
        now > self.campaign.hours * HOUR + HOUR
    }

    fn step(&mut self, event: Event, now: Millis) {
        match event {
            Event::Answer { dial } if self.capacity.answer(dial, now) => {
                self.outcome.served += 1;
                let lasts = self.dialler.between(CALL_TIME.0, CALL_TIME.1);
                self.schedule(now + lasts, Event::CallEnded { call: dial });
            }
            Event::Answer { .. } => self.outcome.missed += 1,
            Event::DialEnded { dial } => self.capacity.end_dial(dial, now),
            Event::CallEnded { call } => self.capacity.end_call(call, now),
            Event::Inbound => self.accept_inbound(now),
            Event::Sweep => {
                self.capacity.sweep(now);
                if !self.is_over(now) {
                    self.schedule(now + SWEEP_INTERVAL, Event::Sweep);
                }
            }
            Event::Retry => self.retry_at = None,
        }
    }

    fn accept_inbound(&mut self, now: Millis) {
        self.outcome.inbound += 1;
        self.created += 1;
        let call = self.created;
        let lasts = self.inbound.between(CALL_TIME.0, CALL_TIME.1);
        if self.capacity.accept_inbound(call, now) {
            self.schedule(now + lasts, Event::CallEnded { call });
        } else {
            self.outcome.inbound_refused += 1;
        }
        self.schedule_inbound(now);
    }

    /// Schedules the next inbound call: arrivals are a Poisson process.
    fn schedule_inbound(&mut self, now: Millis) {
        let calls = self.campaign.inbound * self.campaign.pods as f64;
        if calls == 0.0 {
            return;
        }
        let mean = (CALL_TIME.0 + CALL_TIME.1) as f64 / 2.0 / calls;
        let at = now + (-uniform(&mut self.inbound).ln() * mean) as Millis;
        if at < self.campaign.hours * HOUR {
            self.schedule(at, Event::Inbound);
        }
    }

    /// Dials until a reservation is refused.
    fn dial(&mut self, now: Millis) {
        let (first, second) = self.campaign.answer_rates;
        let rate = if now < self.campaign.hours * HOUR / 2 { first } else { second };
        loop {
            // The draws of a refused dial are those of the next one.
            let before = self.dialler.0;
            let is_answered = uniform(&mut self.dialler) < rate;
            let unanswered = self.campaign.unanswered_ring_time;
            let (shortest, longest) = if is_answered { RING_TIME } else { unanswered };
            let rings = self.dialler.between(shortest, longest);
            self.created += 1;
            let dial = self.created;
            if let Err(refused) = self.capacity.reserve(dial, is_answered, now) {
                self.dialler.0 = before;
                self.retry(refused, now);
                return;
            }
            self.outcome.dials += 1;
            if is_answered {
                self.schedule(now + rings, Event::Answer { dial });
            } else if !self.dialler.percent(self.campaign.lost_callbacks) {
                self.schedule(now + rings, Event::DialEnded { dial });
            }
        }
    }

    fn retry(&mut self, refused: Refused, now: Millis) {
        let Some(after) = refused.retry_after else { return };
        if self.retry_at.is_none() {
            self.retry_at = Some(now + after);
            self.schedule(now + after, Event::Retry);
        }
    }
}
