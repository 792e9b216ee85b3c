//! Clock steps: all times of the fleet move along, so that the remaining time of leases, drains
//! and queue entries stays the same.

use std::collections::BTreeSet;

use super::{Change, Fleet, QueueEntry};
use crate::Millis;

impl Fleet {
    /// Moves all times by `by` ms after a clock step of that size.
    pub fn shift(&mut self, by: i64) {
        self.record(Change::Shifted { by });
    }

    pub(super) fn shift_times(&mut self, by: i64) {
        let shift = |time: &mut Millis| *time = time.saturating_add_signed(by);
        shift(&mut self.trusting_until);
        self.gateways.values_mut().for_each(|gateway| shift(&mut gateway.until));
        self.swept_at.iter_mut().for_each(shift);
        self.seen_requests.shift(by);
        self.list.iter_mut().for_each(|list| shift(&mut list.followed_at));
        for pod in self.pods.values_mut() {
            pod.draining_until.iter_mut().for_each(shift);
            pod.quarantined_until.iter_mut().for_each(shift);
        }
        for call in self.calls.values_mut() {
            shift(&mut call.at);
            shift(&mut call.until);
            call.queue_entry.iter_mut().for_each(|entry| entry.shift(by));
            call.stream.iter_mut().for_each(|stream| shift(&mut stream.since));
        }
        self.admissions.values_mut().flatten().for_each(shift);
        shift_deadlines(&mut self.leases, by);
        shift_deadlines(&mut self.drains, by);
        shift_deadlines(&mut self.quarantines, by);
        self.history.shift(by);
        self.queue.shift(by);
        self.capacity.shift(by);
        self.outbound.shift(by);
        self.waiting_reports.shift(by);
    }
}

impl QueueEntry {
    pub(super) fn shift(&mut self, by: i64) {
        for time in [&mut self.since, &mut self.until, &mut self.poll_by] {
            *time = time.saturating_add_signed(by);
        }
    }
}

/// Shifts an index of deadlines.
pub(super) fn shift_deadlines<T: Ord>(deadlines: &mut BTreeSet<(Millis, T)>, by: i64) {
    let shifted = std::mem::take(deadlines).into_iter();
    *deadlines = shifted.map(|(at, name)| (at.saturating_add_signed(by), name)).collect();
}
