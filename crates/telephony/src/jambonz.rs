//! jambonz: JSON with `call_sid`, answered with a list of verbs.

use data_encoding::HEXLOWER;
use serde_json::json;

use crate::{
    CallFormat, Dialect, Document, Stream,
    signature::{Hash, hmac},
    twilio,
    webhook::{Covered, Forged, Genuine, Webhook},
};
use crate::{Secret, is_same};

pub(crate) struct Jambonz;

const SIGNATURE: &str = "jambonz-signature";
/// Of the audio in both directions (Hz): what telephone lines carry, and the default of
/// `listen`. The direction back has no default.
const SAMPLE_RATE: u32 = 8_000;

impl Dialect for Jambonz {
    fn call_field(&self) -> &'static str {
        "call_sid"
    }

    fn call_format(&self) -> Option<CallFormat> {
        Some(CallFormat::Uuid)
    }

    /// `t=<seconds>,v1=<signature>`, perhaps with several signatures.
    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Genuine, Forged> {
        let malformed = Forged::Malformed(SIGNATURE);
        let header = webhook.header(SIGNATURE)?;
        let parts = || header.split(',').filter_map(|part| part.trim().split_once('='));
        let signed_at = parts().find(|(name, _)| *name == "t").ok_or(malformed)?.1;
        webhook.check_time(signed_at.parse().map_err(|_| malformed)?)?;
        // Nothing but the time is signed where there is no body.
        if webhook.body.is_empty() {
            return Err(Forged::Uncovered);
        }
        let text = [signed_at.as_bytes(), b".", webhook.body].concat();
        let is_signed = |key: &Secret| {
            let tag = hmac(Hash::Sha256, key, &[&text]);
            let expected = HEXLOWER.encode(tag.as_ref());
            let mut given = parts().filter(|(name, _)| *name == "v1");
            given.any(|(_, given)| is_same(expected.as_bytes(), given.as_bytes()))
        };
        if keys.iter().any(is_signed) {
            Ok(Genuine::signed(Covered::Body, &text))
        } else {
            Err(Forged::Mismatch)
        }
    }

    fn connect(&self, stream: &Stream<'_>) -> Document {
        // Audio from the agent is played as it comes only where streaming is asked for: by
        // default jambonz drops the binary frames, and the caller hears nothing.
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
        if let Some(traceparent) = stream.traceparent {
            listen["metadata"] = json!({"traceparent": traceparent});
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

    /// No further verbs: the call ends.
    fn noted(&self) -> Document {
        Document::json(&json!([]))
    }

    fn goodbye(&self) -> Document {
        Document::json(&json!([{"verb": "hangup"}]))
    }

    fn call_is_over(&self, webhook: &Webhook<'_>) -> Option<bool> {
        webhook.get("call_status").map(|status| twilio::OVER.contains(&status))
    }

    /// The hook of a `listen` is called when the listening has ended. What is said
    /// of a call before it was answered is no such thing.
    fn stream_is_over(&self, webhook: &Webhook<'_>) -> Option<bool> {
        let status = webhook.get("call_status").unwrap_or_default();
        Some(!matches!(status, "trying" | "ringing" | "early-media" | "queued"))
    }
}
