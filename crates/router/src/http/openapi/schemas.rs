//! Schemas of names and configuration documents; the domain types do not depend on them.

use std::borrow::Cow;

use serde_json::{Value, json};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{
        RefOr, Schema,
        schema::{Object, SchemaType},
    },
};

use fleet::{SkipReason, rules::MAX_STEPS, tiers};

/// A schema from raw JSON. (utoipa's types cover part of JSON Schema and pass the rest on as
/// extensions.)
pub(crate) fn schema(value: Value) -> RefOr<Schema> {
    let Value::Object(keywords) = value else { panic!("a schema is an object: {value}") };
    let mut schema = Object::with_type(SchemaType::AnyValue);
    schema.extensions = Some(keywords.into_iter().collect());
    Schema::Object(schema).into()
}

pub(crate) fn text() -> RefOr<Schema> {
    schema(json!({"type": "string"}))
}

pub(crate) fn object() -> RefOr<Schema> {
    schema(json!({"type": "object"}))
}

pub(crate) fn one_of(values: &[&str]) -> RefOr<Schema> {
    schema(json!({"type": "string", "enum": values}))
}

pub(crate) fn limit(default: usize, max: usize) -> RefOr<Schema> {
    schema(json!({"type": "integer", "minimum": 1, "maximum": max, "default": default}))
}

pub(crate) const POD_NAME: &str = "^(?!metadata$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$";
pub(crate) const CALL_SID: &str = "^[A-Za-z0-9._:-]{1,128}$";
pub(crate) const NAME: &str = r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}$";
/// A tier name, or a pool name as in `source_pool`.
const POOL: &str = r"^(pool:|merchant:)?(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}$";
const NUMBER: &str = r"^(\+?[1-9][0-9]{1,14}|sips?:(?!.*\.\.)[A-Za-z0-9._~!$&*+,;=:@%-]{1,123})$";
const EVENT_ID: &str = "^[0-9]{1,19}-[0-9]{1,19}$";

/// Types that stand for those of other crates in `#[schema(value_type = …)]`.
macro_rules! stand_ins {
    ($($type:ident)*) => {$(pub(crate) struct $type;)*};
}

stand_ins! { PodName CallSid MerchantId Pool EventKind Reason Strategy CapacityReason OrderId }
stand_ins! { ReservationId PhoneNumber AccountName }

macro_rules! named {
    ($($type:ty, $name:literal: $schema:expr;)*) => {$(
        impl PartialSchema for $type {
            fn schema() -> RefOr<Schema> {
                schema($schema)
            }
        }

        impl ToSchema for $type {
            fn name() -> Cow<'static, str> {
                $name.into()
            }
        }
    )*};
}

named! {
    PodName, "PodName": json!({
        "type": "string",
        "pattern": POD_NAME,
        "description": "An RFC 1123 label other than `metadata`.",
        "examples": ["voice-agent-0"],
    });
    CallSid, "CallSid": json!({
        "type": "string",
        "pattern": CALL_SID,
        "description": "The provider's id of a call.",
        "examples": ["CA1"],
    });
    MerchantId, "MerchantId": json!({"type": "string", "pattern": NAME, "examples": ["acme"]});
    Pool, "Pool": json!({
        "type": "string",
        "pattern": POOL,
        "description": "A tier, or a merchant's own pool.",
        "examples": ["pool:gold", "merchant:acme"],
    });
    EventKind, "EventKind": json!({"type": "string", "enum": fleet::EventKind::ALL});
    Reason, "Reason": json!({
        "type": "string",
        "enum": [SkipReason::Empty, SkipReason::AllDraining, SkipReason::AtCapacity, SkipReason::Held, SkipReason::Unknown],
        "description": "Reason for which a step of the chain was skipped.",
    });
    OrderId, "OrderId": json!({
        "type": "string",
        "pattern": "^[0-9a-f]{8}$",
        "description": "A prescale order.",
        "examples": ["5f3a09c2"],
    });
    ReservationId, "ReservationId": json!({
        "type": "string",
        "pattern": "^R[0-9a-f]{16}$",
        "description": "A reservation.",
        "examples": ["R5f3a09c2b1d4e687"],
    });
    PhoneNumber, "PhoneNumber": json!({
        "type": "string",
        "pattern": NUMBER,
        "description": "E.164 with at most 15 digits, or a SIP address of at most 128 characters.",
        "examples": ["+14155550100"],
    });
    AccountName, "AccountName": json!({
        "type": "string",
        "pattern": "^(twilio|plivo|exotel|signalwire|telnyx|vonage|jambonz)(:(?!\\.{1,2}$)[A-Za-z0-9._-]{1,64})?$",
        "description": "A provider, or one of its accounts.",
        "examples": ["twilio", "twilio:AC1"],
    });
    CapacityReason, "CapacityReason": json!({
        "type": "string",
        "enum": fleet::capacity::Reason::ALL,
        "description": "Reason of a capacity decision.",
    });
    Strategy, "Strategy": json!({"type": "string", "enum": [tiers::Strategy::Spread, tiers::Strategy::Pack]});
}

