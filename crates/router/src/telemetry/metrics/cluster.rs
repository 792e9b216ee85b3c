//! Metrics of the connection to the cluster.

use prometheus_client::{metrics::gauge::Gauge, registry::Registry};

#[derive(Debug, Default)]
pub(crate) struct ClusterMetrics {
    pub(crate) problems: Gauge,
    pub(crate) refused_manifests: Gauge,
}

impl ClusterMetrics {
    pub(super) fn register(&self, prefixed: &mut Registry) {
        prefixed.register(
            "cluster_problems",
            "Namespaces, nodes, manifests and Events that this replica cannot watch or write",
            self.problems.clone(),
        );
        prefixed.register(
            "manifests_refused",
            "VoiceTier and VoiceMerchant objects that are refused, counted by the leader",
            self.refused_manifests.clone(),
        );
    }
}
