//! The slots that a pool holds for its outstanding dials.

use crate::rules::{
    MAX_MISS_TARGET, MAX_TERMS, MAX_TRANSLATED_TARGET, MIN_MISS_TARGET, NORMAL_QUANTILES,
    PROBABILITY_UNIT, SUMMED_VARIANCE,
};

/// Sums over the outstanding dials of a pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DialSums {
    pub dials: u64,
    /// Sum of the answer probabilities, in units of 1/1024.
    pub probability: u64,
    /// Sum of p (1 − p), in units of 1/1024².
    pub variance: u64,
}

impl DialSums {
    /// Adds a dial with an answer probability in units of 1/1024.
    pub fn add(&mut self, probability: u64) {
        self.dials += 1;
        self.probability += probability;
        self.variance += probability * (PROBABILITY_UNIT - probability);
    }

    /// Removes a dial that was added with this answer probability.
    pub fn remove(&mut self, probability: u64) {
        self.dials -= 1;
        self.probability -= probability;
        self.variance -= probability * (PROBABILITY_UNIT - probability);
    }
}

/// Returns the slots to hold: the smallest k such that more than k dials are answered with a
/// probability of at most `target`.
///
/// Two distributions bound the number of answers, and the smaller result holds:
/// - the binomial distribution of the same mean (exact if all probabilities are equal; otherwise
///   wider than the answers, by Hoeffding's inequality of 1956);
/// - the translated Poisson distribution of the same mean and variance (close if the
///   probabilities differ much).
pub fn held(sums: DialSums, target: f64) -> u64 {
    if target < MIN_MISS_TARGET {
        return sums.dials;
    }
    if sums.variance == 0 {
        return sums.probability / PROBABILITY_UNIT;
    }
    let target = target.min(MAX_MISS_TARGET);
    let unit = PROBABILITY_UNIT as f64;
    let dials = sums.dials as f64;
    let mean = sums.probability as f64 / unit;
    let variance = sums.variance as f64 / (unit * unit);

    let p = mean / dials;
    let q = 1.0 - p;
    let equal_variance = mean * q;
    let mut slots = if equal_variance > SUMMED_VARIANCE {
        normal_bound(mean, equal_variance, q - p, target)
    } else {
        let odds = p / q;
        let mode = ((dials + 1.0) * p).floor();
        summed_bound(mode, dials * odds, odds, target)
    };
    if variance < equal_variance && target <= MAX_TRANSLATED_TARGET {
        let bound = if variance > SUMMED_VARIANCE {
            normal_bound(mean, variance, 1.0, target)
        } else {
            let shift = (mean - variance).floor();
            let rest = mean - shift;
            shift + summed_bound(rest.floor(), rest, 0.0, target)
        };
        slots = slots.min(bound);
    }
    slots.min(dials) as u64
}

/// Returns the smallest k with P(X > k) ≤ target, where P(j + 1) / P(j) = (a − b j) / (j + 1). With
/// b = 0 that is the Poisson distribution of mean a, otherwise a binomial one.
fn summed_bound(mode: f64, a: f64, b: f64, target: f64) -> f64 {
    let negligible = target * 0.0001;
    let mut above = 0.0;
    let mut term = 1.0;
    let mut at = mode;
    for _ in 0..MAX_TERMS {
        term = term * (a - b * at) / (at + 1.0);
        if term < negligible {
            break;
        }
        above += term;
        at += 1.0;
    }
    let mut below = 0.0;
    term = 1.0;
    at = mode;
    for _ in 0..MAX_TERMS {
        if at < 1.0 {
            break;
        }
        term = term * at / (a - b * (at - 1.0));
        if term < negligible {
            break;
        }
        below += term;
        at -= 1.0;
    }
    let allowed = target * (below + 1.0 + above);
    term = 1.0;
    at = mode;
    for _ in 0..MAX_TERMS {
        if above <= allowed {
            break;
        }
        term = term * (a - b * at) / (at + 1.0);
        above -= term;
        at += 1.0;
    }
    at
}

/// The same from the normal distribution, with the corrections for skewness (the third cumulant
/// as a multiple of the variance) and for whole numbers.
fn normal_bound(mean: f64, variance: f64, skewness: f64, target: f64) -> f64 {
    let z = normal_quantile(target);
    let slots = mean + z * variance.sqrt() + (z * z - 1.0) * skewness / 6.0 - 0.5;
    -((-slots).floor())
}

fn normal_quantile(target: f64) -> f64 {
    let mut row = 1;
    while NORMAL_QUANTILES[row].0 < target {
        row += 1;
    }
    let (low, high) = (NORMAL_QUANTILES[row - 1], NORMAL_QUANTILES[row]);
    low.1 + (target - low.0) * (high.1 - low.1) / (high.0 - low.0)
}
