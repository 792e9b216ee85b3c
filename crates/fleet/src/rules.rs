//! The constants of the rules. The build script of the store writes them into the Redis
//! functions, so both stores use the same values.

use std::fmt::Display;

use crate::Millis;

macro_rules! rules {
    ($($(#[doc = $doc:literal])* $name:ident: $type:ty = $value:expr;)*) => {
        $($(#[doc = $doc])* pub const $name: $type = $value;)*

        /// Every constant by its name.
        pub const ALL: &[(&str, &dyn Display)] = &[$((stringify!($name), &$name),)*];
    };
}

rules! {
    /// Maximum size of a merchant document (bytes).
    MAX_DOCUMENT: usize = 4096;
    /// Maximum number of steps in a merchant's fallback.
    MAX_STEPS: usize = 16;
    /// Maximum `max_calls` of a merchant.
    MAX_MERCHANT_CALLS: u32 = 1_000_000;
    /// Maximum `max_rate` of a merchant.
    MAX_MERCHANT_RATE: u32 = 1_000;
    /// Highest priority of a merchant; its negative is the lowest.
    MAX_PRIORITY: i32 = 100;
    /// Sliding window of `max_rate` (ms).
    RATE_WINDOW: Millis = 1_000;
    /// Subtracted from the ticket of a call that had a pod before: it precedes all new calls of
    /// the same priority.
    REQUEUE_ADVANTAGE: i64 = 1 << 41;
    /// Distance between two priorities in a queue score: greater than any ticket or advantage.
    PRIORITY_STEP: i64 = 1 << 42;
    /// Retention of the call history (ms): a call may reconnect or confirm within this time.
    CALL_HISTORY_TTL: Millis = 3_600_000;
    /// Early failure: a stream that breaks within this time (ms) counts as a failure of its pod.
    EARLY_FAILURE: Millis = 10_000;
    /// Consecutive failures after which a pod is quarantined.
    QUARANTINE_FAILURES: u32 = 3;
    /// Duration of a quarantine (ms).
    QUARANTINE_TIME: Millis = 60_000;
    /// At most one in this many pods of a pool may be quarantined at a time.
    QUARANTINE_SHARE: usize = 5;
    /// Ended calls kept during the re-registration window, so that a late renewal does not
    /// re-register them.
    MAX_RECENT_ENDS: usize = 10_000;
    /// Time that a list of pods stays in force without a claim by a replica that follows it (ms).
    LIST_TTL: Millis = 30_000;
    /// Time without sweeps (ms) after which the store counts as having been away: gateways could
    /// not send heartbeats either. For a gateway with a short lease it is two thirds of the lease.
    SWEEP_GAP: Millis = 10_000;
    /// Lease of a gateway whose entry in Redis was lost or malformed (ms).
    GATEWAY_LEASE: Millis = 30_000;
    /// Lifetime of the index of a gateway in Redis without a heartbeat (ms).
    GATEWAY_TTL: Millis = 86_400_000;
    /// Extra lifetime of Redis keys past their deadline (ms): the sweep ends calls, not expiry.
    KEY_SLACK: Millis = 30_000;
    /// Events per trim of the event log in Redis.
    EVENTS_PER_TRIM: usize = 64;
    /// Available pods of a StatefulSet of which a call gets the one with the lowest ordinal.
    ORDINAL_SAMPLE: usize = 16;
    /// Lifetime of the learned capacity state of a pool after its last save (ms).
    CAPACITY_STATE_TTL: Millis = 2_592_000_000;
    /// Maximum lease of the router that takes the capacity decisions (ms). A longer one is left from
    /// before the clock was set back.
    MAX_CAPACITY_LEASE: Millis = 60_000;
    /// Maximum number of prescale orders.
    MAX_PRESCALE_ORDERS: usize = 100;
    /// Maximum number of reservations per request.
    MAX_RESERVATIONS: usize = 100;
    /// Maximum `max_lines` of a number.
    MAX_LINES: u32 = 1_000_000;
    /// Maximum `max_cps` of an account.
    MAX_CPS: u32 = 1_000;
    /// Different numbers of live calls up to which the free slots of an index of pods are counted
    /// exactly. It bounds the work; further pods count as one free slot each.
    MAX_COUNTED_LOADS: usize = 64;
    /// Lifetime of the learned answer rate of a merchant after its last dial (ms). A campaign on
    /// idle pods dials many at once, before it can learn that more are answered than before.
    ANSWER_RATE_TTL: Millis = 600_000;
    /// Lifetime of the lines of a number in Redis without a change (ms).
    LINES_TTL: Millis = 86_400_000;
    /// Pause before a refused dialler asks again (ms), unless the limit itself names a time.
    DIAL_RETRY: Millis = 1_000;
    /// Time for which a router's report of its waiting dials is in force (ms).
    WAITING_DIALS_TTL: Millis = 6_000;
    /// Waiting dials of one number that a report counts at most.
    MAX_WAITING_DIALS: u64 = 100_000;
    /// Holders of lines that a refusal checks for their end.
    MAX_CHECKED: usize = 16;
    /// Lifetime of a queue key without a change (ms).
    QUEUE_TTL: Millis = 86_400_000;
    /// Answer probabilities are whole multiples of 1/1024, so that sums of them are exact.
    PROBABILITY_UNIT: u64 = 1024;
    /// Miss targets are stored in millionths.
    MISS_TARGET_UNIT: u32 = 1_000_000;
    /// The smallest miss target. Below it a whole slot is held per dial.
    MIN_MISS_TARGET: f64 = 0.000001;
    /// The largest miss target.
    MAX_MISS_TARGET: f64 = 0.5;
    /// The largest miss target for the translated Poisson distribution: nearer to the mean it is no
    /// bound.
    MAX_TRANSLATED_TARGET: f64 = 0.05;
    /// Variance up to which the tail is summed term by term; a normal approximation is too
    /// optimistic there. It bounds the work: the sum stops a few standard deviations from the mode.
    SUMMED_VARIANCE: f64 = 25.0;
    /// Terms of a sum on either side of its mode, at most. Fewer than 100 are reached.
    MAX_TERMS: u32 = 200;
    /// Weight of one ended dial. Counts are whole numbers, so that both stores decay them alike.
    DIAL_WEIGHT: u64 = 65_536;
    /// Ended dials after which the weight of a dial has fallen to 1/e: this number, and
    /// [`ANSWER_MEMORY_PER_DIAL`] times the outstanding dials.
    ///
    /// Dials without an answer ring longer and often end together, when the provider gives up. If
    /// the memory were shorter than such a series, the rate would fall to its minimum, the dialler
    /// would dial far too much, and those dials would form the next series.
    ANSWER_MEMORY: u64 = 32;
    /// See [`ANSWER_MEMORY`].
    ANSWER_MEMORY_PER_DIAL: u64 = 2;
    /// Answered dials that a merchant starts with: the estimate falls only as evidence arrives.
    ANSWER_PRIOR: u64 = 8;
    /// The smallest answer probability, in units of 1/1024: it bounds the dials per slot if a series
    /// of dials without an answer comes to an end.
    MIN_ANSWER_PROBABILITY: u64 = 32;
    /// Half-width of the Wilson interval of the answer rate, in standard deviations.
    ANSWER_DEVIATIONS: f64 = 0.25;
}

/// Quantiles of the normal distribution: the tail and the standard deviations above the mean. The
/// quantile is convex in the tail, so interpolation between two rows never falls below it.
pub const NORMAL_QUANTILES: [(f64, f64); 15] = [
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
