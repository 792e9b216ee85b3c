//! Declarative configuration: folds the objects of a cluster (`VoiceTier`, `VoiceMerchant`) into the
//! tier table and the merchants' documents. Objects that contradict each other or are invalid are
//! refused in words.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::{
    Step,
    merchant::MerchantConfig,
    names::{MerchantId, TierName},
    tiers::{DocumentSource, MANAGED_BY, Tier, TierError, TierKind, Tiers},
    workload::Workload,
};

/// The largest position in the chain, which the schema of the object also states.
const MAX_POSITION: i64 = 1_000_000;

/// The fields of a tier object.
pub const TIER_FIELDS: [&str; 10] = [
    "tier",
    "type",
    "target",
    "maxConcurrent",
    "strategy",
    "chainPosition",
    "workload",
    "min",
    "max",
    "inboundReserve",
];

/// The fields of a merchant object other than its id, and those of the document.
pub const MERCHANT_FIELDS: [(&str, &str); 6] = [
    ("pool", "pool"),
    ("fallback", "fallback"),
    ("dedicatedOnly", "dedicated_only"),
    ("maxCalls", "max_calls"),
    ("maxRate", "max_rate"),
    ("priority", "priority"),
];

/// An object of the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    pub name: String,
    /// Counts the changes of the spec.
    pub generation: i64,
    /// When the object was created (s).
    pub created: i64,
    pub spec: Value,
}

/// Why an object is not applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The reason in one word, for programs: `Invalid`, `Conflict`, `UnknownTier`.
    pub reason: &'static str,
    pub message: String,
}

impl Refused {
    fn invalid(message: impl Into<String>) -> Self {
        Self { reason: "Invalid", message: message.into() }
    }

    fn conflict(message: impl Into<String>) -> Self {
        Self { reason: "Conflict", message: message.into() }
    }
}

/// The tier table of a set of objects. The table is one document: if any object is refused, there
/// is no new table.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FoldedTiers {
    pub table: Option<Tiers>,
    /// Why accepted objects form no table.
    pub error: Option<String>,
    /// The verdict about each object, by its name.
    pub objects: BTreeMap<String, Result<AcceptedTier, Refused>>,
    /// An object has a position, so that the chain is not automatic.
    has_positions: bool,
}

/// A tier as an accepted object defines it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcceptedTier {
    pub name: TierName,
    pub tier: Tier,
    position: Option<i64>,
}

impl FoldedTiers {
    /// Whether a table has the tier of an accepted object as the object defines it.
    pub fn is_in_force(&self, accepted: &AcceptedTier, table: &Tiers) -> bool {
        let AcceptedTier { name, tier, position } = accepted;
        let place = |name: &TierName| {
            let is_it = |step: &Step| matches!(step, Step::Tier(tier) if tier == name);
            table.default_chain().iter().position(is_it)
        };
        let is_chained = position.is_some() || !self.has_positions;
        let is_in_order = |other: &AcceptedTier| match (place(name), place(&other.name)) {
            (Some(here), Some(there)) => {
                position.cmp(&other.position) == here.cmp(&there) || other.position.is_none()
            }
            _ => true,
        };
        let is_same = |known: &Tier| {
            let is_shared = |tier: &Tier| matches!(tier.kind, TierKind::Shared { .. });
            let is_of_kind = known.kind == tier.kind || !is_shared(known) && !is_shared(tier);
            is_of_kind && (Tier { kind: tier.kind, ..known.clone() }) == *tier
        };
        table.get(name).is_some_and(is_same)
            && place(name).is_some() == is_chained
            && (position.is_none() || self.objects.values().flatten().all(is_in_order))
    }
}

/// Returns the owner of a tier table that objects of this namespace manage.
pub fn tiers_owner(namespace: &str) -> String {
    format!("the VoiceTier objects of the namespace {namespace}")
}

/// Returns the owner of a merchant's document that an object manages.
pub fn merchant_owner(namespace: &str, object: &str) -> String {
    format!("VoiceMerchant {namespace}/{object}")
}

/// Returns the object that manages a merchant's document, if any.
pub fn owner_of(document: &str) -> Option<String> {
    // Most documents have no owner: the search is cheaper than parsing them.
    let document = Some(document).filter(|document| document.contains(MANAGED_BY))?;
    let value: Value = serde_json::from_str(document).ok()?;
    value.get(MANAGED_BY)?.as_str().map(str::to_owned)
}

/// A tier as an object defines it.
struct TierSpec {
    name: TierName,
    entry: Value,
    position: Option<i64>,
    tier: Tier,
}

