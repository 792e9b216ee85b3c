//! The present rate of arrivals: several estimates, weighted by how well each one forecast.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::{
    policy::is_amount,
    profile::{Profile, Shape, slots_between},
    start_up::MAX_START_UP,
};

/// Averaging times, in seconds. The weights choose among them.
const WINDOWS: [f64; 4] = [90.0, 360.0, 1_500.0, 7_200.0];
const SHAPES: [Shape; 3] = [Shape::Flat, Shape::Day, Shape::Week];
pub(super) const ESTIMATES: usize = WINDOWS.len() * SHAPES.len();
/// Weight of "the profile is right", in calls: a relative uncertainty of 20 %.
const PRIOR_CALLS: f64 = 25.0;
/// Half a call within 30 s: the assumption about a pool of which nothing is known.
const UNKNOWN: (f64, f64) = (0.5, 30.0);
/// Share of the weight that is spread over all estimates after each comparison, so that the
/// weights follow a change of regime.
const SHARE: f64 = 0.004;
/// Days after which the measured dispersion forgets.
const DISPERSION_MEMORY: f64 = 2.0 * 86_400.0;
/// Relative variance of the rate before it is measured, and its weight in comparisons.
const PRIOR_DISPERSION: (f64, f64) = (0.01, 10.0);
/// The least squared number of calls of such a comparison: the noise of fewer calls hides the
/// dispersion.
const MIN_SQUARE: f64 = 100.0;
/// Relative variance of a forecast, beyond the dispersion, up to which its error is learned from.
/// The error of a forecast from less than four calls says nothing of the dispersion.
const MAX_OWN_VARIANCE: f64 = 0.25;
/// The smallest relative variance with which forecasts are compared.
const MIN_DISPERSION: f64 = 0.002;
/// Errors beyond this number of standard deviations count as this number: one burst must not
/// widen the margin of the days after it.
const OUTLIER: f64 = 4.0;
/// Lengths of a stored comparison, in seconds: a start-up time and an interval.
const COMPARISON: RangeInclusive<f64> = 0.05..=2.0 * MAX_START_UP;
/// Error of local times, in seconds, far below a change of clocks.
const CLOCK_TOLERANCE: f64 = 1.0;
/// The smallest rate that a forecast may claim, in calls per second.
const MIN_RATE: f64 = 1e-6;

/// Discounted calls, and the seconds (or expected calls) in which they arrived.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, PartialEq)]
struct Estimate {
    calls: f64,
    exposure: f64,
    weight: f64,
    /// Calls forecast for the current comparison, and their relative variance beyond Poisson.
    forecast: Option<(f64, f64)>,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub(super) struct Rate {
    estimates: Vec<Estimate>,
    /// The current comparison: start and planned end in local seconds, arrivals so far.
    comparison: Option<(f64, f64, f64)>,
    /// Sums of squared errors beyond Poisson, and of squared forecasts, over the comparisons.
    excess: f64,
    squares: f64,
    /// The mean of squared forecasts, weighted by themselves: that of the comparisons that count.
    #[serde(default)]
    typical: f64,
}

impl Default for Rate {
    fn default() -> Self {
        let weight = 1.0 / ESTIMATES as f64;
        Self {
            estimates: vec![Estimate { weight, ..Estimate::default() }; ESTIMATES],
            comparison: None,
            excess: 0.0,
            squares: 0.0,
            typical: 0.0,
        }
    }
}

fn kind(estimate: usize) -> (Shape, f64) {
    (SHAPES[estimate / WINDOWS.len()], WINDOWS[estimate % WINDOWS.len()])
}

impl Estimate {
    fn level(self, shape: Shape) -> f64 {
        match shape {
            Shape::Flat => (self.calls + UNKNOWN.0) / (self.exposure + UNKNOWN.1),
            _ => (self.calls + PRIOR_CALLS) / (self.exposure + PRIOR_CALLS),
        }
    }

    /// The relative variance of the level: few calls say little.
    fn variance(self, shape: Shape) -> f64 {
        match shape {
            Shape::Flat => 1.0 / (self.calls + UNKNOWN.0),
            _ => 1.0 / (self.calls + PRIOR_CALLS),
        }
    }
}

/// Expected arrivals of each shape; of the constant one, the seconds in which they arrive.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Expected {
    pub flat: f64,
    pub day: Option<f64>,
    pub week: Option<f64>,
}

