//! The tier table: the pools, the capacity of their pods, their targets, and the default chain.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{
    merchant::Step,
    names::{MerchantId, Pool, TierName},
};

/// `max_concurrent` of a shared tier that does not set it.
pub(crate) const DEFAULT_MAX_CONCURRENT: u32 = 5;

/// The type of a tier: the capacity of its pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierKind {
    /// One call.
    Exclusive,
    /// Up to `max_concurrent` calls.
    Shared { max_concurrent: u32, strategy: Strategy },
    /// One call of one merchant: an exclusive tier outside the default chain.
    Dedicated,
}

impl TierKind {
    /// The maximum number of concurrent calls per pod.
    pub fn cap(self) -> u32 {
        match self {
            Self::Exclusive | Self::Dedicated => 1,
            Self::Shared { max_concurrent, .. } => max_concurrent,
        }
    }
}

/// How a shared tier selects the pod for the next call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// The least loaded pod.
    #[default]
    Spread,
    /// The most loaded pod with a free slot, so that idle pods can be scaled down.
    Pack,
}

/// One tier of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tier {
    pub kind: TierKind,
    /// The desired number of pods.
    pub target: u32,
}

/// The source of a tier document. Settings are validated strictly. A document in the store may
/// come from an older version: there a `max_concurrent` below 1 becomes the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DocumentSource {
    Settings,
    Store,
}

/// The error in a tier document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TierError(String);

/// The tier table. Immutable: a change replaces the table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Value", try_from = "Value")]
pub struct Tiers {
    tiers: BTreeMap<TierName, Tier>,
    chain: Vec<Step>,
}

impl Tiers {
    /// Parses any of the three shapes of a tier document. The second value lists warnings about
    /// ignored parts.
    pub fn parse(text: &str, source: DocumentSource) -> Result<(Self, Vec<String>), TierError> {
        let value = serde_json::from_str(text)
            .map_err(|error| TierError(format!("expected a JSON object: {error}")))?;
        Self::from_value(value, source)
    }

    fn from_value(value: Value, source: DocumentSource) -> Result<(Self, Vec<String>), TierError> {
        let Value::Object(mut document) = value else {
            return Err(TierError("expected a JSON object of tiers".into()));
        };
        let (entries, chain) = match document.remove("tiers") {
            Some(Value::Object(entries)) => (entries, document.remove("default_chain")),
            Some(other) => {
                document.insert("tiers".into(), other);
                (document, None)
            }
            None => (document, None),
        };
        if entries.is_empty() {
            return Err(TierError("expected at least one tier".into()));
        }
        let mut warnings = Vec::new();
        let counts_only = entries.values().all(Value::is_number);
        let mut tiers = BTreeMap::new();
        for (name, entry) in entries {
            let tier = if counts_only {
                let target = count(&name, "target", &entry)?;
                Tier { kind: TierKind::Exclusive, target }
            } else {
                read_tier(&name, &entry, source, &mut warnings)?
            };
            let name: TierName = name.parse().map_err(|error| TierError(format!("{error}")))?;
            tiers.insert(name, tier);
        }
        let chain = read_chain(chain, &tiers, &mut warnings)?;
        Ok((Self::new(tiers, chain), warnings))
    }

    /// An empty `chain` selects the automatic chain: exclusive tiers by name, then shared tiers by
    /// name.
    pub fn new(mut tiers: BTreeMap<TierName, Tier>, mut chain: Vec<TierName>) -> Self {
        if chain.is_empty() {
            let shared = |name: &&TierName| matches!(tiers[*name].kind, TierKind::Shared { .. });
            let exclusive_first = tiers.keys().filter(|name| !shared(name));
            chain = exclusive_first.chain(tiers.keys().filter(shared)).cloned().collect();
        }
        for (name, tier) in &mut tiers {
            match tier.kind {
                TierKind::Shared { .. } => {}
                _ if chain.contains(name) => tier.kind = TierKind::Exclusive,
                _ => tier.kind = TierKind::Dedicated,
            }
        }
        let chain = chain.into_iter().map(Step::Tier).collect();
        Self { tiers, chain }
    }

    pub fn get(&self, name: &TierName) -> Option<&Tier> {
        self.tiers.get(name)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&TierName, &Tier)> {
        self.tiers.iter()
    }

    /// The chain of calls whose merchant configures no fallback.
    pub fn default_chain(&self) -> &[Step] {
        &self.chain
    }

