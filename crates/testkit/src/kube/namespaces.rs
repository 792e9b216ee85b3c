//! The namespaces of the fake cluster.

use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::{FakeKube, NAMESPACE};

impl FakeKube {
    /// The UID of the namespace, which has the same name in every fake cluster.
    pub fn namespace_uid(&self) -> String {
        uid(self.port)
    }
}

pub(super) fn uid(port: u16) -> String {
    format!("namespace-of-127.0.0.1:{port}")
}

/// A namespace object. Every namespace exists; each has its own UID.
pub(super) fn object(name: &str, uid: &str) -> Response {
    let uid = if name == NAMESPACE { uid.to_owned() } else { format!("{uid}-{name}") };
    let metadata = json!({"name": name, "uid": uid});
    axum::Json(json!({"kind": "Namespace", "apiVersion": "v1", "metadata": metadata}))
        .into_response()
}
