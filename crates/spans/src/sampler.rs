//! Which traces are recorded.

use crate::SpanContext;

/// How it is decided whether a request is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    /// Who has a parent does as the parent.
    by_parent: bool,
    /// How many of 2^63 traces are recorded.
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
    /// The sampler of a standard name; `ratio` is what those that need one are told.
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

    /// Decides by the last 63 bits but one of the trace's id, as others do, so that all who
    /// have the same ratio record the same traces.
    pub fn takes(&self, trace: u128, parent: Option<&SpanContext>) -> bool {
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
    fn a_sampler_does_what_its_name_says() {
        let parent = |flags: &str| {
            let text = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flags}");
            SpanContext::parse(text.as_bytes())
        };
        // Without a parent, with one that is not recorded, with one that is.
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
                .map(|parent| sampler.takes(u128::MAX, parent.as_ref()));
            assert_eq!(decided, expected, "{name} {ratio}");
        }
        assert!(SAMPLERS.iter().all(|name| Sampler::named(name, 1.0).is_some()));
        assert_eq!(Sampler::named("jaeger_remote", 1.0), None);
    }

    #[test]
    fn a_ratio_takes_about_so_many() {
        let sampler = Sampler::named("traceidratio", 0.25).unwrap();
        let taken = (0..10_000).filter(|_| sampler.takes(crate::id().get(), None)).count();
        assert!((2_200..2_800).contains(&taken), "{taken}");
    }
}
