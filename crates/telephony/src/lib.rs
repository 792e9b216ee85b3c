//! Telephony providers, one file each: parse a webhook, verify its signature, build the response
//! document. The crate does no I/O and reads no clock.

mod exotel;
mod jambonz;
mod parameters;
mod params;
mod plivo;
pub mod secrets;
mod signalwire;
mod signature;
mod start;
mod telnyx;
#[cfg(test)]
mod tests;
mod twilio;
mod url;
mod vonage;
mod webhook;
mod xml;

use std::{fmt, str::FromStr};

use self::secrets::constant_time_eq;
pub use self::{
    parameters::{MAX_PARAMETERS, MAX_VALUE, Parameters},
    params::{BadEncoding, Params},
    secrets::Secret,
    signature::sha256_hex,
    start::InvalidStart,
    url::{DEFAULT_WS_PATH, WsPath, WsUrls},
    webhook::{BodyFormat, Coverage, InvalidSignature, Verified, Webhook},
};
use fleet::names::{CallSid, Carrier, Flow, InvalidName, MerchantId, PhoneNumber, Template};

/// A supported telephony provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Provider {
    #[default]
    Twilio,
    Plivo,
    Exotel,
    SignalWire,
    Telnyx,
    Vonage,
    Jambonz,
}

/// The webhook format of a provider: parameters, signatures and response documents.
pub trait Dialect: Sync {
    /// The parameter that holds the call id.
    fn call_id_field(&self) -> &'static str {
        "CallSid"
    }

    /// The error message for a request without a call id; empty for the general message.
    fn missing_call_hint(&self) -> &'static str {
        ""
    }

    /// The template of a call request without one.
    fn default_template(&self) -> &'static str {
        "order-confirmation"
    }

    /// Whether the provider signs the URL of the webhook, so that `PUBLIC_URL` must be known.
    fn signs_urls(&self) -> bool {
        false
    }

    /// Whether the provider signs the handshakes of media streams, as a GET of the stream URL.
    fn signs_streams(&self) -> bool {
        false
    }

    /// Parses the keys that verify the provider's signatures.
    fn keys(&self, text: &str) -> Result<Vec<Secret>, String> {
        secrets::list(text)
    }

    /// Verifies a request against all keys; one match is enough.
    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Verified, InvalidSignature>;

    /// The format of call ids, if the provider documents one.
    fn call_format(&self) -> Option<CallFormat> {
        None
    }

    /// The document that connects a call to an agent.
    fn connect(&self, stream: &Stream<'_>) -> Document;

    /// The document that speaks a sentence and hangs up. `None` for providers that receive a
    /// JSON error instead.
    fn hang_up(&self, sentence: &str) -> Option<Document>;

    /// The document that rejects an unanswered call as busy, if the provider has one.
    fn busy(&self) -> Option<Document> {
        None
    }

    /// The response to a status callback.
    fn acknowledgement(&self) -> Document {
        xml::response(|_| Ok(()))
    }

    /// Whether a callback reports the end of a call; `None` if it has no call status.
    fn call_ended(&self, webhook: &Webhook<'_>) -> Option<bool>;

    /// The document that holds a waiting call and then redirects it to `HoldOptions::url`.
    /// `None` for providers without redirects.
    fn hold(&self, _: &HoldOptions<'_>) -> Option<Document> {
        None
    }

    /// Whether the provider requests another document after a pause or after a stream.
    fn supports_redirect(&self) -> bool {
        false
    }

    /// The document that hangs up without speaking.
    fn silent_hang_up(&self) -> Document {
        xml::response(|xml| xml::empty(xml, "Hangup"))
    }

    /// Whether the provider sends a callback when a stream starts.
    fn reports_stream_start(&self) -> bool {
        false
    }

    /// Whether a callback reports the start of a stream.
    fn stream_started(&self, _: &Webhook<'_>) -> bool {
        false
    }

    /// Whether a callback reports the end of a stream; `None` if it has no stream status.
    fn stream_ended(&self, webhook: &Webhook<'_>) -> Option<bool>;
}

/// The format of a provider's call ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFormat {
    /// `CA` and 32 hexadecimal digits.
    TwilioSid,
    /// 32 hexadecimal digits, with the hyphens of a UUID or without.
    Uuid,
}

impl CallFormat {
    pub fn matches(self, id: &str) -> bool {
        let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        match self {
            Self::TwilioSid => {
                id.strip_prefix("CA").is_some_and(|rest| rest.len() == 32 && is_hex(rest))
            }
            Self::Uuid => {
                let parts: Vec<&str> = id.split('-').collect();
                let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
                matches!(lengths[..], [32] | [8, 4, 4, 4, 12]) && parts.into_iter().all(is_hex)
            }
        }
    }

    pub fn expected(self) -> &'static str {
        match self {
            Self::TwilioSid => "CA and 32 hexadecimal digits",
            Self::Uuid => "a UUID",
        }
    }
}

