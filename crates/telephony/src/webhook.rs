//! A request of a provider, as it came, and what shows that it is genuine.

use aws_lc_rs::digest::{SHA256, digest};
use data_encoding::BASE64URL_NOPAD;
use http::HeaderMap;

use crate::params::{BadEncoding, Params};
use fleet::names::Fingerprint;

/// A request as it came. Nothing of it is to be believed before it is verified.
#[derive(Debug, Clone)]
pub struct Webhook<'a> {
    pub is_get: bool,
    /// What providers were told is our URL, without the path of the request;
    /// empty if nobody said.
    pub public_url: &'a str,
    /// Path and query as they were received.
    pub target: &'a str,
    pub headers: &'a HeaderMap,
    /// The body. That of a GET is not looked at: no provider signs it.
    pub body: &'a [u8],
    pub content: Content,
    /// When it arrived (unix seconds).
    pub at: u64,
    /// What its query says.
    pub query: Params,
    /// What its body says.
    pub sent: Params,
    /// What of it may be believed, once it is verified.
    pub covered: Covered,
    /// Tells it from other signed requests, if it is one.
    pub fingerprint: Option<Fingerprint>,
}

/// What a body is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    Form,
    Json,
    /// `multipart/form-data`, with what stands between its parts.
    Multipart {
        boundary: String,
    },
}

/// What of a genuine request its signature covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Covered {
    Everything,
    /// The body alone: what the query says of a call may be anybody's.
    Body,
    /// Nothing; it only shows that the sender is genuine. Enough to ask for a pod,
    /// not to end a call.
    Nothing,
}

/// A request that is genuine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Genuine {
    pub covered: Covered,
    pub fingerprint: Option<Fingerprint>,
}

impl Genuine {
    /// A request whose signature is right for this text. The text makes the fingerprint, and not
    /// the signature: several may be right, and some schemes let one text stand for requests
    /// whose parameters are divided differently.
    pub fn signed(covered: Covered, text: &[u8]) -> Self {
        let hash = BASE64URL_NOPAD.encode(&digest(&SHA256, text).as_ref()[..12]);
        Self { covered, fingerprint: Some(hash.parse().expect("16 characters of Base64")) }
    }

    /// A request that shows a secret and is not signed: nothing tells it from another.
    pub(crate) fn with_secret() -> Self {
        Self { covered: Covered::Everything, fingerprint: None }
    }
}

/// Why a request is not taken for genuine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Forged {
    #[error("it has no {0}")]
    Missing(&'static str),
    #[error("its {0} makes no sense")]
    Malformed(&'static str),
    #[error("its signature does not match")]
    Mismatch,
    #[error("it was signed too long ago, or in the future")]
    Stale,
    #[error("its body is not signed")]
    Uncovered,
}

/// How far a signed time may be from ours (s).
const TOLERANCE: u64 = 300;

impl<'a> Webhook<'a> {
    /// Reads the query and the body of a request.
    pub fn read(mut self) -> Result<Self, BadEncoding> {
        let query = self.target.split_once('?').map_or("", |(_, query)| query);
        self.query = Params::from_form(query)
            .map_err(|error| BadEncoding(format!("the query cannot be read: {error}")))?;
        if self.is_get {
            self.body = &[];
        }
        let text = |body| str::from_utf8(body).map_err(|error| BadEncoding(error.to_string()));
        self.sent = match (self.body, &self.content) {
            ([], _) => Params::default(),
            (body, Content::Json) => Params::from_json(body)?,
            (body, Content::Form) => Params::from_form(text(body)?)?,
            (body, Content::Multipart { boundary }) => {
                Params::from_multipart(text(body)?, boundary)?
            }
        };
        Ok(self)
    }

    pub fn header(&self, name: &'static str) -> Result<&'a str, Forged> {
        let value = self.headers.get(name).ok_or(Forged::Missing(name))?;
        value.to_str().map_err(|_| Forged::Malformed(name))
    }

    /// The whole URL as the provider knows it.
    pub fn url(&self) -> String {
        format!("{}{}", self.public_url, self.target)
    }

    /// All lines of a header that may stand more than once.
    pub fn lines(&self, name: &'static str) -> impl Iterator<Item = &'a str> {
        self.headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok())
    }

    pub fn is_json(&self) -> bool {
        self.content == Content::Json && !self.body.is_empty()
    }

    /// A value that the provider gave, from the body or else from the query, if
    /// that is covered.
    pub fn get(&self, name: &str) -> Option<&str> {
        let from_query = || self.query.get(name).filter(|_| self.covered != Covered::Body);
        self.sent.get(name).or_else(from_query)
    }

    /// Whether a signed time is near enough to ours.
    pub(crate) fn check_time(&self, signed: u64) -> Result<(), Forged> {
        if signed.abs_diff(self.at) > TOLERANCE { Err(Forged::Stale) } else { Ok(()) }
    }
}
