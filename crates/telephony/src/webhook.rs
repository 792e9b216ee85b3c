//! A provider's webhook request and the result of its verification.

use aws_lc_rs::digest::{SHA256, digest};
use data_encoding::BASE64URL_NOPAD;
use http::HeaderMap;

use crate::params::{BadEncoding, Params};
use fleet::names::Fingerprint;

/// A webhook request. Its contents are untrusted until it is verified.
#[derive(Debug, Clone)]
pub struct Webhook<'a> {
    pub is_get: bool,
    /// Public base URL of this router, without the path of the request; empty if not configured.
    pub public_url: &'a str,
    /// Path and query as received.
    pub target: &'a str,
    pub headers: &'a HeaderMap,
    /// The body. [`read`](Self::read) discards the body of a GET: no provider signs it.
    pub body: &'a [u8],
    pub body_format: BodyFormat,
    /// Unix seconds.
    pub received_at: u64,
    pub query: Params,
    pub body_params: Params,
    /// The signed part of the request, set after verification.
    pub coverage: Coverage,
    /// Identifies a signed request, for replay protection.
    pub fingerprint: Option<Fingerprint>,
}

/// The format of a request body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyFormat {
    Form,
    Json,
    /// `multipart/form-data`
    Multipart {
        boundary: String,
    },
}

/// The part of a verified request that its signature covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coverage {
    Everything,
    /// The body alone: a call id in the query is untrusted.
    Body,
    /// The signature only authenticates the sender. It may allocate a pod, but not end a call.
    Nothing,
}

/// The result of a successful verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    pub coverage: Coverage,
    pub fingerprint: Option<Fingerprint>,
}

impl Verified {
    /// A request with a valid signature of `text`. The fingerprint hashes the text, not the
    /// signature: one text can have several valid signatures, and some schemes sign requests
    /// with different parameter boundaries as the same text.
    pub fn signed(coverage: Coverage, text: &[u8]) -> Self {
        let hash = BASE64URL_NOPAD.encode(&digest(&SHA256, text).as_ref()[..12]);
        Self { coverage, fingerprint: Some(hash.parse().expect("16 characters of Base64")) }
    }

    /// A request with a shared secret and no signature: it has no fingerprint.
    pub(crate) fn with_secret() -> Self {
        Self { coverage: Coverage::Everything, fingerprint: None }
    }
}

/// The reason why verification failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSignature {
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("{0} is malformed")]
    Malformed(&'static str),
    #[error("the signature does not match")]
    Mismatch,
    #[error("the signed time has expired or differs from the router's clock by more than 300 s")]
    Stale,
    #[error("the signature does not cover the content of the request")]
    ContentNotSigned,
}

/// Maximum difference between a signed time and the router's clock.
const MAX_CLOCK_SKEW_SECONDS: u64 = 300;

impl<'a> Webhook<'a> {
    /// Parses the query and the body.
    pub fn read(mut self) -> Result<Self, BadEncoding> {
        let query = self.target.split_once('?').map_or("", |(_, query)| query);
        self.query = Params::from_form(query)
            .map_err(|error| BadEncoding(format!("the query cannot be read: {error}")))?;
        if self.is_get {
            self.body = &[];
        }
        let text = |body| str::from_utf8(body).map_err(|error| BadEncoding(error.to_string()));
        self.body_params = match (self.body, &self.body_format) {
            ([], _) => Params::default(),
            (body, BodyFormat::Json) => Params::from_json(body)?,
            (body, BodyFormat::Form) => Params::from_form(text(body)?)?,
            (body, BodyFormat::Multipart { boundary }) => {
                Params::from_multipart(text(body)?, boundary)?
            }
        };
        Ok(self)
    }

    pub fn header(&self, name: &'static str) -> Result<&'a str, InvalidSignature> {
        let value = self.headers.get(name).ok_or(InvalidSignature::Missing(name))?;
        value.to_str().map_err(|_| InvalidSignature::Malformed(name))
    }

    /// The URL that the provider requested.
    pub fn url(&self) -> String {
        format!("{}{}", self.public_url, self.target)
    }

    /// All values of a repeatable header.
    pub(crate) fn header_values(&self, name: &'static str) -> impl Iterator<Item = &'a str> {
        self.headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok())
    }

    pub fn is_json(&self) -> bool {
        self.body_format == BodyFormat::Json && !self.body.is_empty()
    }

    /// A parameter from the body, or else from the query if the signature covers it.
    pub fn get(&self, name: &str) -> Option<&str> {
        let from_query = || self.query.get(name).filter(|_| self.coverage != Coverage::Body);
        self.body_params.get(name).or_else(from_query)
    }

    /// Checks a signed time against the time of receipt.
    pub(crate) fn check_time(&self, signed: u64) -> Result<(), InvalidSignature> {
        let skew = signed.abs_diff(self.received_at);
        if skew > MAX_CLOCK_SKEW_SECONDS { Err(InvalidSignature::Stale) } else { Ok(()) }
    }
}
