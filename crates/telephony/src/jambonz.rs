//! jambonz: JSON with `call_sid`; responses are lists of verbs.

use data_encoding::HEXLOWER;
use serde_json::json;

use crate::{
    CallFormat, Dialect, Document, Stream,
    signature::{Hash, hmac},
    twilio,
    webhook::{Coverage, InvalidSignature, Verified, Webhook},
};
use crate::{Secret, constant_time_eq};

pub(crate) struct Jambonz;

const SIGNATURE: &str = "jambonz-signature";
/// Sample rate in both directions (Hz): that of telephone lines and the default of `listen`.
/// Audio from the agent has no default.
const SAMPLE_RATE: u32 = 8_000;

impl Dialect for Jambonz {
    fn call_id_field(&self) -> &'static str {
        "call_sid"
    }

    fn call_format(&self) -> Option<CallFormat> {
        Some(CallFormat::Uuid)
    }

    /// Parses `t=<seconds>,v1=<signature>`; `v1` may repeat.
    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Verified, InvalidSignature> {
        let malformed = InvalidSignature::Malformed(SIGNATURE);
        let header = webhook.header(SIGNATURE)?;
        let parts = || header.split(',').filter_map(|part| part.trim().split_once('='));
        let signed_at = parts().find(|(name, _)| *name == "t").ok_or(malformed)?.1;
        webhook.check_time(signed_at.parse().map_err(|_| malformed)?)?;
        // Without a body the signature covers only the timestamp.
        if webhook.body.is_empty() {
            return Err(InvalidSignature::ContentNotSigned);
        }
        let text = [signed_at.as_bytes(), b".", webhook.body].concat();
        let is_signed = |key: &Secret| {
            let tag = hmac(Hash::Sha256, key, &[&text]);
            let expected = HEXLOWER.encode(tag.as_ref());
            let mut given = parts().filter(|(name, _)| *name == "v1");
            given.any(|(_, given)| constant_time_eq(expected.as_bytes(), given.as_bytes()))
        };
        if keys.iter().any(is_signed) {
            Ok(Verified::signed(Coverage::Body, &text))
        } else {
            Err(InvalidSignature::Mismatch)
        }
    }

    fn connect(&self, stream: &Stream<'_>) -> Document {
        // Without `streaming` jambonz drops the agent's binary frames and plays no audio.
        let mut listen = json!({
            "verb": "listen",
            "url": stream.url,
            "sampleRate": SAMPLE_RATE,
            "bidirectionalAudio":
                {"enabled": true, "streaming": true, "sampleRate": SAMPLE_RATE},
        });
        if let Some(url) = stream.status_url {
            listen["actionHook"] = json!(url);
        }
        for (name, value) in stream.values() {
            listen["metadata"][name] = json!(value);
        }
        Document::json(&json!([listen]))
    }

    fn hang_up(&self, sentence: &str) -> Option<Document> {
        Some(Document::json(&json!([{"verb": "say", "text": sentence}, {"verb": "hangup"}])))
    }

    fn busy(&self) -> Option<Document> {
        Some(Document::json(
            &json!([{"verb": "sip:decline", "status": 486, "reason": "Busy Here"}]),
        ))
    }

    /// An empty list of verbs: the call ends.
    fn acknowledgement(&self) -> Document {
        Document::json(&json!([]))
    }

    fn silent_hang_up(&self) -> Document {
        Document::json(&json!([{"verb": "hangup"}]))
    }

    fn call_ended(&self, webhook: &Webhook<'_>) -> Option<bool> {
        webhook.get("call_status").map(|status| twilio::END_STATUSES.contains(&status))
    }

    /// jambonz calls the `actionHook` of a `listen` at its end. A status from before the call is
    /// answered does not come from that hook.
    fn stream_ended(&self, webhook: &Webhook<'_>) -> Option<bool> {
        let status = webhook.get("call_status").unwrap_or_default();
        Some(!matches!(status, "trying" | "ringing" | "early-media" | "queued"))
    }
}
