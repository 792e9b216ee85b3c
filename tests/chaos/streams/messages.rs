//! Messages of the providers, reduced to what the gateway looks at. The payload of a frame names
//! its call and its sequence number.

use telephony::Provider;
use tokio_tungstenite::tungstenite::Message;

/// The provider of a call, which its id names.
pub(crate) fn provider_of(call: &str) -> Provider {
    call.rsplit('-').next().and_then(|name| name.parse().ok()).expect("the id of a stream's call")
}

pub(crate) fn is_binary(provider: Provider) -> bool {
    matches!(provider, Provider::Vonage | Provider::Jambonz)
}

pub(crate) fn subprotocol(provider: Provider) -> Option<&'static str> {
    (provider == Provider::Jambonz).then_some("audio.jambonz.org")
}

/// The messages before the first frame.
pub(crate) fn opening(call: &str) -> Vec<String> {
    let connected = r#"{"event":"connected","version":"1.0.0"}"#.to_owned();
    match provider_of(call) {
        Provider::Twilio => vec![
            connected,
            format!(r#"{{"event":"start","streamSid":"MZ1","start":{{"callSid":"{call}"}}}}"#),
        ],
        Provider::SignalWire => vec![
            connected,
            format!(r#"{{"event":"start","streamSid":"6f","start":{{"callSid":"{call}"}}}}"#),
        ],
        Provider::Telnyx => vec![
            connected,
            format!(r#"{{"event":"start","start":{{"call_control_id":"{call}"}}}}"#),
        ],
        Provider::Exotel => vec![
            connected,
            format!(r#"{{"event":"start","stream_sid":"E1","start":{{"call_sid":"{call}"}}}}"#),
        ],
        Provider::Plivo => {
            vec![format!(r#"{{"event":"start","start":{{"callId":"{call}","streamId":"P1"}}}}"#)]
        }
        Provider::Vonage => {
            vec![format!(r#"{{"event":"websocket:connected","call_sid":"{call}"}}"#)]
        }
        Provider::Jambonz => vec![format!(r#"{{"callSid":"{call}","mixType":"mono"}}"#)],
    }
}

/// The reaction of an agent to a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    Echo,
    /// End the call.
    Close,
}

/// A frame of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    pub call: String,
    pub sequence: u64,
    pub request: Request,
}

impl Frame {
    /// The message in the provider's format, with `padding` more bytes.
    pub(crate) fn message(&self, padding: usize) -> Message {
        let request = if self.request == Request::Close { 'c' } else { 'e' };
        let payload = format!("{}:{}:{request}:{}", self.call, self.sequence, "x".repeat(padding));
        if is_binary(provider_of(&self.call)) {
            return Message::binary(payload.into_bytes());
        }
        Message::text(format!(r#"{{"event":"media","media":{{"payload":"{payload}"}}}}"#))
    }

    /// Reads a frame; `None` for another message.
    pub(crate) fn read(message: &Message) -> Option<Self> {
        let payload = match message {
            Message::Text(text) => {
                let (_, rest) = text.split_once(r#""payload":""#)?;
                rest.split('"').next()?
            }
            Message::Binary(bytes) => std::str::from_utf8(bytes).ok()?,
            _ => return None,
        };
        let mut parts = payload.split(':');
        let (call, sequence) = (parts.next()?.to_owned(), parts.next()?.parse().ok()?);
        let request = if parts.next()? == "c" { Request::Close } else { Request::Echo };
        Some(Self { call, sequence, request })
    }
}
