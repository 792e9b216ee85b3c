//! Twilio: a form with `CallSid`, answered in TwiML.

use super::{Document, xml};

pub const CALL_FIELD: &str = "CallSid";

/// Connects the call to an agent's stream.
pub fn connect(ws_url: &str) -> Document {
    xml::response(|xml| {
        let connect = xml.create_element("Connect").write_inner_content(|xml| {
            xml.create_element("Stream").with_attribute(("url", ws_url)).write_empty().map(drop)
        });
        connect.map(drop)
    })
}

/// Says a sentence and hangs up.
pub fn hang_up(sentence: &str) -> Document {
    xml::response(|xml| {
        xml::text(xml, "Say", sentence)?;
        xml::empty(xml, "Hangup")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_connected_to_its_stream() {
        assert_eq!(
            connect("wss://a/ws/pod/p/x").body,
            r#"<?xml version="1.0" encoding="UTF-8"?><Response><Connect><Stream url="wss://a/ws/pod/p/x"/></Connect></Response>"#
        );
    }

    #[test]
    fn values_cannot_break_out_of_the_document() {
        assert!(connect(r#"wss://a/"><Say>x"#).body.contains("wss://a/&quot;&gt;&lt;Say&gt;x"));
        assert_eq!(
            hang_up("a < b & \"c\"").body,
            r#"<?xml version="1.0" encoding="UTF-8"?><Response><Say>a &lt; b &amp; &quot;c&quot;</Say><Hangup/></Response>"#
        );
    }
}
