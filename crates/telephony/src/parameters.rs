//! Custom values of a call for its agent.

use fleet::names::InvalidName;

/// The maximum number of parameters.
pub const MAX_PARAMETERS: usize = 16;
/// Size limit (bytes) of a name.
const MAX_NAME: usize = 32;
/// Size limit (bytes) of a value.
pub const MAX_VALUE: usize = 256;
/// Size limit (bytes) of all names and values together. Plivo passes on no more, and they are part
/// of a URL.
const MAX_SIZE: usize = 512;

/// Prefix of parameters in the query of a webhook.
const QUERY_PREFIX: &str = "param.";

/// Names that providers or the router set in the same place, or that mark a message as an event.
const RESERVED: [&str; 5] = ["traceparent", "call_sid", "callsid", "event", "content-type"];

/// Named values, valid in headers, XML attributes and URLs after escaping.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Parameters(Vec<(String, String)>);

impl Parameters {
    pub const NONE: Self = Self(Vec::new());

    pub fn new<'a>(
        pairs: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, InvalidName> {
        let mut parameters = Self::NONE;
        let mut size = 0;
        for (name, value) in pairs {
            check_name(name)?;
            check_value(value)?;
            size += name.len() + value.len();
            if parameters.0.len() == MAX_PARAMETERS || size > MAX_SIZE {
                let expected = "at most 16 parameters of 512 bytes in all, names included";
                return Err(InvalidName::new("parameters", name, expected));
            }
            // Names become names of headers, which have no case.
            if parameters.iter().any(|(other, _)| other.eq_ignore_ascii_case(name)) {
                let expected = "each name once, whatever its case";
                return Err(InvalidName::new("parameters", name, expected));
            }
            parameters.0.push((name.to_owned(), value.to_owned()));
        }
        Ok(parameters)
    }

    /// Takes the parameters `param.{name}` of a query.
    pub fn from_query<'a>(
        query: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, InvalidName> {
        let pairs = query.into_iter();
        Self::new(pairs.filter_map(|(name, value)| Some((name.strip_prefix(QUERY_PREFIX)?, value))))
    }

    /// The parameters as part of a query that [`Self::from_query`] reads: `&param.{name}={value}`.
    pub fn to_query(&self) -> String {
        let mut query = String::new();
        for (name, value) in self.iter() {
            query.extend(["&", QUERY_PREFIX, name, "="]);
            query.extend(percent_encoding::utf8_percent_encode(
                value,
                percent_encoding::NON_ALPHANUMERIC,
            ));
        }
        query
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// One line `{name}={value}` per parameter: neither has a line break, and a name no `=`.
    pub fn to_lines(&self) -> String {
        let lines: Vec<String> =
            self.iter().map(|(name, value)| format!("{name}={value}")).collect();
        lines.join("\n")
    }

    /// Reads the lines of [`Self::to_lines`].
    pub fn from_lines(text: &str) -> Option<Self> {
        let lines = text.split('\n').filter(|line| !line.is_empty());
        let pairs: Option<Vec<_>> = lines.map(|line| line.split_once('=')).collect();
        Self::new(pairs?).ok()
    }
}

fn check_name(name: &str) -> Result<(), InvalidName> {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    let begins_with_letter = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic());
    if !begins_with_letter || name.len() > MAX_NAME || !name.bytes().all(is_word) {
        let expected = "a name of 1 to 32 characters of A-Z a-z 0-9 _ - that begins with a letter";
        return Err(InvalidName::new("parameters", name, expected));
    }
    if RESERVED.iter().any(|reserved| reserved.eq_ignore_ascii_case(name)) {
        let expected = "a name other than traceparent, call_sid, callsid, event and content-type";
        return Err(InvalidName::new("parameters", name, expected));
    }
    Ok(())
}

/// XML has neither control characters nor the two last characters of the basic plane.
fn check_value(value: &str) -> Result<(), InvalidName> {
    let is_plain = |it: char| !it.is_control() && !matches!(it, '\u{fffe}' | '\u{ffff}');
    if value.len() > MAX_VALUE || !value.chars().all(is_plain) {
        let expected = "a value of at most 256 bytes without control characters";
        return Err(InvalidName::new("parameters", value, expected));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Params;

    fn parse(pairs: &[(&str, &str)]) -> Result<Parameters, InvalidName> {
        Parameters::new(pairs.iter().copied())
    }

    #[test]
    fn parameters_survive_a_query_and_lines() {
        let pairs = [("name", "Jürgen & Söhne = 100 %"), ("order-id", "7"), ("empty", "")];
        let parameters = parse(&pairs).unwrap();
        assert_eq!(parameters.iter().collect::<Vec<_>>(), pairs);
        let query = Params::from_form(&parameters.to_query()).unwrap();
        assert_eq!(Parameters::from_query(query.iter()), Ok(parameters.clone()));
        assert_eq!(Parameters::from_lines(&parameters.to_lines()), Some(parameters));
        assert_eq!(Parameters::from_lines(""), Some(Parameters::NONE));
        assert_eq!(Parameters::from_lines("no value"), None);
        let query = Params::from_form("param.a=1&template=x&parameter=2&param.b=").unwrap();
        let expected = parse(&[("a", "1"), ("b", "")]);
        assert_eq!(Parameters::from_query(query.iter()), expected);
    }

    #[test]
    fn names_values_and_sizes_are_bounded() {
        let long = "v".repeat(MAX_VALUE + 1);
        for (name, value) in [
            ("", "1"),
            ("1a", "1"),
            ("a b", "1"),
            ("a.b", "1"),
            ("a:b", "1"),
            ("ü", "1"),
            (&"n".repeat(MAX_NAME + 1), "1"),
            ("TraceParent", "1"),
            ("call_sid", "1"),
            ("event", "1"),
            ("a", "line\nbreak"),
            ("a", "\u{0}"),
            ("a", "\u{ffff}"),
            ("a", &long),
        ] {
            assert!(parse(&[(name, value)]).is_err(), "{name:?} {value:?}");
        }
        assert!(parse(&[("a", "1"), ("A", "2")]).is_err(), "the same header");
        let names: Vec<String> = (0..=MAX_PARAMETERS).map(|it| format!("n{it}")).collect();
        let pairs: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "1")).collect();
        assert!(parse(&pairs).is_err() && parse(&pairs[1..]).is_ok());
        let half = "v".repeat(MAX_VALUE - 1);
        assert!(parse(&[("a", &half), ("b", &half)]).is_ok());
        assert!(parse(&[("a", &half), ("bb", &half)]).is_err());
    }
}
