//! The Redis keys, without the prefix; docs/redis.md describes them. The build script declares them
//! in the Redis functions under the same names: `K.pod_calls` is the prefix and [`POD_CALLS`].

macro_rules! keys {
    ($($name:ident $key:literal)*) => {
        $(#[allow(dead_code, reason = "some keys are used by the Redis functions only")]
        pub(crate) const $name: &str = $key;)*

        /// Every key by the name of its constant.
        #[allow(dead_code, reason = "for the build script")]
        pub(crate) const ALL: &[(&str, &str)] = &[$((stringify!($name), $key),)*];
    };
}

keys! {
    ACCOUNTS "accounts"
    ADOPTING "adopting"
    ANSWER_RATE "answer_rate:"
    AUDIT_DUE "audit_due"
    CALL "call:"
    CALLS "calls"
    CALL_END "end:"
    CAPACITY "capacity"
    CAPACITY_STATE "capacity:state:"
    CLOCK "clock"
    DIAL "dial:"
    DIALS "dials"
    DRAINED "drained"
    DRAINING "draining"
    ENDED "ended"
    ENDING "ending"
    EVENTS "events"
    FIGURES "figures:"
    GATEWAY "gateway:"
    GATEWAYS "gateways"
    HANDED "handed"
    LAST_DIALS "last_dials"
    LEADER_EPOCH "leader:epoch"
    LEASE "lease:"
    LINES "lines:"
    MEDIA_SECRET "media:secret"
    MERCHANT "merchant:"
    MERCHANT_CONFIG "merchant:config"
    MIGRATION "migration"
    MISSED_ANSWER "missed_answer:"
    NUMBERS "numbers"
    ORIGIN "origin"
    POD "pod:"
    POD_CALLS "pod:calls:"
    POD_DRAINING "pod:draining:"
    POD_LIST "pod_list"
    POD_METADATA "pod:metadata"
    POD_TIER "pod:tier:"
    POOL "pool:"
    POOLS "pools"
    PRESCALE "prescale"
    QUARANTINED "quarantined"
    RESERVATION "reservation:"
    RESERVATIONS "reservations"
    SCHEMA "schema"
    SEEN "seen:"
    TICKETS "tickets"
    TIERS "tiers"
    TIER_BOUNDS "tier:bounds"
    TIER_CONFIG "tier:config"
    WAITING "waiting"
    WAITING_DIALS "waiting_dials"
}
