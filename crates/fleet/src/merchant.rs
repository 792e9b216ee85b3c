//! The configuration of a merchant: dedicated pool, fallback chain, limits and priority.

use serde_json::{Map, Value};

use crate::rules::{MAX_DOCUMENT, MAX_MERCHANT_CALLS, MAX_MERCHANT_RATE, MAX_PRIORITY, MAX_STEPS};
use crate::{Step, tiers::Tiers};

/// The fields of a merchant document; others are ignored.
pub const FIELDS: [&str; 6] =
    ["pool", "fallback", "dedicated_only", "max_calls", "max_rate", "priority"];

/// The error in a merchant document. Calls of the merchant take the default chain.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(String);

impl Malformed {
    pub fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

/// A parsed merchant document.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MerchantConfig {
    /// The merchant's dedicated pool; the first step of the chain.
    pool: Option<Step>,
    /// The next steps; empty for the default chain.
    fallback: Vec<Step>,
    /// The dedicated pool is the only step.
    dedicated_only: bool,
    pub limits: Limits,
    /// Waiting calls with a higher priority are served first.
    pub priority: i32,
}

/// The limits of a merchant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Concurrent calls.
    pub max_calls: Option<u32>,
    /// New calls within any one second.
    pub max_rate: Option<u32>,
}

/// A limit that a call would exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Limit {
    MaxCalls,
    MaxRate,
}

impl Limit {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::MaxCalls => "max_calls",
            Self::MaxRate => "max_rate",
        }
    }
}

impl MerchantConfig {
    /// The first step of its fallback that is not in the tier table.
    pub fn unknown_tier(&self, tiers: &Tiers) -> Option<&Step> {
        let is_unknown =
            |step: &&Step| matches!(step, Step::Tier(_)) && tiers.resolve(step).is_none();
        self.fallback.iter().find(is_unknown)
    }

    /// The steps that the document names: its dedicated pool and its fallback.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.pool.iter().chain(&self.fallback)
    }

    /// Whether the configuration refuses every call: `dedicated_only` without a pool.
    pub fn refuses_all(&self) -> bool {
        self.dedicated_only && self.pool.is_none()
    }

    pub fn parse(document: &str) -> Result<Self, Malformed> {
        if document.len() > MAX_DOCUMENT {
            return Err(Malformed(format!("longer than {MAX_DOCUMENT} bytes")));
        }
        let value: Value = serde_json::from_str(document)
            .map_err(|error| Malformed(format!("not JSON: {error}")))?;
        let Value::Object(fields) = value else {
            return Err(Malformed("not a JSON object".into()));
        };
        Ok(Self {
            pool: read_pool(&fields)?,
            fallback: read_fallback(&fields)?,
            dedicated_only: match fields.get("dedicated_only") {
                None | Some(Value::Null) => false,
                Some(Value::Bool(only)) => *only,
                Some(other) => {
                    return Err(Malformed(format!(
                        "dedicated_only {other}: expected true or false"
                    )));
                }
            },
            limits: Limits {
                max_calls: read_limit(&fields, "max_calls", MAX_MERCHANT_CALLS)?,
                max_rate: read_limit(&fields, "max_rate", MAX_MERCHANT_RATE)?,
            },
            priority: read_whole(&fields, "priority", -MAX_PRIORITY, MAX_PRIORITY)?.unwrap_or(0),
        })
    }
}

fn read_limit(fields: &Map<String, Value>, name: &str, max: u32) -> Result<Option<u32>, Malformed> {
    let whole = read_whole(fields, name, 0, max as i32)?;
    Ok(whole.map(|number| number as u32))
}

fn read_whole(
    fields: &Map<String, Value>,
    name: &str,
    min: i32,
    max: i32,
) -> Result<Option<i32>, Malformed> {
    let value = match fields.get(name) {
        None | Some(Value::Null) => return Ok(None),
        Some(value) => value,
    };
    let whole = value.as_f64().filter(|number| number.fract() == 0.0);
    let fits = whole.filter(|number| (f64::from(min)..=f64::from(max)).contains(number));
    fits.map(|number| Some(number as i32)).ok_or_else(|| {
        Malformed(format!("{name} {value}: expected a whole number from {min} to {max}"))
    })
}

fn read_pool(fields: &Map<String, Value>) -> Result<Option<Step>, Malformed> {
    match fields.get("pool") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(id)) if id.is_empty() => Ok(None),
        Some(Value::String(id)) => match id.parse() {
            Ok(id) => Ok(Some(Step::Merchant(id))),
            Err(error) => Err(Malformed(format!("pool: {error}"))),
        },
        Some(other) => Err(Malformed(format!("pool {other}: expected a name"))),
    }
}

