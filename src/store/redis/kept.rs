//! What has to be done once Redis is back: releases and started streams that nobody
//! will tell of again, and allocations that may have happened although their callers were refused.

use std::collections::VecDeque;

use crate::domain::{
    Millis,
    fleet::{Confirm, Release},
    names::CallSid,
};

/// So many are kept; then the oldest go. A lease ends what is lost here.
const MOST: usize = 100_000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Debt {
    /// It was asked for at that time, by Redis's clock: a call that begins later under the
    /// same id is another.
    Release {
        release: Release,
        asked: Option<Millis>,
    },
    Confirm(Confirm),
    /// Ends the call if it still stems from this attempt.
    Doubt {
        call: CallSid,
        attempt: String,
    },
}

#[derive(Debug, Default)]
pub struct Kept {
    debts: VecDeque<Debt>,
    pub dropped: u64,
}

impl Kept {
    pub fn push(&mut self, debt: Debt) {
        if self.debts.len() == MOST {
            self.debts.pop_front();
            self.dropped += 1;
        }
        self.debts.push_back(debt);
    }

    /// Takes the oldest debts, to be paid or put back.
    pub fn take(&mut self, most: usize) -> Vec<Debt> {
        let count = most.min(self.debts.len());
        self.debts.drain(..count).collect()
    }

    pub fn put_back(&mut self, debts: Vec<Debt>) {
        debts.into_iter().rev().for_each(|debt| self.debts.push_front(debt));
    }

    pub fn len(&self) -> usize {
        self.debts.len()
    }
}
