//! Vonage: the call id in `uuid`; responses are NCCOs; a JWT signs the request.

use data_encoding::BASE64URL_NOPAD;
use serde_json::{Value, json};

use crate::{
    CallFormat, Dialect, Document, Stream,
    signature::{Hash, hmac, sha256_hex},
    webhook::{Coverage, InvalidSignature, Verified, Webhook},
};
use crate::{Secret, constant_time_eq};

pub(crate) struct Vonage;

const AUTHORIZATION: &str = "authorization";
/// Values of `status` for a call that has ended.
const END_STATUSES: [&str; 7] =
    ["completed", "failed", "rejected", "busy", "cancelled", "timeout", "unanswered"];

impl Dialect for Vonage {
    fn call_id_field(&self) -> &'static str {
        "uuid"
    }

    fn call_format(&self) -> Option<CallFormat> {
        Some(CallFormat::Uuid)
    }

    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Verified, InvalidSignature> {
        let malformed = InvalidSignature::Malformed(AUTHORIZATION);
        let (scheme, token) =
            webhook.header(AUTHORIZATION)?.trim().split_once(' ').ok_or(malformed)?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(malformed);
        }
        let (claims, signed) = verified_claims(token.trim(), keys)?;
        let time = |name: &str| claims[name].as_u64();
        match (time("iat"), time("exp")) {
            (_, Some(expires)) if expires < webhook.received_at => {
                return Err(InvalidSignature::Stale);
            }
            (Some(issued), _) => webhook.check_time(issued)?,
            (None, Some(expires)) => webhook.check_time(expires)?,
            (None, None) => return Err(malformed),
        }
        let coverage = match claims["payload_hash"].as_str() {
            None if !webhook.body.is_empty() => return Err(InvalidSignature::ContentNotSigned),
            None => Coverage::Nothing,
            Some(signed_hash) => {
                let is_same =
                    |hash: &String| constant_time_eq(hash.as_bytes(), signed_hash.as_bytes());
                let is_intact = payload_hashes(webhook).iter().any(is_same);
                match (is_intact, webhook.body.is_empty()) {
                    (false, _) => return Err(InvalidSignature::Mismatch),
                    (true, true) => Coverage::Everything,
                    (true, false) => Coverage::Body,
                }
            }
        };
        Ok(Verified::signed(coverage, signed.as_bytes()))
    }

    fn connect(&self, stream: &Stream<'_>) -> Document {
        // The agent learns the call id only from this header.
        let mut headers = json!({"call_sid": stream.call});
        for (name, value) in stream.values() {
            headers[name] = json!(value);
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

    fn acknowledgement(&self) -> Document {
        Document::json(&json!({"success": true}))
    }

    /// No further actions: the call ends.
    fn silent_hang_up(&self) -> Document {
        Document::json(&json!([]))
    }

    fn call_ended(&self, webhook: &Webhook<'_>) -> Option<bool> {
        webhook.get("status").map(|status| END_STATUSES.contains(&status))
    }

    fn stream_ended(&self, webhook: &Webhook<'_>) -> Option<bool> {
        let has_ended = |status| status == "disconnected" || END_STATUSES.contains(&status);
        webhook.get("status").map(has_ended)
    }
}

/// The claims of a token that one of the keys signed, and the signed part of the token.
fn verified_claims<'a>(
    token: &'a str,
    keys: &[Secret],
) -> Result<(Value, &'a str), InvalidSignature> {
    let malformed = InvalidSignature::Malformed(AUTHORIZATION);
    let (signed, signature) = token.rsplit_once('.').ok_or(malformed)?;
    let (head, claims) = signed.split_once('.').ok_or(malformed)?;
    let is_signed = |key: &Secret| {
        let expected =
            BASE64URL_NOPAD.encode(hmac(Hash::Sha256, key, &[signed.as_bytes()]).as_ref());
        constant_time_eq(expected.as_bytes(), signature.as_bytes())
    };
    if !keys.iter().any(is_signed) {
        return Err(InvalidSignature::Mismatch);
    }
    let read = |part: &str| -> Result<Value, InvalidSignature> {
        let bytes = BASE64URL_NOPAD.decode(part.as_bytes()).map_err(|_| malformed)?;
        serde_json::from_slice(&bytes).map_err(|_| malformed)
    };
    // A token with another `alg` must not pass as HS256 (algorithm confusion).
    if read(head)?["alg"] != "HS256" {
        return Err(malformed);
    }
    Ok((read(claims)?, signed))
}

/// The valid payload hashes: that of the body; without a body, that of the query as a JSON
/// object, with or without the parameters that the operator configured.
fn payload_hashes(webhook: &Webhook<'_>) -> Vec<String> {
    if !webhook.body.is_empty() {
        return vec![sha256_hex(webhook.body)];
    }
    let object = |includes: fn(&str) -> bool| {
        let pairs = webhook.query.iter().filter(|(name, _)| includes(name));
        let texts = pairs.map(|(name, value)| format!("{}:{}", json!(name), json!(value)));
        sha256_hex(format!("{{{}}}", texts.collect::<Vec<_>>().join(",")).as_bytes())
    };
    let is_from_provider = |name: &str| !["merchant_id", "flow", "template"].contains(&name);
    vec![object(|_| true), object(is_from_provider)]
}
