//! Exotel: `CallSid` in a query, a form or JSON, answered in JSON. It signs
//! nothing; a secret in the query of our URL takes the place of a signature.

use serde_json::{Value, json};

use crate::Secret;
use crate::{
    Dialect, Document, Stream,
    webhook::{Forged, Genuine, Webhook},
};

pub(crate) struct Exotel;

const TOKEN: &str = "auth_token";
/// What a call or a stream is after its end.
const OVER: [&str; 7] =
    ["completed", "failed", "busy", "no-answer", "canceled", "cancelled", "stopped"];

impl Dialect for Exotel {
    fn default_template(&self) -> &'static str {
        "template"
    }

    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Genuine, Forged> {
        let given = webhook.query.get(TOKEN).ok_or(Forged::Missing("auth_token in the query"))?;
        if keys.iter().any(|key| key.is(given)) {
            Ok(Genuine::with_secret())
        } else {
            Err(Forged::Mismatch)
        }
    }

    fn without_call(&self) -> &'static str {
        "CallSid is missing: in the Exotel flow, give the applet the URL of this endpoint itself \
         (a Voicebot or Stream applet then adds CallSid), or put CallSid into its query"
    }

    fn connect(&self, stream: &Stream<'_>) -> Document {
        Document::json(&json!({"url": stream.url}))
    }

    fn hang_up(&self, _: &str) -> Option<Document> {
        None
    }

    fn noted(&self) -> Document {
        Document::json(&json!({"success": true}))
    }

    fn goodbye(&self) -> Document {
        self.noted()
    }

    fn call_is_over(&self, webhook: &Webhook<'_>) -> Option<bool> {
        let status = webhook.get("Status").or_else(|| webhook.get("CallStatus"));
        match (webhook.get("EventType"), status) {
            (Some("terminal"), _) => Some(true),
            (_, Some(status)) => Some(OVER.contains(&status)),
            (Some(_), None) => Some(false),
            (None, None) => None,
        }
    }

    /// The Passthru applet sends fields of the stream one by one, or all of them
    /// as JSON in one.
    fn stream_is_over(&self, webhook: &Webhook<'_>) -> Option<bool> {
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
            (Some(status), _) => Some(OVER.contains(&status)),
            (None, Some(event)) => Some(matches!(event, "stream-stop" | "stream-end")),
            (None, None) => None,
        }
    }
}
