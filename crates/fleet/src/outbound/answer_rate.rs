//! The share of a merchant's dials that are answered, learned from the dials that ended.

use crate::rules::{
    ANSWER_DEVIATIONS, ANSWER_MEMORY, ANSWER_MEMORY_PER_DIAL, ANSWER_PRIOR, DIAL_WEIGHT,
    MIN_ANSWER_PROBABILITY, PROBABILITY_UNIT,
};

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
        Self { dials: ANSWER_PRIOR * DIAL_WEIGHT, answers: ANSWER_PRIOR * DIAL_WEIGHT }
    }
}

impl AnswerRate {
    /// Records that a dial ended: with an answer, or without one. `outstanding` is the number of
    /// dials that its pool still has.
    pub fn record(&mut self, answered: bool, outstanding: u64) {
        let memory = ANSWER_MEMORY + ANSWER_MEMORY_PER_DIAL * outstanding;
        self.dials = self.dials - self.dials / memory + DIAL_WEIGHT;
        self.answers =
            self.answers - self.answers / memory + if answered { DIAL_WEIGHT } else { 0 };
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
        let unproven = (outstanding * DIAL_WEIGHT).saturating_sub(self.dials);
        let dials = (self.dials + unproven) as f64 / DIAL_WEIGHT as f64;
        let answers = (self.answers + unproven) as f64 / DIAL_WEIGHT as f64;
        let (z, square) = (ANSWER_DEVIATIONS, ANSWER_DEVIATIONS * ANSWER_DEVIATIONS);
        let spread = z * (answers * (dials - answers) / dials + square / 4.0).sqrt();
        let upper = (answers + square / 2.0 + spread) / (dials + square);
        let units = -((-upper * PROBABILITY_UNIT as f64).floor());
        (units as u64).clamp(MIN_ANSWER_PROBABILITY, PROBABILITY_UNIT)
    }
}
