//! What telephony providers send and what they accept, one file each. Pure:
//! nothing here reads a socket or a clock.

pub mod exotel;
mod params;
pub mod plivo;
pub mod twilio;
mod url;
mod xml;

use std::{fmt, str::FromStr};

pub use self::{
    params::{BadEncoding, Params},
    url::{DEFAULT_WS_PATH, WsPath, WsUrls},
};
use crate::domain::names::{CallSid, Flow, InvalidName, MerchantId, Template};

/// A provider we know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Provider {
    #[default]
    Twilio,
    Plivo,
    Exotel,
}

impl Provider {
    pub const ALL: [Self; 3] = [Self::Twilio, Self::Plivo, Self::Exotel];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Twilio => "twilio",
            Self::Plivo => "plivo",
            Self::Exotel => "exotel",
        }
    }

    /// What the provider calls the id of a call.
    pub fn call_field(self) -> &'static str {
        match self {
            Self::Twilio => twilio::CALL_FIELD,
            Self::Plivo => plivo::CALL_FIELD,
            Self::Exotel => exotel::CALL_FIELD,
        }
    }

    /// The template of a call that names none.
    pub fn default_template(self) -> &'static str {
        match self {
            Self::Exotel => "template",
            _ => "order-confirmation",
        }
    }

    /// The document that connects a call to an agent.
    pub fn connect(self, ws_url: &str) -> Document {
        match self {
            Self::Twilio => twilio::connect(ws_url),
            Self::Plivo => plivo::connect(ws_url),
            Self::Exotel => exotel::connect(ws_url),
        }
    }

    /// The document that says a sentence and hangs up. `None` for providers
    /// that take a JSON error instead.
    pub fn hang_up(self, sentence: &str) -> Option<Document> {
        match self {
            Self::Twilio => Some(twilio::hang_up(sentence)),
            Self::Plivo => Some(plivo::hang_up(sentence)),
            Self::Exotel => None,
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
        known.ok_or_else(|| InvalidName::new("provider", text, "twilio, plivo or exotel"))
    }
}

/// An answer in a provider's own format; its status is 200.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    pub content_type: &'static str,
    pub body: String,
}

/// A call that asks for an agent, and how it wants to be spoken to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallRequest {
    pub call: CallSid,
    pub merchant: Option<MerchantId>,
    pub provider: Provider,
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
        let template = given(parts.template).unwrap_or_else(|| provider.default_template().into());
        Ok(Self {
            call: parts.call.unwrap_or_default().parse()?,
            merchant: given(parts.merchant).map(MerchantId::try_from).transpose()?,
            provider,
            flow: given(parts.flow).unwrap_or_else(|| "v2".into()).parse()?,
            template: template.parse()?,
        })
    }

    /// Reads a webhook: the call's id from what the provider sent, the rest
    /// from the query that the operator wrote into the provider's console.
    pub fn from_webhook(
        provider: Provider,
        query: &Params,
        body: &Params,
    ) -> Result<Self, InvalidName> {
        let field = provider.call_field();
        let ours = |name| query.get(name).or_else(|| body.get(name));
        let parts = CallParts {
            call: body.get(field).or_else(|| query.get(field)),
            merchant: ours("merchant_id"),
            flow: ours("flow"),
            template: ours("template"),
        };
        Self::new(provider, parts)
    }
}
