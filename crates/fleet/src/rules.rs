//! The constants of the rules. The build script of the store writes them into the Redis
//! functions, so both stores use the same values.

use crate::Millis;

macro_rules! rules {
    ($($(#[doc = $doc:literal])* $name:ident: $type:ty = $value:expr;)*) => {
        $($(#[doc = $doc])* pub const $name: $type = $value;)*

        /// Every constant by its name.
        pub const ALL: &[(&str, i64)] = &[$((stringify!($name), $name as i64),)*];
    };
}

rules! {
    /// Longest merchant document in bytes.
    MAX_DOCUMENT: usize = 4096;
    /// Most steps of a merchant's fallback chain.
    MAX_STEPS: usize = 16;
    /// Largest `max_calls` of a merchant.
    MAX_MERCHANT_CALLS: u32 = 1_000_000;
    /// Largest `max_rate` of a merchant.
    MAX_MERCHANT_RATE: u32 = 1_000;
    /// Highest priority of a merchant; its negative is the lowest.
    MAX_PRIORITY: i32 = 100;
    /// Window of `max_rate` (ms).
    RATE_WINDOW: Millis = 1_000;
    /// Advantage in the queue of a call that had a pod before, over all of its priority.
    REQUEUE_ADVANTAGE: i64 = 1 << 41;
    /// Distance of two priorities in the score of a queue: above every ticket and advantage.
    PRIORITY_STEP: i64 = 1 << 42;
    /// How long the end of a call is remembered that may come back (ms).
    CALL_HISTORY_TTL: Millis = 3_600_000;
    /// A call that ended sooner than this (ms) without its agent's word counts against its pod.
    EARLY_FAILURE: Millis = 10_000;
    /// Failures in a row that put a pod into quarantine.
    QUARANTINE_FAILURES: u32 = 3;
    /// How long a quarantine lasts (ms).
    QUARANTINE_TIME: Millis = 60_000;
    /// One pod of so many may be in quarantine at a time.
    QUARANTINE_SHARE: usize = 5;
    /// Ended calls that a store remembers while it trusts pods about calls it does not know.
    MAX_RECENT_ENDS: usize = 10_000;
    /// How long a list of pods stays in force after the last replica with it was seen (ms).
    LIST_TTL: Millis = 30_000;
    /// Seconds past their deadline that keys in Redis live, in ms: only the sweep ends calls.
    KEY_SLACK: Millis = 30_000;
    /// Longest lifetime of a queue without a change (ms).
    QUEUE_TTL: Millis = 86_400_000;
}
