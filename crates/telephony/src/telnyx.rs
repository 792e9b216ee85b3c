//! Telnyx: TeXML, which resembles TwiML, and Ed25519 signatures of the body.

use aws_lc_rs::signature::{ED25519, ParsedPublicKey};
use data_encoding::BASE64;

use crate::{
    Dialect, Document, HoldOptions, Stream,
    twilio::{self, Twilio},
    webhook::{Coverage, InvalidSignature, Verified, Webhook},
};
use crate::{Secret, secrets};

pub(crate) struct Telnyx;

const SIGNATURE: &str = "telnyx-signature-ed25519";
const TIMESTAMP: &str = "telnyx-timestamp";

impl Dialect for Telnyx {
    fn keys(&self, text: &str) -> Result<Vec<Secret>, String> {
        let keys = secrets::list(text)?;
        let is_key = |key: &Secret| public_key(key).is_ok();
        if keys.iter().all(is_key) {
            Ok(keys)
        } else {
            Err("public keys of 32 bytes in Base64, as the Telnyx portal shows them".into())
        }
    }

    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Verified, InvalidSignature> {
        let (signature, signed_at) = (webhook.header(SIGNATURE)?, webhook.header(TIMESTAMP)?);
        let is_number =
            !signed_at.is_empty() && signed_at.bytes().all(|byte| byte.is_ascii_digit());
        let seconds = Some(signed_at).filter(|_| is_number).and_then(|text| text.parse().ok());
        webhook.check_time(seconds.ok_or(InvalidSignature::Malformed(TIMESTAMP))?)?;
        let signature = BASE64
            .decode(signature.as_bytes())
            .map_err(|_| InvalidSignature::Malformed(SIGNATURE))?;
        // Without a body the signature covers only the timestamp.
        if webhook.body.is_empty() {
            return Err(InvalidSignature::ContentNotSigned);
        }
        let text = [signed_at.as_bytes(), b"|", webhook.body].concat();
        let is_signed = |key: &Secret| {
            public_key(key).is_ok_and(|key| key.verify_sig(&text, &signature).is_ok())
        };
        if keys.iter().any(is_signed) {
            Ok(Verified::signed(Coverage::Body, &text))
        } else {
            Err(InvalidSignature::Mismatch)
        }
    }

    fn connect(&self, stream: &Stream<'_>) -> Document {
        twilio::connect(stream, &[("bidirectionalMode", "rtp"), ("bidirectionalCodec", "PCMU")])
    }

    fn hang_up(&self, sentence: &str) -> Option<Document> {
        Twilio.hang_up(sentence)
    }

    fn busy(&self) -> Option<Document> {
        Twilio.busy()
    }

    fn call_ended(&self, webhook: &Webhook<'_>) -> Option<bool> {
        Twilio.call_ended(webhook)
    }

    fn hold(&self, hold: &HoldOptions<'_>) -> Option<Document> {
        Twilio.hold(hold)
    }

    fn supports_redirect(&self) -> bool {
        true
    }

    fn reports_stream_start(&self) -> bool {
        true
    }

    fn stream_started(&self, webhook: &Webhook<'_>) -> bool {
        Twilio.stream_started(webhook)
    }

    fn stream_ended(&self, webhook: &Webhook<'_>) -> Option<bool> {
        twilio::stream_ended(webhook)
    }
}

fn public_key(key: &Secret) -> Result<ParsedPublicKey, ()> {
    let bytes = BASE64.decode(key.as_bytes()).map_err(drop)?;
    ParsedPublicKey::new(&ED25519, bytes).map_err(drop)
}
