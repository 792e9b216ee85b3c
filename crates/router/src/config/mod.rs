//! The configuration: settings checked individually and against each other, in one small struct
//! per concern.

mod capacity_settings;
mod cluster_settings;
mod hold_settings;
mod listener_settings;
mod media_settings;
mod outbound_settings;
mod process_role;
mod reference;
mod secret_settings;
mod settings;
mod trace_settings;
mod value_parsers;

use crate::{
    cluster::LeaderConfig,
    hold_config::{BusyAction, HoldConfig},
    http::OutboundConfig,
    telemetry::logs::{LogConfig, LogFormat},
};
use std::{
    io::IsTerminal,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};
use store::Ttls;

use serde_json::Value;

use self::hold_settings::{hold, hold_config, max_waiting_per_merchant};
pub use self::settings::Settings;
pub(crate) use self::{
    capacity_settings::capacity_target, process_role::ProcessRole, reference::reference,
    value_parsers::without_password,
};
use crate::{
    auth::AccessConfig,
    capacity::CapacityConfig,
    cluster::ClusterConfig,
    control::{
        ListFile,
        pod_list::{self, ListedPod},
    },
    human_duration::HumanDuration,
    media::MediaConfig,
    telemetry::traces::TraceConfig,
    tls::TlsConfig,
    trusted_proxies::TrustedProxies,
};
use fleet::{
    Millis, PodOrigin,
    tiers::{DocumentSource, Tiers},
};
use telephony::{Provider, WsPath};

const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";
const DEFAULT_TIERS: &str = r#"{"gold": 10, "standard": 20, "overflow": 5}"#;
const SIMULATED_TIERS: &str = r#"{"tiers": {"gold": {"target": 1}, "standard": {"target": 1},
    "basic": {"type": "shared", "target": 1, "max_concurrent": 3}}}"#;

/// An invalid setting: its variable, its value, and what was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={value}: expected {expected}")]
pub struct ConfigError {
    pub variable: String,
    pub value: String,
    pub expected: String,
}

impl ConfigError {
    pub(crate) fn new(variable: &str, value: impl ToString, expected: impl ToString) -> Self {
        Self { variable: variable.into(), value: value.to_string(), expected: expected.to_string() }
    }
}

/// The store of the facts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoreConfig {
    Memory,
    Journal(PathBuf),
    Redis { url: String, key_prefix: String, ca_file: Option<PathBuf> },
}

/// The source of pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PodSource {
    /// Agents inside this process.
    Simulated,
    List(Vec<ListedPod>),
    File(PathBuf),
    Cluster(ClusterConfig),
    /// The store only: routers write the pods, and this process writes none.
    Routers,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HttpConfig {
    pub(crate) api: SocketAddr,
    pub(crate) metrics: SocketAddr,
    /// Address of everything but the webhooks, if separate.
    pub(crate) admin: Option<SocketAddr>,
    pub(crate) read_timeout: Duration,
    pub(crate) idle_timeout: Duration,
    pub(crate) max_connections: usize,
    pub(crate) shutdown_timeout: Duration,
}

/// The checked configuration.
#[derive(Debug, Clone)]
pub struct Config {
    pub(crate) role: ProcessRole,
    pub(crate) http: HttpConfig,
    pub(crate) store: StoreConfig,
    pub(crate) pods: PodSource,
    /// Take the store over from another origin of pods.
    pub(crate) force_pod_origin: bool,
    pub(crate) agent_port: u16,
    /// Base of WebSocket URLs past the media gateway, if that is off.
    pub(crate) agent_base_url: Option<String>,
    /// The media gateway; `None` if it is off.
    pub(crate) media: Option<MediaConfig>,
    pub(crate) ws_path: WsPath,
    pub(crate) public_url: Option<String>,
    /// Providers whose webhooks are served.
    pub(crate) providers: Vec<Provider>,
    pub(crate) access: AccessConfig,
    /// Certificate of the listeners; `None` for plain HTTP.
    pub(crate) tls: Option<TlsConfig>,
    /// Unauthenticated requests per second of one source; 0 for no limit.
    pub(crate) rate_limit: u32,
    pub(crate) trusted_proxies: TrustedProxies,
    /// How long the fingerprint of a signed request is stored.
    pub(crate) replay_window: Millis,
    pub(crate) stream_status: bool,
    pub(crate) busy_action: BusyAction,
    pub(crate) hold: Option<HoldConfig>,
    /// How many times a call gets another pod after its stream disconnects.
    pub(crate) retries: u32,
    /// Approximate number of stored events.
    pub(crate) events: usize,
    pub(crate) identity: String,
    /// Export of traces, if enabled.
    pub(crate) traces: Option<TraceConfig>,
    pub(crate) cleanup_interval: Duration,
    pub(crate) reconcile_interval: Duration,
    pub(crate) ttls: Ttls,
    pub(crate) tiers: Tiers,
    pub(crate) leader: LeaderConfig,
    pub(crate) capacity: CapacityConfig,
    pub(crate) outbound: OutboundConfig,
    pub(crate) log: LogConfig,
    /// Ignored parts of the settings, with the reason.
    pub(crate) warnings: Vec<String>,
    settings: Settings,
}

