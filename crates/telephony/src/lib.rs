//! What telephony providers send and what they accept, one file each: parse,
//! verify, answer. Pure: nothing here reads a socket or a clock.

mod exotel;
mod jambonz;
mod params;
mod plivo;
pub mod secrets;
mod signalwire;
mod signature;
mod telnyx;
#[cfg(test)]
mod tests;
mod twilio;
mod url;
mod vonage;
mod webhook;
mod xml;

use std::{fmt, str::FromStr};

pub use self::{
    params::{BadEncoding, Params},
    secrets::{Secret, is_same},
    signature::sha256_hex,
    url::{DEFAULT_WS_PATH, WsPath, WsUrls},
    webhook::{Content, Covered, Forged, Genuine, Webhook},
};
use fleet::names::{CallSid, Carrier, Flow, InvalidName, MerchantId, Template};

/// A provider we know.
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

/// How a provider speaks.
pub trait Dialect: Sync {
    /// What the provider calls the id of a call.
    fn call_field(&self) -> &'static str {
        "CallSid"
    }

    /// What to do about a request without the id of its call.
    fn without_call(&self) -> &'static str {
        ""
    }

    /// The template of a call that names none.
    fn default_template(&self) -> &'static str {
        "order-confirmation"
    }

    /// Whether our own URL is part of what the provider signs.
    fn signs_urls(&self) -> bool {
        false
    }

    /// Reads the keys that check its signatures.
    fn keys(&self, text: &str) -> Result<Vec<Secret>, String> {
        secrets::list(text)
    }

    /// Whether a request is genuine, by any of the keys.
    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Genuine, Forged>;

    /// The format of the ids of calls, where the provider documents one.
    fn call_format(&self) -> Option<CallFormat> {
        None
    }

    /// The document that connects a call to an agent.
    fn connect(&self, stream: &Stream<'_>) -> Document;

    /// The document that says a sentence and hangs up. `None` for providers
    /// that take a JSON error instead.
    fn hang_up(&self, sentence: &str) -> Option<Document>;

    /// The document that says busy before the call is answered, where there is
    /// such a thing.
    fn busy(&self) -> Option<Document> {
        None
    }

    /// The answer to a callback that asks for nothing.
    fn noted(&self) -> Document {
        xml::response(|_| Ok(()))
    }

    /// Whether a callback says that a call is over; `None` if it does not speak
    /// of it.
    fn call_is_over(&self, webhook: &Webhook<'_>) -> Option<bool>;

    /// The document of a call that waits for an agent, and then comes back to us;
    /// `None` where there is no such thing.
    fn hold(&self, _: &OnHold<'_>) -> Option<Document> {
        None
    }

    /// Whether a call comes back to us when its stream is gone.
    fn comes_back(&self) -> bool {
        false
    }

    /// The document that hangs up without a word.
    fn goodbye(&self) -> Document {
        xml::response(|xml| xml::empty(xml, "Hangup"))
    }

    /// Whether the provider tells when a stream has started.
    fn tells_of_starts(&self) -> bool {
        false
    }

    /// Whether a callback says that a stream has started.
    fn stream_has_started(&self, _: &Webhook<'_>) -> bool {
        false
    }

    /// The same of the stream of a call.
    fn stream_is_over(&self, webhook: &Webhook<'_>) -> Option<bool>;
}

/// A format that a provider gives the ids of its calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFormat {
    /// `CA` and 32 hexadecimal digits.
    TwilioSid,
    /// 32 hexadecimal digits, with the hyphens of a UUID or without.
    Uuid,
}

impl CallFormat {
    pub fn fits(self, id: &str) -> bool {
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
    /// Where the provider shall say what becomes of the stream.
    pub status_url: Option<&'a str>,
    /// Where the call goes when the stream is gone.
    pub after_url: Option<&'a str>,
    /// The trace that the agent goes on with, where something is traced.
    pub traceparent: Option<&'a str>,
}

/// What a call hears while it waits.
#[derive(Debug, Clone, Copy)]
pub struct OnHold<'a> {
    /// Spoken instead of a pause.
    pub sentence: Option<&'a str>,
    /// Played instead of a pause.
    pub audio: Option<&'a str>,
    pub pause_seconds: u64,
    /// Where to ask again.
    pub url: &'a str,
}

/// An answer in a provider's own format; its status is 200.
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

/// A call that asks for an agent, and how it wants to be spoken to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallRequest {
    pub call: CallSid,
    pub merchant: Option<MerchantId>,
    pub provider: Provider,
    /// The provider in the stream URL, where a JSON caller names one that has no webhooks here.
    pub carrier: Option<Carrier>,
    pub flow: Flow,
    pub template: Template,
}

/// The parts of a call request as they came. An empty part counts as missing.
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
        })
    }

    /// What stands for the provider in the stream URL.
    pub(crate) fn provider_name(&self) -> &str {
        self.carrier.as_ref().map_or(self.provider.as_str(), Carrier::as_str)
    }

    /// Reads a webhook: the call's id from what the provider sent, the rest
    /// from the query that the operator wrote into the provider's console.
    pub fn from_webhook(provider: Provider, webhook: &Webhook<'_>) -> Result<Self, InvalidName> {
        let ours = |name| webhook.query.get(name).or_else(|| webhook.sent.get(name));
        let parts = CallParts {
            call: webhook.get(provider.dialect().call_field()),
            merchant: ours("merchant_id"),
            flow: ours("flow"),
            template: ours("template"),
        };
        Self::new(provider, parts)
    }
}

/// The call a webhook is about.
pub fn call_of(provider: Provider, webhook: &Webhook<'_>) -> Result<CallSid, InvalidName> {
    webhook.get(provider.dialect().call_field()).unwrap_or_default().parse()
}
