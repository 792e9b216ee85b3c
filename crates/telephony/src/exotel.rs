//! Exotel: `CallSid` in a query, a form or JSON; responses in JSON. Exotel does not sign
//! requests; a secret in the query of the webhook URL authenticates them.

use serde_json::{Value, json};

use crate::Secret;
use crate::{
    Dialect, Document, Stream,
    webhook::{InvalidSignature, Verified, Webhook},
};

pub(crate) struct Exotel;

const TOKEN: &str = "auth_token";
/// Status values of a call or stream that has ended.
const END_STATUSES: [&str; 7] =
    ["completed", "failed", "busy", "no-answer", "canceled", "cancelled", "stopped"];

impl Dialect for Exotel {
    fn default_template(&self) -> &'static str {
        "template"
    }

    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Verified, InvalidSignature> {
        let given =
            webhook.query.get(TOKEN).ok_or(InvalidSignature::Missing("auth_token in the query"))?;
        if keys.iter().any(|key| key.matches(given)) {
            Ok(Verified::with_secret())
        } else {
            Err(InvalidSignature::Mismatch)
        }
    }

    fn missing_call_hint(&self) -> &'static str {
        "CallSid is missing: in the Exotel flow, give the applet the URL of this endpoint itself \
         (a Voicebot or Stream applet then adds CallSid), or put CallSid into its query"
    }

    fn connect(&self, stream: &Stream<'_>) -> Document {
        Document::json(&json!({"url": stream.url}))
    }

    fn hang_up(&self, _: &str) -> Option<Document> {
        None
    }

    fn acknowledgement(&self) -> Document {
        Document::json(&json!({"success": true}))
    }

    fn silent_hang_up(&self) -> Document {
        self.acknowledgement()
    }

    fn call_ended(&self, webhook: &Webhook<'_>) -> Option<bool> {
        let status = webhook.get("Status").or_else(|| webhook.get("CallStatus"));
        match (webhook.get("EventType"), status) {
            (Some("terminal"), _) => Some(true),
            (_, Some(status)) => Some(END_STATUSES.contains(&status)),
            (Some(_), None) => Some(false),
            (None, None) => None,
        }
    }

    /// The Passthru applet sends the stream's fields one by one, or as JSON in one parameter.
    fn stream_ended(&self, webhook: &Webhook<'_>) -> Option<bool> {
        let whole: Value = webhook
            .get("Stream")
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default();
        let part = |name: &str| {
            let single = webhook.get(&format!("Stream[{name}]"));
            single.or_else(|| whole[name].as_str()).filter(|text| !text.is_empty())
        };
        if part("DisconnectedBy").is_some() {
            return Some(true);
        }
        match (part("Status"), webhook.get("EventType")) {
            (Some(status), _) => Some(END_STATUSES.contains(&status)),
            (None, Some(event)) => Some(matches!(event, "stream-stop" | "stream-end")),
            (None, None) => None,
        }
    }
}
