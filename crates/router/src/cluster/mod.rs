//! The only module that names Kubernetes: which pods there are, and who leads.

pub mod lease;
pub mod pods;
mod trouble;
mod view;
mod watch;

use std::time::Duration;

use anyhow::Context;
use fleet::PodOrigin;
use futures_util::Stream;
use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client, Error,
    config::KubeConfigOptions,
    runtime::watcher::{self, Event},
};

pub(crate) use self::watch::PodWatch;
pub use self::{
    lease::{Lock, Renewal},
    pods::ClusterPod,
    trouble::Trouble,
    view::{PodState, PodView, Sighting},
};

/// Pods in one page of a list.
const PAGE: u32 = 500;
const CONNECT: Duration = Duration::from_secs(5);

/// What to watch, and how pods are to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterConfig {
    pub namespace: String,
    pub selector: String,
    /// The container whose restart ends a pod's calls; `None` for the first.
    pub agent_container: Option<String>,
    pub agent_port: u16,
}

/// The leader election.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaderConfig {
    pub enabled: bool,
    pub namespace: String,
    pub lock_name: String,
    pub duration: Duration,
    pub renew_deadline: Duration,
    pub retry_period: Duration,
}

/// A cluster we can ask.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    pub config: ClusterConfig,
}

impl Cluster {
    /// Finds the cluster by the service account of our pod, or by `KUBECONFIG`.
    pub async fn find(config: ClusterConfig) -> anyhow::Result<Self> {
        // Fails only where a provider is installed already, which is as good.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let mut found = match std::env::var_os("KUBECONFIG").filter(|path| !path.is_empty()) {
            Some(path) => kube::Config::from_kubeconfig(&KubeConfigOptions::default())
                .await
                .with_context(|| format!("KUBECONFIG={}", path.display()))?,
            None => kube::Config::incluster().context("cannot use the pod's service account")?,
        };
        found.connect_timeout = Some(CONNECT);
        let client = Client::try_from(found).context("cannot reach the cluster")?;
        Ok(Self { client, config })
    }

    /// The UID of the namespace, which tells it from one of the same name in another cluster. It
    /// lasts as long as the namespace, and a Role of the namespace can allow to read it.
    pub async fn namespace_uid(&self) -> Result<String, Error> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let found = namespaces.get_metadata(&self.config.namespace).await?;
        Ok(found.metadata.uid.unwrap_or_default())
    }

    /// The origin of its pods, by the UID of the namespace.
    pub fn origin(&self, uid: String) -> PodOrigin {
        PodOrigin::Kubernetes { namespace: self.config.namespace.clone(), cluster: uid }
    }

    /// What is wrong with an answer about the namespace, and whether the Role forbids it.
    pub fn explain_identity(&self, error: &Error) -> (String, bool) {
        let rule = format!("get on namespaces in the namespace {}", self.config.namespace);
        (explain(error, &rule), is_status(Some(error), 403))
    }

    /// All pods, and then what becomes of them. An error is followed by another
    /// try when the stream is asked again.
    pub fn watch(
        &self,
    ) -> impl Stream<Item = Result<Event<ClusterPod>, watcher::Error>> + Send + use<> {
        let pods: Api<ClusterPod> = Api::namespaced(self.client.clone(), &self.config.namespace);
        let selected = watcher::Config::default().labels(&self.config.selector).page_size(PAGE);
        watcher::watcher(pods, selected)
    }

    /// The lock that makes one replica the leader.
    pub fn lock(&self, config: &LeaderConfig, identity: String) -> Lock {
        let leases = Api::namespaced(self.client.clone(), &config.namespace);
        Lock::new(leases, config.lock_name.clone(), identity, config.duration)
    }

    /// The rights that watching pods needs.
    pub fn watch_rule(&self) -> String {
        format!("list and watch on pods in the namespace {}", self.config.namespace)
    }
}

/// The error of the API behind the error of a watch, if there is one.
pub fn cause_of(error: &watcher::Error) -> Option<&Error> {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => Some(error),
        _ => None,
    }
}

/// Whether a watch can't go on from where it was.
pub fn is_expired(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::WatchError(status) => status.code == 410,
        error => is_status(cause_of(error), 410),
    }
}

/// Whether the API answered with this status.
fn is_status(error: Option<&Error>, code: u16) -> bool {
    matches!(error, Some(Error::Api(status)) if status.code == code)
}

/// What went wrong, naming the rule that is missing where one is.
fn explain(error: &Error, rule: &str) -> String {
    match error {
        Error::Api(status) if status.code == 401 => {
            format!("the cluster does not know us: {}; is the token still good?", status.message)
        }
        Error::Api(status) if status.code == 403 => {
            format!("{}; the service account needs a Role that allows {rule}", status.message)
        }
        Error::Api(status) => format!("the cluster answered {}: {}", status.code, status.message),
        other => {
            // The cause stands at the end of the chain.
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