impl Expected {
    /// Adds `seconds` at a local time.
    pub(super) fn add(&mut self, profile: &Profile, at: f64, seconds: f64) {
        // A slot without history adds nothing: before the first opening that was seen, none was.
        let add = |sum: Option<f64>, shape| match profile.rate(shape, at) {
            Some(rate) => Some(sum.unwrap_or(0.0) + rate * seconds),
            None => sum,
        };
        self.day = add(self.day, Shape::Day);
        self.week = add(self.week, Shape::Week);
        self.flat += seconds;
    }

    /// Expected arrivals over an interval.
    pub(super) fn over(profile: &Profile, from: f64, to: f64) -> Self {
        let mut expected = Self::default();
        for (start, end) in slots_between(from, to) {
            expected.add(profile, start, end - start);
        }
        expected
    }

    fn of(self, shape: Shape) -> Option<f64> {
        match shape {
            Shape::Flat => Some(self.flat),
            Shape::Day => self.day,
            Shape::Week => self.week,
        }
    }
}

/// The logarithm of the probability of `arrived` calls (negative binomial), without the terms
/// that all forecasts share.
fn likelihood(arrived: f64, mean: f64, variance: f64) -> f64 {
    let shape = 1.0 / variance;
    ln_gamma(arrived + shape) - ln_gamma(shape) + arrived * (mean / (shape + mean)).ln()
        - shape * (mean / shape).ln_1p()
}

/// The logarithm of the gamma function (Stirling's series after a shift).
fn ln_gamma(x: f64) -> f64 {
    let (mut x, mut shift) = (x, 0.0);
    while x < 8.0 {
        shift -= x.ln();
        x += 1.0;
    }
    let inverse = 1.0 / x;
    let series =
        inverse * (1.0 / 12.0 - inverse * inverse * (1.0 / 360.0 - inverse * inverse / 1_260.0));
    shift + (x - 0.5) * x.ln() - x + 0.918_938_533_204_672_7 + series
}

impl Rate {
    pub(super) fn is_sane(&self) -> bool {
        let is_estimate = |estimate: &Estimate| {
            let Estimate { calls, exposure, weight, forecast } = *estimate;
            let is_forecast = |(calls, variance): (f64, f64)| {
                [calls, variance].into_iter().all(|it| is_amount(it) && it > 0.0)
            };
            [calls, exposure, weight].into_iter().all(is_amount) && forecast.is_none_or(is_forecast)
        };
        let is_comparison = |(start, end, calls): (f64, f64, f64)| {
            COMPARISON.contains(&(end - start)) && is_amount(calls)
        };
        self.estimates.len() == ESTIMATES
            && self.estimates.iter().all(is_estimate)
            && self.comparison.is_none_or(is_comparison)
            && self.excess.is_finite()
            && is_amount(self.squares)
            && is_amount(self.typical)
    }

    /// Assumes a steady state at the first observation: the live calls, none included, are the
    /// arrivals of a mean duration of `seconds`.
    pub(super) fn assume(&mut self, calls: f64, seconds: f64) {
        for (number, estimate) in self.estimates.iter_mut().enumerate() {
            if kind(number).0 == Shape::Flat {
                (estimate.calls, estimate.exposure) = (calls, seconds);
            }
        }
    }

    /// Arrivals that an interval is expected to have.
    pub(super) fn expected(&self, profile: &Profile, (from, to): (f64, f64)) -> f64 {
        let expected = Expected::over(profile, from, to);
        self.mixed(|estimate, shape| Some(estimate.level(shape) * expected.of(shape)?))
    }

    /// Records arrivals of an interval, and compares forecasts that it completes.
    pub(super) fn observe(
        &mut self,
        profile: &Profile,
        (from, to): (f64, f64),
        arrivals: f64,
        horizon: f64,
    ) {
        let expected = Expected::over(profile, from, to);
        for (number, estimate) in self.estimates.iter_mut().enumerate() {
            let (shape, window) = kind(number);
            let keep = (-(to - from) / window).exp();
            estimate.calls *= keep;
            estimate.exposure *= keep;
            if let Some(expected) = expected.of(shape) {
                estimate.calls += arrivals;
                estimate.exposure += expected;
            }
        }
        // A change of clocks moves the local time out of the comparison under way, which then has
        // an hour too much or too little.
        let comparison = self.comparison.filter(|(start, end, _)| {
            (start - CLOCK_TOLERANCE..end + CLOCK_TOLERANCE).contains(&from)
        });
        let (start, end, sum) = comparison.unwrap_or((from, from, 0.0));
        if to >= end {
            if end > start {
                self.compare(sum + arrivals, (to - start) / (end - start));
            }
            self.begin_comparison(profile, to, horizon);
        } else {
            self.comparison = Some((start, end, sum + arrivals));
        }
    }

