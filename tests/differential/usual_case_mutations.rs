//! Broken builds of the usual case of allocate and release, which decides without the checks of the
//! general case.

/// Description, text of the library, replacement.
pub(crate) const USUAL_CASE_MUTATIONS: [(&str, &str, &str); 14] = [
    ("the usual case exceeds the cap of a shared pod", "or calls >= kind.cap)", ")"),
    (
        "the usual case allocates another pod to a repeated request",
        "    K.call .. call, K.call_end .. call, K.reservations,",
        "    K.call_end .. call, K.reservations,",
    ),
    (
        "the usual case keeps the history of an earlier call of the id",
        "    K.call .. call, K.call_end .. call, K.reservations,",
        "    K.call .. call, K.reservations,",
    ),
    (
        "the usual case gives held slots to a new call",
        "K.reservations, numbers and K.numbers or K.reservations) ~= 0",
        "numbers and K.numbers or K.seen) ~= 0",
    ),
    (
        "the usual case does not count the line of a new call",
        "K.reservations, numbers and K.numbers or K.reservations) ~= 0",
        "K.reservations) ~= 0",
    ),
    (
        "the usual case ignores the document of a merchant",
        "or merchant ~= '' and run_protected('HGET', K.merchant_config, merchant) then",
        "then",
    ),
    (
        "the usual case does not hand the freed pod off",
        "'EXISTS', calls_key, K.pod_draining .. pod_name, K.waiting) ~= 0",
        "'EXISTS', calls_key, K.pod_draining .. pod_name) ~= 0",
    ),
    (
        "the usual case returns a draining pod to its pool",
        "'EXISTS', calls_key, K.pod_draining .. pod_name, K.waiting) ~= 0",
        "'EXISTS', calls_key, K.waiting) ~= 0",
    ),
    (
        "the usual case does not remember ends of the re-registration window",
        "if not chain or trusting and (tonumber(trusting) or now) >= now then",
        "if not chain then",
    ),
    (
        "the usual case ends provisional calls without a history",
        " and (stage or '') == '' and (pod_attempt or '') == ''",
        "",
    ),
    (
        "the usual case skips pods at risk of the pool before",
        "'EXISTS', keys.at_risk, K.audit_due) ~= 0",
        "'EXISTS', K.audit_due) ~= 0",
    ),
    (
        "the usual case does not tell the skipped pools",
        "    tried = tried, record = nil",
        "    tried = '', record = nil",
    ),
    (
        "the usual case keeps the line of an ended call",
        "and not stream and not number and is_final",
        "and not stream and is_final",
    ),
    (
        "the usual case ends a call while its stream is attached",
        "and not stream and not number and is_final",
        "and not number and is_final",
    ),
];
