//! The learned rate of arrivals over the day and the week.

use serde::{Deserialize, Serialize};

use super::policy::is_amount;

/// Length of a slot, in seconds.
pub(super) const SLOT: f64 = 300.0;
pub(super) const SLOTS_PER_DAY: usize = 288;
pub(super) const SLOTS_PER_WEEK: usize = 7 * SLOTS_PER_DAY;
/// Weeks after which a slot of the week forgets.
const WEEKS: f32 = 5.0;
/// Days after which a slot of the day forgets.
const DAYS: f32 = 4.0;
/// Share of a slot that must be observed before it counts.
const MIN_COVERAGE: f64 = 0.6;

/// A slot: the mean rate in calls per second, and the number of observations in it.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, PartialEq)]
struct Slot(f32, f32);

impl Slot {
    fn learn(&mut self, rate: f32, memory: f32) {
        self.1 = (self.1 + 1.0).min(memory);
        self.0 += (rate - self.0) / self.1;
    }

    /// Calls behind the mean.
    fn calls(self) -> f64 {
        f64::from(self.0 * self.1) * SLOT
    }
}

/// The shape of demand that a forecast assumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// The rate stays as it is.
    Flat,
    /// The rate follows the last days.
    Day,
    /// The rate follows the same day of the last weeks.
    Week,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub(super) struct Profile {
    day: Vec<Slot>,
    week: Vec<Slot>,
    /// The slot that is being observed: its number since the epoch (local time), calls, seconds.
    current: Option<(i64, f64, f64)>,
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            day: vec![Slot::default(); SLOTS_PER_DAY],
            week: vec![Slot::default(); SLOTS_PER_WEEK],
            current: None,
        }
    }
}

/// Splits an interval at the bounds of slots.
pub(super) fn slots_between(from: f64, to: f64) -> impl Iterator<Item = (f64, f64)> {
    let mut start = from;
    std::iter::from_fn(move || {
        let end = (((start / SLOT).floor() + 1.0) * SLOT).min(to);
        let part = (start < to).then_some((start, end));
        start = end;
        part
    })
}

fn index(slot: i64, slots: usize) -> usize {
    slot.rem_euclid(slots as i64) as usize
}

impl Profile {
    pub(super) fn is_sane(&self) -> bool {
        let is_slot = |slot: &Slot| is_amount(slot.0.into()) && is_amount(slot.1.into());
        let is_current =
            |(_, calls, seconds): (i64, f64, f64)| is_amount(calls) && is_amount(seconds);
        self.day.len() == SLOTS_PER_DAY
            && self.week.len() == SLOTS_PER_WEEK
            && self.day.iter().chain(&self.week).all(is_slot)
            && self.current.is_none_or(is_current)
    }

    /// Records arrivals of an interval, in seconds of local time since the epoch.
    pub(super) fn observe(&mut self, from: f64, to: f64, arrivals: f64) {
        let length = to - from;
        for (start, end) in slots_between(from, to) {
            let slot = (start / SLOT).floor() as i64;
            if self.current.is_none_or(|(current, ..)| current != slot) {
                self.finish();
                self.current = Some((slot, 0.0, 0.0));
            }
            if let Some((_, calls, seconds)) = &mut self.current {
                *calls += arrivals * (end - start) / length;
                *seconds += end - start;
            }
        }
    }

    /// Ends the slot that is being observed; a slot with gaps does not count.
    pub(super) fn finish(&mut self) {
        let Some((slot, calls, seconds)) = self.current.take() else { return };
        if seconds < MIN_COVERAGE * SLOT {
            return;
        }
        let rate = (calls / seconds) as f32;
        self.day[index(slot, SLOTS_PER_DAY)].learn(rate, DAYS);
        self.week[index(slot, SLOTS_PER_WEEK)].learn(rate, WEEKS);
    }

    /// The expected rate at a local time; `None` without any history of that time.
    pub(super) fn rate(&self, shape: Shape, at: f64) -> Option<f64> {
        let slot = (at / SLOT).floor() as i64;
        match shape {
            Shape::Flat => None,
            Shape::Day => smoothed(&self.day, slot),
            Shape::Week => smoothed(&self.week, slot),
        }
    }
}

/// The mean over the slot and those neighbours whose counts agree with it: a small pool has few
/// calls in one slot, and the edge of an opening must stay sharp.
fn smoothed(slots: &[Slot], slot: i64) -> Option<f64> {
    let own = slots[index(slot, slots.len())];
    if own.1 == 0.0 {
        return None;
    }
    let (mut calls, mut seen) = (own.calls(), f64::from(own.1));
    for step in [-1, 1] {
        for distance in 1..=2 {
            let other = slots[index(slot + step * distance, slots.len())];
            let difference = (f64::from(own.0) - f64::from(other.0)).abs() * SLOT;
            let noise = (f64::from(own.0) * SLOT / f64::from(own.1)
                + f64::from(other.0) * SLOT / f64::from(other.1))
            .sqrt();
            if other.1 == 0.0 || difference > 1.5 * noise {
                break;
            }
            calls += other.calls();
            seen += f64::from(other.1);
        }
    }
    Some(calls / (seen * SLOT))
}