/// A query parameter; an empty value means that it is absent.
pub(crate) fn matching_or_empty(pattern: &str) -> RefOr<Schema> {
    schema(json!({"type": "string", "pattern": format!("^$|{pattern}")}))
}

pub(crate) fn pod_or_empty() -> RefOr<Schema> {
    matching_or_empty(POD_NAME)
}

pub(crate) fn call_or_empty() -> RefOr<Schema> {
    matching_or_empty(CALL_SID)
}

pub(crate) fn merchant_or_empty() -> RefOr<Schema> {
    matching_or_empty(NAME)
}

pub(crate) fn pool_or_empty() -> RefOr<Schema> {
    matching_or_empty(POOL)
}

pub(crate) fn event_id_or_empty() -> RefOr<Schema> {
    matching_or_empty(EVENT_ID)
}

pub(crate) fn one_of_or_empty(values: &[&str]) -> RefOr<Schema> {
    one_of(&[values, &[""]].concat())
}

pub(crate) fn event_id() -> RefOr<Schema> {
    schema(json!({"type": "string", "pattern": EVENT_ID, "examples": ["1763280000123-0"]}))
}

/// A text field; null or empty means that it is absent.
fn optional(pattern: &str, description: &str) -> RefOr<Schema> {
    let pattern = format!("^$|{pattern}");
    schema(json!({"type": ["string", "null"], "pattern": pattern, "description": description}))
}

pub(crate) fn optional_pod() -> RefOr<Schema> {
    optional(POD_NAME, "A pod.")
}

pub(crate) fn optional_name() -> RefOr<Schema> {
    optional(NAME, "A name.")
}

/// Custom values of a call.
pub(crate) fn parameters() -> RefOr<Schema> {
    schema(json!({
        "type": ["object", "null"],
        "description": "Custom values for the agent: at most 512 bytes, names included. A name \
            occurs once, whatever its case; traceparent, call_sid, callsid, event and \
            content-type are reserved.",
        "maxProperties": telephony::MAX_PARAMETERS,
        "propertyNames": {"pattern": "^[A-Za-z][A-Za-z0-9_-]{0,31}$"},
        "additionalProperties": {"type": "string", "maxLength": telephony::MAX_VALUE},
    }))
}

/// Hold time of a call.
pub(crate) fn wait_for_pod() -> RefOr<Schema> {
    const PART: &str = "([1-9][0-9]{0,8}ms|[1-9][0-9]{0,5}s|[1-9][0-9]{0,4}m|[1-9][0-9]{0,2}h)";
    optional(&format!("^0s?$|^{PART}{{1,4}}$"), "Maximum hold time of the call.")
}

/// Time that a drain request waits for the pod's calls.
pub(crate) fn wait_for_calls() -> RefOr<Schema> {
    const SECONDS: &str = "[1-9][0-9]{0,2}|[12][0-9]{3}|3[0-5][0-9]{2}|3600";
    let pattern = format!("^([1-9][0-9]{{0,5}}ms|({SECONDS})s|([1-9]|[1-5][0-9]|60)m|1h)$");
    optional(&pattern, "Maximum time to wait for the pod's calls to end, up to `1h`.")
}

pub(crate) fn prescale_pods() -> RefOr<Schema> {
    schema(json!({"type": "integer", "minimum": 1, "maximum": 1_000_000}))
}

/// The end of a prescale order.
pub(crate) fn prescale_until() -> RefOr<Schema> {
    schema(json!({
        "type": ["integer", "string", "null"],
        "description": "End of the order: unix seconds, or a time such as 2025-11-16T18:00:00Z.",
    }))
}

/// The length of a prescale order.
pub(crate) fn prescale_for() -> RefOr<Schema> {
    optional("^([1-9][0-9]{0,5}s|[1-9][0-9]{0,4}m|[1-9][0-9]{0,2}h)$", "Length of the order.")
}

pub(crate) fn optional_provider() -> RefOr<Schema> {
    optional(NAME, "The provider in `ws_url`; default `twilio`.")
}

pub(crate) fn optional_number() -> RefOr<Schema> {
    optional(NUMBER, "A phone number.")
}

pub(crate) fn optional_account() -> RefOr<Schema> {
    schema(json!({"type": ["string", "null"], "description": "A provider account."}))
}

/// A text without a format: an invalid one has no effect.
pub(crate) fn any_text() -> RefOr<Schema> {
    schema(json!({"type": ["string", "null"]}))
}

pub(crate) fn dialling_provider() -> RefOr<Schema> {
    optional(
        "^(twilio|plivo|exotel|signalwire|telnyx|vonage|jambonz)$",
        "The provider, whose rate limit applies.",
    )
}