    /// The pools of the default chain, in order.
    pub fn chain_pools(&self) -> impl DoubleEndedIterator<Item = Pool> {
        self.chain.iter().filter_map(|step| self.resolve(step))
    }

    /// The pool that holds the pods of a tier.
    pub fn pool(&self, name: &TierName) -> Option<Pool> {
        Some(match self.get(name)?.kind {
            TierKind::Dedicated => Pool::Merchant(MerchantId::from(name.clone())),
            _ => Pool::Tier(name.clone()),
        })
    }

    /// The pool of a chain step; `None` for an unknown tier.
    pub fn resolve(&self, step: &Step) -> Option<Pool> {
        match step {
            Step::Tier(name) => self.pool(name),
            Step::Merchant(id) => Some(Pool::Merchant(id.clone())),
        }
    }

    /// The type of a pool; `None` if its tier is not in the table. Merchant pools need no entry:
    /// they are always dedicated.
    pub fn kind(&self, pool: &Pool) -> Option<TierKind> {
        match pool {
            Pool::Merchant(_) => Some(TierKind::Dedicated),
            Pool::Tier(name) => {
                self.get(name).map(|tier| tier.kind).filter(|kind| *kind != TierKind::Dedicated)
            }
        }
    }

    /// The desired number of pods in a pool.
    pub fn target(&self, pool: &Pool) -> u32 {
        let tier = match pool {
            Pool::Tier(name) => self.get(name).filter(|tier| tier.kind != TierKind::Dedicated),
            Pool::Merchant(id) => {
                self.get(&id.as_tier()).filter(|tier| tier.kind == TierKind::Dedicated)
            }
        };
        tier.map_or(0, |tier| tier.target)
    }

    /// Whether the table has a tier for this pool.
    pub fn defines(&self, pool: &Pool) -> bool {
        match pool {
            Pool::Tier(_) => self.kind(pool).is_some(),
            Pool::Merchant(id) => {
                self.get(&id.as_tier()).is_some_and(|tier| tier.kind == TierKind::Dedicated)
            }
        }
    }

    /// The sum of all targets.
    pub fn total_target(&self) -> usize {
        self.tiers.values().map(|tier| tier.target as usize).sum()
    }
}

fn read_tier(
    name: &str,
    entry: &Value,
    source: DocumentSource,
    warnings: &mut Vec<String>,
) -> Result<Tier, TierError> {
    let Value::Object(fields) = entry else {
        return Err(TierError(format!("tier {name:?}: expected an object, got {entry}")));
    };
    for field in fields.keys() {
        if !matches!(field.as_str(), "type" | "target" | "max_concurrent" | "strategy") {
            warnings.push(format!("tier {name:?}: unknown field {field:?} is ignored"));
        }
    }
    let target = match present(fields, "target") {
        None => 0,
        Some(value) => count(name, "target", value)?,
    };
    let kind = match present(fields, "type").map(|value| value.as_str()) {
        None | Some(Some("exclusive")) => TierKind::Exclusive,
        Some(Some("shared")) => TierKind::Shared {
            max_concurrent: read_cap(name, fields, source)?,
            strategy: read_strategy(name, fields)?,
        },
        Some(_) => {
            let got = &fields["type"];
            return Err(TierError(format!(
                "tier {name:?}: type {got}: expected \"exclusive\" or \"shared\""
            )));
        }
    };
    Ok(Tier { kind, target })
}

fn read_cap(
    name: &str,
    fields: &Map<String, Value>,
    source: DocumentSource,
) -> Result<u32, TierError> {
    match present(fields, "max_concurrent") {
        None => Ok(DEFAULT_MAX_CONCURRENT),
        Some(value)
            if source == DocumentSource::Store && value.as_i64().is_some_and(|cap| cap <= 0) =>
        {
            Ok(DEFAULT_MAX_CONCURRENT)
        }
        Some(value) => match count(name, "max_concurrent", value)? {
            0 => Err(TierError(format!("tier {name:?}: max_concurrent 0: expected at least 1"))),
            cap => Ok(cap),
        },
    }
}

fn read_strategy(name: &str, fields: &Map<String, Value>) -> Result<Strategy, TierError> {
    match present(fields, "strategy") {
        None => Ok(Strategy::default()),
        Some(value) => Strategy::deserialize(value).map_err(|_| {
            TierError(format!("tier {name:?}: strategy {value}: expected \"spread\" or \"pack\""))
        }),
    }
}

