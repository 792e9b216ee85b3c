//! What the fuzz targets do: feed one parser or verifier, and check what must hold
//! whatever it is fed.

use std::net::SocketAddr;

use axum::http::{Extensions, HeaderMap, HeaderName, HeaderValue};
use fleet::{
    merchant::MerchantConfig,
    tiers::{Origin, Tiers},
};
use smart_router::{
    auth::Tokens,
    cluster::{ClusterConfig, ClusterPod, pods::Seen},
    control::pod_list,
    http::middleware::rate_limit::Rates,
    tools::agent::{Reaction, react},
};
use spans::SpanContext;
use telephony::{CallRequest, Content, Covered, Params, Provider, Secret, Stream, Webhook};
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
    for origin in [Origin::Settings, Origin::Store] {
        if let Ok((tiers, _)) = Tiers::parse(text(data), origin) {
            // What is written is read as the same.
            let written = serde_json::Value::from(tiers.clone()).to_string();
            assert_eq!(Tiers::parse(&written, Origin::Store).map(|(again, _)| again), Ok(tiers));
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
    if let Ok(pods) = pod_list::parse(text(data), 8000) {
        assert!(!pods.is_empty());
    }
}

/// An object of the Kubernetes API that is or is not a pod.
pub fn cluster_pod(data: &[u8]) {
    let Ok(pod) = serde_json::from_slice::<ClusterPod>(data) else { return };
    let config = ClusterConfig {
        namespace: "default".into(),
        selector: "app=voice-agent".into(),
        agent_container: Some("agent".into()),
        agent_port: 8000,
    };
    match pod.read(&config) {
        Ok(Seen::Present { facts, .. }) => {
            assert!(!facts.uid.is_empty());
            assert!(!facts.ready || facts.address.ends_with(":8000"));
        }
        Ok(Seen::Finished { uid, .. }) => assert!(!uid.is_empty()),
        Err(why) => assert!(!why.is_empty()),
    }
}

/// What a caller's provider says on a stream.
pub fn frame(data: &[u8]) {
    if let Reaction::Named(call) = react(&Message::text(text(data))) {
        assert!(text(data).contains("call"), "{call}");
    }
}

/// Where a request says that it comes from: a proxy's address, and a header.
pub fn source(data: &[u8]) {
    let rates = Rates::new(1, "10.0.0.0/8,::1".parse().unwrap());
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
        let source = rates.source(&extensions, &headers).unwrap();
        // Only proxies of ours are believed.
        assert!(!peer.ip().to_string().starts_with("192") || source == peer.ip());
    }
}

/// A request in lines: how it is sent, its target, its headers, and after an empty
/// line its body.
pub fn webhook(provider: Provider, data: &[u8]) {
    let (head, body) = match data.windows(2).position(|pair| pair == b"\n\n") {
        Some(end) => (&data[..end], &data[end + 2..]),
        None => (data, &[][..]),
    };
    let mut lines = text(head).lines();
    let how = lines.next().unwrap_or_default();
    let target = format!("/api/v1/x?{}", lines.next().unwrap_or_default());
    let mut headers = HeaderMap::new();
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value.parse::<HeaderValue>()) {
            headers.insert(name, value);
        }
    }
    let webhook = Webhook {
        is_get: how.contains('g'),
        content: match how {
            how if how.contains('j') => Content::Json,
            how if how.contains('m') => Content::Multipart { boundary: "B".into() },
            _ => Content::Form,
        },
        public_url: "https://router.example.com",
        target: &target,
        headers: &headers,
        body,
        at: 1_750_000_000,
        query: Params::default(),
        sent: Params::default(),
        covered: Covered::Everything,
        fingerprint: None,
    };
    let Ok(webhook) = webhook.read() else { return };
    let dialect = provider.dialect();
    // Nobody can sign with a key that nobody knows.
    let key = match provider {
        Provider::Telnyx => "6kpsY+KcUgq+9VB7Ey7F+ZVHdq6+vnuSQh7qaRRG0iw=",
        _ => "a key that is not in any corpus: 0b6f7d1d",
    };
    assert!(dialect.verify(&webhook, &[Secret::from(key)]).is_err());
    dialect.call_is_over(&webhook);
    dialect.stream_is_over(&webhook);
    if let Ok(request) = CallRequest::from_webhook(provider, &webhook) {
        let stream = Stream {
            url: "wss://a/b",
            call: &request.call,
            status_url: Some("https://r.example/s?a=b&c=d"),
            after_url: Some("https://r.example/s?a=b&c=d"),
            traceparent: Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        };
        let document = dialect.connect(&stream);
        assert!(!document.body.contains('\0'));
    }
}
