//! Watches the nodes that are cordoned: their pods are at risk, since an operator or an autoscaler
//! is about to drain them. Nodes belong to the cluster, so that this needs a ClusterRole; without
//! it, cordoned nodes are not heeded.

use std::{collections::HashSet, sync::Arc, time::Duration};

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    core::PartialObjectMeta,
    runtime::watcher::{self, Event},
};
use tokio::time::sleep;

use super::{ApiErrors, Cluster, PodView, api_errors::Report};
use crate::lifecycle::Lifecycle;

/// Backoff after an error.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// The API server selects cordoned nodes, so that the updates of all others are not sent.
const CORDONED: &str = "spec.unschedulable=true";
const RULE: &str = "list and watch on nodes, by a ClusterRole";
/// The name of this watch's problem on the dashboard.
const PROBLEM: &str = "nodes";

/// Updates a view from the cordoned nodes.
pub(crate) struct NodeWatch {
    pub(crate) cluster: Cluster,
    pub(crate) view: Arc<PodView>,
    pub(crate) lifecycle: Arc<Lifecycle>,
}

impl NodeWatch {
    /// Watches until shutdown.
    pub(crate) async fn run(self: Arc<Self>) {
        tokio::select! {
            () = self.watch() => {}
            () = self.lifecycle.stopping.cancelled() => {}
        }
    }

    async fn watch(&self) {
        let (mut errors, mut backoff) = (ApiErrors::default(), MIN_BACKOFF);
        loop {
            // A new watch lists the nodes again, which shows that it works.
            let error = self.watch_until_error(&mut errors, &mut backoff).await;
            if let Some(report) = errors.record_watch_error(&error, RULE) {
                report.log("cannot watch the nodes; pods on cordoned nodes get calls as others do");
                if let Report::Lasting(text) = report {
                    let problem = format!("cordoned nodes are not heeded: {text}");
                    self.lifecycle.set_problem(PROBLEM, Some(problem));
                }
            }
            sleep(backoff).await;
            backoff = (backoff * 2).min(MAX_BACKOFF);
        }
    }

    async fn watch_until_error(
        &self,
        errors: &mut ApiErrors,
        backoff: &mut Duration,
    ) -> watcher::Error {
        let nodes: Api<PartialObjectMeta<Node>> = Api::all(self.cluster.client.clone());
        let selected = watcher::Config::default().fields(CORDONED);
        let mut events = std::pin::pin!(watcher::watcher(nodes, selected));
        let (mut cordoned, mut listed) = (HashSet::new(), HashSet::new());
        loop {
            match events.next().await {
                Some(Ok(Event::Init)) => listed.clear(),
                Some(Ok(Event::InitApply(node))) => drop(listed.insert(name_of(node))),
                Some(Ok(Event::InitDone)) => {
                    cordoned = std::mem::take(&mut listed);
                    self.view.set_cordoned(cordoned.clone());
                    self.lifecycle.set_problem(PROBLEM, None);
                    errors.clear();
                    *backoff = MIN_BACKOFF;
                }
                Some(Ok(Event::Apply(node))) => {
                    let name = name_of(node);
                    if cordoned.insert(name.clone()) {
                        tracing::info!(
                            node = name,
                            "a node is cordoned; its pods are the last choice"
                        );
                        self.view.set_cordoned(cordoned.clone());
                    }
                }
                Some(Ok(Event::Delete(node))) => {
                    cordoned.remove(&name_of(node));
                    self.view.set_cordoned(cordoned.clone());
                }
                Some(Err(error)) => return error,
                // A watcher does not end.
                None => std::future::pending().await,
            }
        }
    }
}

fn name_of(node: PartialObjectMeta<Node>) -> String {
    node.metadata.name.unwrap_or_default()
}
