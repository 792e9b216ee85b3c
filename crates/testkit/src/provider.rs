//! A provider that does what documents say, as far as a test lets it.

use super::{Connection, Router};

pub const PUBLIC_URL: &str = "https://r.example";

/// What a document asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// Connect to this URL; where to go when the stream is gone.
    Stream { url: String, after: Option<String> },
    /// Wait, then ask there. What is heard meanwhile.
    Hold { then: String, hears: String },
    /// The call is over, with these words or none.
    HangUp(String),
}

impl Heard {
    pub fn read(document: &str) -> Self {
        let redirect = between(document, "<Redirect method=\"POST\">", "</Redirect>");
        let then = redirect.map(|url| path_of(&unescape(url)));
        if let Some(url) = between(document, "<Stream url=\"", "\"") {
            return Self::Stream { url: unescape(url), after: then };
        }
        match then {
            Some(then) => {
                let hears = between(document, "<Response>", "<Redirect").unwrap_or_default();
                Self::Hold { then, hears: hears.to_owned() }
            }
            None => {
                Self::HangUp(between(document, "<Say>", "</Say>").unwrap_or_default().to_owned())
            }
        }
    }

    /// The pod to connect to.
    pub fn pod(&self) -> Option<String> {
        let Self::Stream { url, .. } = self else { return None };
        between(url, "/ws/pod/", "/").map(str::to_owned)
    }

    /// Where the call goes next, if it goes on here.
    pub fn next(&self) -> Option<&str> {
        match self {
            Self::Stream { after, .. } => after.as_deref(),
            Self::Hold { then, .. } => Some(then),
            Self::HangUp(_) => None,
        }
    }

    pub fn waits(&self) -> bool {
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
    url.strip_prefix(PUBLIC_URL).unwrap_or_else(|| panic!("{url} is not ours")).to_owned()
}

/// Asks as Twilio would, at a path that a document gave or at the first one.
pub fn ask(connection: &mut Connection, call: &str, path: &str) -> Heard {
    let answer = connection.form(path, &format!("CallSid={call}&CallStatus=in-progress"));
    assert_eq!(answer.status, 200, "{}", answer.text());
    Heard::read(&answer.text())
}

/// A new call.
pub fn call(connection: &mut Connection, sid: &str) -> Heard {
    ask(connection, sid, "/api/v1/twilio/allocate")
}

/// The same call again, as its last document said.
pub fn again(router: &Router, sid: &str, heard: &Heard) -> Heard {
    ask(&mut router.connect(), sid, heard.next().expect("the call goes on"))
}
