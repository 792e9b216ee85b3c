//! The fuzz targets: each feeds one parser or verifier and checks its invariants.

pub mod media;

use std::net::SocketAddr;

use axum::http::{Extensions, HeaderMap, HeaderName, HeaderValue};
use fleet::{
    merchant::MerchantConfig,
    tiers::{DocumentSource, Tiers},
};
use smart_router::fuzz_targets::{
    ClusterConfig, ClusterPod, PodObject, RateLimiter, Reaction, Tokens, parse_pod_list, react,
};
use spans::SpanContext;
use telephony::{
    BodyFormat, CallRequest, Coverage, Parameters, Params, Provider, Secret, Stream, Webhook,
};
use tokio_tungstenite::tungstenite::Message;

fn text(data: &[u8]) -> &str {
    std::str::from_utf8(data).unwrap_or_default()
}

pub fn form(data: &[u8]) {
    if let Ok(params) = Params::from_form(text(data)) {
        assert!(params.iter().count() <= data.len());
    }
}

pub fn multipart(data: &[u8]) {
    let _ = Params::from_multipart(text(data), "B");
}

pub fn json(data: &[u8]) {
    let _ = Params::from_json(data);
}

pub fn tokens(data: &[u8]) {
    if let Ok(tokens) = Tokens::parse(text(data)) {
        assert!(tokens.bearer("").is_none());
    }
}

pub fn tiers(data: &[u8]) {
    for origin in [DocumentSource::Settings, DocumentSource::Store] {
        if let Ok((tiers, _)) = Tiers::parse(text(data), origin) {
            // Serialized tiers parse to the same value.
            let written = serde_json::Value::from(tiers.clone()).to_string();
            assert_eq!(
                Tiers::parse(&written, DocumentSource::Store).map(|(parsed, _)| parsed),
                Ok(tiers)
            );
        }
    }
}

pub fn merchant(data: &[u8]) {
    let _ = MerchantConfig::parse(text(data));
}

pub fn traceparent(data: &[u8]) {
    if let Some(context) = SpanContext::parse(data) {
        let written = context.to_string();
        assert_eq!(written.as_bytes()[2..53], data[2..53]);
        assert_eq!(SpanContext::parse(written.as_bytes()), Some(context));
    }
}

pub fn pod_list(data: &[u8]) {
    if let Ok(pods) = parse_pod_list(text(data), 8000) {
        assert!(!pods.is_empty());
    }
}

/// An arbitrary object of the Kubernetes API.
pub fn cluster_pod(data: &[u8]) {
    let Ok(pod) = serde_json::from_slice::<ClusterPod>(data) else { return };
    let config = ClusterConfig {
        namespace: "default".into(),
        namespaces: vec!["default".into()],
        selector: "app=voice-agent".into(),
        agent_container: Some("agent".into()),
        agent_port: 8000,
        settle_time: std::time::Duration::ZERO,
        has_manifests: false,
    };
    match pod.read(&config) {
        Ok(PodObject::Present { facts, .. }) => {
            assert!(!facts.uid.is_empty());
            assert!(!facts.ready || facts.address.ends_with(":8000"));
        }
        Ok(PodObject::Finished { uid, .. }) => assert!(!uid.is_empty()),
        Err(error) => assert!(!error.is_empty()),
    }
}

/// A text frame from a provider on a stream.
pub fn frame(data: &[u8]) {
    if let Reaction::Named(call) = react(&Message::text(text(data))) {
        assert!(text(data).contains("call"), "{call}");
    }
}

/// The client address of a request, from the peer address and `X-Forwarded-For`.
pub fn source(data: &[u8]) {
    let limiter = RateLimiter::new(1, "10.0.0.0/8,::1".parse().unwrap());
    for peer in ["10.0.0.1:1", "[::1]:1", "192.0.2.1:1"] {
        let peer: SocketAddr = peer.parse().unwrap();
        let mut extensions = Extensions::new();
        extensions.insert(peer);
        let mut headers = HeaderMap::new();
        for line in data.split(|byte| *byte == b'\n') {
            if let Ok(value) = HeaderValue::from_bytes(line) {
                headers.append("x-forwarded-for", value);
            }
        }
        let source = limiter.source(&extensions, &headers).unwrap();
        // Only trusted proxies may set the client address.
        assert!(!peer.ip().to_string().starts_with("192") || source == peer.ip());
    }
}

/// A request in lines: flags, query, headers, and after an empty line the body.
pub fn webhook(provider: Provider, data: &[u8]) {
    let (head, body) = match data.windows(2).position(|pair| pair == b"\n\n") {
        Some(end) => (&data[..end], &data[end + 2..]),
        None => (data, &[][..]),
    };
    let mut lines = text(head).lines();
    let flags = lines.next().unwrap_or_default();
    let target = format!("/api/v1/x?{}", lines.next().unwrap_or_default());
    let mut headers = HeaderMap::new();
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value.parse::<HeaderValue>()) {
            headers.insert(name, value);
        }
    }
    let webhook = Webhook {
        is_get: flags.contains('g'),
        body_format: match flags {
            flags if flags.contains('j') => BodyFormat::Json,
            flags if flags.contains('m') => BodyFormat::Multipart { boundary: "B".into() },
            _ => BodyFormat::Form,
        },
        public_url: "https://router.example.com",
        target: &target,
        headers: &headers,
        body,
        received_at: 1_750_000_000,
        query: Params::default(),
        body_params: Params::default(),
        coverage: Coverage::Everything,
        fingerprint: None,
    };
    let Ok(webhook) = webhook.read() else { return };
    let dialect = provider.dialect();
    // No input can contain a valid signature with this key.
    let key = match provider {
        Provider::Telnyx => "6kpsY+KcUgq+9VB7Ey7F+ZVHdq6+vnuSQh7qaRRG0iw=",
        _ => "a key that is not in any corpus: 0b6f7d1d",
    };
    assert!(dialect.verify(&webhook, &[Secret::from(key)]).is_err());
    dialect.call_ended(&webhook);
    dialect.stream_ended(&webhook);
    if let Ok(request) = CallRequest::from_webhook(provider, &webhook) {
        let stream = Stream {
            url: "wss://a/b",
            call: &request.call,
            status_url: Some("https://r.example/s?a=b&c=d"),
            after_stream_url: Some("https://r.example/s?a=b&c=d"),
            traceparent: Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
            parameters: &request.parameters,
        };
        // A URL that leads the call back has the same parameters.
        let query = Params::from_form(&request.parameters.to_query()).expect("a query");
        assert_eq!(Parameters::from_query(query.iter()), Ok(request.parameters.clone()));
        let lines = request.parameters.to_lines();
        assert_eq!(Parameters::from_lines(&lines), Some(request.parameters.clone()));
        let document = dialect.connect(&stream);
        assert!(!document.body.contains('\0'));
    }
}