impl PodSource {
    /// Returns the origin of these pods, as far as the settings define it; `None` for a process
    /// without pods of its own.
    pub(crate) fn origin(&self) -> Option<PodOrigin> {
        match self {
            Self::Simulated => Some(PodOrigin::Simulated),
            Self::List(_) | Self::File(_) => Some(PodOrigin::List),
            Self::Cluster(cluster) => {
                let namespace = cluster.namespace.clone();
                Some(PodOrigin::Kubernetes { namespace, cluster: String::new() })
            }
            Self::Routers => None,
        }
    }
}

impl Config {
    /// The configuration of a router.
    pub fn new(settings: Settings) -> Result<Self, ConfigError> {
        Self::for_role(settings, ProcessRole::Router)
    }

    pub(crate) fn for_role(settings: Settings, role: ProcessRole) -> Result<Self, ConfigError> {
        role.check(&settings)?;
        let pods = match role {
            ProcessRole::Router => pod_source(&settings)?,
            ProcessRole::Media => PodSource::Routers,
        };
        let simulated = pods == PodSource::Simulated;
        let in_cluster = matches!(pods, PodSource::Cluster(_));
        let default_bind = if simulated { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
        let bind = settings.http.http_bind.unwrap_or(IpAddr::V4(default_bind));
        let (tiers, mut warnings) = tiers(&settings, simulated)?;
        let media = media_settings::media(&settings)?;
        let has_gateway = media.is_some();
        if has_gateway && settings.calls.stream_status {
            warnings.push("STREAM_STATUS: the media gateway needs no callbacks".into());
        }
        let connect_timeout = media_settings::connect_timeout(&settings);
        let identity = settings.cluster.pod_name.clone().unwrap_or_else(host_name);
        Ok(Self {
            role,
            http: listener_settings::http(&settings, bind)?,
            store: store(&settings)?,
            pods,
            force_pod_origin: settings.pods.force_pod_origin,
            agent_port: settings.streams.voice_agent_port,
            agent_base_url: settings.streams.voice_agent_base_url.clone(),
            ws_path: settings.streams.ws_path_template.clone(),
            providers: listener_settings::providers(&settings)?,
            access: listener_settings::access(&settings, role)?,
            tls: listener_settings::tls(&settings)?,
            rate_limit: settings.edge.rate_limit,
            trusted_proxies: settings.edge.trusted_proxies.clone().unwrap_or_default(),
            public_url: settings.edge.public_url.clone(),
            replay_window: settings.edge.replay_window.millis(),
            stream_status: !has_gateway
                && (settings.calls.stream_status || connect_timeout.is_some()),
            busy_action: settings.calls.busy_action,
            hold: hold(&settings)?,
            retries: media_settings::retries(&settings),
            media,
            events: settings.calls.events,
            traces: settings.traces.config(&identity)?,
            identity,
            cleanup_interval: settings.fleet.cleanup_interval.0,
            reconcile_interval: settings.fleet.reconcile_interval.0,
            ttls: Ttls {
                lease: settings.fleet.lease_ttl.millis(),
                draining: settings.fleet.draining_ttl.millis(),
                call_info: settings.fleet.call_info_ttl.millis(),
                connect: connect_timeout.map(HumanDuration::millis),
                poll_timeout: hold_config(&settings).map(|hold| hold.poll_timeout()),
            },
            tiers,
            leader: cluster_settings::leader(&settings, in_cluster)?,
            capacity: settings.capacity.config(),
            outbound: settings.outbound.config(),
            log: LogConfig {
                level: settings.log.log_level,
                format: settings.log.log_format.unwrap_or_else(|| {
                    if std::io::stderr().is_terminal() {
                        LogFormat::Console
                    } else {
                        LogFormat::Json
                    }
                }),
            },
            warnings,
            settings,
        })
    }

    /// Returns the base of stream URLs for the API's port.
    pub(crate) fn media_url(&self, api_port: u16) -> String {
        let scheme = if self.tls.is_some() { "wss" } else { "ws" };
        let given = self.media.as_ref().and_then(|media| media.url.clone());
        given.unwrap_or_else(|| format!("{scheme}://localhost:{api_port}"))
    }

    /// Returns the effective value of every variable, with secrets hidden.
    pub(crate) fn describe(&self) -> Vec<(&'static str, String)> {
        let s = &self.settings;
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let path = |value: &Option<PathBuf>| {
            value.as_ref().map(|path| path.display().to_string()).unwrap_or_default()
        };
        let mut described = vec![
            ("REDIS_URL", s.store.redis_url.as_deref().map(without_password).unwrap_or_default()),
            ("REDIS_CA_FILE", path(&s.store.redis_ca_file)),
            ("KEY_PREFIX", s.store.key_prefix.clone()),
            ("DATA_DIR", path(&s.store.data_dir)),
            ("PODS", text(&s.pods.pods)),
            ("PODS_FILE", path(&s.pods.pods_file)),
            ("FORCE_POD_ORIGIN", if s.pods.force_pod_origin { "on" } else { "off" }.into()),
            ("HTTP_BIND", self.http.api.ip().to_string()),
            ("HTTP_PORT", s.http.http_port.to_string()),
            ("METRICS_PORT", s.http.metrics_port.to_string()),
            ("HTTP_READ_TIMEOUT", s.http.http_read_timeout.to_string()),
            ("HTTP_IDLE_TIMEOUT", s.http.http_idle_timeout.to_string()),
            ("MAX_CONNECTIONS", s.http.max_connections.to_string()),
            ("HTTP_SHUTDOWN_TIMEOUT", s.http.http_shutdown_timeout.to_string()),
        ];
        described.extend(media_settings::describe(self));
        described.extend([
            ("VOICE_AGENT_BASE_URL", text(&self.agent_base_url)),
            ("VOICE_AGENT_PORT", s.streams.voice_agent_port.to_string()),
            ("WS_PATH_TEMPLATE", s.streams.ws_path_template.to_string()),
            ("PUBLIC_URL", text(&s.edge.public_url)),
            ("PROVIDERS", listener_settings::join(&self.providers)),
            ("ADMIN_BIND", s.edge.admin_bind.map(|it| it.to_string()).unwrap_or_default()),
            ("TLS_CERT_FILE", path(&s.edge.tls_cert_file)),
            ("TLS_KEY_FILE", path(&s.edge.tls_key_file)),
            ("TLS_CLIENT_CA_FILE", path(&s.edge.tls_client_ca_file)),
            ("RATE_LIMIT", number_or_off(s.edge.rate_limit as usize)),
            ("TRUSTED_PROXIES", self.trusted_proxies.to_string()),
            ("REPLAY_WINDOW", s.edge.replay_window.to_string()),
            ("STREAM_STATUS", if self.stream_status { "on" } else { "off" }.into()),
            (
                "CONNECT_TIMEOUT",
                media_settings::connect_timeout(s).map(|it| it.to_string()).unwrap_or_default(),
            ),
            ("BUSY_ACTION", format!("{:?}", s.calls.busy_action).to_lowercase()),
            ("HOLD_TIME", s.calls.hold_time.map(|it| it.to_string()).unwrap_or_default()),
            ("HOLD_POLL", s.calls.hold_poll.to_string()),
            ("HOLD_MAX", s.calls.hold_max.to_string()),
            ("HOLD_MAX_PER_MERCHANT", max_waiting_per_merchant(s).to_string()),
            ("HOLD_MESSAGE", s.calls.hold_message.clone()),
            ("HOLD_AUDIO", text(&s.calls.hold_audio)),
            ("EVENTS", number_or_off(s.calls.events)),
            ("RETRY_ON_DISCONNECT", self.retries.to_string()),
        ]);
        described.extend(cluster_settings::describe(s));
        described.extend([
            ("POD_NAME", self.identity.clone()),
            ("CLEANUP_INTERVAL", s.fleet.cleanup_interval.to_string()),
            ("RECONCILE_INTERVAL", s.fleet.reconcile_interval.to_string()),
            ("LEASE_TTL", s.fleet.lease_ttl.to_string()),
            ("DRAINING_TTL", s.fleet.draining_ttl.to_string()),
            ("CALL_INFO_TTL", s.fleet.call_info_ttl.to_string()),
            ("TIER_CONFIG", Value::from(self.tiers.clone()).to_string()),
        ]);
        described.extend(s.capacity.describe());
        described.extend(s.outbound.describe());
        described.extend(cluster_settings::describe_leader(self));
        described.extend([
            ("LOG_LEVEL", s.log.log_level.to_string()),
            ("LOG_FORMAT", format!("{:?}", self.log.format).to_lowercase()),
        ]);
        described.extend(s.traces.describe());
        described.extend(s.secrets.describe());
        described
    }
}

fn number_or_off(number: usize) -> String {
    if number == 0 { "off".into() } else { number.to_string() }
}

fn duration_or_off(duration: HumanDuration) -> String {
    if duration.0.is_zero() { "off".into() } else { duration.to_string() }
}

fn store(settings: &Settings) -> Result<StoreConfig, ConfigError> {
    match (&settings.store.redis_url, &settings.store.data_dir) {
        (Some(url), Some(_)) => Err(ConfigError::new(
            "REDIS_URL",
            without_password(url),
            "either REDIS_URL or DATA_DIR, not both",
        )),
        (Some(url), None) => Ok(StoreConfig::Redis {
            url: url.clone(),
            key_prefix: settings.store.key_prefix.clone(),
            ca_file: settings.store.redis_ca_file.clone(),
        }),
        (None, Some(path)) => Ok(StoreConfig::Journal(path.clone())),
        (None, None) => Ok(StoreConfig::Memory),
    }
}

fn pod_source(settings: &Settings) -> Result<PodSource, ConfigError> {
    if let (Some(list), Some(_)) = (&settings.pods.pods, &settings.pods.pods_file) {
        return Err(ConfigError::new("PODS", list, "either PODS or PODS_FILE, not both"));
    }
    if let Some(list) = &settings.pods.pods {
        let pods = pod_list::parse(list, settings.streams.voice_agent_port);
        return pods.map(PodSource::List).map_err(|error| ConfigError::new("PODS", list, error));
    }
    if let Some(path) = &settings.pods.pods_file {
        return match ListFile::open(path.clone(), settings.streams.voice_agent_port) {
            Ok(_) => Ok(PodSource::File(path.clone())),
            Err(error) => Err(ConfigError::new("PODS_FILE", path.display(), error)),
        };
    }
    // A default kubeconfig without KUBECONFIG does not count as a cluster.
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let host = std::env::var("KUBERNETES_SERVICE_HOST").unwrap_or_default();
    let has_token = Path::new(SERVICE_ACCOUNT).exists();
    if !host.is_empty() && !has_token && !is_set("KUBECONFIG") {
        // A fallback to simulated agents would remove the pods of the fleet from a shared store.
        return Err(ConfigError::new(
            "KUBERNETES_SERVICE_HOST",
            host,
            format!(
                "a service account token in {SERVICE_ACCOUNT}, because this is a pod of a cluster: \
                 set automountServiceAccountToken: true, or name the agents with PODS or PODS_FILE"
            ),
        ));
    }
    if !host.is_empty() || is_set("KUBECONFIG") {
        return cluster_settings::cluster(settings).map(PodSource::Cluster);
    }
    Ok(PodSource::Simulated)
}

fn tiers(settings: &Settings, simulated: bool) -> Result<(Tiers, Vec<String>), ConfigError> {
    let default = if simulated { SIMULATED_TIERS } else { DEFAULT_TIERS };
    let text = settings.fleet.tier_config.as_deref().unwrap_or(default);
    let (tiers, warnings) = Tiers::parse(text, DocumentSource::Settings).map_err(|error| {
        ConfigError::new("TIER_CONFIG", text, format!("a tier document; {error}"))
    })?;
    let warnings = warnings.into_iter().map(|warning| format!("TIER_CONFIG: {warning}")).collect();
    Ok((tiers, warnings))
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "smart-router".into(),
        name => name.into(),
    }
}
