//! Twilio: a form with `CallSid`; responses in TwiML.

use crate::{
    CallFormat, Dialect, Document, HoldOptions, Stream,
    signature::{Hash, check_base64, sha256_hex},
    webhook::{Coverage, InvalidSignature, Verified, Webhook},
    xml,
};
use crate::{Secret, constant_time_eq};

pub(crate) struct Twilio;

/// Values of `CallStatus` for a call that has ended.
pub(crate) const END_STATUSES: [&str; 5] = ["completed", "busy", "failed", "no-answer", "canceled"];

impl Dialect for Twilio {
    fn signs_urls(&self) -> bool {
        true
    }

    fn signs_streams(&self) -> bool {
        true
    }

    fn call_format(&self) -> Option<CallFormat> {
        Some(CallFormat::TwilioSid)
    }

    fn verify(&self, webhook: &Webhook<'_>, keys: &[Secret]) -> Result<Verified, InvalidSignature> {
        // Custom signing keys may use a newer hash, which this header names.
        let hash = match webhook.headers.get("x-twilio-webhooks-signature-settings") {
            None => Hash::Sha1,
            Some(settings) => parse_hash(settings.to_str().unwrap_or("algorithm=?"))?,
        };
        verify(webhook, keys, "x-twilio-signature", hash)
    }

    fn connect(&self, stream: &Stream<'_>) -> Document {
        connect(stream, &[])
    }

    fn hang_up(&self, sentence: &str) -> Option<Document> {
        Some(hang_up(sentence))
    }

    fn busy(&self) -> Option<Document> {
        Some(xml::response(|xml| {
            let reject = xml.create_element("Reject").with_attribute(("reason", "busy"));
            reject.write_empty().map(drop)
        }))
    }

    fn call_ended(&self, webhook: &Webhook<'_>) -> Option<bool> {
        webhook.get("CallStatus").map(|status| END_STATUSES.contains(&status))
    }

    fn hold(&self, hold: &HoldOptions<'_>) -> Option<Document> {
        Some(xml::hold(hold, "Say", "Pause"))
    }

    fn supports_redirect(&self) -> bool {
        true
    }

    fn reports_stream_start(&self) -> bool {
        true
    }

    fn stream_started(&self, webhook: &Webhook<'_>) -> bool {
        webhook.get("StreamEvent") == Some("stream-started")
    }

    fn stream_ended(&self, webhook: &Webhook<'_>) -> Option<bool> {
        stream_ended(webhook)
    }
}

/// Parses `key=…,algorithm=HMAC_SHA256`.
fn parse_hash(settings: &str) -> Result<Hash, InvalidSignature> {
    let mut parts = settings.split(',').filter_map(|part| part.split_once('='));
    let algorithm = parts.find(|(name, _)| name.trim() == "algorithm").map(|(_, value)| value);
    match algorithm.map(str::trim) {
        None | Some("" | "HMAC_SHA1") => Ok(Hash::Sha1),
        Some("HMAC_SHA256") => Ok(Hash::Sha256),
        Some(_) => Err(InvalidSignature::Malformed("x-twilio-webhooks-signature-settings")),
    }
}

/// Twilio's scheme signs the URL followed by the form parameters, sorted by name. For any other
/// body the URL contains the body's hash.
pub(crate) fn verify(
    webhook: &Webhook<'_>,
    keys: &[Secret],
    header: &'static str,
    hash: Hash,
) -> Result<Verified, InvalidSignature> {
    let given = webhook.header(header)?;
    let mut params = String::new();
    if webhook.is_json() {
        let signed_hash =
            webhook.query.get("bodySHA256").ok_or(InvalidSignature::ContentNotSigned)?;
        if !constant_time_eq(sha256_hex(webhook.body).as_bytes(), signed_hash.as_bytes()) {
            return Err(InvalidSignature::Mismatch);
        }
    } else {
        let mut pairs: Vec<(&str, &str)> = webhook.body_params.iter().collect();
        pairs.sort_unstable();
        pairs.dedup();
        pairs.into_iter().for_each(|(name, value)| {
            params.push_str(name);
            params.push_str(value);
        });
    }
    // Twilio signs some URLs with the port and some without.
    for base in with_and_without_port(webhook.public_url) {
        let text = format!("{base}{}{params}", webhook.target);
        if check_base64(hash, keys, text.as_bytes(), [given]).is_ok() {
            return Ok(Verified::signed(Coverage::Everything, text.as_bytes()));
        }
    }
    Err(InvalidSignature::Mismatch)
}

/// The URL without a port, and with its port or the default port of its scheme.
fn with_and_without_port(url: &str) -> [String; 2] {
    let (scheme, rest) = url.split_once("://").unwrap_or(("https", url));
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host_end = authority.find(']').map_or(0, |bracket| bracket + 1);
    let (host, port) = match authority[host_end..].find(':') {
        Some(colon) => authority.split_at(host_end + colon),
        None => (authority, if scheme == "http" { ":80" } else { ":443" }),
    };
    [format!("{scheme}://{host}{path}"), format!("{scheme}://{host}{port}{path}")]
}

