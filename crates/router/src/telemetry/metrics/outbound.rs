//! Metrics of outbound calls: reservations by outcome, refusals by limit, and the outstanding dials
//! at the last read of the store.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{
        MetricType,
        counter::Counter,
        family::Family,
        gauge::{ConstGauge, Gauge},
    },
    registry::Registry,
};

use fleet::{DialLimit, HeldDials, rules::PROBABILITY_UNIT};
use store::Outbound;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LimitLabel {
    limit: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabel {
    tier: String,
}

/// Outcomes of reservations. The alerts need series that begin with 0.
const OUTCOMES: [&str; 7] =
    ["granted", "answered", "missed", "unanswered", "given_back", "expired", "unknown"];

#[derive(Debug, Clone, Default)]
pub(crate) struct OutboundMetrics {
    reservations: Family<OutcomeLabel, Counter>,
    refusals: Family<LimitLabel, Counter>,
    latest: Arc<Mutex<Option<Arc<Outbound>>>>,
    full_numbers: Gauge,
}

impl OutboundMetrics {
    pub(super) fn register(&self, prefixed: &mut Registry) {
        for outcome in OUTCOMES {
            drop(self.reservations.get_or_create(&OutcomeLabel { outcome }));
        }
        for limit in DialLimit::ALL {
            drop(self.refusals.get_or_create(&LimitLabel { limit: limit.as_str() }));
        }
        prefixed.register(
            "reservations",
            "Reservations for dials, by outcome: granted, and how they ended",
            self.reservations.clone(),
        );
        prefixed.register(
            "reservations_refused",
            "Requests for reservations without a grant, by limit",
            self.refusals.clone(),
        );
        prefixed.register(
            "full_numbers",
            "Numbers whose lines are all in use, without numbers of max_lines 0, read from the store",
            self.full_numbers.clone(),
        );
        prefixed.register_collector(Box::new(self.clone()));
    }

    pub(crate) fn granted(&self, count: usize) {
        let outcome = OutcomeLabel { outcome: "granted" };
        self.reservations.get_or_create(&outcome).inc_by(count as u64);
    }

    /// Counts the end of a reservation.
    pub(crate) fn ended(&self, outcome: &'static str) {
        self.reservations.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Counts a request without a grant.
    pub(crate) fn refused(&self, limit: DialLimit) {
        self.refusals.get_or_create(&LimitLabel { limit: limit.as_str() }).inc();
    }

    /// Sets the outstanding dials, for the gauges.
    pub(crate) fn set(&self, outbound: Arc<Outbound>) {
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(outbound);
    }

    pub(crate) fn set_full_numbers(&self, numbers: usize) {
        self.full_numbers.set(numbers as i64);
    }
}

/// A gauge of a pool: name, help text, value.
type DialGauge = (&'static str, &'static str, fn(&HeldDials) -> f64);

const GAUGES: [DialGauge; 4] = [
    ("pool_dials", "Outstanding dials of the pool", |dials| dials.sums.dials as f64),
    ("pool_held_slots", "Slots that are held for outstanding dials", |dials| dials.held as f64),
    (
        "pool_expected_answers",
        "Outstanding dials that are expected to be answered, by the learned answer rates",
        |dials| dials.sums.probability as f64 / PROBABILITY_UNIT as f64,
    ),
    // By pool, not by merchant: the number of merchants is unbounded.
    (
        "pool_answer_rate",
        "Learned answer rate: the mean answer probability of the pool's outstanding dials",
        HeldDials::answer_rate,
    ),
];

impl Collector for OutboundMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(outbound) = latest else { return Ok(()) };
        for (name, help, value) in GAUGES {
            let help = format!("{help}, read from the store");
            let mut gauges = encoder.encode_descriptor(name, &help, None, MetricType::Gauge)?;
            for (pool, dials) in &outbound.status.pools {
                let labels = TierLabel { tier: pool.as_tier_value() };
                ConstGauge::new(value(dials)).encode(gauges.encode_family(&labels)?)?;
            }
        }
        let help = "Outstanding reservations, read from the store";
        let name = "outstanding_reservations";
        let gauge = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(outbound.status.reservations as i64).encode(gauge)
    }
}
