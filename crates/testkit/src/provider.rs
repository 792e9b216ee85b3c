//! A simulated provider that follows the documents of the router.

use super::{Connection, Router};

pub const PUBLIC_URL: &str = "https://r.example";

/// A parsed response document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallDocument {
    /// Connect to a URL; `after_stream` is the redirect after the stream has ended.
    Stream { url: String, after_stream: Option<String> },
    /// Play something, then follow the redirect.
    Hold { redirect: String, played: String },
    /// Hang up after a sentence, which may be empty.
    HangUp(String),
}

impl CallDocument {
    pub fn read(document: &str) -> Self {
        let redirect = between(document, "<Redirect method=\"POST\">", "</Redirect>");
        let redirect = redirect.map(|url| path_of(&unescape(url)));
        if let Some(url) = between(document, "<Stream url=\"", "\"") {
            return Self::Stream { url: unescape(url), after_stream: redirect };
        }
        match redirect {
            Some(redirect) => {
                let played = between(document, "<Response>", "<Redirect").unwrap_or_default();
                Self::Hold { redirect, played: played.to_owned() }
            }
            None => {
                Self::HangUp(between(document, "<Say>", "</Say>").unwrap_or_default().to_owned())
            }
        }
    }

    /// The pod to connect to, if streams reach it without the media gateway. [`pod_of`] works in
    /// both cases.
    pub fn pod(&self) -> Option<String> {
        let Self::Stream { url, .. } = self else { return None };
        between(url, "/ws/pod/", "/").map(str::to_owned)
    }

    /// The path of the stream URL; empty if the document has none.
    pub fn stream_path(&self) -> &str {
        let Self::Stream { url, .. } = self else { return "" };
        let (_, rest) = url.split_once("://").expect("a URL");
        &rest[rest.find('/').expect("a path")..]
    }

    /// The path of the next request, if the document has a redirect.
    pub fn next(&self) -> Option<&str> {
        match self {
            Self::Stream { after_stream, .. } => after_stream.as_deref(),
            Self::Hold { redirect, .. } => Some(redirect),
            Self::HangUp(_) => None,
        }
    }

    pub fn is_stream(&self) -> bool {
        matches!(self, Self::Stream { .. })
    }

    pub fn is_hold(&self) -> bool {
        matches!(self, Self::Hold { .. })
    }
}

fn between<'a>(text: &'a str, from: &str, to: &str) -> Option<&'a str> {
    let rest = &text[text.find(from)? + from.len()..];
    Some(&rest[..rest.find(to)?])
}

fn unescape(text: &str) -> String {
    text.replace("&amp;", "&")
}

fn path_of(url: &str) -> String {
    let path = url.strip_prefix(PUBLIC_URL);
    path.unwrap_or_else(|| panic!("{url} is not a URL of the router")).to_owned()
}

/// Sends a Twilio webhook to a path and parses the response document.
pub fn request_document(connection: &mut Connection, call: &str, path: &str) -> CallDocument {
    let answer = connection.form(path, &format!("CallSid={call}&CallStatus=in-progress"));
    assert_eq!(answer.status, 200, "{}", answer.text());
    CallDocument::read(&answer.text())
}

/// The pod of a call, unless the call has ended or waits.
pub fn pod_of(router: &Router, sid: &str) -> Option<String> {
    let (status, found) = router.get(&format!("/api/v1/calls/{sid}"));
    assert!(matches!(status, 200 | 404), "{status}: {found}");
    found["pod_name"].as_str().map(str::to_owned)
}

/// Starts a new call.
pub fn start_call(connection: &mut Connection, sid: &str) -> CallDocument {
    request_document(connection, sid, "/api/v1/twilio/allocate")
}

/// Follows the redirect of a call's last document.
pub fn follow_redirect(router: &Router, sid: &str, document: &CallDocument) -> CallDocument {
    request_document(&mut router.connect(), sid, document.next().expect("the call goes on"))
}
