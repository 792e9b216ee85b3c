//! The tier table in Redis: the hash `voice:tiers`, one field per tier and one for the chain.

use std::collections::BTreeMap;

use super::reply::parse;
use crate::StoreError;
use fleet::{
    merchant::Step,
    names::TierName,
    tiers::{Strategy, Tier, TierKind, Tiers},
};

const CHAIN: &str = ":chain";

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

/// Kind, capacity and strategy of a tier.
fn tier_fields(tier: &Tier) -> (&'static str, u32, &'static str) {
    match tier.kind {
        TierKind::Exclusive => ("exclusive", 1, "spread"),
        TierKind::Dedicated => ("dedicated", 1, "spread"),
        TierKind::Shared { max_concurrent, strategy: Strategy::Spread } => {
            ("shared", max_concurrent, "spread")
        }
        TierKind::Shared { max_concurrent, strategy: Strategy::Pack } => {
            ("shared", max_concurrent, "pack")
        }
    }
}

/// `gold=exclusive:1:spread basic=shared:3:pack`
pub(super) fn chain(tiers: &Tiers) -> String {
    let names = tiers.default_chain().iter().filter_map(|step| match step {
        Step::Tier(name) => Some(name),
        Step::Merchant(_) => None,
    });
    let steps = names.filter_map(|name| {
        let (kind, cap, strategy) = tier_fields(tiers.get(name)?);
        Some(format!("{name}={kind}:{cap}:{strategy}"))
    });
    steps.collect::<Vec<_>>().join(" ")
}

/// The name and the field value of each tier.
pub(super) fn entries(tiers: &Tiers) -> Vec<(String, String)> {
    let entry = |(name, tier): (&TierName, &Tier)| {
        let (kind, cap, strategy) = tier_fields(tier);
        (name.to_string(), format!("{kind} {cap} {strategy} {}", tier.target))
    };
    tiers.iter().map(entry).collect()
}

/// The table as text, sorted, one field per line.
fn lines(tiers: &Tiers) -> String {
    let entries = entries(tiers);
    let mut lines: Vec<String> =
        entries.iter().map(|(name, entry)| format!("{name} {entry}")).collect();
    lines.push(chain(tiers));
    lines.sort();
    lines.join("\n")
}

/// Parses the table from the fields and values of its hash.
pub(super) fn read(fields: &[String]) -> Result<Tiers, StoreError> {
    let mut tiers = BTreeMap::new();
    let mut chain = None;
    for pair in fields.chunks_exact(2) {
        match pair[0].as_str() {
            CHAIN => chain = Some(pair[1].as_str()),
            name if name.starts_with(':') => {}
            // Skip malformed entries; the next refresh writes the table again.
            name => {
                if let (Ok(name), Ok(tier)) = (parse::<TierName>(name), read_entry(&pair[1])) {
                    tiers.insert(name, tier);
                }
            }
        }
    }
    let chain = chain.ok_or_else(|| StoreError::Unavailable("Redis has no tiers yet".into()))?;
    let names = chain
        .split_whitespace()
        .filter_map(|step| step.split_once('='))
        .map(|(name, _)| parse(name));
    Ok(Tiers::new(tiers, names.collect::<Result<_, _>>()?))
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
    Ok(Tier { kind, target: parse(target)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fleet::tiers::DocumentSource;

    #[test]
    fn a_tier_table_round_trips() {
        let text = r#"{"tiers": {"gold": {"target": 1}, "acme": {"target": 2},
            "basic": {"type": "shared", "max_concurrent": 3, "strategy": "pack"}}, "default_chain": ["gold", "basic"]}"#;
        let tiers = Tiers::parse(text, DocumentSource::Settings).unwrap().0;
        assert_eq!(chain(&tiers), "gold=exclusive:1:spread basic=shared:3:pack");
        let mut fields =
            vec![CHAIN.to_owned(), chain(&tiers), ":trusting_until".into(), "7".into()];
        fields.extend(entries(&tiers).into_iter().flat_map(|(name, entry)| [name, entry]));
        assert_eq!(read(&fields).unwrap(), tiers);
    }
}