fn read_chain(
    chain: Option<Value>,
    tiers: &BTreeMap<TierName, Tier>,
    warnings: &mut Vec<String>,
) -> Result<Vec<TierName>, TierError> {
    let steps = match chain {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(steps)) => steps,
        Some(other) => {
            return Err(TierError(format!("default_chain {other}: expected a list of tier names")));
        }
    };
    let mut known: Vec<TierName> = Vec::new();
    for step in &steps {
        let Value::String(name) = step else {
            return Err(TierError(format!("default_chain: {step}: expected a tier name")));
        };
        match name.parse::<TierName>().ok().filter(|name| tiers.contains_key(name)) {
            None => warnings.push(format!("default_chain: unknown tier {name:?} is ignored")),
            Some(name) if known.contains(&name) => {
                warnings
                    .push(format!("default_chain: {name} is named twice; the second is ignored"));
            }
            Some(name) => known.push(name),
        }
    }
    if known.is_empty() && !steps.is_empty() {
        warnings.push("default_chain: no known tier is left; using the automatic chain".into());
    }
    Ok(known)
}

/// A field that is present and not null.
fn present<'a>(fields: &'a Map<String, Value>, field: &str) -> Option<&'a Value> {
    fields.get(field).filter(|value| !value.is_null())
}

fn count(tier: &str, field: &str, value: &Value) -> Result<u32, TierError> {
    const MAX_COUNT: u64 = 1_000_000;
    // Accepts 2.0: JSON does not separate integers from floats.
    let whole = value.as_f64().filter(|count| count.fract() == 0.0 && *count >= 0.0);
    match whole.map(|count| count as u64).filter(|count| *count <= MAX_COUNT) {
        Some(count) => Ok(count as u32),
        None => Err(TierError(format!(
            "tier {tier:?}: {field} {value}: expected a whole number from 0 to {MAX_COUNT}"
        ))),
    }
}

impl From<Tiers> for Value {
    /// Serializes the table in the first shape of a tier document.
    fn from(table: Tiers) -> Self {
        let tiers: Map<String, Value> = table
            .tiers
            .iter()
            .map(|(name, tier)| {
                let entry = match tier.kind {
                    TierKind::Shared { max_concurrent, strategy } => json!({
                        "type": "shared",
                        "target": tier.target,
                        "max_concurrent": max_concurrent,
                        "strategy": strategy,
                    }),
                    _ => json!({"type": "exclusive", "target": tier.target}),
                };
                (name.to_string(), entry)
            })
            .collect();
        let chain: Vec<String> = table.chain.iter().map(Step::to_string).collect();
        json!({"tiers": tiers, "default_chain": chain})
    }
}

impl TryFrom<Value> for Tiers {
    type Error = TierError;

