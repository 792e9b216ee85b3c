//! Synthetic traces: daily and weekly shape, bursts, campaigns, holidays and drift.

use super::simulate::Call;

/// Mean duration of a synthetic call, in seconds.
pub(super) const MEAN_DURATION: f64 = 180.0;
const DAY: f64 = 86_400.0;
/// The start of all traces: Monday, 6 January 2025, UTC.
const START: u64 = 1_736_121_600;

/// A kind of demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A call centre, open on weekdays from 7 to 21.
    Office,
    /// Round the clock, with quiet nights and weekends.
    AroundTheClock,
    /// `AroundTheClock` with sudden bursts of ten minutes.
    Bursts,
    /// `Office` with campaigns that double the demand for two hours.
    Campaign,
    /// `AroundTheClock` that grows by 3 % a day.
    Drift,
    /// `Office` with a closed Friday, and a heavy Monday after it.
    Holiday,
}

impl Kind {
    pub(super) const ALL: [Self; 6] = [
        Self::Office,
        Self::AroundTheClock,
        Self::Bursts,
        Self::Campaign,
        Self::Drift,
        Self::Holiday,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Office => "office hours",
            Self::AroundTheClock => "round the clock",
            Self::Bursts => "bursts",
            Self::Campaign => "campaign",
            Self::Drift => "drift",
            Self::Holiday => "holiday",
        }
    }
}

/// A seeded generator of random numbers (SplitMix64): the same trace on every platform.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in (0, 1).
    pub(super) fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    pub(super) fn exponential(&mut self, mean: f64) -> f64 {
        -self.uniform().ln() * mean
    }

    /// Normal (Box-Muller).
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        radius * (2.0 * std::f64::consts::PI * self.uniform()).cos()
    }
}

/// A synthetic trace.
#[derive(Debug, Clone, Copy)]
pub(super) struct Synthetic {
    pub(super) kind: Kind,
    /// Calls at the same time at the usual peak of a weekday.
    pub(super) peak: f64,
    pub(super) days: usize,
    pub(super) seed: u64,
}

/// The shape of a working day by hour: a morning peak, a dip at lunch, a slow evening.
const WORKING_DAY: [f64; 15] =
    [0.33, 0.55, 0.82, 0.97, 1.0, 0.93, 0.82, 0.86, 0.92, 0.90, 0.80, 0.62, 0.45, 0.34, 0.25];
const OPENS: f64 = 7.0;
const CLOSES: f64 = 21.0;
const WEEKDAYS: [f64; 7] = [1.12, 1.0, 0.96, 0.97, 1.02, 0.0, 0.0];

impl Synthetic {
    /// Draws the calls.
    pub(super) fn calls(&self) -> Vec<Call> {
        let mut random = Random::new(self.seed);
        let mut calls = Vec::new();
        let bursts = self.bursts(&mut random);
        let mut quarter_noise = 0.0;
        for day in 0..self.days {
            let level = (0.07 * random.normal()).exp();
            for slot in 0..288 {
                // Noise of a quarter of an hour, partly carried over to the next one.
                if slot % 3 == 0 {
                    quarter_noise = 0.6 * quarter_noise + 0.045 * random.normal();
                }
                let from = day as f64 * DAY + f64::from(slot) * 300.0;
                let noise = (quarter_noise + 0.03 * random.normal()).exp() * level;
                self.draw_slot(from, noise, &bursts, &mut random, &mut calls);
            }
        }
        calls
    }

    /// The time of the first burst, in milliseconds since the epoch.
    pub(super) fn first_burst(&self) -> Option<u64> {
        let bursts = self.bursts(&mut Random::new(self.seed));
        bursts.first().map(|(start, _)| ((START as f64 + start) * 1_000.0) as u64)
    }

