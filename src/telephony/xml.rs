//! XML documents, with every value escaped.

use std::io;

use quick_xml::{
    Writer,
    events::{BytesDecl, BytesText, Event},
};

use super::Document;

pub type Xml = Writer<Vec<u8>>;

/// A `<Response>` around what `build` writes.
pub fn response(build: impl FnOnce(&mut Xml) -> io::Result<()>) -> Document {
    let mut xml = Writer::new(Vec::new());
    let written = xml
        .write_event(Event::Decl(BytesDecl::new("1.0", Some("UTF-8"), None)))
        .and_then(|()| xml.create_element("Response").write_inner_content(build).map(drop));
    // Writing to memory does not fail, and what is written is text.
    written.expect("a vector takes every write");
    let body = String::from_utf8(xml.into_inner()).expect("XML written from text is text");
    Document { content_type: "text/xml; charset=utf-8", body }
}

/// `<element>text</element>`
pub fn text(xml: &mut Xml, element: &'static str, text: &str) -> io::Result<()> {
    xml.create_element(element).write_text_content(BytesText::new(text)).map(drop)
}

/// `<element/>`
pub fn empty(xml: &mut Xml, element: &'static str) -> io::Result<()> {
    xml.create_element(element).write_empty().map(drop)
}