    fn try_from(value: Value) -> Result<Self, TierError> {
        Self::from_value(value, DocumentSource::Store).map(|(tiers, _)| tiers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Tiers {
        Tiers::parse(text, DocumentSource::Settings).unwrap().0
    }

    fn chain(tiers: &Tiers) -> Vec<String> {
        tiers.default_chain().iter().map(Step::to_string).collect()
    }

    fn refusal(text: &str) -> String {
        Tiers::parse(text, DocumentSource::Settings).unwrap_err().to_string()
    }

    #[test]
    fn all_three_document_shapes_are_parsed() {
        let full = parse(
            r#"{"tiers": {"gold": {"type": "exclusive", "target": 1},
                "basic": {"type": "shared", "target": 1, "max_concurrent": 3}},
                "default_chain": ["basic", "gold"]}"#,
        );
        assert_eq!(chain(&full), ["basic", "gold"]);
        let map = parse(r#"{"gold": {"target": 2}, "basic": {"type": "shared"}}"#);
        assert_eq!(chain(&map), ["gold", "basic"]);
        let basic = map.get(&"basic".parse().unwrap()).unwrap();
        assert_eq!(basic.kind, TierKind::Shared { max_concurrent: 5, strategy: Strategy::Spread });
        let counts = parse(r#"{"gold": 10.0, "standard": 20}"#);
        assert_eq!(counts.get(&"gold".parse().unwrap()).unwrap().target, 10);
        assert_eq!(counts.total_target(), 30);
        assert_eq!(chain(&parse(r#"{"tiers": 5}"#)), ["tiers"]);
    }

    #[test]
    fn an_exclusive_tier_outside_the_chain_is_a_merchant_pool() {
        let tiers = parse(
            r#"{"tiers": {"gold": {}, "acme": {"target": 2}, "basic": {"type": "shared"}}, "default_chain": ["gold"]}"#,
        );
        assert_eq!(tiers.pool(&"acme".parse().unwrap()).unwrap().to_string(), "merchant:acme");
        assert_eq!(tiers.pool(&"basic".parse().unwrap()).unwrap().to_string(), "pool:basic");
        assert_eq!(tiers.target(&"merchant:acme".parse().unwrap()), 2);
        assert_eq!(tiers.kind(&"pool:acme".parse().unwrap()), None);
        let defines = |pool: &str| tiers.defines(&pool.parse().unwrap());
        assert!(defines("gold") && defines("basic") && defines("merchant:acme"));
        assert!(!defines("acme") && !defines("merchant:gold") && !defines("merchant:other"));
    }

    #[test]
    fn unknown_fields_are_ignored_with_a_warning() {
        let known = r#""type": "shared", "target": 1, "max_concurrent": 3, "strategy": "pack""#;
        let warnings = |text: &str| Tiers::parse(text, DocumentSource::Settings).unwrap().1;
        assert_eq!(warnings(&format!(r#"{{"gold": {{{known}}}}}"#)), [""; 0]);
        let given = warnings(&format!(r#"{{"gold": {{{known}, "colour": 7}}}}"#));
        assert!(given.len() == 1 && given[0].contains("\"colour\""), "{given:?}");
    }

    #[test]
    fn unknown_chain_steps_are_dropped_with_a_warning() {
        let text = r#"{"tiers": {"b": {}, "a": {}}, "default_chain": ["x", "b", "b"]}"#;
        let (tiers, warnings) = Tiers::parse(text, DocumentSource::Settings).unwrap();
        assert_eq!((chain(&tiers), warnings.len()), (vec!["b".to_string()], 2));
        let text = r#"{"tiers": {"b": {}, "a": {}}, "default_chain": ["x"]}"#;
        let (tiers, warnings) = Tiers::parse(text, DocumentSource::Settings).unwrap();
        assert_eq!((chain(&tiers), warnings.len()), (vec!["a".to_string(), "b".to_string()], 2));
    }

    #[test]
    fn a_zero_cap_is_an_error_in_settings_and_a_default_in_the_store() {
        let text = r#"{"basic": {"type": "shared", "max_concurrent": 0}}"#;
        assert!(refusal(text).contains("expected at least 1"));
        let text = r#"{"basic": {"type": "shared", "max_concurrent": -3}}"#;
        let tiers = Tiers::parse(text, DocumentSource::Store).unwrap().0;
        assert!(matches!(
            tiers.kind(&"basic".parse().unwrap()),
            Some(TierKind::Shared { max_concurrent: 5, .. })
        ));
    }

    #[test]
    fn invalid_documents_are_refused_with_the_reason() {
        for (text, reason) in [
            ("", "expected a JSON object"),
            ("[]", "expected a JSON object"),
            ("{}", "at least one tier"),
            (r#"{"tiers": {}}"#, "at least one tier"),
            (r#"{"gold": -1}"#, "target -1"),
            (r#"{"gold": 1.5}"#, "whole number"),
            (r#"{"gold": {"target": -1}}"#, "target -1"),
            (r#"{"gold": {"type": "silver"}}"#, "\"silver\""),
            (r#"{"gold": {"type": 7}}"#, "type 7"),
            (r#"{"gold": {"type": "shared", "strategy": "heap"}}"#, "\"heap\""),
            (r#"{"go ld": 1}"#, "tier \"go ld\""),
            (r#"{"tiers": {"a": {}}, "default_chain": "a"}"#, "default_chain"),
            (r#"{"a": {}, "b": 3}"#, "expected an object"),
        ] {
            let refused = refusal(text);
            assert!(refused.contains(reason), "{text}: {refused}");
        }
    }

    #[test]
    fn a_table_round_trips_through_json() {
        let tiers = parse(
            r#"{"tiers": {"gold": {"target": 1}, "acme": {"target": 2},
                "basic": {"type": "shared", "max_concurrent": 3, "strategy": "pack"}}, "default_chain": ["gold", "basic"]}"#,
        );
        assert_eq!(Tiers::try_from(Value::from(tiers.clone())).unwrap(), tiers);
    }
}