/// Connects the call to an agent's stream.
pub(crate) fn connect(stream: &Stream<'_>, attributes: &[(&str, &str)]) -> Document {
    xml::response(|xml| {
        let connect = xml.create_element("Connect").write_inner_content(|xml| {
            let mut element = xml
                .create_element("Stream")
                .with_attribute(("url", stream.url))
                .with_attributes(attributes.iter().copied());
            if let Some(url) = stream.status_url {
                element = element
                    .with_attributes([("statusCallback", url), ("statusCallbackMethod", "POST")]);
            }
            if stream.values().next().is_none() {
                return element.write_empty().map(drop);
            }
            let parameters = element.write_inner_content(|xml| {
                for (name, value) in stream.values() {
                    let parameter = xml.create_element("Parameter");
                    let parameter = parameter.with_attributes([("name", name), ("value", value)]);
                    parameter.write_empty()?;
                }
                Ok(())
            });
            parameters.map(drop)
        });
        connect?;
        stream.after_stream_url.map_or(Ok(()), |url| xml::redirect(xml, url))
    })
}

/// Speaks a sentence and hangs up.
pub(crate) fn hang_up(sentence: &str) -> Document {
    xml::response(|xml| {
        xml::text(xml, "Say", sentence)?;
        xml::empty(xml, "Hangup")
    })
}

pub(crate) fn stream_ended(webhook: &Webhook<'_>) -> Option<bool> {
    let event = webhook.get("StreamEvent")?;
    Some(matches!(event, "stream-stopped" | "stream-error" | "stream-failed"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Parameters;

    fn connect_to(url: &str, status_url: Option<&str>) -> String {
        let call = "CA1".parse().unwrap();
        Twilio
            .connect(&Stream {
                url,
                call: &call,
                status_url,
                after_stream_url: None,
                traceparent: None,
                parameters: &Parameters::NONE,
            })
            .body
    }

    #[test]
    fn a_call_is_redirected_after_its_stream_and_while_it_waits() {
        let call = "CA1".parse().unwrap();
        let url = Some("https://r/s?a=b&c=d");
        let stream = Stream {
            url: "wss://a/x",
            call: &call,
            status_url: None,
            after_stream_url: url,
            traceparent: None,
            parameters: &Parameters::NONE,
        };
        assert_eq!(
            Twilio.connect(&stream).body,
            r#"<?xml version="1.0" encoding="UTF-8"?><Response><Connect><Stream url="wss://a/x"/></Connect><Redirect method="POST">https://r/s?a=b&amp;c=d</Redirect></Response>"#
        );
        let hold = HoldOptions { sentence: None, audio: None, pause_seconds: 5, url: "https://r" };
        let held = |hold: HoldOptions<'_>| Twilio.hold(&hold).unwrap().body;
        assert!(held(hold).ends_with(r#"<Response><Pause length="5"/><Redirect method="POST">https://r</Redirect></Response>"#));
        let audio = HoldOptions { audio: Some("https://a/b.mp3"), ..hold };
        assert!(held(audio).contains(r#"<Response><Play>https://a/b.mp3</Play><Redirect"#));
        let sentence = HoldOptions { sentence: Some("Wait <here>"), ..audio };
        assert!(held(sentence).contains(r#"<Response><Say>Wait &lt;here&gt;</Say><Redirect"#));
    }

    #[test]
    fn a_call_is_connected_to_its_stream() {
        assert_eq!(
            connect_to("wss://a/ws/pod/p/x", None),
            r#"<?xml version="1.0" encoding="UTF-8"?><Response><Connect><Stream url="wss://a/ws/pod/p/x"/></Connect></Response>"#
        );
        assert_eq!(
            connect_to("wss://a/x", Some("https://r/s?a=b&c=d")),
            r#"<?xml version="1.0" encoding="UTF-8"?><Response><Connect><Stream url="wss://a/x" statusCallback="https://r/s?a=b&amp;c=d" statusCallbackMethod="POST"/></Connect></Response>"#
        );
    }

    #[test]
    fn values_cannot_break_out_of_the_document() {
        assert!(connect_to(r#"wss://a/"><Say>x"#, None).contains("wss://a/&quot;&gt;&lt;Say&gt;x"));
        assert_eq!(
            hang_up("a < b & \"c\"").body,
            r#"<?xml version="1.0" encoding="UTF-8"?><Response><Say>a &lt; b &amp; &quot;c&quot;</Say><Hangup/></Response>"#
        );
    }

    #[test]
    fn a_url_is_signed_with_or_without_its_port() {
        for (url, without, with) in [
            ("https://a.b", "https://a.b", "https://a.b:443"),
            ("http://a.b/c", "http://a.b/c", "http://a.b:80/c"),
            ("https://a.b:8443/c/d", "https://a.b/c/d", "https://a.b:8443/c/d"),
            ("https://[::1]:1", "https://[::1]", "https://[::1]:1"),
            ("https://[::1]/x:y", "https://[::1]/x:y", "https://[::1]:443/x:y"),
        ] {
            assert_eq!(with_and_without_port(url), [without, with], "{url}");
        }
    }
}
