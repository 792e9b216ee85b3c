//! The bounds of a tier's number of pods, for the capacity policy.

use std::{fmt, str::FromStr};

use serde_json::{Map, Value};

use super::{TierError, count, present};

/// Fields of a tier document.
pub(super) const FIELDS: [&str; 3] = ["min", "max", "inbound_reserve"];

/// Limits of the pods that the capacity policy asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierBounds {
    pub min: u32,
    /// `None` for no limit.
    pub max: Option<u32>,
    /// Slots that stay free beyond the live calls, and that dials do not use.
    pub inbound_reserve: InboundReserve,
}

/// Slots of a tier that are kept for inbound calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InboundReserve {
    Slots(u32),
    /// Percent of the slots of the pods in service.
    Share(u32),
}

impl Default for InboundReserve {
    fn default() -> Self {
        Self::Slots(0)
    }
}

impl InboundReserve {
    fn read(name: &str, value: &Value) -> Result<Self, TierError> {
        let share = value.as_str().and_then(|text| text.parse().ok());
        if let Some(share @ Self::Share(_)) = share {
            return Ok(share);
        }
        count(name, FIELDS[2], value).map(Self::Slots).map_err(|_| {
            TierError::new(format!(
                "tier {name:?}: inbound_reserve {value}: expected a whole number from 0 to \
                 1000000, or a share from \"0%\" to \"99%\""
            ))
        })
    }

    /// The reserved slots of a pool with this number of slots in service; a share is rounded up.
    pub fn of_slots(self, slots: u64) -> u64 {
        match self {
            Self::Slots(slots) => slots.into(),
            Self::Share(percent) => (slots * u64::from(percent)).div_ceil(100),
        }
    }

    /// The slots to reserve beside this number of calls, so that a share of the sum is free.
    pub(crate) fn beside_calls(self, calls: u64) -> u64 {
        match self {
            Self::Slots(slots) => slots.into(),
            Self::Share(percent) => {
                (calls * u64::from(percent)).div_ceil(u64::from(100 - percent.min(99)))
            }
        }
    }
}

impl fmt::Display for InboundReserve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slots(slots) => write!(f, "{slots}"),
            Self::Share(percent) => write!(f, "{percent}%"),
        }
    }
}

impl FromStr for InboundReserve {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let number = |text: &str| text.parse::<u32>().map_err(|_| ());
        match text.strip_suffix('%') {
            Some(percent) => {
                number(percent).and_then(|it| if it < 100 { Ok(Self::Share(it)) } else { Err(()) })
            }
            None => number(text).map(Self::Slots),
        }
    }
}

impl From<InboundReserve> for Value {
    fn from(reserve: InboundReserve) -> Self {
        match reserve {
            InboundReserve::Slots(slots) => slots.into(),
            share => share.to_string().into(),
        }
    }
}

impl TierBounds {
    pub(super) fn read(name: &str, fields: &Map<String, Value>) -> Result<Self, TierError> {
        let number = |field| present(fields, field).map(|it| count(name, field, it)).transpose();
        let (min, max) = (number(FIELDS[0])?.unwrap_or(0), number(FIELDS[1])?);
        let inbound_reserve = present(fields, FIELDS[2]);
        let inbound_reserve =
            inbound_reserve.map(|it| InboundReserve::read(name, it)).transpose()?;
        if let Some(max) = max.filter(|max| min > *max) {
            let error = format!("tier {name:?}: min {min} is above max {max}");
            return Err(TierError::new(error));
        }
        Ok(Self { min, max, inbound_reserve: inbound_reserve.unwrap_or_default() })
    }

    /// Adds the fields that differ from the defaults to a tier document.
    pub(super) fn write(self, fields: &mut Map<String, Value>) {
        let reserve = Some(self.inbound_reserve);
        let values: [Option<Value>; 3] = [
            Some(self.min).filter(|min| *min > 0).map(Value::from),
            self.max.map(Value::from),
            reserve.filter(|it| *it != InboundReserve::default()).map(Value::from),
        ];
        for (field, value) in FIELDS.into_iter().zip(values) {
            fields.extend(value.map(|value| (field.to_owned(), value)));
        }
    }
}

