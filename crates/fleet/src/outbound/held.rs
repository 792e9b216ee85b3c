//! The slots that a pool holds for its outstanding dials.

/// Answer probabilities are whole multiples of 1/1024, so that sums of them are exact.
pub const PROBABILITY_UNIT: u64 = 1024;

/// Variance up to which the tail is summed term by term; a normal approximation is too optimistic
/// there. It bounds the work: the sum stops a few standard deviations from the mode.
const SUMMED_VARIANCE: f64 = 25.0;

/// Terms of a sum on either side of its mode, at most. Fewer than 100 are reached.
const MAX_TERMS: u32 = 200;

/// The smallest miss target. Below it a whole slot is held per dial.
const MIN_TARGET: f64 = 0.000001;
const MAX_TARGET: f64 = 0.5;

/// The largest target for the translated Poisson distribution: nearer to the mean it is no bound.
const MAX_TRANSLATED_TARGET: f64 = 0.05;

/// Quantiles of the normal distribution: the tail and the standard deviations above the mean. The
/// quantile is convex in the tail, so interpolation between two rows never falls below it.
const NORMAL_QUANTILES: [(f64, f64); 15] = [
    (0.000001, 4.753425),
    (0.000002, 4.611383),
    (0.000005, 4.417174),
    (0.00001, 4.264892),
    (0.00005, 3.890593),
    (0.0001, 3.719017),
    (0.0005, 3.290528),
    (0.001, 3.090233),
    (0.002, 2.878163),
    (0.005, 2.575830),
    (0.01, 2.326349),
    (0.02, 2.053750),
    (0.05, 1.644855),
    (0.2, 0.841622),
    (0.5, 0.0),
];

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
    if target < MIN_TARGET {
        return sums.dials;
    }
    if sums.variance == 0 {
        return sums.probability / PROBABILITY_UNIT;
    }
    let target = target.min(MAX_TARGET);
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
