//! The tier table in Redis: the hash `voice:tiers`, one field per tier and one for the chain, and
//! the hash `voice:tier:bounds`, which routers of earlier versions neither read nor write.

use std::collections::BTreeMap;

use super::reply::parse;
use crate::StoreError;
use fleet::{
    Step,
    names::TierName,
    tiers::{Strategy, Tier, TierBounds, TierKind, Tiers},
};

const CHAIN: &str = ":chain";
/// The field of the workloads of tiers; absent if no tier has one. Versions without workloads
/// ignore it.
const WORKLOADS: &str = ":workloads";
/// The objects of the cluster that manage the table.
const MANAGED_BY: &str = ":managed_by";

/// The precondition of a write of the tier table.
pub(super) enum DependsOn<'a> {
    Nothing,
    Table(&'a Tiers),
    /// The tier document is unchanged.
    Document(&'a str),
}

impl DependsOn<'_> {
    pub(super) fn text(&self) -> String {
        match self {
            Self::Nothing => String::new(),
            Self::Table(tiers) => format!("={}", lines(tiers)),
            Self::Document(text) => format!("@{text}"),
        }
    }
}

/// Kind, capacity and strategy of a tier. Versions without workloads ignore the strategy
/// `ordinal`.
fn tier_fields(tier: &Tier) -> (&'static str, u32, &'static str) {
    let strategy = if tier.prefers_low_ordinals() { "ordinal" } else { "spread" };
    match tier.kind {
        TierKind::Exclusive => ("exclusive", 1, strategy),
        TierKind::Dedicated => ("dedicated", 1, strategy),
        TierKind::Shared { max_concurrent, strategy: Strategy::Spread } => {
            ("shared", max_concurrent, "spread")
        }
        TierKind::Shared { max_concurrent, strategy: Strategy::Pack } => {
            ("shared", max_concurrent, "pack")
        }
    }
}

/// `gold=exclusive:1:spread basic=shared:3:pack ~acme`: the tiers of the chain, then the merchant
/// pools whose calls prefer low ordinals, which an allocation learns without another read.
pub(super) fn chain(tiers: &Tiers) -> String {
    let names = tiers.default_chain().iter().filter_map(|step| match step {
        Step::Tier(name) => Some(name),
        Step::Merchant(_) => None,
    });
    let steps = names.filter_map(|name| {
        let (kind, cap, strategy) = tier_fields(tiers.get(name)?);
        Some(format!("{name}={kind}:{cap}:{strategy}"))
    });
    let is_ordered = |tier: &Tier| tier.kind == TierKind::Dedicated && tier.prefers_low_ordinals();
    let ordered = tiers.iter().filter(|(_, tier)| is_ordered(tier));
    let words = steps.chain(ordered.map(|(name, _)| format!("~{name}")));
    words.collect::<Vec<_>>().join(" ")
}

/// The name, the field value and the bounds of each tier. Default bounds are empty. Then the workloads, and the owner
/// of the table.
pub(super) fn entries(tiers: &Tiers) -> Vec<[String; 3]> {
    let entry = |(name, tier): (&TierName, &Tier)| {
        let (kind, cap, strategy) = tier_fields(tier);
        let has_bounds = tier.bounds != TierBounds::default();
        let bounds = if has_bounds { tier.bounds.to_string() } else { String::new() };
        [name.to_string(), format!("{kind} {cap} {strategy} {}", tier.target), bounds]
    };
    let workloads: Vec<String> = tiers
        .iter()
        .filter_map(|(name, tier)| Some(format!("{name}={}", tier.workload.as_ref()?)))
        .collect();
    let workloads =
        (!workloads.is_empty()).then(|| [WORKLOADS.to_owned(), workloads.join(" "), String::new()]);
    let owner =
        tiers.managed_by().map(|owner| [MANAGED_BY.to_owned(), owner.to_owned(), String::new()]);
    tiers.iter().map(entry).chain(workloads).chain(owner).collect()
}

/// The table as text, sorted, one field per line.
fn lines(tiers: &Tiers) -> String {
    let entries = entries(tiers);
    let mut lines: Vec<String> =
        entries.iter().map(|[name, entry, bounds]| format!("{name} {entry} {bounds}")).collect();
    lines.push(chain(tiers));
    lines.sort();
    lines.join("\n")
}

