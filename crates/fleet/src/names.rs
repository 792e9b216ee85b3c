//! Names that become parts of Redis keys, URLs and XML. Each type checks its text once, when it
//! is parsed, so its values need no escaping.

use std::{borrow::Borrow, fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};

/// A text that does not match the format of its field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} {shown:?} is not valid: expected {expected}")]
pub struct InvalidName {
    /// The name of the field in requests (`call_sid`).
    pub field: &'static str,
    /// The beginning of the invalid text.
    pub shown: String,
    /// The accepted format.
    pub expected: &'static str,
}

impl InvalidName {
    pub fn new(field: &'static str, text: &str, expected: &'static str) -> Self {
        const MAX_SHOWN_CHARS: usize = 80;
        let mut shown: String = text.chars().take(MAX_SHOWN_CHARS).collect();
        if shown.len() < text.len() {
            shown.push('…');
        }
        Self { field, shown, expected }
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-')
}

/// Rejects `.` and `..`: URL paths resolve them as relative segments.
fn is_name(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(is_word) && text != "." && text != ".."
}

fn is_call_sid(text: &str) -> bool {
    (1..=128).contains(&text.len()) && text.bytes().all(|byte| is_word(byte) || byte == b':')
}

/// Lower case, as host names: a gateway is named after its host.
fn is_gateway_id(text: &str) -> bool {
    (1..=80).contains(&text.len())
        && text.bytes().all(|byte| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.')
        })
}

