//! Parameters of a webhook, from a query, a form or a JSON body.

use percent_encoding::percent_decode_str;
use serde_json::Value;

/// Text that is not what its content type says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadEncoding(pub String);

/// Named values in the order they came. A name may stand more than once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Params(Vec<(String, String)>);

impl Params {
    /// Reads `application/x-www-form-urlencoded` text.
    pub fn from_form(text: &str) -> Result<Self, BadEncoding> {
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            Ok((decode(name)?, decode(value)?))
        });
        pairs.collect::<Result<_, _>>().map(Self)
    }

    /// Reads a JSON object; what is not text or a number is passed over.
    pub fn from_json(bytes: &[u8]) -> Result<Self, BadEncoding> {
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|error| BadEncoding(format!("not JSON: {error}")))?;
        let Value::Object(fields) = value else {
            return Err(BadEncoding("not a JSON object".into()));
        };
        let pairs = fields.into_iter().filter_map(|(name, value)| match value {
            Value::String(text) => Some((name, text)),
            Value::Number(number) => Some((name, number.to_string())),
            _ => None,
        });
        Ok(Self(pairs.collect()))
    }

    /// All names with their values, in the order they came.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The first value of a name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }
}

fn decode(text: &str) -> Result<String, BadEncoding> {
    let spaced = text.replace('+', " ");
    let decoded = percent_decode_str(&spaced).decode_utf8();
    decoded.map(|text| text.into_owned()).map_err(|_| BadEncoding("not valid UTF-8".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_decoded_once() {
        let params =
            Params::from_form("CallSid=CA1&From=%2B14158675310&a+b=c%20d&e&CallSid=CA2&&=x")
                .unwrap();
        assert_eq!(params.get("CallSid"), Some("CA1"));
        assert_eq!(params.get("From"), Some("+14158675310"));
        assert_eq!(params.get("a b"), Some("c d"));
        assert_eq!(params.get("e"), Some(""));
        assert_eq!(params.get("none"), None);
        assert!(Params::from_form("a=%FF").is_err());
    }

    #[test]
    fn json_objects_give_texts_and_numbers() {
        let params =
            Params::from_json(br#"{"CallSid": "CA1", "n": 7, "x": null, "y": [1]}"#).unwrap();
        assert_eq!(
            (params.get("CallSid"), params.get("n"), params.get("x")),
            (Some("CA1"), Some("7"), None)
        );
        for bad in ["", "[]", "7", "{"] {
            assert!(Params::from_json(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
