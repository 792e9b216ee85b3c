//! The steps of a chain.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::names::{InvalidName, MerchantId, TierName};

/// One step of a chain: a tier, or a merchant's pool (`merchant:acme`).
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Step {
    Tier(TierName),
    Merchant(MerchantId),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tier(tier) => write!(f, "{tier}"),
            Self::Merchant(id) => write!(f, "merchant:{id}"),
        }
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Step {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        match text.strip_prefix("merchant:") {
            Some(id) => id.parse().map(Self::Merchant),
            None => text.parse().map(Self::Tier),
        }
    }
}

impl From<Step> for String {
    fn from(step: Step) -> Self {
        step.to_string()
    }
}

impl TryFrom<String> for Step {
    type Error = InvalidName;

    fn try_from(text: String) -> Result<Self, InvalidName> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_round_trip_through_text() {
        for text in ["gold", "merchant:acme"] {
            let step: Step = text.parse().unwrap();
            assert_eq!(serde_json::to_value(&step).unwrap(), text);
            assert_eq!(format!("{step:?}"), text);
        }
    }
}
