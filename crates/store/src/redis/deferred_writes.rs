//! What has to be done once Redis is back: releases and started streams that nobody
//! will tell of again, and allocations that may have happened although their callers were refused.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use super::client::BUDGET;
use fleet::{
    Confirm, Millis, Release,
    names::{CallSid, Fingerprint},
};

/// So many are kept; then the oldest go. A lease ends what is lost here.
const MOST: usize = 100_000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Debt {
    /// It was asked for at that time, by Redis's clock: a call that begins later under the
    /// same id is another.
    Release {
        release: Release,
        asked: Option<Millis>,
    },
    Confirm(Confirm),
    /// Ends the call if it still stems from this attempt, which may still come to Redis, on
    /// another line: what takes it back has to come after it.
    Doubt {
        call: CallSid,
        attempt: String,
        /// Of the request, if it was signed: it may be sent again, since nobody was answered.
        fingerprint: Option<Fingerprint>,
    },
}

#[derive(Debug, Default)]
pub(super) struct Kept {
    debts: VecDeque<Debt>,
    /// Those that are not due yet, and when they are; the next comes first.
    doubts: VecDeque<(Instant, Debt)>,
    pub dropped: u64,
}

impl Kept {
    pub(super) fn push(&mut self, debt: Debt) {
        if self.len() == MOST {
            if self.debts.pop_front().is_none() {
                self.doubts.pop_front();
            }
            self.dropped += 1;
        }
        if matches!(debt, Debt::Doubt { .. }) {
            // Who hung up did not wait until nothing could come any more.
            self.doubts.push_back((Instant::now() + BUDGET, debt));
        } else {
            self.debts.push_back(debt);
        }
    }

    /// How many are due.
    pub(super) fn due(&mut self) -> usize {
        while let Some((_, debt)) = self.doubts.pop_front_if(|(due, _)| *due <= Instant::now()) {
            self.debts.push_back(debt);
        }
        self.debts.len()
    }

    /// How long until another is due.
    pub(super) fn next_due(&self) -> Option<Duration> {
        self.doubts.front().map(|(due, _)| due.saturating_duration_since(Instant::now()))
    }

    /// How long until all are.
    pub(super) fn last_due(&self) -> Option<Duration> {
        self.doubts.back().map(|(due, _)| due.saturating_duration_since(Instant::now()))
    }

    /// Takes the oldest that are due, to be paid or put back.
    pub(super) fn take(&mut self, most: usize) -> Vec<Debt> {
        let count = most.min(self.debts.len());
        self.debts.drain(..count).collect()
    }

    pub(super) fn put_back(&mut self, debts: Vec<Debt>) {
        debts.into_iter().rev().for_each(|debt| self.debts.push_front(debt));
    }

    pub(super) fn len(&self) -> usize {
        self.debts.len() + self.doubts.len()
    }
}
