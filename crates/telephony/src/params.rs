//! Parameters of a webhook, from a query, a form or a JSON body.

use percent_encoding::percent_decode_str;
use serde_json::Value;

/// Text that does not match its content type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadEncoding(pub String);

/// Named values in order of appearance. Names may repeat.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Params(Vec<(String, String)>);

impl Params {
    /// Parses `application/x-www-form-urlencoded`.
    pub fn from_form(text: &str) -> Result<Self, BadEncoding> {
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            Ok((decode(name)?, decode(value)?))
        });
        pairs.collect::<Result<_, _>>().map(Self)
    }

    /// Parses `multipart/form-data` and skips files.
    pub fn from_multipart(text: &str, boundary: &str) -> Result<Self, BadEncoding> {
        let broken = || BadEncoding("not multipart/form-data".into());
        let (mut pairs, edge) = (Vec::new(), format!("--{boundary}"));
        let parts =
            text.strip_prefix(&edge).or_else(|| Some(text.split_once(&format!("\n{edge}"))?.1));
        for part in parts.ok_or_else(broken)?.split(&format!("\n{edge}")) {
            if part.starts_with("--") {
                return Ok(Self(pairs));
            }
            let part = part.trim_start_matches('\r').strip_prefix('\n').ok_or_else(broken)?;
            let (head, value) = part
                .split_once("\r\n\r\n")
                .or_else(|| part.split_once("\n\n"))
                .ok_or_else(broken)?;
            let disposition = head
                .lines()
                .filter_map(|line| line.split_once(':'))
                .find(|(name, _)| name.eq_ignore_ascii_case("content-disposition"))
                .ok_or_else(broken)?
                .1;
            let name = disposition.split(';').find_map(|it| it.trim().strip_prefix("name="));
            let name = name.ok_or_else(broken)?.trim_matches('"');
            if !disposition.contains("filename") {
                pairs.push((name.into(), value.strip_suffix('\r').unwrap_or(value).into()));
            }
        }
        Err(broken())
    }

    /// Parses a JSON object. Nested objects and lists stay JSON text.
    pub fn from_json(bytes: &[u8]) -> Result<Self, BadEncoding> {
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|error| BadEncoding(format!("not JSON: {error}")))?;
        let Value::Object(fields) = value else {
            return Err(BadEncoding("not a JSON object".into()));
        };
        let pairs = fields.into_iter().filter_map(|(name, value)| match value {
            Value::String(text) => Some((name, text)),
            Value::Null => None,
            // A call id may not contain a plus: 1e+16 becomes 1e16.
            Value::Number(number) => Some((name, number.to_string().replace('+', ""))),
            other => Some((name, other.to_string())),
        });
        Ok(Self(pairs.collect()))
    }

    /// All names and values in order of appearance.
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
    fn multipart_forms_are_parsed_and_malformed_ones_refused() {
        let text = "--B\r\nContent-Disposition: form-data; name=\"CallSid\"\r\n\r\nCA1\r\n--B\r\n\
            content-disposition: form-data; name=x; filename=\"y\"\r\nContent-Type: text/plain\r\n\r\nz\r\n--B\r\n\
            Content-Disposition: form-data; name=\"Status\"\r\n\r\na\r\nb\r\n--B--\r\n";
        let params = Params::from_multipart(text, "B").unwrap();
        assert_eq!((params.get("CallSid"), params.get("Status")), (Some("CA1"), Some("a\r\nb")));
        assert_eq!(params.get("x"), None);
        assert_eq!(
            Params::from_multipart(&text.replace("\r\n", "\n"), "B").unwrap().get("CallSid"),
            Some("CA1")
        );
        for bad in ["", "--B", "--B--", "--C\r\n", "--B\r\n\r\nx\r\n--B--", &text[..text.len() - 6]]
        {
            let read = Params::from_multipart(bad, "B");
            assert!(read.is_err() || read.unwrap().iter().count() == 0, "{bad:?}");
        }
    }

    #[test]
    fn json_objects_yield_texts_and_numbers() {
        let params =
            Params::from_json(br#"{"CallSid": "CA1", "n": 7, "x": null, "y": [1]}"#).unwrap();
        assert_eq!(
            (params.get("CallSid"), params.get("n"), params.get("x")),
            (Some("CA1"), Some("7"), None)
        );
        assert_eq!(params.get("y"), Some("[1]"));
        let large = Params::from_json(br#"{"n": 2.5e+17}"#).unwrap();
        assert_eq!(large.get("n"), Some("2.5e17"));
        for bad in ["", "[]", "7", "{"] {
            assert!(Params::from_json(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
