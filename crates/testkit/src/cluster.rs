//! Routers in the fake cluster.

use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::{
    Log, Router,
    kube::{FakeKube, NAMESPACE},
};

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

impl FakeKube {
    /// The UID of the namespace, which has the same name in every fake cluster.
    pub fn namespace_uid(&self) -> String {
        namespace_uid(self.port)
    }
}

pub(crate) fn namespace_uid(port: u16) -> String {
    format!("namespace-of-127.0.0.1:{port}")
}

/// A namespace object. Every namespace exists; each has its own UID.
pub(crate) fn namespace(name: &str, uid: &str) -> Response {
    let uid = if name == NAMESPACE { uid.to_owned() } else { format!("{uid}-{name}") };
    let metadata = json!({"name": name, "uid": uid});
    axum::Json(json!({"kind": "Namespace", "apiVersion": "v1", "metadata": metadata}))
        .into_response()
}