/// Folds objects into a tier table that `owner` manages.
pub fn fold_tiers(objects: &[Manifest], owner: &str) -> FoldedTiers {
    let mut verdicts = BTreeMap::new();
    let mut accepted: Vec<(&Manifest, TierSpec)> = Vec::new();
    let mut taken = Taken::default();
    for object in by_age(objects) {
        let read = read_tier(object).and_then(|spec| {
            taken.add(object, &spec)?;
            Ok(spec)
        });
        match read {
            Ok(spec) => accepted.push((object, spec)),
            Err(refused) => drop(verdicts.insert(object.name.clone(), Err(refused))),
        }
    }
    let is_complete = verdicts.is_empty() && !accepted.is_empty();
    let (table, error) = match is_complete.then(|| table_of(&accepted, owner)).transpose() {
        Ok(table) => (table, None),
        Err(error) => (None, Some(error.to_string())),
    };
    let accepted = accepted.into_iter().map(|(object, spec)| {
        let TierSpec { name, position, tier, .. } = spec;
        (object.name.clone(), Ok(AcceptedTier { name, tier, position }))
    });
    verdicts.extend(accepted);
    let has_position = |it: &Manifest| it.spec.get("chainPosition").is_some_and(|it| !it.is_null());
    let has_positions = objects.iter().any(has_position);
    FoldedTiers { table, error, objects: verdicts, has_positions }
}

/// Oldest first: of two objects that contradict each other, the older is accepted.
fn by_age(objects: &[Manifest]) -> Vec<&Manifest> {
    let mut sorted: Vec<&Manifest> = objects.iter().collect();
    sorted.sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
    sorted
}

/// The tiers, positions and workloads of accepted objects, with the objects' names.
#[derive(Default)]
struct Taken<'a> {
    tiers: BTreeMap<TierName, &'a str>,
    positions: BTreeMap<i64, &'a str>,
    workloads: BTreeMap<Workload, &'a str>,
}

impl<'a> Taken<'a> {
    /// Adds an object, unless it contradicts an older one.
    fn add(&mut self, object: &'a Manifest, spec: &TierSpec) -> Result<(), Refused> {
        let tier = &spec.name;
        if let Some(other) = self.tiers.get(tier) {
            return Err(Refused::conflict(format!(
                "the tier {tier} is already defined by the VoiceTier {other}, which is older"
            )));
        }
        let position = spec.position;
        if let Some((position, other)) = position.and_then(|it| self.positions.get_key_value(&it)) {
            return Err(Refused::conflict(format!(
                "chainPosition {position} is already used by the VoiceTier {other}, which is \
                 older; the order of the chain would be ambiguous"
            )));
        }
        let workload = spec.tier.workload.as_ref();
        if let Some((workload, other)) = workload.and_then(|it| self.workloads.get_key_value(it)) {
            return Err(Refused::conflict(format!(
                "the workload {workload} is already used by the VoiceTier {other}, which is \
                 older; its pods can belong to one tier only"
            )));
        }
        self.positions.extend(position.map(|it| (it, object.name.as_str())));
        self.workloads.extend(workload.map(|it| (it.clone(), object.name.as_str())));
        self.tiers.insert(tier.clone(), &object.name);
        Ok(())
    }
}

fn table_of(accepted: &[(&Manifest, TierSpec)], owner: &str) -> Result<Tiers, TierError> {
    let entries = accepted.iter().map(|(_, it)| (it.name.to_string(), it.entry.clone()));
    let tiers: Map<String, Value> = entries.collect();
    let mut chain: Vec<(i64, &TierName)> =
        accepted.iter().filter_map(|(_, it)| Some((it.position?, &it.name))).collect();
    chain.sort();
    let chain: Vec<&str> = chain.into_iter().map(|(_, name)| name.as_str()).collect();
    let document = json!({"tiers": tiers, "default_chain": chain}).to_string();
    let (table, _) = Tiers::parse(&document, DocumentSource::Settings)?;
    Ok(table.with_owner(Some(owner)))
}

fn fields_of<'a>(spec: &'a Value, known: &[&str]) -> Result<&'a Map<String, Value>, Refused> {
    let fields = spec.as_object().ok_or_else(|| Refused::invalid("spec: expected an object"))?;
    match fields.keys().find(|field| !known.contains(&field.as_str())) {
        Some(field) => Err(Refused::invalid(format!("spec.{field}: unknown field"))),
        None => Ok(fields),
    }
}

/// Returns a name from a field of the spec, or else the object's own.
fn name_of(object: &Manifest, field: &str) -> Result<String, Refused> {
    match object.spec.get(field).filter(|value| !value.is_null()) {
        None => Ok(object.name.clone()),
        Some(Value::String(name)) => Ok(name.clone()),
        Some(other) => Err(Refused::invalid(format!("spec.{field} {other}: expected a name"))),
    }
}

