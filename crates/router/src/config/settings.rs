//! Every setting: its variable, its flag, its default, its meaning.

use crate::{http::BusyAction, telemetry::logs::LogFormat};
use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroUsize,
    path::PathBuf,
};

use clap::Args;
use tracing_subscriber::filter::LevelFilter;

use super::{
    secret_settings::SecretSettings,
    trace_settings::TraceSettings,
    values::{self, HumanDuration},
};
use crate::networks::Networks;

/// The settings as given, before they are checked against each other.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Settings (each is a variable too)")]
pub struct Settings {
    /// Redis that replicas share: redis://, rediss:// (TLS), redis+sentinel:// or
    /// rediss+sentinel://. Unset: the embedded store
    #[arg(long, env, value_name = "URL", value_parser = values::redis_url)]
    pub redis_url: Option<String>,

    /// Certificate authority to trust for TLS to Redis, besides the system's (PEM)
    #[arg(long, env, value_name = "PATH")]
    pub redis_ca_file: Option<PathBuf>,

    /// What every Redis key begins with; {voice}: puts all keys in one cluster slot
    #[arg(long, env, value_name = "TEXT", default_value = "voice:", value_parser = values::key_prefix)]
    pub key_prefix: String,

    /// Directory for the journal of the embedded store. Unset: in memory
    #[arg(long, env, value_name = "PATH")]
    pub data_dir: Option<PathBuf>,

    /// Pods without a cluster: name=host:port, separated by commas. Neither this, nor a file, nor a cluster: simulated agents
    #[arg(long, env, value_name = "LIST")]
    pub pods: Option<String>,

    /// The same list in a file, one per line, read again when it changes
    #[arg(long, env, value_name = "PATH")]
    pub pods_file: Option<PathBuf>,

    /// on takes the pods of the store over from another origin (simulated, list or a namespace of Kubernetes) at the start; off refuses to start over them
    #[arg(long, env, value_name = "on|off", default_value = "off", value_parser = values::on_off, action = clap::ArgAction::Set)]
    pub force_pod_origin: bool,

    /// Address to listen on. Default: 0.0.0.0, with simulated agents 127.0.0.1
    #[arg(long, env, value_name = "IP", value_parser = values::bind_address)]
    pub http_bind: Option<IpAddr>,

    /// Port of the API
    #[arg(long, env, value_name = "PORT", default_value = "8080", value_parser = values::port)]
    pub http_port: u16,

    /// Port of /metrics and /health; may equal the API's
    #[arg(long, env, value_name = "PORT", default_value = "9090", value_parser = values::port)]
    pub metrics_port: u16,

    /// How long a client may take to send a request
    #[arg(long, env, value_name = "TIME", default_value = "5s")]
    pub http_read_timeout: HumanDuration,

    /// How long a connection may wait for its next request
    #[arg(long, env, value_name = "TIME", default_value = "60s")]
    pub http_idle_timeout: HumanDuration,

    /// How many connections there may be; one more takes the place of the most silent
    #[arg(long, env, value_name = "COUNT", default_value = "10000")]
    pub max_connections: NonZeroUsize,

    /// How long requests in flight may take to finish at shutdown
    #[arg(long, env, value_name = "TIME", default_value = "30s")]
    pub http_shutdown_timeout: HumanDuration,

    /// Base of every WebSocket URL, ws:// or wss://. Default with simulated agents: ws://localhost:{HTTP_PORT}; else required
    #[arg(long, env, value_name = "URL", value_parser = values::agent_url)]
    pub voice_agent_base_url: Option<String>,

    /// Port of the agents' own server on a pod
    #[arg(long, env, value_name = "PORT", default_value = "8000", value_parser = values::port)]
    pub voice_agent_port: u16,

    /// Path after the pod in WebSocket URLs; {provider}, {template} and {flow} are filled in, {v2} becomes /v2 where the flow is v2
    #[arg(long, env, value_name = "PATH", default_value = telephony::DEFAULT_WS_PATH)]
    pub ws_path_template: telephony::WsPath,

