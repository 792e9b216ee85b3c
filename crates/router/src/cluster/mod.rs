//! The Kubernetes client: the watch of pods and the Lease of the leader. No other module names
//! Kubernetes types.

mod api_errors;
pub(crate) mod lease;
mod manifests;
mod nodes;
mod pod_events;
mod pod_view;
mod pods;
mod watch;
pub(crate) mod workloads;

use std::{sync::Arc, time::Duration};

use anyhow::Context;
use fleet::PodOrigin;
use futures_util::Stream;
use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client, Error,
    config::KubeConfigOptions,
    runtime::watcher::{self, Event},
};

pub use self::pods::{ClusterPod, PodObject};
pub(crate) use self::{
    api_errors::{ApiErrors, ApiFailure, FORBIDDEN_GRACE},
    lease::{Lock, Renewal},
    manifests::{ManifestKind, ManifestList, ManifestWatch},
    nodes::NodeWatch,
    pod_events::{PodEvent, PodEvents},
    pod_view::{PodState, PodView, Sighting, StartingPod, WorkloadPod},
    pods::PodDetails,
    watch::PodWatch,
    workloads::{Replicas, ScaleError, Workloads},
};

/// Pods per page of a list.
const PAGE_SIZE: u32 = 500;
const API_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Selection of the pods to watch, and how to read them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterConfig {
    /// The router's own namespace: it identifies the cluster, and holds the manifests.
    pub namespace: String,
    /// The namespaces whose pods are watched.
    pub namespaces: Vec<String>,
    pub selector: String,
    /// The container whose restart ends a pod's calls; `None` for the first.
    pub agent_container: Option<String>,
    pub agent_port: u16,
    /// Time after its Ready transition from which a pod gets calls.
    pub settle_time: Duration,
    /// VoiceTier and VoiceMerchant objects are applied.
    pub has_manifests: bool,
}

/// The leader election.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeaderConfig {
    pub(crate) enabled: bool,
    pub(crate) namespace: String,
    pub(crate) lock_name: String,
    pub(crate) duration: Duration,
    pub(crate) renew_deadline: Duration,
    pub(crate) retry_period: Duration,
}

/// A client of the cluster's API.
#[derive(Clone)]
pub(crate) struct Cluster {
    client: Client,
    pub(crate) config: Arc<ClusterConfig>,
}

impl Cluster {
    /// Connects by the pod's service account, or by `KUBECONFIG`.
    pub(crate) async fn find(config: ClusterConfig) -> anyhow::Result<Self> {
        // Fails only if a provider is already installed, which serves as well.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let mut found = match std::env::var_os("KUBECONFIG").filter(|path| !path.is_empty()) {
            Some(path) => kube::Config::from_kubeconfig(&KubeConfigOptions::default())
                .await
                .with_context(|| format!("KUBECONFIG={}", path.display()))?,
            None => kube::Config::incluster().context("cannot use the pod's service account")?,
        };
        found.connect_timeout = Some(API_CONNECT_TIMEOUT);
        let client = Client::try_from(found).context("cannot reach the cluster")?;
        Ok(Self { client, config: Arc::new(config) })
    }

    /// Reads the UID of the namespace, which distinguishes it from a namespace of the same name
    /// in another cluster. It is stable for the life of the namespace, and a Role of the
    /// namespace can grant reading it.
    pub(crate) async fn namespace_uid(&self) -> Result<String, Error> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let found = namespaces.get_metadata(&self.config.namespace).await?;
        Ok(found.metadata.uid.unwrap_or_default())
    }

    /// Returns the origin of its pods, by the UID of the namespace.
    pub(crate) fn origin(&self, uid: String) -> PodOrigin {
        PodOrigin::Kubernetes { namespace: self.config.namespace.clone(), cluster: uid }
    }

    /// Describes a failed read of the namespace, and returns whether the Role forbids it.
    pub(crate) fn explain_identity(&self, error: &Error) -> (String, bool) {
        let rule = format!("get on namespaces in the namespace {}", self.config.namespace);
        (explain(error, &rule), is_status(Some(error), 403))
    }

    /// Lists all pods of a namespace, then streams their changes. After an error, polling the
    /// stream retries.
    pub(crate) fn watch(
        &self,
        namespace: &str,
    ) -> impl Stream<Item = Result<Event<ClusterPod>, watcher::Error>> + Send + use<> {
        let pods: Api<ClusterPod> = Api::namespaced(self.client.clone(), namespace);
        let selected =
            watcher::Config::default().labels(&self.config.selector).page_size(PAGE_SIZE);
        watcher::watcher(pods, selected)
    }

    /// Returns the lock for leader election.
    pub(crate) fn lock(&self, config: &LeaderConfig, identity: String) -> Lock {
        let leases = Api::namespaced(self.client.clone(), &config.namespace);
        Lock::new(leases, config.lock_name.clone(), identity, config.duration)
    }

    /// Names the permissions that the watch of pods needs.
    pub(crate) fn watch_rule(namespace: &str) -> String {
        format!("list and watch on pods in the namespace {namespace}")
    }
}

/// Returns the API error behind an error of a watch, if any.
pub(crate) fn cause_of(error: &watcher::Error) -> Option<&Error> {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => Some(error),
        _ => None,
    }
}

/// Whether a watch can't resume from its last resource version (410 Gone).
pub(crate) fn is_expired(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::WatchError(status) => status.code == 410,
        error => is_status(cause_of(error), 410),
    }
}

/// Whether the error is an API response with this status.
fn is_status(error: Option<&Error>, code: u16) -> bool {
    matches!(error, Some(Error::Api(status)) if status.code == code)
}

/// Describes an error; for a 403 it names the missing permission.
fn explain(error: &Error, rule: &str) -> String {
    match error {
        Error::Api(status) if status.code == 401 => {
            format!("the cluster rejects the credentials: {}; check the token", status.message)
        }
        Error::Api(status) if status.code == 403 => {
            format!("{}; the service account needs a Role that allows {rule}", status.message)
        }
        Error::Api(status) => format!("the cluster answered {}: {}", status.code, status.message),
        other => {
            // The root cause is the last of the chain.
            let mut text = other.to_string();
            let mut source = std::error::Error::source(other);
            while let Some(error) = source {
                if !text.contains(&error.to_string()) {
                    text = format!("{text}: {error}");
                }
                source = error.source();
            }
            text
        }
    }
}