/// Returns the tier that an object defines.
pub fn tier_name(object: &Manifest) -> Result<TierName, Refused> {
    let name = name_of(object, "tier")?;
    name.parse().map_err(|error| Refused::invalid(format!("{error}")))
}

fn read_tier(object: &Manifest) -> Result<TierSpec, Refused> {
    let fields = fields_of(&object.spec, &TIER_FIELDS)?;
    let name = tier_name(object)?;
    let given = |field: &str| fields.get(field).filter(|value| !value.is_null()).cloned();
    let mut entry = Map::new();
    for (field, key) in [
        ("type", "type"),
        ("target", "target"),
        ("maxConcurrent", "max_concurrent"),
        ("strategy", "strategy"),
        ("workload", "workload"),
        ("min", "min"),
        ("max", "max"),
        ("inboundReserve", "inbound_reserve"),
    ] {
        entry.extend(given(field).map(|value| (key.to_owned(), value)));
    }
    let entry = Value::Object(entry);
    let document = json!({"tiers": {name.as_str(): entry}}).to_string();
    let (table, _) = Tiers::parse(&document, DocumentSource::Settings)
        .map_err(|error| Refused::invalid(error.to_string()))?;
    let tier = table.get(&name).ok_or_else(|| Refused::invalid("the tier is missing"))?;
    if !matches!(tier.kind, TierKind::Shared { .. }) {
        for field in ["maxConcurrent", "strategy"] {
            if given(field).is_some() {
                let message = format!("spec.{field} applies to tiers of the type shared only");
                return Err(Refused::invalid(message));
            }
        }
    }
    let position = match given("chainPosition") {
        None => None,
        Some(value) => match value.as_i64().filter(|it| (0..=MAX_POSITION).contains(it)) {
            Some(position) => Some(position),
            None => {
                return Err(Refused::invalid(format!(
                    "spec.chainPosition {value}: expected a whole number from 0 to {MAX_POSITION}"
                )));
            }
        },
    };
    let tier = tier.clone();
    Ok(TierSpec { name, entry, position, tier })
}

/// A merchant's document as an object defines it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoldedMerchant {
    pub id: MerchantId,
    pub document: String,
    pub config: MerchantConfig,
}

/// Folds objects of a namespace into merchants' documents, checked against the tier table in force.
/// Each object stands for itself: a refused one does not affect the others.
pub fn fold_merchants(
    objects: &[Manifest],
    namespace: &str,
    tiers: &Tiers,
) -> BTreeMap<String, Result<FoldedMerchant, Refused>> {
    let mut owners: BTreeMap<MerchantId, &str> = BTreeMap::new();
    let mut folded = BTreeMap::new();
    for object in by_age(objects) {
        let read = read_merchant(object, namespace, tiers).and_then(|merchant| {
            match owners.get(&merchant.id) {
                None => Ok(merchant),
                Some(other) => Err(Refused::conflict(format!(
                    "the merchant {} is already defined by the VoiceMerchant {other}, which is \
                     older",
                    merchant.id
                ))),
            }
        });
        // A refused object still keeps the name from a younger one: its last good state stays.
        if let Ok(id) = merchant_id(object) {
            owners.entry(id).or_insert(&object.name);
        }
        folded.insert(object.name.clone(), read);
    }
    folded
}

/// Returns the merchant that an object configures.
pub fn merchant_id(object: &Manifest) -> Result<MerchantId, Refused> {
    let id = name_of(object, "merchant")?;
    id.parse().map_err(|error| Refused::invalid(format!("{error}")))
}

fn read_merchant(
    object: &Manifest,
    namespace: &str,
    tiers: &Tiers,
) -> Result<FoldedMerchant, Refused> {
    let mut known: Vec<&str> = MERCHANT_FIELDS.iter().map(|(field, _)| *field).collect();
    known.push("merchant");
    let fields = fields_of(&object.spec, &known)?;
    let id = merchant_id(object)?;
    let mut document = Map::new();
    for (field, key) in MERCHANT_FIELDS {
        let value = fields.get(field).filter(|value| !value.is_null());
        document.extend(value.map(|value| (key.to_owned(), value.clone())));
    }
    document.insert(MANAGED_BY.into(), json!(merchant_owner(namespace, &object.name)));
    let document = Value::Object(document).to_string();
    let config = MerchantConfig::parse(&document)
        .map_err(|error| Refused::invalid(format!("not a merchant document: {error}")))?;
    if config.refuses_all() {
        return Err(Refused::invalid("dedicatedOnly without a pool refuses every call"));
    }
    if let Some(step) = config.unknown_tier(tiers) {
        let message = format!("fallback names the tier {step}, which is not in the tier table");
        return Err(Refused { reason: "UnknownTier", message });
    }
    Ok(FoldedMerchant { id, document, config })
}

#[cfg(test)]
mod tests;
