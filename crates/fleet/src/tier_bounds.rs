//! The bounds of a tier's number of pods, for the capacity policy.

use std::{fmt, str::FromStr};

use serde_json::{Map, Value};

use crate::tiers::{TierError, count, present};

/// Fields of a tier document.
pub(crate) const FIELDS: [&str; 3] = ["min", "max", "inbound_reserve"];

/// Limits of the pods that the capacity policy asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierBounds {
    pub min: u32,
    /// `None` for no limit.
    pub max: Option<u32>,
    /// Slots that stay free beyond the live calls.
    pub inbound_reserve: u32,
}

impl TierBounds {
    pub(crate) fn read(name: &str, fields: &Map<String, Value>) -> Result<Self, TierError> {
        let number = |field| present(fields, field).map(|it| count(name, field, it)).transpose();
        let [min, max, inbound_reserve] = FIELDS.map(number);
        let (min, max) = (min?.unwrap_or(0), max?);
        if let Some(max) = max.filter(|max| min > *max) {
            let error = format!("tier {name:?}: min {min} is above max {max}");
            return Err(TierError::new(error));
        }
        Ok(Self { min, max, inbound_reserve: inbound_reserve?.unwrap_or(0) })
    }

    /// Adds the fields that differ from the defaults to a tier document.
    pub(crate) fn write(self, fields: &mut Map<String, Value>) {
        let numbers = [
            Some(self.min).filter(|min| *min > 0),
            self.max,
            Some(self.inbound_reserve).filter(|reserve| *reserve > 0),
        ];
        for (field, number) in FIELDS.into_iter().zip(numbers) {
            fields.extend(number.map(|number| (field.to_owned(), number.into())));
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
            inbound_reserve: number(inbound_reserve)?,
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
        assert_eq!(bounds, TierBounds { min: 2, max: Some(9), inbound_reserve: 3 });
        assert_eq!(parse(r#""min": null"#), Ok(TierBounds::default()));
        assert_eq!(parse(r#""min": 4, "max": 4"#).map(|it| it.max), Ok(Some(4)));
        for bounds in [bounds, TierBounds::default(), TierBounds { max: Some(0), ..bounds }] {
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
    }
}
