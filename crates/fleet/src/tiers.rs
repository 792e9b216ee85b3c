//! The tier table: the pools, the capacity of their pods, their targets, and the default chain.

mod bounds;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

pub use self::bounds::{InboundReserve, TierBounds};
use crate::{
    Step,
    names::{MerchantId, Pool, TierName},
    workload::{Workload, WorkloadKind},
};

/// The field of a tier document, or of a merchant's, that names the objects which manage it.
pub const MANAGED_BY: &str = "managed_by";

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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tier {
    pub kind: TierKind,
    /// The desired number of pods; without effect if the tier has a workload.
    pub target: u32,
    pub bounds: TierBounds,
    /// The workload whose pods the tier takes.
    pub workload: Option<Workload>,
}

impl Tier {
    /// Whether calls prefer pods with a low ordinal: exclusive pods of a StatefulSet, which
    /// removes the highest ordinals first.
    pub fn prefers_low_ordinals(&self) -> bool {
        let is_shared = matches!(self.kind, TierKind::Shared { .. });
        let kind = self.workload.as_ref().map(|workload| workload.kind);
        !is_shared && kind == Some(WorkloadKind::StatefulSet)
    }
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

impl TierError {
    pub(crate) fn new(error: String) -> Self {
        Self(error)
    }
}

/// The tier table. Immutable: a change replaces the table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Value", try_from = "Value")]
pub struct Tiers {
    tiers: BTreeMap<TierName, Tier>,
    chain: Vec<Step>,
    /// The objects of the cluster that manage the table; `None` if the API does.
    managed_by: Option<String>,
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
        let (entries, chain, owner) = match document.remove("tiers") {
            Some(Value::Object(entries)) => {
                (entries, document.remove("default_chain"), document.remove(MANAGED_BY))
            }
            Some(other) => {
                document.insert("tiers".into(), other);
                (document, None, None)
            }
            None => (document, None, None),
        };
        // A request or a setting cannot name an owner.
        let owner = owner.filter(|_| source == DocumentSource::Store);
        let owner = owner.as_ref().and_then(Value::as_str);
        if entries.is_empty() {
            return Err(TierError("expected at least one tier".into()));
        }
        let mut warnings = Vec::new();
        let counts_only = entries.values().all(Value::is_number);
        let mut tiers = BTreeMap::new();
        for (name, entry) in entries {
            let tier = if counts_only {
                let target = count(&name, "target", &entry)?;
                let bounds = TierBounds::default();
                Tier { kind: TierKind::Exclusive, target, bounds, workload: None }
            } else {
                read_tier(&name, &entry, source, &mut warnings)?
            };
            let name: TierName = name.parse().map_err(|error| TierError(format!("{error}")))?;
            tiers.insert(name, tier);
        }
        refuse_shared_workloads(&tiers)?;
        let chain = read_chain(chain, &tiers, &mut warnings)?;
        Ok((Self::new(tiers, chain).with_owner(owner), warnings))
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
        Self { tiers, chain, managed_by: None }
    }

    /// The table with another owner.
    pub fn with_owner(self, owner: Option<&str>) -> Self {
        Self { managed_by: owner.map(str::to_owned), ..self }
    }

    /// The objects of the cluster that manage the table, if any.
    pub fn managed_by(&self) -> Option<&str> {
        self.managed_by.as_deref()
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
    pub(crate) fn chain_pools(&self) -> impl DoubleEndedIterator<Item = Pool> {
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

    /// The bounds of a pool's number of pods.
    pub fn bounds(&self, pool: &Pool) -> TierBounds {
        self.tier_of(pool).map(|tier| tier.bounds).unwrap_or_default()
    }

    /// The tier of a pool.
    fn tier_of(&self, pool: &Pool) -> Option<&Tier> {
        match pool {
            Pool::Tier(name) => self.get(name).filter(|tier| tier.kind != TierKind::Dedicated),
            Pool::Merchant(id) => {
                self.get(&id.as_tier()).filter(|tier| tier.kind == TierKind::Dedicated)
            }
        }
    }

    /// The desired number of pods in a pool, from its target. Capacity decides it for a pool with
    /// a workload.
    pub fn target(&self, pool: &Pool) -> u32 {
        let tier = self.tier_of(pool).filter(|tier| tier.workload.is_none());
        tier.map_or(0, |tier| tier.target)
    }

    /// The workload that runs the pods of a pool.
    pub fn workload(&self, pool: &Pool) -> Option<&Workload> {
        self.tier_of(pool)?.workload.as_ref()
    }

    /// See [`Tier::prefers_low_ordinals`].
    pub fn prefers_low_ordinals(&self, pool: &Pool) -> bool {
        self.tier_of(pool).is_some_and(Tier::prefers_low_ordinals)
    }

    /// Whether the table has a tier for this pool.
    pub fn defines(&self, pool: &Pool) -> bool {
        self.tier_of(pool).is_some()
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
        const KNOWN: [&str; 5] = ["type", "target", "max_concurrent", "strategy", "workload"];
        let is_known = KNOWN.contains(&field.as_str());
        if !is_known && !bounds::FIELDS.contains(&field.as_str()) {
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
    let bounds = TierBounds::read(name, fields)?;
    Ok(Tier { kind, target, bounds, workload: read_workload(name, fields)? })
}

fn read_workload(name: &str, fields: &Map<String, Value>) -> Result<Option<Workload>, TierError> {
    let Some(value) = present(fields, "workload") else { return Ok(None) };
    let parsed = value.as_str().unwrap_or_default().parse();
    parsed.map(Some).map_err(|why| TierError(format!("tier {name:?}: workload {value}: {why}")))
}

/// Refuses a workload that two tiers name: its pods can belong to one pool only.
fn refuse_shared_workloads(tiers: &BTreeMap<TierName, Tier>) -> Result<(), TierError> {
    let mut known: BTreeMap<&Workload, &TierName> = BTreeMap::new();
    for (name, tier) in tiers {
        let Some(workload) = &tier.workload else { continue };
        if let Some(other) = known.insert(workload, name) {
            return Err(TierError(format!(
                "tiers {other} and {name} name the same workload {workload}"
            )));
        }
    }
    Ok(())
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
pub(crate) fn present<'a>(fields: &'a Map<String, Value>, field: &str) -> Option<&'a Value> {
    fields.get(field).filter(|value| !value.is_null())
}

pub(crate) fn count(tier: &str, field: &str, value: &Value) -> Result<u32, TierError> {
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
                let mut entry = match tier.kind {
                    TierKind::Shared { max_concurrent, strategy } => json!({
                        "type": "shared",
                        "target": tier.target,
                        "max_concurrent": max_concurrent,
                        "strategy": strategy,
                    }),
                    _ => json!({"type": "exclusive", "target": tier.target}),
                };
                if let Some(workload) = &tier.workload {
                    entry["workload"] = json!(workload.to_string());
                }
                entry.as_object_mut().into_iter().for_each(|entry| tier.bounds.write(entry));
                (name.to_string(), entry)
            })
            .collect();
        let chain: Vec<String> = table.chain.iter().map(Step::to_string).collect();
        let mut document = json!({"tiers": tiers, "default_chain": chain});
        if let Some(owner) = table.managed_by {
            document[MANAGED_BY] = json!(owner);
        }
        document
    }
}

impl TryFrom<Value> for Tiers {
    type Error = TierError;

    fn try_from(value: Value) -> Result<Self, TierError> {
        Self::from_value(value, DocumentSource::Store).map(|(tiers, _)| tiers)
    }
}

#[cfg(test)]
mod tests;
