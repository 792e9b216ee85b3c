//! Tail probabilities of a number of calls, from its moments.

/// Below this mean the tail is summed exactly; above it an expansion in the skewness is close.
const EXACT_BELOW: f64 = 30.0;

/// The largest capacity, far above any pool and within the whole numbers of a float.
const MAX_CAPACITY: f64 = 1e12;

/// A number of calls: its mean, variance and third central moment.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Moments {
    pub mean: f64,
    pub variance: f64,
    pub third: f64,
}

impl Moments {
    /// Calls that each stay with the same probability.
    pub(super) fn binomial(calls: f64, stays: f64) -> Self {
        let variance = calls * stays * (1.0 - stays);
        Self { mean: calls * stays, variance, third: variance * (1.0 - 2.0 * stays) }
    }

    /// Arrivals with a relative variance of their rate (negative binomial; Poisson at 0).
    pub(super) fn arrivals(mean: f64, rate_variance: f64) -> Self {
        let spread = mean * rate_variance;
        let variance = mean * (1.0 + spread);
        Self { mean, variance, third: variance * (1.0 + 2.0 * spread) }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            mean: self.mean + other.mean,
            variance: self.variance + other.variance,
            third: self.third + other.third,
        }
    }

    /// The probability of at least `count` calls.
    pub(super) fn at_least(self, count: f64) -> f64 {
        if count <= 0.0 {
            return 1.0;
        }
        if self.mean <= 0.0 {
            return 0.0;
        }
        match self.mean < EXACT_BELOW && count < 4.0 * EXACT_BELOW {
            true => self.exact_tail(count.ceil() as u32),
            false => self.expanded_tail(count),
        }
    }

    /// The tail of the distribution of Panjer's class (binomial, Poisson, negative binomial) with
    /// this mean and variance.
    fn exact_tail(self, count: u32) -> f64 {
        let ratio = (self.variance / self.mean).max(0.05);
        let (a, b, none) = match (ratio - 1.0).abs() < 1e-6 {
            true => (0.0, self.mean, (-self.mean).exp()),
            false => {
                let shape = self.mean / (ratio - 1.0);
                let a = 1.0 - 1.0 / ratio;
                (a, (shape - 1.0) * a, ratio.powf(-shape))
            }
        };
        let (mut term, mut below) = (none, none);
        for k in 1..count {
            term *= (a + b / f64::from(k)).max(0.0);
            below += term;
        }
        (1.0 - below).clamp(0.0, 1.0)
    }

    /// The normal tail after an inverse Cornish-Fisher expansion to the first order.
    fn expanded_tail(self, count: f64) -> f64 {
        let deviation = self.variance.max(1e-9).sqrt();
        let x = (count - 0.5 - self.mean) / deviation;
        let skew = (self.third / (deviation * self.variance.max(1e-9)) / 6.0).clamp(0.0, 0.5);
        let z = match skew < 1e-6 {
            true => x,
            false => ((1.0 + 4.0 * skew * (x + skew)).max(0.0).sqrt() - 1.0) / (2.0 * skew),
        };
        normal_tail(z)
    }
}

/// The probability that a standard normal variable exceeds `z`.
pub(super) fn normal_tail(z: f64) -> f64 {
    if z < 0.0 {
        return 1.0 - normal_tail(-z);
    }
    // Abramowitz and Stegun 26.2.17; the absolute error is below 7.5e-8.
    let t = 1.0 / (1.0 + 0.231_641_9 * z);
    let polynomial = t
        * (0.319_381_530
            + t * (-0.356_563_782
                + t * (1.781_477_937 + t * (-1.821_255_978 + t * 1.330_274_429))));
    (-0.5 * z * z).exp() * 0.398_942_280_401_432_7 * polynomial
}

/// The `z` that a standard normal variable exceeds with this probability.
pub fn normal_quantile(tail: f64) -> f64 {
    let (mut low, mut high) = (-8.0, 8.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        match normal_tail(middle) > tail {
            true => low = middle,
            false => high = middle,
        }
    }
    (low + high) / 2.0
}

/// A mixture of forecasts of the same number, by weight.
#[derive(Debug, Clone, Default)]
pub(super) struct Mixture(Vec<(f64, Moments)>);

impl Mixture {
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn add(&mut self, weight: f64, moments: Moments) {
        self.0.push((weight, moments));
    }

    pub(super) fn mean(&self) -> f64 {
        self.0.iter().map(|(weight, moments)| weight * moments.mean).sum()
    }

    fn at_least(&self, count: f64) -> f64 {
        self.0.iter().map(|(weight, moments)| weight * moments.at_least(count)).sum()
    }

    /// The smallest capacity that a call finds full with at most this probability.
    pub(super) fn capacity(&self, tail: f64) -> f64 {
        let top = self.0.iter().map(|(_, moments)| moments.mean + 10.0 * moments.variance.sqrt());
        let top = top.fold(0.0, f64::max).min(MAX_CAPACITY);
        let (mut low, mut high) = (0.0, top.ceil() + 20.0);
        while high - low > 1.0 {
            let middle = ((low + high) / 2.0_f64).floor();
            match self.at_least(middle) > tail {
                true => low = middle,
                false => high = middle,
            }
        }
        high
    }
}