    /// Forgets the comparison under way; the clock stepped or observations are missing.
    pub(super) fn skip(&mut self, elapsed: f64) {
        self.comparison = None;
        for (number, estimate) in self.estimates.iter_mut().enumerate() {
            let keep = (-elapsed / kind(number).1).exp();
            estimate.calls *= keep;
            estimate.exposure *= keep;
        }
    }

    fn begin_comparison(&mut self, profile: &Profile, at: f64, horizon: f64) {
        let expected = Expected::over(profile, at, at + horizon);
        let dispersion = self.dispersion();
        for (number, estimate) in self.estimates.iter_mut().enumerate() {
            let (shape, _) = kind(number);
            let floor = MIN_RATE * horizon;
            let variance = estimate.variance(shape).max(dispersion + MIN_DISPERSION);
            estimate.forecast = expected
                .of(shape)
                .map(|calls| ((estimate.level(shape) * calls).max(floor), variance));
        }
        self.comparison = Some((at, at + horizon, 0.0));
    }

    fn compare(&mut self, arrived: f64, stretch: f64) {
        self.learn_dispersion(arrived, stretch);
        let score = |(calls, variance): (f64, f64)| likelihood(arrived, calls * stretch, variance);
        let forecasts = self.estimates.iter().filter_map(|estimate| estimate.forecast);
        let best = forecasts.map(score).fold(f64::MIN, f64::max);
        // An estimate without a forecast keeps its share among the others.
        let (mut before, mut after) = (0.0, 0.0);
        for estimate in &mut self.estimates {
            if let Some(forecast) = estimate.forecast {
                before += estimate.weight;
                estimate.weight *= (score(forecast) - best).exp();
                after += estimate.weight;
            }
        }
        let scale = if after > 0.0 { before / after } else { 0.0 };
        for estimate in &mut self.estimates {
            if estimate.forecast.is_some() {
                estimate.weight *= scale;
            }
            estimate.weight = (1.0 - SHARE) * estimate.weight + SHARE / ESTIMATES as f64;
        }
    }

    /// Learns from the error of the mean forecast, unless it came from too few calls.
    fn learn_dispersion(&mut self, arrived: f64, stretch: f64) {
        let dispersion = self.dispersion();
        let own_variance = self.mixed(|estimate, _| Some(estimate.forecast?.1)) - dispersion;
        if own_variance > MAX_OWN_VARIANCE {
            return;
        }
        let mean = self.mixed(|estimate, _| Some(estimate.forecast?.0 * stretch));
        let variance = mean + dispersion * mean * mean;
        let error = (arrived - mean).powi(2).min(OUTLIER * OUTLIER * (variance + 1.0));
        let length = self.comparison.map_or(60.0, |(start, end, _)| end - start);
        let keep = 1.0 - (length / DISPERSION_MEMORY).min(0.5);
        self.excess = self.excess * keep + error - mean;
        let square = mean * mean;
        self.squares = self.squares * keep + square;
        self.typical += (square - self.typical) * square / self.squares.max(f64::MIN_POSITIVE);
    }

    /// The relative variance of the rate beyond Poisson noise.
    pub(super) fn dispersion(&self) -> f64 {
        let (prior, comparisons) = PRIOR_DISPERSION;
        let weight = comparisons * self.typical.max(MIN_SQUARE);
        ((self.excess + prior * weight) / (self.squares + weight)).clamp(0.0, 1.0)
    }

    fn mixed(&self, value: impl Fn(&Estimate, Shape) -> Option<f64>) -> f64 {
        let (mut sum, mut weights) = (0.0, 0.0);
        for (number, estimate) in self.estimates.iter().enumerate() {
            if let Some(value) = value(estimate, kind(number).0) {
                sum += estimate.weight * value;
                weights += estimate.weight;
            }
        }
        if weights > 0.0 { sum / weights } else { 0.0 }
    }

    /// Each estimate's weight, arrivals and relative variance, where the shapes expect `expected`.
    pub(super) fn forecasts(
        &self,
        expected: Expected,
    ) -> impl Iterator<Item = (f64, f64, f64)> + '_ {
        let dispersion = self.dispersion();
        let known = move |number: usize| expected.of(kind(number).0);
        let weights: f64 = (0..ESTIMATES)
            .filter(|number| known(*number).is_some())
            .map(|number| self.estimates[number].weight)
            .sum();
        self.estimates.iter().enumerate().filter_map(move |(number, estimate)| {
            let shape = kind(number).0;
            let calls = known(number)? * estimate.level(shape);
            let variance = dispersion.max(estimate.variance(shape));
            Some((estimate.weight / weights.max(1e-12), calls, variance))
        })
    }
}
