//! Requests as providers send them, and what is made of them.

mod answers;
mod signatures;

use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::*;
use fleet::names::Fingerprint;

const BASE: &str = "https://router.example.com";
const NOW: u64 = 1_750_000_000;

/// A request in the making.
#[derive(Debug, Clone)]
struct Sent {
    provider: Provider,
    is_get: bool,
    base: String,
    target: String,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    is_json: bool,
    at: u64,
    keys: String,
}

impl Sent {
    fn new(provider: Provider, target: &str, keys: &str) -> Self {
        Self {
            provider,
            is_get: false,
            base: BASE.into(),
            target: target.into(),
            headers: Vec::new(),
            body: Vec::new(),
            is_json: false,
            at: NOW,
            keys: keys.into(),
        }
    }

    fn with(mut self, header: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((header, value.into()));
        self
    }

    fn form(mut self, params: &[(&str, &str)]) -> Self {
        self.body = form(params).into();
        self
    }

    fn json(mut self, body: &str) -> Self {
        (self.body, self.is_json) = (body.into(), true);
        self
    }

    fn get(mut self) -> Self {
        self.is_get = true;
        self
    }

    fn verify(&self) -> Result<(Covered, Result<CallRequest, InvalidName>), String> {
        let (request, genuine) = self.read_and_verify()?;
        Ok((genuine.covered, request))
    }

    fn read_and_verify(&self) -> Result<(Result<CallRequest, InvalidName>, Genuine), String> {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.headers {
            let value = HeaderValue::from_bytes(value.as_bytes()).map_err(|it| it.to_string())?;
            headers.insert(HeaderName::from_static(name), value);
        }
        let webhook = Webhook {
            is_get: self.is_get,
            public_url: &self.base,
            target: &self.target,
            headers: &headers,
            body: &self.body,
            content: if self.is_json { Content::Json } else { Content::Form },
            at: self.at,
            query: Params::default(),
            sent: Params::default(),
            covered: Covered::Everything,
            fingerprint: None,
        };
        let mut webhook = webhook.read().map_err(|error| error.to_string())?;
        let keys = self.provider.dialect().keys(&self.keys).unwrap();
        let genuine =
            self.provider.dialect().verify(&webhook, &keys).map_err(|error| error.to_string())?;
        webhook.covered = genuine.covered;
        Ok((CallRequest::from_webhook(self.provider, &webhook), genuine))
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        self.read_and_verify().unwrap().1.fingerprint
    }

    fn is_genuine(&self) -> bool {
        self.verify().is_ok()
    }
}

fn form(params: &[(&str, &str)]) -> String {
    let encode = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let pairs = params.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value)));
    pairs.collect::<Vec<_>>().join("&")
}
