//! Vonage: the id in `uuid`, answered with an NCCO, signed by a JWT.

use data_encoding::BASE64URL_NOPAD;
use serde_json::{Value, json};

use crate::{
    CallFormat, Dialect, Document, Stream,
    signature::{Hash, hmac, sha256_hex},
    webhook::{Covered, Forged, Genuine, Webhook},
};
use crate::{Secret, is_same};

pub(crate) struct Vonage;

const AUTHORIZATION: &str = "authorization";
const OVER: [&str; 7] =
    ["completed", "failed", "rejected", "busy", "cancelled", "timeout", "unanswered"];

impl Dialect for Vonage {
    fn call_field(&self) -> &'static str {
        "uuid"
    }

    fn call_format(&self) -> Option<CallFormat> {
        Some(CallFormat::Uuid)
    }

    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Genuine, Forged> {
        let malformed = Forged::Malformed(AUTHORIZATION);
        let (scheme, token) =
            webhook.header(AUTHORIZATION)?.trim().split_once(' ').ok_or(malformed)?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(malformed);
        }
        let (claims, signed) = verified_claims(token.trim(), keys)?;
        let time = |name: &str| claims[name].as_u64();
        match (time("iat"), time("exp")) {
            (_, Some(expires)) if expires < webhook.at => return Err(Forged::Stale),
            (Some(issued), _) => webhook.check_time(issued)?,
            (None, Some(expires)) => webhook.check_time(expires)?,
            (None, None) => return Err(malformed),
        }
        let covered = match claims["payload_hash"].as_str() {
            None if !webhook.body.is_empty() => return Err(Forged::Uncovered),
            None => Covered::Nothing,
            Some(promised) => {
                let hashes = payload_hashes(webhook);
                let is_whole =
                    hashes.iter().any(|hash| is_same(hash.as_bytes(), promised.as_bytes()));
                match (is_whole, webhook.body.is_empty()) {
                    (false, _) => return Err(Forged::Mismatch),
                    (true, true) => Covered::Everything,
                    (true, false) => Covered::Body,
                }
            }
        };
        Ok(Genuine::signed(covered, signed.as_bytes()))
    }

    fn connect(&self, stream: &Stream<'_>) -> Document {
        // Nothing else tells the agent which call it hears.
        let mut headers = json!({"call_sid": stream.call});
        if let Some(traceparent) = stream.traceparent {
            headers["traceparent"] = json!(traceparent);
        }
        Document::json(&json!([{
            "action": "connect",
            "endpoint": [{
                "type": "websocket",
                "uri": stream.url,
                "content-type": "audio/l16;rate=16000",
                "headers": headers,
            }],
        }]))
    }

    fn hang_up(&self, sentence: &str) -> Option<Document> {
        Some(Document::json(&json!([{"action": "talk", "text": sentence}])))
    }

    fn noted(&self) -> Document {
        Document::json(&json!({"success": true}))
    }

    /// No further actions: the call ends.
    fn goodbye(&self) -> Document {
        Document::json(&json!([]))
    }

    fn call_is_over(&self, webhook: &Webhook<'_>) -> Option<bool> {
        webhook.get("status").map(|status| OVER.contains(&status))
    }

    fn stream_is_over(&self, webhook: &Webhook<'_>) -> Option<bool> {
        webhook.get("status").map(|status| status == "disconnected" || OVER.contains(&status))
    }
}

/// The claims of a token that one of the keys signed, and the part that is signed.
fn verified_claims<'a>(token: &'a str, keys: &[Secret]) -> Result<(Value, &'a str), Forged> {
    let malformed = Forged::Malformed(AUTHORIZATION);
    let (signed, signature) = token.rsplit_once('.').ok_or(malformed)?;
    let (head, claims) = signed.split_once('.').ok_or(malformed)?;
    let is_signed = |key: &Secret| {
        let expected =
            BASE64URL_NOPAD.encode(hmac(Hash::Sha256, key, &[signed.as_bytes()]).as_ref());
        is_same(expected.as_bytes(), signature.as_bytes())
    };
    if !keys.iter().any(is_signed) {
        return Err(Forged::Mismatch);
    }
    let read = |part: &str| -> Result<Value, Forged> {
        let bytes = BASE64URL_NOPAD.decode(part.as_bytes()).map_err(|_| malformed)?;
        serde_json::from_slice(&bytes).map_err(|_| malformed)
    };
    // What was signed for another algorithm was not signed for this.
    if read(head)?["alg"] != "HS256" {
        return Err(malformed);
    }
    Ok((read(claims)?, signed))
}

/// What the hash of the payload may be: that of the body, or, where there is none,
/// of the query as a JSON object, with or without what we put into it ourselves.
fn payload_hashes(webhook: &Webhook<'_>) -> Vec<String> {
    if !webhook.body.is_empty() {
        return vec![sha256_hex(webhook.body)];
    }
    let object = |takes: fn(&str) -> bool| {
        let pairs = webhook.query.iter().filter(|(name, _)| takes(name));
        let texts = pairs.map(|(name, value)| format!("{}:{}", json!(name), json!(value)));
        sha256_hex(format!("{{{}}}", texts.collect::<Vec<_>>().join(",")).as_bytes())
    };
    let is_theirs = |name: &str| !["merchant_id", "flow", "template"].contains(&name);
    vec![object(|_| true), object(is_theirs)]
}