fn is_stream_id(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_order_id(text: &str) -> bool {
    text.len() == 8 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// `R` and 16 hexadecimal digits.
fn is_reservation_id(text: &str) -> bool {
    text.strip_prefix('R').is_some_and(is_stream_id)
}

/// E.164 with its `+`, or a SIP address without characters that end a path or a line.
fn is_phone_number(text: &str) -> bool {
    if let Some(digits) = text.strip_prefix('+') {
        let is_e164 = (2..=15).contains(&digits.len()) && !digits.starts_with('0');
        return is_e164 && digits.bytes().all(|byte| byte.is_ascii_digit());
    }
    let address = text.strip_prefix("sip:").or_else(|| text.strip_prefix("sips:"));
    let is_allowed = |byte: u8| is_word(byte) || b"~!$&*+,;=:@%".contains(&byte);
    let is_sip = |address: &str| {
        let (user, host) = address.split_once('@').unwrap_or(("anonymous", address));
        let is_complete = !user.is_empty() && !host.is_empty() && !address.contains("..");
        is_complete && address.bytes().all(is_allowed)
    };
    text.len() <= 128 && address.is_some_and(is_sip)
}

/// A provider, or a provider and one of its accounts.
fn is_account_name(text: &str) -> bool {
    let (provider, account) = text.split_once(':').unwrap_or((text, "default"));
    is_name(provider) && is_name(account)
}

fn is_fingerprint(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| is_word(byte) && byte != b'.')
}

/// Rejects `metadata`: `voice:pod:metadata` is the name of another key.
fn is_pod_name(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
        && text != "metadata"
}

const NAME_FORMAT: &str = "1 to 64 characters of A-Z a-z 0-9 . _ - (and not . or ..)";

macro_rules! checked_name {
    ($(#[$doc:meta])* $name:ident, $field:literal, $check:ident, $expected:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidName;

            fn from_str(text: &str) -> Result<Self, InvalidName> {
                if $check(text) {
                    Ok(Self(text.into()))
                } else {
                    Err(InvalidName::new($field, text, $expected))
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidName;

            fn try_from(text: String) -> Result<Self, InvalidName> {
                text.parse()
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

checked_name!(
    /// The name of a voice-agent pod: an RFC 1123 label.
    PodName,
    "pod_name",
    is_pod_name,
    "1 to 63 characters of a-z 0-9 -, not starting or ending with -, and not \"metadata\""
);
checked_name!(
    /// The id of a call, set by the telephony provider.
    CallSid,
    "call_sid",
    is_call_sid,
    "1 to 128 characters of A-Z a-z 0-9 . _ : -"
);
checked_name!(
    /// The id of a merchant, and of the pool dedicated to it.
    MerchantId,
    "merchant_id",
    is_name,
    NAME_FORMAT
);
checked_name!(
    /// The name of a tier.
    TierName,
    "tier",
    is_name,
    NAME_FORMAT
);
checked_name!(
    /// The template that a voice agent uses.
    Template,
    "template",
    is_name,
    NAME_FORMAT
);
checked_name!(
    /// A truncated Base64 hash over the signed parts of a provider's request. Identifies the
    /// request for replay protection.
    Fingerprint,
    "fingerprint",
    is_fingerprint,
    "16 characters of A-Z a-z 0-9 _ -"
);
checked_name!(
    /// One run of a media gateway: its host and a random number.
    GatewayId,
    "gateway",
    is_gateway_id,
    "1 to 80 characters of a-z 0-9 . -"
);
checked_name!(
    /// A media stream: a random number.
    StreamId,
    "stream",
    is_stream_id,
    "16 hexadecimal digits"
);
checked_name!(
    /// A prescale order: a random number.
    OrderId,
    "id",
    is_order_id,
    "8 hexadecimal digits"
);
checked_name!(
    /// A reservation: a random number.
    ReservationId,
    "reservation",
    is_reservation_id,
    "R and 16 hexadecimal digits"
);
checked_name!(
    /// A phone number that calls come from or go to. [`PhoneNumber::parse`] accepts more forms.
    PhoneNumber,
    "number",
    is_phone_number,
    "E.164 (+ and 2 to 15 digits), or a SIP address of at most 128 characters"
);
checked_name!(
    /// An account at a telephony provider: `twilio`, or `twilio:AC1`.
    AccountName,
    "account",
    is_account_name,
    "a provider, or a provider and an account (twilio:AC1)"
);
checked_name!(
    /// The name of a telephony provider in a JSON request.
    Carrier,
    "provider",
    is_name,
    NAME_FORMAT
);
checked_name!(
    /// The flow of a voice agent; only `v2` appears in the stream URL.
    Flow,
    "flow",
    is_name,
    NAME_FORMAT
);

impl PhoneNumber {
    /// Reads a number as providers write it: the `+` may be missing.
    pub fn parse(text: &str) -> Result<Self, InvalidName> {
        let is_bare = text.bytes().all(|byte| byte.is_ascii_digit());
        let with_plus = is_bare.then(|| format!("+{text}").parse().ok()).flatten();
        with_plus.map_or_else(|| text.parse(), Ok)
    }
}

impl From<TierName> for MerchantId {
    fn from(tier: TierName) -> Self {
        Self(tier.0)
    }
}

impl MerchantId {
    /// The tier of the same name: merchant ids and tier names have the same format.
    pub(crate) fn as_tier(&self) -> TierName {
        TierName(self.0.clone())
    }
}

/// The pool of a pod: a tier of the configuration, or the dedicated pool of a merchant.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Pool {
    Tier(TierName),
    Merchant(MerchantId),
}

impl Pool {
    /// The pool as the `tier` of a pod: `gold` or `merchant:acme`.
    pub fn as_tier_value(&self) -> String {
        match self {
            Self::Tier(tier) => tier.to_string(),
            Self::Merchant(id) => format!("merchant:{id}"),
        }
    }
}

impl fmt::Display for Pool {
    /// The pool as a `source_pool`: `pool:gold` or `merchant:acme`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tier(tier) => write!(f, "pool:{tier}"),
            Self::Merchant(id) => write!(f, "merchant:{id}"),
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Pool {
    type Err = InvalidName;

    /// Reads both forms of a pool, `pool:gold` and `gold`.
    fn from_str(text: &str) -> Result<Self, InvalidName> {
        match text.split_once(':') {
            Some(("merchant", id)) => id.parse().map(Self::Merchant),
            Some(("pool", tier)) => tier.parse().map(Self::Tier),
            _ => text.parse().map(Self::Tier),
        }
    }
}

impl From<Pool> for String {
    fn from(pool: Pool) -> Self {
        pool.to_string()
    }
}

impl TryFrom<String> for Pool {
    type Error = InvalidName;

    fn try_from(text: String) -> Result<Self, InvalidName> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_names_are_rfc_1123_labels() {
        for good in ["voice-agent-0", "a", "0", &"a".repeat(63)] {
            assert!(good.parse::<PodName>().is_ok(), "{good}");
        }
        for bad in [
            "",
            "-a",
            "a-",
            "A",
            "a.b",
            "a_b",
            "a:b",
            "a/b",
            "a b",
            "ä",
            &"a".repeat(64),
            "metadata",
        ] {
            assert!(bad.parse::<PodName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn call_sids_may_contain_colons_and_have_a_maximum_length() {
        for good in ["CA1", "b1b1d7a4-1f5c", "a:b.c_d", &"x".repeat(128)] {
            assert!(good.parse::<CallSid>().is_ok(), "{good}");
        }
        for bad in ["", "a b", "a\n", "a\0b", "<a>", "a'b", "é", "a/b", &"x".repeat(129)] {
            assert!(bad.parse::<CallSid>().is_err(), "{bad}");
        }
    }

    #[test]
    fn phone_numbers_are_e164_or_sip_addresses() {
        let sip = format!("sip:{}@example.com", "a".repeat(112));
        assert_eq!(sip.len(), 128);
        for good in ["+14155550100", "+12", "sip:me@example.com", "sips:10.0.0.1:5061", &sip] {
            assert_eq!(PhoneNumber::parse(good).unwrap().as_str(), good);
        }
        assert_eq!(PhoneNumber::parse("14155550100").unwrap().as_str(), "+14155550100");
        for bad in [
            "",
            "+",
            "+1",
            "+0123",
            "0123",
            "+1234567890123456",
            "+1 415",
            "anonymous",
            "sip:",
            "sip:a b",
            "sip:a/b",
            "sip:..",
            "sip:@example.com",
            "sip:a@",
            &format!("{sip}x"),
        ] {
            assert!(PhoneNumber::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn accounts_and_reservations_have_a_format() {
        for good in ["twilio", "twilio:AC1"] {
            assert!(good.parse::<AccountName>().is_ok(), "{good}");
        }
        for bad in ["", ":", "twilio:", ":AC1", "twilio:a:b", "a/b"] {
            assert!(bad.parse::<AccountName>().is_err(), "{bad}");
        }
        assert!("R0123456789abcdef".parse::<ReservationId>().is_ok());
        for bad in ["", "R", "0123456789abcdef0", "R0123456789ABCDEF", "R0123456789abcdef0"] {
            assert!(bad.parse::<ReservationId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn names_cannot_change_the_url_path() {
        for bad in ["", ".", "..", "a/b", "a:b", "a%2fb", "a?b", "a#b", &"x".repeat(65)] {
            assert!(bad.parse::<Template>().is_err(), "{bad}");
        }
        assert!("order-confirmation".parse::<Template>().is_ok());
    }

    #[test]
    fn an_invalid_name_error_names_the_field_and_truncates_the_text() {
        let error = "x".repeat(5000).parse::<CallSid>().unwrap_err();
        assert_eq!(error.field, "call_sid");
        assert!(error.to_string().len() < 300);
    }

    #[test]
    fn pools_round_trip_through_text() {
        for text in ["pool:gold", "merchant:acme"] {
            assert_eq!(text.parse::<Pool>().unwrap().to_string(), text);
        }
        assert_eq!("gold".parse::<Pool>().unwrap().to_string(), "pool:gold");
        assert!("other:gold".parse::<Pool>().is_err());
        assert_eq!("merchant:acme".parse::<Pool>().unwrap().as_tier_value(), "merchant:acme");
        assert_eq!("pool:gold".parse::<Pool>().unwrap().as_tier_value(), "gold");
    }

    #[test]
    fn pools_have_the_same_json_and_debug_form() {
        for text in ["pool:gold", "merchant:acme"] {
            let pool: Pool = text.parse().unwrap();
            assert_eq!(serde_json::to_value(&pool).unwrap(), text);
            assert_eq!(format!("{pool:?}"), text);
        }
    }
}
