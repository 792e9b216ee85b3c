//! The schemas of names and of documents that people write. The domain itself knows nothing
//! of them.

use std::borrow::Cow;

use serde_json::{Value, json};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{
        RefOr, Schema,
        schema::{Object, SchemaType},
    },
};

use fleet::{rules::MAX_STEPS, tiers};

/// A schema, word for word. (The types of the document know only some of JSON Schema, and let
/// everything else pass as extensions.)
pub(crate) fn schema(value: Value) -> RefOr<Schema> {
    let Value::Object(words) = value else { panic!("a schema is an object: {value}") };
    let mut schema = Object::with_type(SchemaType::AnyValue);
    schema.extensions = Some(words.into_iter().collect());
    Schema::Object(schema).into()
}

pub(crate) fn text() -> RefOr<Schema> {
    schema(json!({"type": "string"}))
}

pub(crate) fn object() -> RefOr<Schema> {
    schema(json!({"type": "object"}))
}

pub(crate) fn one_of(words: &[&str]) -> RefOr<Schema> {
    schema(json!({"type": "string", "enum": words}))
}

pub(crate) fn limit(usual: usize, most: usize) -> RefOr<Schema> {
    schema(json!({"type": "integer", "minimum": 1, "maximum": most, "default": usual}))
}

pub(crate) const POD_NAME: &str = "^(?!metadata$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$";
pub(crate) const CALL_SID: &str = "^[A-Za-z0-9._:-]{1,128}$";
pub(crate) const NAME: &str = r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}$";
/// A tier, or a pool in the words of calls.
const POOL: &str = r"^(pool:|merchant:)?(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}$";
const EVENT_ID: &str = "^[0-9]{1,19}-[0-9]{1,19}$";

/// Types that stand for those of other crates in `#[schema(value_type = …)]`.
macro_rules! stand_ins {
    ($($type:ident)*) => {$(pub(crate) struct $type;)*};
}

stand_ins! { PodName CallSid MerchantId Pool EventKind Reason Strategy }

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
        "description": "An RFC 1123 label, and not `metadata`.",
        "examples": ["voice-agent-0"],
    });
    CallSid, "CallSid": json!({
        "type": "string",
        "pattern": CALL_SID,
        "description": "The id that a provider gave a call.",
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
        "enum": [fleet::Reason::Empty, fleet::Reason::AllDraining, fleet::Reason::AtCapacity, fleet::Reason::Unknown],
        "description": "Why a step of a chain gave no pod.",
    });
    Strategy, "Strategy": json!({"type": "string", "enum": [tiers::Strategy::Spread, tiers::Strategy::Pack]});
}

/// A parameter of a query. An empty one is the same as none.
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

/// One of some words, or nothing.
pub(crate) fn one_of_or_empty(words: &[&str]) -> RefOr<Schema> {
    one_of(&[words, &[""]].concat())
}

pub(crate) fn event_id() -> RefOr<Schema> {
    schema(json!({"type": "string", "pattern": EVENT_ID, "examples": ["1763280000123-0"]}))
}

/// A text that may be null or empty, which is the same as leaving it out.
fn optional(pattern: &str, about: &str) -> RefOr<Schema> {
    let pattern = format!("^$|{pattern}");
    schema(json!({"type": ["string", "null"], "pattern": pattern, "description": about}))
}

pub(crate) fn optional_pod() -> RefOr<Schema> {
    optional(POD_NAME, "A pod.")
}

pub(crate) fn optional_name() -> RefOr<Schema> {
    optional(NAME, "A name.")
}

/// How long a call may wait for a pod.
pub(crate) fn wait_for_pod() -> RefOr<Schema> {
    const PART: &str = "([1-9][0-9]{0,8}ms|[1-9][0-9]{0,5}s|[1-9][0-9]{0,4}m|[1-9][0-9]{0,2}h)";
    optional(&format!("^0s?$|^{PART}{{1,4}}$"), "How long the call may wait for a pod.")
}

/// How long a drain may wait for the calls of its pod.
pub(crate) fn wait_for_calls() -> RefOr<Schema> {
    const SECONDS: &str = "[1-9][0-9]{0,2}|[12][0-9]{3}|3[0-5][0-9]{2}|3600";
    let pattern = format!("^([1-9][0-9]{{0,5}}ms|({SECONDS})s|([1-9]|[1-5][0-9]|60)m|1h)$");
    optional(&pattern, "How long to wait for the pod's calls, at most `1h`.")
}

pub(crate) fn optional_provider() -> RefOr<Schema> {
    optional(NAME, "The provider in `ws_url`; `twilio` unless given.")
}

/// A tier document: tiers with their chain, tiers alone, or counts of pods.
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
            },
        },
        // What is called `tiers` and is an object would be the first shape.
        {"allOf": [tiers(tier()), {"properties": {"tiers": {"not": {}}}}]},
        tiers(pods()),
    ]});
    MerchantDocument, "MerchantDocument": json!({
        "type": "object",
        "properties": {
            "pool": {
                "type": ["string", "null"],
                "pattern": format!("^$|{NAME}"),
                "description": "The merchant's own pool, tried first.",
            },
            "fallback": {
                "type": ["array", "null"],
                "maxItems": MAX_STEPS,
                "items": {"type": "string", "pattern": STEP},
                "description": "Tried next, instead of the default chain.",
            },
            "dedicated_only": {"type": ["boolean", "null"]},
            "max_calls": {"type": ["integer", "null"], "minimum": 0, "maximum": 1_000_000},
            "max_rate": {"type": ["integer", "null"], "minimum": 0, "maximum": 1_000},
            "priority": {"type": ["integer", "null"], "minimum": -100, "maximum": 100},
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
    let whole =
        |least: u32| json!({"type": ["integer", "null"], "minimum": least, "maximum": 1_000_000});
    json!({"anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["exclusive", null]}, "target": whole(0)},
        },
        {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["shared"]},
                "target": whole(0),
                "max_concurrent": whole(1),
                "strategy": {"enum": ["spread", "pack", null]},
            },
        },
    ]})
}
