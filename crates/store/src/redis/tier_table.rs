//! The tier table as the scripts keep it: `voice:tiers`, one field per tier and
//! the chain.

use std::collections::BTreeMap;

use super::reply::parse;
use crate::StoreError;
use fleet::{
    merchant::Step,
    names::TierName,
    tiers::{Kind, Strategy, Tier, Tiers},
};

const CHAIN: &str = ":chain";

/// What a table that is written depends on.
pub(super) enum DependsOn<'a> {
    Nothing,
    Table(&'a Tiers),
    /// The document is still this one.
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

/// Kind, cap and strategy of a tier, in words.
fn words(tier: &Tier) -> (&'static str, u32, &'static str) {
    match tier.kind {
        Kind::Exclusive => ("exclusive", 1, "spread"),
        Kind::Dedicated => ("dedicated", 1, "spread"),
        Kind::Shared { max_concurrent, strategy: Strategy::Spread } => {
            ("shared", max_concurrent, "spread")
        }
        Kind::Shared { max_concurrent, strategy: Strategy::Pack } => {
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
        let (kind, cap, strategy) = words(tiers.get(name)?);
        Some(format!("{name}={kind}:{cap}:{strategy}"))
    });
    steps.collect::<Vec<_>>().join(" ")
}

/// Each tier and its entry.
pub(super) fn entries(tiers: &Tiers) -> Vec<(String, String)> {
    let entry = |(name, tier): (&TierName, &Tier)| {
        let (kind, cap, strategy) = words(tier);
        (name.to_string(), format!("{kind} {cap} {strategy} {}", tier.target))
    };
    tiers.iter().map(entry).collect()
}

/// All of it, sorted, one a line.
fn lines(tiers: &Tiers) -> String {
    let entries = entries(tiers);
    let mut lines: Vec<String> =
        entries.iter().map(|(name, entry)| format!("{name} {entry}")).collect();
    lines.push(chain(tiers));
    lines.sort();
    lines.join("\n")
}

/// The table from the fields and values of its hash.
pub(super) fn read(fields: &[String]) -> Result<Tiers, StoreError> {
    let mut tiers = BTreeMap::new();
    let mut chain = None;
    for pair in fields.chunks_exact(2) {
        match pair[0].as_str() {
            CHAIN => chain = Some(pair[1].as_str()),
            name if name.starts_with(':') => {}
            // An entry that makes no sense is none; the table is written anew soon.
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
        return Err(StoreError::Failed(format!("the tier table holds {text:?}")));
    };
    let strategy = if strategy == "pack" { Strategy::Pack } else { Strategy::Spread };
    let kind = match kind {
        "shared" => Kind::Shared { max_concurrent: parse(cap)?, strategy },
        "dedicated" => Kind::Dedicated,
        _ => Kind::Exclusive,
    };
    Ok(Tier { kind, target: parse(target)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fleet::tiers::Origin;

    #[test]
    fn a_table_reads_back_what_it_writes() {
        let text = r#"{"tiers": {"gold": {"target": 1}, "acme": {"target": 2},
            "basic": {"type": "shared", "max_concurrent": 3, "strategy": "pack"}}, "default_chain": ["gold", "basic"]}"#;
        let tiers = Tiers::parse(text, Origin::Settings).unwrap().0;
        assert_eq!(chain(&tiers), "gold=exclusive:1:spread basic=shared:3:pack");
        let mut fields =
            vec![CHAIN.to_owned(), chain(&tiers), ":trusting_until".into(), "7".into()];
        fields.extend(entries(&tiers).into_iter().flat_map(|(name, entry)| [name, entry]));
        assert_eq!(read(&fields).unwrap(), tiers);
    }
}
