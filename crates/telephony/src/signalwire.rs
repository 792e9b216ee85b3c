//! SignalWire: Twilio's formats with its own signature header.

use crate::Secret;
use crate::{
    CallFormat, Dialect, Document, HoldOptions, Stream,
    signature::Hash,
    twilio::{self, Twilio},
    webhook::{InvalidSignature, Verified, Webhook},
};

pub(crate) struct SignalWire;

impl Dialect for SignalWire {
    fn signs_urls(&self) -> bool {
        true
    }

    fn call_format(&self) -> Option<CallFormat> {
        Some(CallFormat::Uuid)
    }

    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Verified, InvalidSignature> {
        twilio::verify(webhook, keys, "x-signalwire-signature", Hash::Sha1)
    }

    fn connect(&self, stream: &Stream<'_>) -> Document {
        Twilio.connect(stream)
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
        Twilio.stream_ended(webhook)
    }
}
