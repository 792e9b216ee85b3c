//! Plivo: a form with `CallUUID`, answered in Plivo XML.

use quick_xml::events::BytesText;

use super::{Document, xml};

pub const CALL_FIELD: &str = "CallUUID";

/// Connects the call to an agent's stream.
pub fn connect(ws_url: &str) -> Document {
    xml::response(|xml| {
        let stream = xml.create_element("Stream").with_attributes([
            ("bidirectional", "true"),
            ("keepCallAlive", "true"),
            ("contentType", "audio/x-mulaw;rate=8000"),
        ]);
        stream.write_text_content(BytesText::new(ws_url)).map(drop)
    })
}

/// Speaks a sentence and hangs up.
pub fn hang_up(sentence: &str) -> Document {
    xml::response(|xml| {
        xml::text(xml, "Speak", sentence)?;
        xml::empty(xml, "Hangup")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_connected_to_its_stream() {
        assert_eq!(
            connect("wss://a/b?c&d").body,
            r#"<?xml version="1.0" encoding="UTF-8"?><Response><Stream bidirectional="true" keepCallAlive="true" contentType="audio/x-mulaw;rate=8000">wss://a/b?c&amp;d</Stream></Response>"#
        );
    }

    #[test]
    fn a_refusal_is_spoken() {
        assert_eq!(
            hang_up("Goodbye.").body,
            r#"<?xml version="1.0" encoding="UTF-8"?><Response><Speak>Goodbye.</Speak><Hangup/></Response>"#
        );
    }
}
