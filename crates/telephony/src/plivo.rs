//! Plivo: a form with `CallUUID`; responses in Plivo XML.

use quick_xml::events::BytesText;

use crate::Secret;
use crate::{
    CallFormat, Dialect, Document, HoldOptions, Stream,
    params::Params,
    signature::{Hash, check_base64},
    webhook::{Coverage, InvalidSignature, Verified, Webhook},
    xml,
};

pub(crate) struct Plivo;

const SIGNATURE: &str = "x-plivo-signature-v3";
/// Signature with the main account's token, for calls of a subaccount.
const MAIN_SIGNATURE: &str = "x-plivo-signature-ma-v3";
const NONCE: &str = "x-plivo-signature-v3-nonce";

/// Values of `CallStatus` for a call that has ended.
const END_STATUSES: [&str; 8] =
    ["completed", "busy", "failed", "timeout", "no-answer", "cancel", "canceled", "rejected"];

impl Dialect for Plivo {
    fn call_id_field(&self) -> &'static str {
        "CallUUID"
    }

    fn signs_urls(&self) -> bool {
        true
    }

    fn signs_streams(&self) -> bool {
        true
    }

    fn call_format(&self) -> Option<CallFormat> {
        Some(CallFormat::Uuid)
    }

    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Verified, InvalidSignature> {
        let nonce = webhook.header(NONCE)?;
        let signatures =
            || webhook.header_values(SIGNATURE).chain(webhook.header_values(MAIN_SIGNATURE));
        if signatures().next().is_none() {
            return Err(InvalidSignature::Missing(SIGNATURE));
        }
        // Plivo sends forms and documents no signature of other bodies.
        if webhook.is_json() {
            return Err(InvalidSignature::ContentNotSigned);
        }
        let given = signatures().flat_map(|list| list.split(',')).map(str::trim);
        let text = format!("{}.{nonce}", signed_text(webhook));
        check_base64(Hash::Sha256, keys, text.as_bytes(), given.filter(|one| !one.is_empty()))?;
        Ok(Verified::signed(Coverage::Everything, text.as_bytes()))
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
            let values = extra_headers(stream);
            if !values.is_empty() {
                element = element.with_attribute(("extraHeaders", values.as_str()));
            }
            element.write_text_content(BytesText::new(stream.url))?;
            stream.after_stream_url.map_or(Ok(()), |url| xml::redirect(xml, url))
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

    fn call_ended(&self, webhook: &Webhook<'_>) -> Option<bool> {
        let hung_up = webhook.get("HangupCause").is_some_and(|cause| !cause.is_empty())
            || webhook.get("Event") == Some("Hangup");
        let status = webhook.get("CallStatus").map(|status| END_STATUSES.contains(&status));
        if hung_up { Some(true) } else { status }
    }

    fn hold(&self, hold: &HoldOptions<'_>) -> Option<Document> {
        Some(xml::hold(hold, "Speak", "Wait"))
    }

    fn supports_redirect(&self) -> bool {
        true
    }

    fn reports_stream_start(&self) -> bool {
        true
    }

    fn stream_started(&self, webhook: &Webhook<'_>) -> bool {
        matches!(webhook.get("Event"), Some("StartStream" | "started"))
    }

    fn stream_ended(&self, webhook: &Webhook<'_>) -> Option<bool> {
        let event = webhook.get("Event")?;
        Some(matches!(
            event,
            "StopStream" | "DroppedStream" | "FailedStream" | "stopped" | "failed"
        ))
    }
}

/// The text that signature V3 covers: the URL with its sorted query, then the sorted form.
fn signed_text(webhook: &Webhook<'_>) -> String {
    let path = webhook.target.split('?').next().unwrap_or_default();
    let query = joined(&webhook.query, "=", "&");
    let form = joined(&webhook.body_params, "", "");
    let (mark, dot) = match (query.is_empty(), form.is_empty()) {
        (true, true) => ("", ""),
        (true, false) | (false, true) => ("?", ""),
        (false, false) => ("?", "."),
    };
    format!("{}{path}{mark}{query}{dot}{form}", webhook.public_url)
}

/// All pairs, sorted, with the given separators.
fn joined(params: &Params, within: &str, between: &str) -> String {
    let mut pairs: Vec<(&str, &str)> = params.iter().collect();
    pairs.sort_unstable();
    let pairs: Vec<String> =
        pairs.into_iter().map(|(name, value)| format!("{name}{within}{value}")).collect();
    pairs.join(between)
}

/// Size limit (bytes) of `extraHeaders`.
const MAX_EXTRA_HEADERS: usize = 512;

/// The values that `extraHeaders` can carry: its names and values have letters and digits only.
fn extra_headers(stream: &Stream<'_>) -> String {
    let is_plain =
        |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let mut headers = String::new();
    for (name, value) in stream.values().filter(|(name, value)| is_plain(name) && is_plain(value)) {
        let separator = if headers.is_empty() { "" } else { "," };
        if headers.len() + separator.len() + name.len() + 1 + value.len() <= MAX_EXTRA_HEADERS {
            headers.extend([separator, name, "=", value]);
        }
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Parameters;

    #[test]
    fn a_call_is_connected_to_its_stream() {
        let call = "CA1".parse().unwrap();
        let (url, status_url) = ("wss://a/b?c&d", Some("https://r/s"));
        let stream = Stream {
            url,
            call: &call,
            status_url,
            after_stream_url: None,
            traceparent: None,
            parameters: &Parameters::NONE,
        };
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