impl Provider {
    pub const ALL: [Self; 7] = [
        Self::Twilio,
        Self::Plivo,
        Self::Exotel,
        Self::SignalWire,
        Self::Telnyx,
        Self::Vonage,
        Self::Jambonz,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Twilio => "twilio",
            Self::Plivo => "plivo",
            Self::Exotel => "exotel",
            Self::SignalWire => "signalwire",
            Self::Telnyx => "telnyx",
            Self::Vonage => "vonage",
            Self::Jambonz => "jambonz",
        }
    }

    pub fn dialect(self) -> &'static dyn Dialect {
        match self {
            Self::Twilio => &twilio::Twilio,
            Self::Plivo => &plivo::Plivo,
            Self::Exotel => &exotel::Exotel,
            Self::SignalWire => &signalwire::SignalWire,
            Self::Telnyx => &telnyx::Telnyx,
            Self::Vonage => &vonage::Vonage,
            Self::Jambonz => &jambonz::Jambonz,
        }
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Provider {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let known = Self::ALL.into_iter().find(|provider| provider.as_str() == text);
        known.ok_or_else(|| {
            let expected = "twilio, plivo, exotel, signalwire, telnyx, vonage or jambonz";
            InvalidName::new("provider", text, expected)
        })
    }
}

/// The stream of a call to its agent.
#[derive(Debug, Clone, Copy)]
pub struct Stream<'a> {
    pub url: &'a str,
    pub call: &'a CallSid,
    /// Callback URL for the stream's status.
    pub status_url: Option<&'a str>,
    /// Redirect target after the stream has ended.
    pub after_stream_url: Option<&'a str>,
    /// Trace context for the agent, if the request is traced.
    pub traceparent: Option<&'a str>,
    /// Custom values for the agent.
    pub parameters: &'a Parameters,
}

impl<'a> Stream<'a> {
    /// Values that documents pass to the agent under their names.
    pub(crate) fn values(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.parameters.iter().chain(self.traceparent.map(|value| ("traceparent", value)))
    }
}

/// Contents of the document that holds a waiting call.
#[derive(Debug, Clone, Copy)]
pub struct HoldOptions<'a> {
    /// Spoken instead of a pause.
    pub sentence: Option<&'a str>,
    /// Played instead of a pause.
    pub audio: Option<&'a str>,
    pub pause_seconds: u64,
    /// Redirect target after the pause.
    pub url: &'a str,
}

/// A response body in a provider's format; its HTTP status is 200.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    pub content_type: &'static str,
    pub body: String,
}

impl Document {
    fn json(value: &serde_json::Value) -> Self {
        Self { content_type: "application/json", body: value.to_string() }
    }
}

/// A request to connect a call to an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallRequest {
    pub call: CallSid,
    pub merchant: Option<MerchantId>,
    pub provider: Provider,
    /// Provider name for the stream URL, if a JSON client names a provider without webhooks here.
    pub carrier: Option<Carrier>,
    pub flow: Flow,
    pub template: Template,
    /// Custom values for the agent.
    pub parameters: Parameters,
    /// The reservation of a dial, as given: an invalid one must not refuse the call.
    pub reservation: Option<String>,
    /// The called number and the caller's, where they are valid.
    pub numbers: Vec<PhoneNumber>,
}

/// The unparsed parts of a call request. An empty part counts as missing.
#[derive(Debug, Clone, Copy, Default)]
pub struct CallParts<'a> {
    pub call: Option<&'a str>,
    pub merchant: Option<&'a str>,
    pub flow: Option<&'a str>,
    pub template: Option<&'a str>,
}

impl CallRequest {
    pub fn new(provider: Provider, parts: CallParts<'_>) -> Result<Self, InvalidName> {
        let given = |part: Option<&'_ str>| part.filter(|text| !text.is_empty()).map(str::to_owned);
        let template =
            given(parts.template).unwrap_or_else(|| provider.dialect().default_template().into());
        Ok(Self {
            call: parts.call.unwrap_or_default().parse()?,
            merchant: given(parts.merchant).map(MerchantId::try_from).transpose()?,
            provider,
            carrier: None,
            flow: given(parts.flow).unwrap_or_else(|| "v2".into()).parse()?,
            template: template.parse()?,
            parameters: Parameters::NONE,
            reservation: None,
            numbers: Vec::new(),
        })
    }

    /// The provider segment of the stream URL.
    pub(crate) fn provider_name(&self) -> &str {
        self.carrier.as_ref().map_or(self.provider.as_str(), Carrier::as_str)
    }

    /// Reads a webhook: the call id from the provider's parameters, the rest from the query that
    /// the operator configured in the provider's console.
    pub fn from_webhook(provider: Provider, webhook: &Webhook<'_>) -> Result<Self, InvalidName> {
        let configured = |name| webhook.query.get(name).or_else(|| webhook.body_params.get(name));
        let parts = CallParts {
            call: webhook.get(provider.dialect().call_id_field()),
            merchant: configured("merchant_id"),
            flow: configured("flow"),
            template: configured("template"),
        };
        let parameters = Parameters::from_query(webhook.query.iter())?;
        let reservation = configured("reservation").filter(|text| !text.is_empty());
        let reservation = reservation.map(str::to_owned);
        let numbers = numbers(webhook);
        Ok(Self { parameters, reservation, numbers, ..Self::new(provider, parts)? })
    }
}

/// The called number and the caller's number of a webhook, under the names that providers use.
fn numbers(webhook: &Webhook<'_>) -> Vec<PhoneNumber> {
    const NAMES: [[&str; 3]; 2] = [["To", "to", "CallTo"], ["From", "from", "CallFrom"]];
    let number = |names: [&str; 3]| {
        let text = names.into_iter().find_map(|name| webhook.get(name))?;
        PhoneNumber::parse(text.trim()).ok()
    };
    NAMES.into_iter().filter_map(number).collect()
}

/// The call that a webhook refers to.
pub fn call_of(provider: Provider, webhook: &Webhook<'_>) -> Result<CallSid, InvalidName> {
    webhook.get(provider.dialect().call_id_field()).unwrap_or_default().parse()
}
