//! The samplers of OpenTelemetry.

use crate::SpanContext;

/// Decides which traces are sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    /// A parent's decision takes precedence.
    by_parent: bool,
    /// Sampled traces out of 2^63.
    share: u64,
}

const ALL: u64 = 1 << 63;

pub const SAMPLERS: [&str; 6] = [
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
];

impl Sampler {
    /// Returns the sampler of a standard name. `ratio` applies to the `traceidratio` samplers.
    pub fn named(name: &str, ratio: f64) -> Option<Self> {
        let (by_parent, rule) = match name.strip_prefix("parentbased_") {
            Some(rule) => (true, rule),
            None => (false, name),
        };
        let share = match rule {
            "always_on" => ALL,
            "always_off" => 0,
            "traceidratio" => (ratio * ALL as f64) as u64,
            _ => return None,
        };
        Some(Self { by_parent, share })
    }

    /// Whether a trace is sampled. Uses the same bits of the trace id as other implementations, so
    /// that services with the same ratio sample the same traces.
    pub fn samples(&self, trace: u128, parent: Option<&SpanContext>) -> bool {
        match parent {
            Some(parent) if self.by_parent => parent.is_sampled,
            _ => (trace as u64) >> 1 < self.share,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samplers_follow_their_standard_names() {
        let parent = |flags: &str| {
            let text = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flags}");
            SpanContext::parse(text.as_bytes())
        };
        // Without a parent, with an unsampled parent, with a sampled parent.
        for (name, ratio, expected) in [
            ("always_on", 0.0, [true, true, true]),
            ("always_off", 1.0, [false, false, false]),
            ("traceidratio", 1.0, [true, true, true]),
            ("traceidratio", 0.0, [false, false, false]),
            ("parentbased_always_on", 0.0, [true, false, true]),
            ("parentbased_always_off", 1.0, [false, false, true]),
            ("parentbased_traceidratio", 0.0, [false, false, true]),
        ] {
            let sampler = Sampler::named(name, ratio).unwrap();
            let decided = [None, parent("00"), parent("01")]
                .map(|parent| sampler.samples(u128::MAX, parent.as_ref()));
            assert_eq!(decided, expected, "{name} {ratio}");
        }
        assert!(SAMPLERS.iter().all(|name| Sampler::named(name, 1.0).is_some()));
        assert_eq!(Sampler::named("jaeger_remote", 1.0), None);
    }

    #[test]
    fn a_ratio_samples_about_that_share_of_traces() {
        let sampler = Sampler::named("traceidratio", 0.25).unwrap();
        let sampled = (0..10_000).filter(|_| sampler.samples(crate::id().get(), None)).count();
        assert!((2_200..2_800).contains(&sampled), "{sampled}");
    }
}