fn whole_number(min: u64, max: u64, description: &str) -> RefOr<Schema> {
    schema(json!({"type": "integer", "minimum": min, "maximum": max, "description": description}))
}

pub(crate) fn reservation_count() -> RefOr<Schema> {
    let max = fleet::rules::MAX_RESERVATIONS;
    schema(json!({
        "type": ["integer", "null"], "minimum": 1, "maximum": max,
        "description": "Number of reservations; default 1.",
    }))
}

pub(crate) fn max_lines() -> RefOr<Schema> {
    whole_number(0, fleet::rules::MAX_LINES.into(), "Concurrent calls and dials of the number.")
}

pub(crate) fn max_cps() -> RefOr<Schema> {
    whole_number(0, fleet::rules::MAX_CPS.into(), "Reservations per second of the account.")
}

pub(crate) fn dial_limit() -> RefOr<Schema> {
    let limits: Vec<Option<&str>> =
        fleet::DialLimit::ALL.into_iter().map(|limit| Some(limit.as_str())).chain([None]).collect();
    schema(json!({"enum": limits, "description": "The limit that refused reservations."}))
}

/// A tier document: tiers with a default chain, tiers alone, or counts of pods by tier.
pub(crate) struct TierDocument;

/// A merchant document.
pub(crate) struct MerchantDocument;

named! {
    TierDocument, "TierDocument": json!({"anyOf": [
        {
            "type": "object",
            "required": ["tiers"],
            "properties": {
                "tiers": {"anyOf": [tiers(tier()), tiers(pods())]},
                "default_chain": {"type": ["array", "null"], "items": {"type": "string"}},
                "managed_by": {
                    "readOnly": true,
                    "description": "The objects of the cluster that manage the tiers; ignored in requests.",
                },
            },
        },
        // An object with a key `tiers` is parsed as the first shape.
        {"allOf": [tiers(tier()), {"properties": {"tiers": {"not": {}}}}]},
        tiers(pods()),
    ]});
    MerchantDocument, "MerchantDocument": json!({
        "type": "object",
        "properties": {
            "pool": {
                "type": ["string", "null"],
                "pattern": format!("^$|{NAME}"),
                "description": "The merchant's dedicated pool, tried first.",
            },
            "fallback": {
                "type": ["array", "null"],
                "maxItems": MAX_STEPS,
                "items": {"type": "string", "pattern": STEP},
                "description": "Tried next, in place of the default chain.",
            },
            "dedicated_only": {"type": ["boolean", "null"]},
            "max_calls": {"type": ["integer", "null"], "minimum": 0, "maximum": 1_000_000},
            "max_rate": {"type": ["integer", "null"], "minimum": 0, "maximum": 1_000},
            "priority": {"type": ["integer", "null"], "minimum": -100, "maximum": 100},
            // The router adds it to a document that an object of the cluster manages.
            "managed_by": {"not": {}},
        },
    });
}

const STEP: &str = r"^(merchant:)?(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}$";

pub(crate) fn tier_document() -> RefOr<Schema> {
    schema(json!({"$ref": "#/components/schemas/TierDocument"}))
}

fn tiers(tier: Value) -> Value {
    json!({
        "type": "object",
        "minProperties": 1,
        "propertyNames": {"type": "string", "pattern": NAME},
        "additionalProperties": tier,
    })
}

fn pods() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": 1_000_000})
}

fn tier() -> Value {
    let integer =
        |least: u32| json!({"type": ["integer", "null"], "minimum": least, "maximum": 1_000_000});
    let named = |kind: &str| {
        let label = "[a-z0-9]([a-z0-9-]*[a-z0-9])?";
        let pattern = format!("^{kind}/{label}(\\.{label})*$");
        json!({"type": "string", "maxLength": kind.len() + 1 + 253, "pattern": pattern})
    };
    let share = json!({"type": "string", "pattern": "^[1-9]?[0-9]%$"});
    let inbound_reserve = json!({"anyOf": [integer(0), share]});
    let workload = json!({"anyOf": [named("deployment"), named("statefulset"), {"type": "null"}]});
    json!({"anyOf": [
        {
            "type": "object",
            "properties": {
                "workload": workload,
                "type": {"enum": ["exclusive", null]},
                "target": integer(0),
                "min": integer(0),
                "max": integer(0),
                "inbound_reserve": inbound_reserve,
            },
        },
        {
            "type": "object",
            "required": ["type"],
            "properties": {
                "workload": workload,
                "type": {"enum": ["shared"]},
                "target": integer(0),
                "min": integer(0),
                "max": integer(0),
                "inbound_reserve": inbound_reserve,
                "max_concurrent": integer(1),
                "strategy": {"enum": ["spread", "pack", null]},
            },
        },
    ]})
}