    /// The URL under which providers reach this router; needed to check signatures
    #[arg(long, env, value_name = "URL", value_parser = values::public_url)]
    pub public_url: Option<String>,

    /// Providers whose webhooks are there at all, separated by commas. Default: all of them
    #[arg(long, env, value_name = "NAMES")]
    pub providers: Option<String>,

    /// Address and port of everything but the webhooks, which then stand alone on the API's. Default: all on one
    #[arg(long, env, value_name = "IP:PORT", value_parser = values::socket_address)]
    pub admin_bind: Option<SocketAddr>,

    /// Certificate (PEM, with its chain) to serve HTTPS with, read again when it changes. Unset: plain HTTP
    #[arg(long, env, value_name = "PATH")]
    pub tls_cert_file: Option<PathBuf>,

    /// The certificate's private key (PEM)
    #[arg(long, env, value_name = "PATH")]
    pub tls_key_file: Option<PathBuf>,

    /// Authorities (PEM) one of which must have signed the certificate of every client: on ADMIN_BIND, or without it on the API's address. Unset: clients need no certificate
    #[arg(long, env, value_name = "PATH")]
    pub tls_client_ca_file: Option<PathBuf>,

    /// How many requests a second of one source are answered that are not authenticated; off for all. Those with a valid token or signature are never counted
    #[arg(long, env, value_name = "NUMBER", default_value = "50", value_parser = values::rate_limit)]
    pub rate_limit: u32,

    /// Proxies in front of this router, as addresses or networks such as 10.0.0.0/8, separated by commas: what they say in X-Forwarded-For is believed
    #[arg(long, env, value_name = "LIST")]
    pub trusted_proxies: Option<Networks>,

    /// How long a signed webhook is remembered: in this time the same request gives no pod once its call is over
    #[arg(long, env, value_name = "TIME", default_value = "24h")]
    pub replay_window: HumanDuration,

    /// on puts our stream-status URL into the documents that providers get, so that calls end even if their agents forget to release them; needs PUBLIC_URL
    #[arg(long, env, value_name = "on|off", default_value = "off", value_parser = values::on_off, action = clap::ArgAction::Set)]
    pub stream_status: bool,

    /// How long a call may take until its stream has started; then its pod is free again. Unset: not looked at. Implies STREAM_STATUS=on
    #[arg(long, env, value_name = "TIME")]
    pub connect_timeout: Option<HumanDuration>,

    /// What a call hears for which there is no pod: say speaks and hangs up, reject says busy before the call is answered, where the provider can
    #[arg(long, env, value_name = "ACTION", default_value = "say", value_enum)]
    pub busy_action: BusyAction,

    /// How long a call may wait for a pod, hearing HOLD_MESSAGE or HOLD_AUDIO, before it is refused. Unset: it is refused at once. Needs PUBLIC_URL
    #[arg(long, env, value_name = "TIME")]
    pub hold_time: Option<HumanDuration>,

    /// How often a call that waits asks again; after three times without it has lost its place
    #[arg(long, env, value_name = "TIME", default_value = "5s", value_parser = values::whole_seconds)]
    pub hold_poll: HumanDuration,

    /// How many calls may wait
    #[arg(long, env, value_name = "NUMBER", default_value = "1000", value_parser = values::places)]
    pub hold_max: usize,

    /// How many calls of one merchant may wait. Default: half of HOLD_MAX
    #[arg(long, env, value_name = "NUMBER", value_parser = values::places)]
    pub hold_max_per_merchant: Option<usize>,

