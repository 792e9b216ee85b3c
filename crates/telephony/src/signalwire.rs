//! SignalWire: speaks as Twilio does, and signs under a name of its own.

use crate::Secret;
use crate::{
    CallFormat, Dialect, Document, OnHold, Stream,
    signature::Hash,
    twilio::{self, Twilio},
    webhook::{Forged, Genuine, Webhook},
};

pub(crate) struct SignalWire;

impl Dialect for SignalWire {
    fn signs_urls(&self) -> bool {
        true
    }

    fn call_format(&self) -> Option<CallFormat> {
        Some(CallFormat::Uuid)
    }

    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Genuine, Forged> {
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

    fn call_is_over(&self, webhook: &Webhook<'_>) -> Option<bool> {
        Twilio.call_is_over(webhook)
    }

    fn hold(&self, hold: &OnHold<'_>) -> Option<Document> {
        Twilio.hold(hold)
    }

    fn comes_back(&self) -> bool {
        true
    }

    fn tells_of_starts(&self) -> bool {
        true
    }

    fn stream_has_started(&self, webhook: &Webhook<'_>) -> bool {
        Twilio.stream_has_started(webhook)
    }

    fn stream_is_over(&self, webhook: &Webhook<'_>) -> Option<bool> {
        Twilio.stream_is_over(webhook)
    }
}