fn read_fallback(fields: &Map<String, Value>) -> Result<Vec<Step>, Malformed> {
    let steps = match fields.get("fallback") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(steps)) => steps,
        Some(other) => return Err(Malformed(format!("fallback {other}: expected a list"))),
    };
    if steps.len() > MAX_STEPS {
        return Err(Malformed(format!("fallback: more than {MAX_STEPS} steps")));
    }
    steps
        .iter()
        .map(|step| match step {
            Value::String(step) => {
                step.parse().map_err(|error| Malformed(format!("fallback: {error}")))
            }
            other => Err(Malformed(format!("fallback: {other}: expected a name"))),
        })
        .collect()
}

/// The steps of a call's chain, in order: the merchant's dedicated pool, then its fallback or
/// the default chain.
pub fn chain<'a>(
    tiers: &'a Tiers,
    merchant: Option<&'a MerchantConfig>,
) -> impl Iterator<Item = &'a Step> {
    let dedicated = merchant.and_then(|merchant| merchant.pool.as_ref());
    let rest: &[Step] = match merchant {
        Some(merchant) if merchant.dedicated_only => &[],
        Some(merchant) if !merchant.fallback.is_empty() => &merchant.fallback,
        _ => tiers.default_chain(),
    };
    dedicated.into_iter().chain(rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiers::DocumentSource;

    fn steps(document: &str) -> Vec<String> {
        let tiers = Tiers::parse(
            r#"{"gold": {}, "standard": {}, "basic": {"type": "shared"}}"#,
            DocumentSource::Settings,
        )
        .unwrap()
        .0;
        let merchant = MerchantConfig::parse(document).unwrap();
        chain(&tiers, Some(&merchant)).map(Step::to_string).collect()
    }

    #[test]
    fn chains_are_resolved_as_documented() {
        assert_eq!(steps("{}"), ["gold", "standard", "basic"]);
        assert_eq!(
            steps(r#"{"pool": "9shines"}"#),
            ["merchant:9shines", "gold", "standard", "basic"]
        );
        assert_eq!(steps(r#"{"fallback": ["standard", "basic"]}"#), ["standard", "basic"]);
        assert_eq!(
            steps(r#"{"pool": "acme", "fallback": ["gold"], "tier": 7}"#),
            ["merchant:acme", "gold"]
        );
        assert_eq!(
            steps(r#"{"pool": "acme", "fallback": [], "x": 1}"#),
            ["merchant:acme", "gold", "standard", "basic"]
        );
        assert_eq!(steps(r#"{"pool": "acme", "dedicated_only": true}"#), ["merchant:acme"]);
        assert_eq!(steps(r#"{"fallback": ["merchant:b", "gold"]}"#), ["merchant:b", "gold"]);
        assert_eq!(steps(r#"{"pool": "", "fallback": null}"#), ["gold", "standard", "basic"]);
    }

    #[test]
    fn the_largest_document_and_the_longest_chain_are_accepted() {
        let frame = r#"{"x": ""}"#.len();
        let largest = format!(r#"{{"x": "{}"}}"#, "y".repeat(MAX_DOCUMENT - frame));
        assert_eq!(largest.len(), MAX_DOCUMENT);
        assert!(MerchantConfig::parse(&largest).is_ok());
        let steps = vec!["gold"; MAX_STEPS];
        let longest = serde_json::json!({"fallback": steps}).to_string();
        assert_eq!(MerchantConfig::parse(&longest).unwrap().fallback.len(), MAX_STEPS);
    }

    #[test]
    fn limits_and_priorities_are_whole_numbers() {
        let limits = |document| MerchantConfig::parse(document).unwrap().limits;
        let given = limits(r#"{"max_calls": 50, "max_rate": 3.0}"#);
        assert_eq!((given.max_calls, given.max_rate), (Some(50), Some(3)));
        assert_eq!(limits(r#"{"max_calls": null}"#), Limits::default());
        assert_eq!(limits(r#"{"max_calls": 0}"#).max_calls, Some(0));
        let priority = |document| MerchantConfig::parse(document).unwrap().priority;
        assert_eq!((priority("{}"), priority(r#"{"priority": -7}"#)), (0, -7));
    }

    #[test]
    fn invalid_documents_are_malformed() {
        let long = format!(r#"{{"x": "{}"}}"#, "y".repeat(MAX_DOCUMENT));
        let many = format!(r#"{{"fallback": [{}"gold"]}}"#, r#""gold","#.repeat(MAX_STEPS));
        for bad in [
            "",
            "7",
            "[]",
            "{",
            r#"{"pool": 7}"#,
            r#"{"pool": "a b"}"#,
            r#"{"fallback": "gold"}"#,
            r#"{"fallback": [7]}"#,
            r#"{"fallback": ["a b"]}"#,
            r#"{"dedicated_only": "yes"}"#,
            r#"{"max_calls": -1}"#,
            r#"{"max_calls": 1.5}"#,
            r#"{"max_calls": "3"}"#,
            r#"{"max_calls": 1000001}"#,
            r#"{"max_rate": 1001}"#,
            r#"{"max_rate": true}"#,
            r#"{"priority": 101}"#,
            r#"{"priority": "high"}"#,
            &long,
            &many,
        ] {
            assert!(MerchantConfig::parse(bad).is_err(), "{bad}");
        }
    }
}