/// Parses the table from the fields and values of its hashes.
pub(super) fn read(fields: &[String], bounds: &[String]) -> Result<Tiers, StoreError> {
    let bounds: BTreeMap<&str, TierBounds> = bounds
        .chunks_exact(2)
        // Skip malformed bounds, as malformed entries.
        .filter_map(|pair| Some((pair[0].as_str(), pair[1].parse().ok()?)))
        .collect();
    let mut tiers = BTreeMap::new();
    let (mut chain, mut workloads, mut owner) = (None, "", None);
    for pair in fields.chunks_exact(2) {
        match pair[0].as_str() {
            CHAIN => chain = Some(pair[1].as_str()),
            WORKLOADS => workloads = &pair[1],
            MANAGED_BY => owner = Some(pair[1].as_str()),
            name if name.starts_with(':') => {}
            // Skip malformed entries; the next refresh writes the table again.
            name => {
                if let (Ok(name), Ok(tier)) = (parse::<TierName>(name), read_entry(&pair[1])) {
                    let bounds = bounds.get(pair[0].as_str()).copied().unwrap_or_default();
                    tiers.insert(name, Tier { bounds, ..tier });
                }
            }
        }
    }
    for (name, workload) in workloads.split_whitespace().filter_map(|it| it.split_once('=')) {
        let tier = name.parse().ok().and_then(|name: TierName| tiers.get_mut(&name));
        if let (Some(tier), Ok(workload)) = (tier, workload.parse()) {
            tier.workload = Some(workload);
        }
    }
    let chain = chain.ok_or_else(|| StoreError::Unavailable("Redis has no tiers yet".into()))?;
    let names = chain
        .split_whitespace()
        .filter_map(|step| step.split_once('='))
        .map(|(name, _)| parse(name));
    Ok(Tiers::new(tiers, names.collect::<Result<_, _>>()?).with_owner(owner))
}

fn read_entry(text: &str) -> Result<Tier, StoreError> {
    let words: Vec<&str> = text.split(' ').collect();
    let [kind, cap, strategy, target] = words[..] else {
        return Err(StoreError::Failed(format!(
            "the tier table contains the malformed entry {text:?}"
        )));
    };
    let strategy = if strategy == "pack" { Strategy::Pack } else { Strategy::Spread };
    let kind = match kind {
        "shared" => TierKind::Shared { max_concurrent: parse(cap)?, strategy },
        "dedicated" => TierKind::Dedicated,
        _ => TierKind::Exclusive,
    };
    Ok(Tier { kind, target: parse(target)?, bounds: TierBounds::default(), workload: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fleet::tiers::DocumentSource;

    #[test]
    fn a_tier_table_round_trips() {
        let text = r#"{"tiers": {"gold": {"target": 1, "min": 2, "max": 7, "workload": "statefulset/gold"},
            "acme": {"target": 2, "workload": "statefulset/acme"},
            "basic": {"type": "shared", "max_concurrent": 3, "strategy": "pack"}}, "default_chain": ["gold", "basic"]}"#;
        let tiers = Tiers::parse(text, DocumentSource::Settings).unwrap().0;
        assert_eq!(chain(&tiers), "gold=exclusive:1:ordinal basic=shared:3:pack ~acme");
        let mut fields =
            vec![CHAIN.to_owned(), chain(&tiers), ":trusting_until".into(), "7".into()];
        let mut bounds = Vec::new();
        for [name, entry, bounds_of_tier] in entries(&tiers) {
            fields.extend([name.clone(), entry]);
            bounds.extend([name, bounds_of_tier]);
        }
        assert_eq!(read(&fields, &bounds).unwrap(), tiers);
        let at = bounds.iter().position(|it| it == "gold").unwrap() + 1;
        bounds[at] = "seven".into();
        let gold = "gold".parse().unwrap();
        let managed = tiers.clone().with_owner(Some("objects"));
        assert!(lines(&managed).contains(":managed_by objects"));
        let read = read(&fields, &bounds).unwrap();
        assert_eq!(read.get(&gold).unwrap().bounds, TierBounds::default(), "malformed");
    }
}