    fn draw_slot(
        &self,
        from: f64,
        noise: f64,
        bursts: &[(f64, f64)],
        random: &mut Random,
        calls: &mut Vec<Call>,
    ) {
        let burst = |at: f64| {
            let hit = bursts.iter().find(|(start, _)| (*start..*start + 600.0).contains(&at));
            hit.map_or(1.0, |(_, factor)| *factor)
        };
        let most = 3.0 * 1.2 * noise * self.peak / MEAN_DURATION;
        let mut at = from + random.exponential(1.0 / most);
        // Thinning: candidates at the highest rate, kept in proportion to the rate at their time.
        while at < from + 300.0 {
            let rate = self.shape(at) * burst(at) * noise * self.peak / MEAN_DURATION;
            if random.uniform() * most < rate {
                let duration = random.exponential(MEAN_DURATION).clamp(1.0, 7_200.0);
                let start = (START as f64 + at) * 1_000.0;
                calls.push(Call { start: start as u64, duration: (duration * 1_000.0) as u64 });
            }
            at += random.exponential(1.0 / most);
        }
    }

    /// Two bursts a week, of 1.6 to 2.4 times the usual rate.
    fn bursts(&self, random: &mut Random) -> Vec<(f64, f64)> {
        if self.kind != Kind::Bursts {
            return Vec::new();
        }
        let number = self.days * 2 / 7;
        (0..number)
            .map(|burst| {
                let day = (burst as f64 + random.uniform()) * self.days as f64 / number as f64;
                let start = day.floor() * DAY + (9.0 + 8.0 * random.uniform()) * 3_600.0;
                (start, 1.6 + 0.8 * random.uniform())
            })
            .collect()
    }

    /// The expected rate, relative to the peak of a usual day.
    fn shape(&self, at: f64) -> f64 {
        let day = (at / DAY) as usize;
        let hour = at % DAY / 3_600.0;
        let weekday = WEEKDAYS[day % 7];
        match self.kind {
            Kind::Office => office(hour) * weekday,
            Kind::AroundTheClock | Kind::Bursts => around_the_clock(hour, weekday),
            Kind::Drift => {
                around_the_clock(hour, weekday) * 1.03_f64.powf(day as f64 - self.days as f64 / 2.0)
            }
            Kind::Campaign => {
                let campaign = day % 7 == 2 && (14.0..16.0).contains(&hour);
                office(hour) * weekday * if campaign { 2.0 } else { 1.0 }
            }
            Kind::Holiday => match day {
                4 => 0.0,
                7 => office(hour) * weekday * 1.25,
                _ => office(hour) * weekday,
            },
        }
    }
}

fn office(hour: f64) -> f64 {
    match (OPENS..CLOSES).contains(&hour) {
        true => {
            let place = hour - OPENS;
            let (low, share) = (place as usize, place.fract());
            WORKING_DAY[low] * (1.0 - share) + WORKING_DAY[low + 1] * share
        }
        false => 0.0,
    }
}

fn around_the_clock(hour: f64, weekday: f64) -> f64 {
    let week = if weekday > 0.0 { weekday } else { 0.45 };
    let wave = (2.0 * std::f64::consts::PI * (hour - 14.0) / 24.0).cos();
    let dip = 0.15 * (-((hour - 12.75) / 0.6).powi(2)).exp();
    ((0.5 + 0.5 * wave).powf(1.5) - dip).max(0.0).max(0.03) * week
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_trace_again() {
        let trace = Synthetic { kind: Kind::Bursts, peak: 20.0, days: 2, seed: 7 };
        assert_eq!(trace.calls(), trace.calls());
        assert_ne!(trace.calls(), Synthetic { seed: 8, ..trace }.calls());
    }

    #[test]
    fn calls_are_in_order_and_of_the_usual_length() {
        for kind in Kind::ALL {
            let calls = Synthetic { kind, peak: 50.0, days: 9, seed: 1 }.calls();
            assert!(calls.is_sorted_by_key(|call| call.start), "{kind:?}");
            let mean = calls.iter().map(|call| call.duration).sum::<u64>() / calls.len() as u64;
            assert!((170_000..190_000).contains(&mean), "{kind:?}: {mean}");
        }
    }
}
