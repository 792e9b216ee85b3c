//! Plivo: a form with `CallUUID`, answered in Plivo XML.

use quick_xml::events::BytesText;

use crate::Secret;
use crate::{
    CallFormat, Dialect, Document, OnHold, Stream,
    params::Params,
    signature::{Hash, check_base64},
    webhook::{Covered, Forged, Genuine, Webhook},
    xml,
};

pub(crate) struct Plivo;

const SIGNATURE: &str = "x-plivo-signature-v3";
/// Signed with the token of the main account, where the call is a subaccount's.
const MAIN_SIGNATURE: &str = "x-plivo-signature-ma-v3";
const NONCE: &str = "x-plivo-signature-v3-nonce";

/// What a call is after its end.
const OVER: [&str; 8] =
    ["completed", "busy", "failed", "timeout", "no-answer", "cancel", "canceled", "rejected"];

impl Dialect for Plivo {
    fn call_field(&self) -> &'static str {
        "CallUUID"
    }

    fn signs_urls(&self) -> bool {
        true
    }

    fn call_format(&self) -> Option<CallFormat> {
        Some(CallFormat::Uuid)
    }

    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Genuine, Forged> {
        let nonce = webhook.header(NONCE)?;
        let lines = || webhook.lines(SIGNATURE).chain(webhook.lines(MAIN_SIGNATURE));
        if lines().next().is_none() {
            return Err(Forged::Missing(SIGNATURE));
        }
        // Plivo sends forms; how it would sign anything else is not known.
        if webhook.is_json() {
            return Err(Forged::Uncovered);
        }
        let given = lines().flat_map(|some| some.split(',')).map(str::trim);
        let text = format!("{}.{nonce}", signed_text(webhook));
        check_base64(Hash::Sha256, keys, text.as_bytes(), given.filter(|one| !one.is_empty()))?;
        Ok(Genuine::signed(Covered::Everything, text.as_bytes()))
    }

    fn connect(&self, stream: &Stream<'_>) -> Document {
        xml::response(|xml| {
            let mut element = xml.create_element("Stream").with_attributes([
                ("bidirectional", "true"),
                ("keepCallAlive", "true"),
                ("contentType", "audio/x-mulaw;rate=8000"),
            ]);
            if let Some(url) = stream.status_url {
                element = element.with_attributes([
                    ("statusCallbackUrl", url),
                    ("statusCallbackMethod", "POST"),
                ]);
            }
            element.write_text_content(BytesText::new(stream.url))?;
            stream.after_url.map_or(Ok(()), |url| xml::redirect(xml, url))
        })
    }

    fn hang_up(&self, sentence: &str) -> Option<Document> {
        Some(xml::response(|xml| {
            xml::text(xml, "Speak", sentence)?;
            xml::empty(xml, "Hangup")
        }))
    }

    fn busy(&self) -> Option<Document> {
        Some(xml::response(|xml| {
            let hangup = xml.create_element("Hangup").with_attribute(("reason", "busy"));
            hangup.write_empty().map(drop)
        }))
    }

    fn call_is_over(&self, webhook: &Webhook<'_>) -> Option<bool> {
        let hung_up = webhook.get("HangupCause").is_some_and(|cause| !cause.is_empty())
            || webhook.get("Event") == Some("Hangup");
        let status = webhook.get("CallStatus").map(|status| OVER.contains(&status));
        if hung_up { Some(true) } else { status }
    }

    fn hold(&self, hold: &OnHold<'_>) -> Option<Document> {
        Some(xml::hold(hold, "Speak", "Wait"))
    }

    fn comes_back(&self) -> bool {
        true
    }

    fn tells_of_starts(&self) -> bool {
        true
    }

    fn stream_has_started(&self, webhook: &Webhook<'_>) -> bool {
        matches!(webhook.get("Event"), Some("StartStream" | "started"))
    }

    fn stream_is_over(&self, webhook: &Webhook<'_>) -> Option<bool> {
        let event = webhook.get("Event")?;
        Some(matches!(
            event,
            "StopStream" | "DroppedStream" | "FailedStream" | "stopped" | "failed"
        ))
    }
}

/// The URL with its query sorted, and the sorted parameters of a form, as V3
/// strings them together.
fn signed_text(webhook: &Webhook<'_>) -> String {
    let path = webhook.target.split('?').next().unwrap_or_default();
    let query = joined(&webhook.query, "=", "&");
    let sent = joined(&webhook.sent, "", "");
    let (mark, dot) = match (query.is_empty(), sent.is_empty()) {
        (true, true) => ("", ""),
        (true, false) | (false, true) => ("?", ""),
        (false, false) => ("?", "."),
    };
    format!("{}{path}{mark}{query}{dot}{sent}", webhook.public_url)
}

/// All pairs, sorted, with something in between.
fn joined(params: &Params, within: &str, between: &str) -> String {
    let mut pairs: Vec<(&str, &str)> = params.iter().collect();
    pairs.sort_unstable();
    let pairs: Vec<String> =
        pairs.into_iter().map(|(name, value)| format!("{name}{within}{value}")).collect();
    pairs.join(between)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_connected_to_its_stream() {
        let call = "CA1".parse().unwrap();
        let (url, status_url) = ("wss://a/b?c&d", Some("https://r/s"));
        let stream = Stream { url, call: &call, status_url, after_url: None, traceparent: None };
        assert_eq!(
            Plivo.connect(&stream).body,
            r#"<?xml version="1.0" encoding="UTF-8"?><Response><Stream bidirectional="true" keepCallAlive="true" contentType="audio/x-mulaw;rate=8000" statusCallbackUrl="https://r/s" statusCallbackMethod="POST">wss://a/b?c&amp;d</Stream></Response>"#
        );
    }

    #[test]
    fn a_refusal_is_spoken() {
        assert_eq!(
            Plivo.hang_up("Goodbye.").unwrap().body,
            r#"<?xml version="1.0" encoding="UTF-8"?><Response><Speak>Goodbye.</Speak><Hangup/></Response>"#
        );
    }
}
