//! XML documents, with every value escaped.

use std::io;

use quick_xml::{
    Writer,
    events::{BytesDecl, BytesText, Event},
};

use crate::{Document, HoldOptions};

pub(crate) type Xml = Writer<Vec<u8>>;

/// A `<Response>` with the elements that `build` writes.
pub(crate) fn response(build: impl FnOnce(&mut Xml) -> io::Result<()>) -> Document {
    let mut xml = Writer::new(Vec::new());
    let written = xml
        .write_event(Event::Decl(BytesDecl::new("1.0", Some("UTF-8"), None)))
        .and_then(|()| xml.create_element("Response").write_inner_content(build).map(drop));
    written.expect("writing to a vector cannot fail");
    let body = String::from_utf8(xml.into_inner()).expect("XML written from text is UTF-8");
    Document { content_type: "text/xml; charset=utf-8", body }
}

/// `<element>text</element>`
pub(crate) fn text(xml: &mut Xml, element: &'static str, text: &str) -> io::Result<()> {
    xml.create_element(element).write_text_content(BytesText::new(text)).map(drop)
}

/// `<Redirect method="POST">url</Redirect>`
pub(crate) fn redirect(xml: &mut Xml, url: &str) -> io::Result<()> {
    let element = xml.create_element("Redirect").with_attribute(("method", "POST"));
    element.write_text_content(BytesText::new(url)).map(drop)
}

/// The document that holds a waiting call, with the provider's element names.
pub(crate) fn hold(hold: &HoldOptions<'_>, say: &'static str, pause: &'static str) -> Document {
    response(|xml| {
        match hold {
            HoldOptions { sentence: Some(sentence), .. } => text(xml, say, sentence)?,
            HoldOptions { audio: Some(url), .. } => text(xml, "Play", url)?,
            HoldOptions { pause_seconds, .. } => {
                let length = pause_seconds.to_string();
                let pause = xml.create_element(pause).with_attribute(("length", length.as_str()));
                pause.write_empty().map(drop)?;
            }
        }
        redirect(xml, hold.url)
    })
}

/// `<element/>`
pub(crate) fn empty(xml: &mut Xml, element: &'static str) -> io::Result<()> {
    xml.create_element(element).write_empty().map(drop)
}