    /// What a call hears when it begins to wait; none for nothing
    #[arg(
        long,
        env,
        value_name = "TEXT",
        default_value = "All agents are busy. Please stay on the line."
    )]
    pub hold_message: String,

    /// URL of what a call hears while it waits, about as long as HOLD_POLL. Unset: silence
    #[arg(long, env, value_name = "URL", value_parser = values::audio_url)]
    pub hold_audio: Option<String>,

    /// About how many events are kept; off for none
    #[arg(long, env, value_name = "NUMBER", default_value = "20000", value_parser = values::events)]
    pub events: usize,

    /// How often a call is given another pod when its stream is gone and its agent has not released it; 0 hangs up. Needs PUBLIC_URL
    #[arg(long, env, value_name = "NUMBER", default_value = "0", value_parser = values::retries)]
    pub retry_on_disconnect: u32,

    /// Namespace of the pods to watch
    #[arg(long, env, value_name = "NAME", default_value = "default")]
    pub namespace: String,

    /// Which pods to watch
    #[arg(long, env, value_name = "SELECTOR", default_value = "app=voice-agent")]
    pub pod_label_selector: String,

    /// Container of a pod whose restart ends its calls. Default: the first
    #[arg(long, env, value_name = "NAME")]
    pub agent_container: Option<String>,

    /// Identity of this replica. Default: the host name
    #[arg(long, env, value_name = "NAME")]
    pub pod_name: Option<String>,

    /// How often all views are checked against the facts
    #[arg(long, env, value_name = "TIME", default_value = "30s")]
    pub cleanup_interval: HumanDuration,

    /// How often the pods of the store are compared with those of the cluster
    #[arg(long, env, value_name = "TIME", default_value = "60s")]
    pub reconcile_interval: HumanDuration,

    /// How long a call keeps its pod without being renewed
    #[arg(long, env, value_name = "TIME", default_value = "15m")]
    pub lease_ttl: HumanDuration,

    /// How long a pod stays drained
    #[arg(long, env, value_name = "TIME", default_value = "6m")]
    pub draining_ttl: HumanDuration,

    /// How long a call's record stays in Redis, at least
    #[arg(long, env, value_name = "TIME", default_value = "1h")]
    pub call_info_ttl: HumanDuration,

    /// Tiers as JSON, used while the store has none. Default: gold 10, standard 20, overflow 5, all exclusive; with simulated agents gold 1, standard 1, basic 1 shared by 3 calls
    #[arg(long, env, value_name = "JSON")]
    pub tier_config: Option<String>,

    /// Whether one leader is elected through a Lease. Default: true in a cluster
    #[arg(long, env, value_name = "BOOL", value_parser = values::switch)]
    pub leader_election_enabled: Option<bool>,

    /// Namespace of the Lease. Default: NAMESPACE
    #[arg(long, env, value_name = "NAME")]
    pub leader_election_namespace: Option<String>,

    /// Name of the Lease
    #[arg(long, env, value_name = "NAME", default_value = "smart-router-leader")]
    pub leader_election_lock_name: String,

    /// How long a Lease is valid without being renewed
    #[arg(long, env, value_name = "TIME", default_value = "15s")]
    pub leader_election_duration: HumanDuration,

    /// How long a leader tries to renew before it steps down
    #[arg(long, env, value_name = "TIME", default_value = "10s")]
    pub leader_election_renew_deadline: HumanDuration,

    /// How often a replica tries to take or renew the Lease
    #[arg(long, env, value_name = "TIME", default_value = "2s")]
    pub leader_election_retry_period: HumanDuration,

    /// off, error, warn, info, debug or trace
    #[arg(long, env, value_name = "LEVEL", default_value = "info", value_parser = log_level)]
    pub log_level: LevelFilter,

    /// json or console. Default: json, on a terminal console
    #[arg(long, env, value_name = "FORMAT", value_enum)]
    pub log_format: Option<LogFormat>,

    #[command(flatten)]
    pub traces: TraceSettings,

    #[command(flatten)]
    pub secrets: SecretSettings,
}

fn log_level(text: &str) -> Result<LevelFilter, String> {
    text.parse().map_err(|_| "off, error, warn, info, debug or trace".into())
}