impl fmt::Display for TierBounds {
    /// The bounds as an entry of the Redis layout: min, max (`-` for none), inbound reserve.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { min, max, inbound_reserve } = self;
        match max {
            Some(max) => write!(f, "{min} {max} {inbound_reserve}"),
            None => write!(f, "{min} - {inbound_reserve}"),
        }
    }
}

impl FromStr for TierBounds {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let words: Vec<&str> = text.split(' ').collect();
        let [min, max, inbound_reserve] = words[..] else { return Err(()) };
        let number = |text: &str| text.parse::<u32>().map_err(|_| ());
        Ok(Self {
            min: number(min)?,
            max: if max == "-" { None } else { Some(number(max)?) },
            inbound_reserve: inbound_reserve.parse()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiers::{DocumentSource, Tiers};

    fn parse(fields: &str) -> Result<TierBounds, String> {
        let text = format!(r#"{{"gold": {{{fields}}}}}"#);
        let (tiers, warnings) =
            Tiers::parse(&text, DocumentSource::Settings).map_err(|error| error.to_string())?;
        assert_eq!(warnings, [""; 0]);
        Ok(tiers.get(&"gold".parse().unwrap()).unwrap().bounds)
    }

    #[test]
    fn bounds_are_read_and_written() {
        let bounds = parse(r#""min": 2, "max": 9.0, "inbound_reserve": 3"#).unwrap();
        assert_eq!(
            bounds,
            TierBounds { min: 2, max: Some(9), inbound_reserve: InboundReserve::Slots(3) }
        );
        assert_eq!(parse(r#""min": null"#), Ok(TierBounds::default()));
        assert_eq!(parse(r#""min": 4, "max": 4"#).map(|it| it.max), Ok(Some(4)));
        let shared = parse(r#""inbound_reserve": "20%""#).unwrap();
        assert_eq!(shared.inbound_reserve, InboundReserve::Share(20));
        let none = TierBounds::default();
        for bounds in [bounds, none, shared, TierBounds { max: Some(0), ..bounds }] {
            assert_eq!(bounds.to_string().parse(), Ok(bounds));
        }
        let table = |text: &str| Tiers::parse(text, DocumentSource::Settings).unwrap().0;
        let tiers = table(r#"{"gold": {"min": 2, "max": 9}, "basic": {"type": "shared"}}"#);
        let value = Value::from(tiers.clone());
        assert_eq!(value["tiers"]["gold"]["max"], 9);
        assert_eq!(value["tiers"]["basic"].get("max"), None);
        assert_eq!(table(&value.to_string()), tiers);
    }

    #[test]
    fn bad_bounds_are_refused_in_words() {
        let refused = |fields| parse(fields).unwrap_err();
        assert_eq!(refused(r#""min": 5, "max": 3"#), r#"tier "gold": min 5 is above max 3"#);
        assert!(refused(r#""max": -1"#).contains("max -1: expected a whole number"));
        assert!(refused(r#""min": "2""#).contains(r#"min "2": expected a whole number"#));
        assert!(refused(r#""inbound_reserve": 0.5"#).contains("inbound_reserve 0.5: expected"));
        assert!(
            refused(r#""inbound_reserve": "100%""#).contains(r#"expected a whole number from"#)
        );
        assert!(refused(r#""inbound_reserve": "3""#).contains(r#"inbound_reserve "3": expected"#));
    }

    #[test]
    fn a_share_is_of_the_slots_in_service() {
        let share = InboundReserve::Share(20);
        assert_eq!([share.of_slots(10), share.of_slots(11), share.of_slots(0)], [2, 3, 0]);
        assert_eq!(share.beside_calls(8), 2, "two of ten");
        assert_eq!(InboundReserve::Slots(3).of_slots(100), 3);
    }
}
