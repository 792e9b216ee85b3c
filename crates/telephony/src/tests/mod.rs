//! Webhook requests: verification, parsing and response documents.

mod documents;
mod signatures;

use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::*;
use fleet::names::Fingerprint;

const BASE: &str = "https://router.example.com";
const NOW: u64 = 1_750_000_000;

/// A builder for webhook requests.
#[derive(Debug, Clone)]
struct TestRequest {
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

impl TestRequest {
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

    fn verify(&self) -> Result<(Coverage, Result<CallRequest, InvalidName>), String> {
        let (request, verified) = self.read_and_verify()?;
        Ok((verified.coverage, request))
    }

    fn read_and_verify(&self) -> Result<(Result<CallRequest, InvalidName>, Verified), String> {
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
            body_format: if self.is_json { BodyFormat::Json } else { BodyFormat::Form },
            received_at: self.at,
            query: Params::default(),
            body_params: Params::default(),
            coverage: Coverage::Everything,
            fingerprint: None,
        };
        let mut webhook = webhook.read().map_err(|error| error.to_string())?;
        let keys = self.provider.dialect().keys(&self.keys).unwrap();
        let verified =
            self.provider.dialect().verify(&webhook, &keys).map_err(|error| error.to_string())?;
        webhook.coverage = verified.coverage;
        Ok((CallRequest::from_webhook(self.provider, &webhook), verified))
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        self.read_and_verify().unwrap().1.fingerprint
    }

    fn is_verified(&self) -> bool {
        self.verify().is_ok()
    }
}

fn form(params: &[(&str, &str)]) -> String {
    let encode = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let pairs = params.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value)));
    pairs.collect::<Vec<_>>().join("&")
}
