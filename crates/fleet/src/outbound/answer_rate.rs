//! The share of a merchant's dials that are answered, learned from the dials that ended.

use super::held::PROBABILITY_UNIT;

/// Weight of one dial. Counts are whole numbers, so that both stores decay them alike.
const DIAL: u64 = 65_536;
/// Ended dials after which the weight of a dial has fallen to 1/e: this number, and a multiple of
/// the outstanding dials.
///
/// Dials without an answer ring longer and often end together, when the provider gives up. If the
/// memory were shorter than such a series, the rate would fall to its minimum, the dialler would
/// dial far too much, and those dials would form the next series.
const MEMORY: u64 = 32;
const MEMORY_PER_OUTSTANDING: u64 = 2;
/// Answered dials that a merchant starts with: the estimate falls only as evidence arrives.
const PRIOR: u64 = 8;
/// The smallest answer probability, in units of 1/1024: it bounds the dials per slot if a series
/// of dials without an answer comes to an end.
const MIN_PROBABILITY: u64 = 32;

/// Decayed counts of a merchant's ended dials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerRate {
    /// Ended dials, in units of 1/65,536.
    pub dials: u64,
    /// Answered ones among them.
    pub answers: u64,
}

impl Default for AnswerRate {
    fn default() -> Self {
        Self { dials: PRIOR * DIAL, answers: PRIOR * DIAL }
    }
}

impl AnswerRate {
    /// Records that a dial ended: with an answer, or without one. `outstanding` is the number of
    /// dials that its pool still has.
    pub fn record(&mut self, answered: bool, outstanding: u64) {
        let memory = MEMORY + MEMORY_PER_OUTSTANDING * outstanding;
        self.dials = self.dials - self.dials / memory + DIAL;
        self.answers = self.answers - self.answers / memory + if answered { DIAL } else { 0 };
        // Both counts round down; with nothing but answers they stay equal.
        self.answers = self.answers.min(self.dials);
    }

    /// Returns the answer probability to plan with, in units of 1/1024, rounded up: the upper end
    /// of the Wilson interval of a quarter of a standard deviation. It is 1 before the first dial.
    /// A wider interval costs throughput in the campaign simulator and saves few misses: `held`
    /// leaves out the calls that end while phones ring.
    pub fn probability(self) -> u64 {
        self.probability_among(0)
    }

    /// The same for a dial in a pool that then has `outstanding` dials. Dials beyond the number of
    /// ended ones count as answered: a burst on idle pods is planned with the old rate only as far
    /// as there is evidence for it.
    pub fn probability_among(self, outstanding: u64) -> u64 {
        let unproven = (outstanding * DIAL).saturating_sub(self.dials);
        let dials = (self.dials + unproven) as f64 / DIAL as f64;
        let answers = (self.answers + unproven) as f64 / DIAL as f64;
        let spread = 0.25 * (answers * (dials - answers) / dials + 0.015625).sqrt();
        let upper = (answers + 0.03125 + spread) / (dials + 0.0625);
        let units = -((-upper * PROBABILITY_UNIT as f64).floor());
        (units as u64).clamp(MIN_PROBABILITY, PROBABILITY_UNIT)
    }
}
