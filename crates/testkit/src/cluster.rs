//! Routers in the fake cluster.

use crate::{Log, Router, kube::FakeKube};

const CLUSTER_TIERS: &str = r#"{"tiers": {"gold": {"target": 100}}}"#;

/// Short leader election times for tests.
pub const TIMES: [(&str, &str); 3] = [
    ("LEADER_ELECTION_DURATION", "3s"),
    ("LEADER_ELECTION_RENEW_DEADLINE", "2s"),
    ("LEADER_ELECTION_RETRY_PERIOD", "300ms"),
];

/// A router in the fake cluster.
pub fn router(kube: &FakeKube, extra: &[(&str, &str)]) -> Router {
    Router::start(&settings(kube, extra))
}

/// The same with its log, at the level info.
pub fn logged_router(kube: &FakeKube, extra: &[(&str, &str)]) -> (Router, Log) {
    let mut settings = settings(kube, extra);
    settings.push(("LOG_LEVEL", "info"));
    Router::start_logged(&settings)
}

fn settings<'a>(kube: &'a FakeKube, extra: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let config = kube.config.to_str().unwrap();
    let mut settings = vec![
        ("KUBECONFIG", config),
        ("VOICE_AGENT_BASE_URL", "wss://voice.example.com"),
        ("TIER_CONFIG", CLUSTER_TIERS),
        ("HTTP_BIND", "127.0.0.1"),
        ("LOG_LEVEL", "error"),
    ];
    settings.extend(TIMES);
    settings.extend(extra);
    settings
}

pub fn available(router: &Router) -> u64 {
    router.status()["pools"]["gold"]["available"].as_u64().unwrap()
}
