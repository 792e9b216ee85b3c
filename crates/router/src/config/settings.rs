//! Declarations of all settings. `reference.rs` generates `docs/reference/settings.md` from them.
//!
//! The doc comment of a setting is its help text and its meaning in the reference. A default that
//! depends on other settings is its last sentence, "Default: …"; an optional setting may say
//! "Unset: …" instead. The value name is the type or the allowed values: `DURATION`, `on|off`,
//! `off|1..100`.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroUsize,
    path::PathBuf,
};

use clap::{ArgAction, Args};
use tracing_subscriber::filter::LevelFilter;

use super::{
    capacity_settings::CapacitySettings, outbound_settings::OutboundSettings,
    secret_settings::SecretSettings, trace_settings::TraceSettings, value_parsers,
};
use crate::{
    hold_config::BusyAction, human_duration::HumanDuration, telemetry::logs::LogFormat,
    trusted_proxies::TrustedProxies,
};

/// The settings as given, before they are checked against each other.
#[derive(Debug, Clone, Args)]
pub struct Settings {
    #[command(flatten)]
    pub(crate) store: StoreSettings,
    #[command(flatten)]
    pub(crate) pods: PodSettings,
    #[command(flatten)]
    pub(crate) http: HttpSettings,
    #[command(flatten)]
    pub(crate) streams: StreamSettings,
    #[command(flatten)]
    pub(crate) edge: EdgeSettings,
    #[command(flatten)]
    pub(crate) calls: CallSettings,
    #[command(flatten)]
    pub(crate) cluster: ClusterSettings,
    #[command(flatten)]
    pub(crate) fleet: FleetSettings,
    #[command(flatten)]
    pub(crate) capacity: CapacitySettings,
    #[command(flatten)]
    pub(crate) outbound: OutboundSettings,
    #[command(flatten)]
    pub(crate) leader: LeaderSettings,
    #[command(flatten)]
    pub(crate) log: LogSettings,
    #[command(flatten)]
    pub(crate) traces: TraceSettings,
    #[command(flatten)]
    pub(crate) secrets: SecretSettings,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Store")]
pub(crate) struct StoreSettings {
    /// Redis that the replicas share: redis://, rediss:// (TLS), redis+sentinel:// or
    /// rediss+sentinel:// (Sentinel, with TLS). Unset: the embedded store
    #[arg(long, env, value_name = "URL", value_parser = value_parsers::redis_url)]
    pub(crate) redis_url: Option<String>,

    /// Certificate authority to trust for TLS to Redis, besides the system's (PEM). Unset: the
    /// system's only
    #[arg(long, env, value_name = "PATH")]
    pub(crate) redis_ca_file: Option<PathBuf>,

    /// Prefix of every Redis key; {voice}: puts all keys in one slot of a Redis Cluster. Up to 64
    /// printable characters other than * ? [ ] \ " '
    #[arg(
        long,
        env,
        value_name = "TEXT",
        default_value = "voice:",
        value_parser = value_parsers::key_prefix
    )]
    pub(crate) key_prefix: String,

    /// Directory for the journal of the embedded store; excludes REDIS_URL. Unset: calls are held in
    /// memory only
    #[arg(long, env, value_name = "PATH")]
    pub(crate) data_dir: Option<PathBuf>,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Pods")]
pub(crate) struct PodSettings {
    /// Pods without a cluster: name=host:port, separated by commas; the default port is
    /// VOICE_AGENT_PORT. Unset: PODS_FILE, else the pods of the cluster, else simulated agents
    #[arg(long, env, value_name = "LIST")]
    pub(crate) pods: Option<String>,

    /// File with the list of PODS, one pod per line, # for comments; excludes PODS. It is read every
    /// second; a change takes effect when two reads agree
    #[arg(long, env, value_name = "PATH")]
    pub(crate) pods_file: Option<PathBuf>,

    /// Take the store over at the start if its pods have another origin (simulated, list or a
    /// namespace of Kubernetes); with off such a router refuses to start
    #[arg(
        long, env, value_name = "on|off", default_value = "off",
        value_parser = value_parsers::on_off, action = ArgAction::Set
    )]
    pub(crate) force_pod_origin: bool,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "HTTP")]
pub(crate) struct HttpSettings {
    /// Address to listen on. Default: 0.0.0.0; with simulated agents 127.0.0.1
    #[arg(long, env, value_name = "IP", value_parser = value_parsers::bind_address)]
    pub(crate) http_bind: Option<IpAddr>,

    /// Port of the API and the webhooks
    #[arg(long, env, value_name = "PORT", default_value = "8080", value_parser = value_parsers::port)]
    pub(crate) http_port: u16,

    /// Port of /metrics, /health and /ready; if it equals HTTP_PORT, one server serves both
    #[arg(long, env, value_name = "PORT", default_value = "9090", value_parser = value_parsers::port)]
    pub(crate) metrics_port: u16,

    /// How long a client may take to send the head of a request, again to send its body, and to
    /// read any part of the response
    #[arg(long, env, value_name = "DURATION", default_value = "5s")]
    pub(crate) http_read_timeout: HumanDuration,

    /// How long a connection may be idle before its next request
    #[arg(long, env, value_name = "DURATION", default_value = "60s")]
    pub(crate) http_idle_timeout: HumanDuration,

    /// Connection limit of webhooks and API together, and at most the limit of open files
    /// (ulimit -n) less 128; beyond it, a new connection evicts an idle one
    #[arg(
        long, env, value_name = "NUMBER", default_value = "10000",
        value_parser = value_parsers::above_zero
    )]
    pub(crate) max_connections: NonZeroUsize,

    /// How long requests in flight may take to finish at shutdown
    #[arg(long, env, value_name = "DURATION", default_value = "30s")]
    pub(crate) http_shutdown_timeout: HumanDuration,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Media streams")]
pub(crate) struct StreamSettings {
    /// Public base of the media gateway's stream URLs, ws:// or wss://; excludes
    /// VOICE_AGENT_BASE_URL. Default: PUBLIC_URL with ws:// or wss://, else ws://localhost:{HTTP_PORT},
    /// wss:// with TLS_CERT_FILE
    #[arg(long, env, value_name = "URL", value_parser = value_parsers::agent_url)]
    pub(crate) media_url: Option<String>,

    /// Largest frame of a media stream (bytes); a larger one closes the stream with 1009
    #[arg(
        long, env, value_name = "1024..268435456", default_value = "1048576",
        value_parser = value_parsers::max_frame
    )]
    pub(crate) media_max_frame: u64,

    /// How long a provider may send nothing before its stream is closed
    #[arg(long, env, value_name = "DURATION", default_value = "60s")]
    pub(crate) media_idle_timeout: HumanDuration,

    /// How long after its last heartbeat a gateway counts as lost: its calls end and their pods
    /// are free again. At least 3s
    #[arg(long, env, value_name = "DURATION", default_value = "30s")]
    pub(crate) media_lease: HumanDuration,

    /// How long a stopping process goes on to relay its open streams; it closes the rest with 1012.
    /// A second signal closes them at once, and so does off
    #[arg(
        long, env, value_name = "off|DURATION", default_value = "5m",
        value_parser = value_parsers::duration_or_off
    )]
    pub(crate) media_drain_time: HumanDuration,

    /// How long an agent may take to close its side once the provider has ended the stream
    #[arg(long, env, value_name = "DURATION", default_value = "5s")]
    pub(crate) wrap_up_time: HumanDuration,

    /// Limit of media streams; each takes two file descriptors. Default: what the limit of open
    /// files (ulimit -n) leaves besides MAX_CONNECTIONS, at least a quarter of it
    #[arg(long, env, value_name = "NUMBER", value_parser = value_parsers::above_zero)]
    pub(crate) max_streams: Option<NonZeroUsize>,

    /// Connect to agents with TLS (wss://)
    #[arg(
        long, env, value_name = "on|off", default_value = "off",
        value_parser = value_parsers::on_off, action = ArgAction::Set
    )]
    pub(crate) agent_tls: bool,

    /// Certificate authority to trust for TLS to agents, besides the system's (PEM). Unset: the
    /// system's only
    #[arg(long, env, value_name = "PATH")]
    pub(crate) agent_ca_file: Option<PathBuf>,

    /// Base of WebSocket URLs that lead to the pods through a proxy of your own, ws:// or wss://.
    /// It turns the media gateway off. Unset: the gateway is on
    #[arg(long, env, value_name = "URL", value_parser = value_parsers::agent_url)]
    pub(crate) voice_agent_base_url: Option<String>,

    /// Port of the agent's server on a pod
    #[arg(long, env, value_name = "PORT", default_value = "8000", value_parser = value_parsers::port)]
    pub(crate) voice_agent_port: u16,

    /// Path of the agent's WebSocket; {provider}, {template} and {flow} are replaced, {v2}
    /// becomes /v2 for the flow v2 and nothing for others
    #[arg(long, env, value_name = "TEXT", default_value = telephony::DEFAULT_WS_PATH)]
    pub(crate) ws_path_template: telephony::WsPath,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Webhooks, TLS and access")]
pub(crate) struct EdgeSettings {
    /// URL under which providers reach this router; needed to verify signatures, and for
    /// STREAM_STATUS, CONNECT_TIMEOUT, HOLD_TIME and RETRY_ON_DISCONNECT
    #[arg(long, env, value_name = "URL", value_parser = value_parsers::public_url)]
    pub(crate) public_url: Option<String>,

    /// Providers whose webhooks are served, separated by commas: twilio, plivo, exotel,
    /// signalwire, telnyx, vonage, jambonz. Default: all of them
    #[arg(long, env, value_name = "LIST")]
    pub(crate) providers: Option<String>,

    /// Address of everything but webhooks and media streams, such as 127.0.0.1:8081. HTTP_PORT
    /// then serves only these, /health and /ready, and METRICS_PORT listens on this IP address.
    /// Unset: one address for all
    #[arg(long, env, value_name = "IP:PORT", value_parser = value_parsers::socket_address)]
    pub(crate) admin_bind: Option<SocketAddr>,

    /// Certificate with its chain to serve HTTPS with (PEM), reloaded when it changes. Unset:
    /// plain HTTP
    #[arg(long, env, value_name = "PATH")]
    pub(crate) tls_cert_file: Option<PathBuf>,

    /// Private key of TLS_CERT_FILE (PEM), reloaded when it changes
    #[arg(long, env, value_name = "PATH")]
    pub(crate) tls_key_file: Option<PathBuf>,

    /// Authorities that must have signed the certificate of every client (PEM): on ADMIN_BIND, or
    /// without it on HTTP_PORT. Unset: clients need no certificate
    #[arg(long, env, value_name = "PATH")]
    pub(crate) tls_client_ca_file: Option<PathBuf>,

    /// Unauthenticated requests per second that one source may send, off for no limit; requests
    /// with a valid token or signature are not counted
    #[arg(
        long,
        env,
        value_name = "off|1..1000000",
        default_value = "50",
        value_parser = value_parsers::rate_limit
    )]
    pub(crate) rate_limit: u32,

    /// Proxies whose X-Forwarded-For is trusted: addresses or networks such as 10.0.0.0/8,
    /// separated by commas. Unset: none
    #[arg(long, env, value_name = "LIST")]
    pub(crate) trusted_proxies: Option<TrustedProxies>,

    /// How long the fingerprint of a signed webhook is stored: within this time the same request
    /// gets no pod once its call has ended. Each takes about 120 bytes of Redis
    #[arg(long, env, value_name = "DURATION", default_value = "24h")]
    pub(crate) replay_window: HumanDuration,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Calls")]
pub(crate) struct CallSettings {
    /// Put the stream-status URL into the documents for Twilio, SignalWire, Telnyx, Plivo and
    /// jambonz, so that calls end even if their agents do not release them; needs PUBLIC_URL. The
    /// media gateway needs none: with it, this has no effect
    #[arg(
        long, env, value_name = "on|off", default_value = "off",
        value_parser = value_parsers::on_off, action = ArgAction::Set
    )]
    pub(crate) stream_status: bool,

    /// How long a call is provisional: if its stream does not start in this time, its pod is free
    /// again. With VOICE_AGENT_BASE_URL it applies to Twilio, SignalWire, Telnyx and Plivo, needs
    /// PUBLIC_URL and implies STREAM_STATUS=on. Default: 30s; with VOICE_AGENT_BASE_URL calls are
    /// confirmed at once
    #[arg(long, env, value_name = "DURATION")]
    pub(crate) connect_timeout: Option<HumanDuration>,

    /// Response to a call without a pod: say plays a message and hangs up; reject signals busy
    /// before the call is answered and billed, where the provider can (Twilio, SignalWire,
    /// Telnyx, Plivo, jambonz)
    #[arg(long, env, value_name = "ACTION", default_value = "say", value_enum)]
    pub(crate) busy_action: BusyAction,

    /// How long a call may wait for a pod before it is refused; needs PUBLIC_URL. Unset: calls
    /// without a pod are refused at once
    #[arg(long, env, value_name = "DURATION")]
    pub(crate) hold_time: Option<HumanDuration>,

    /// Poll interval of a waiting call, in whole seconds, at most HOLD_TIME; a call that has not
    /// polled for three intervals loses its queue entry
    #[arg(
        long, env, value_name = "DURATION", default_value = "5s",
        value_parser = value_parsers::whole_seconds
    )]
    pub(crate) hold_poll: HumanDuration,

    /// Maximum number of waiting calls
    #[arg(
        long,
        env,
        value_name = "1..1000000",
        default_value = "1000",
        value_parser = value_parsers::queue_limit
    )]
    pub(crate) hold_max: usize,

    /// Maximum number of waiting calls of one merchant. Default: half of HOLD_MAX
    #[arg(long, env, value_name = "1..1000000", value_parser = value_parsers::queue_limit)]
    pub(crate) hold_max_per_merchant: Option<usize>,

    /// Message to a call that begins to wait; none for no message
    #[arg(
        long,
        env,
        value_name = "none|TEXT",
        default_value = "All agents are busy. Please stay on the line."
    )]
    pub(crate) hold_message: String,

    /// URL of the audio that a waiting call hears. It should be about as long as HOLD_POLL,
    /// because the call polls after it. Unset: silence
    #[arg(long, env, value_name = "URL", value_parser = value_parsers::audio_url)]
    pub(crate) hold_audio: Option<String>,

    /// Approximate number of events to store, for the dashboard and the events of calls; off stores
    /// none. Use the same value in all replicas
    #[arg(
        long,
        env,
        value_name = "off|100..100000",
        default_value = "20000",
        value_parser = value_parsers::events
    )]
    pub(crate) events: usize,

    /// How many times a call gets another pod when its stream disconnects and its agent has not
    /// released it; 0 hangs up. Providers ask for it at PUBLIC_URL, which VOICE_AGENT_BASE_URL
    /// makes necessary. Default: 2; with VOICE_AGENT_BASE_URL 0
    #[arg(long, env, value_name = "0..9", value_parser = value_parsers::retries)]
    pub(crate) retry_on_disconnect: Option<u32>,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Kubernetes")]
pub(crate) struct ClusterSettings {
    /// Namespace of the router, which identifies the store's pods and holds the VoiceTier and
    /// VoiceMerchant objects
    #[arg(long, env, value_name = "NAME", default_value = "default")]
    pub(crate) namespace: String,

    /// Namespaces of the pods to watch, separated by commas; a pod name may occur in one of them
    /// only. Default: NAMESPACE
    #[arg(long, env, value_name = "LIST")]
    pub(crate) namespaces: Option<String>,

    /// Label selector of the pods to watch
    #[arg(long, env, value_name = "TEXT", default_value = "app=voice-agent")]
    pub(crate) pod_label_selector: String,

    /// Container whose restart ends the calls of its pod; set it where sidecars are injected as
    /// the first container. Default: the first container
    #[arg(long, env, value_name = "NAME")]
    pub(crate) agent_container: Option<String>,

    /// Time after its Ready transition from which a pod gets calls: for a proxy that caches DNS;
    /// off for none
    #[arg(
        long, env, value_name = "DURATION", default_value = "off",
        value_parser = value_parsers::settle_time
    )]
    pub(crate) pod_settle_time: HumanDuration,

    /// Apply VoiceTier and VoiceMerchant objects of NAMESPACE; with off they are ignored, and the
    /// API may change what they manage
    #[arg(
        long, env, value_name = "on|off", default_value = "on",
        value_parser = value_parsers::on_off, action = ArgAction::Set
    )]
    pub(crate) manifests: bool,

    /// Identity of this replica. Default: the host name
    #[arg(long, env, value_name = "NAME")]
    pub(crate) pod_name: Option<String>,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Leases, drains and tiers")]
pub(crate) struct FleetSettings {
    /// Interval of the audit, which derives all indexes from the facts again
    #[arg(long, env, value_name = "DURATION", default_value = "30s")]
    pub(crate) cleanup_interval: HumanDuration,

    /// Interval at which the pods of the store are reconciled with the list or the cluster
    #[arg(long, env, value_name = "DURATION", default_value = "60s")]
    pub(crate) reconcile_interval: HumanDuration,

    /// Lease of a call: without a renewal for this long the call ends, and its pod is free again.
    /// At least 1s with the media gateway
    #[arg(long, env, value_name = "DURATION", default_value = "15m")]
    pub(crate) lease_ttl: HumanDuration,

    /// How long a pod stays drained
    #[arg(long, env, value_name = "DURATION", default_value = "6m")]
    pub(crate) draining_ttl: HumanDuration,

    /// Minimum time that the record of a call stays in Redis
    #[arg(long, env, value_name = "DURATION", default_value = "1h")]
    pub(crate) call_info_ttl: HumanDuration,

    /// Tier document, used while the store has none. Default: gold 10, standard 20, overflow 5,
    /// all exclusive; with simulated agents gold 1, standard 1, and basic 1 shared by 3 calls
    #[arg(long, env, value_name = "JSON")]
    pub(crate) tier_config: Option<String>,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Leader election")]
pub(crate) struct LeaderSettings {
    /// Elect one leader through a Lease. Default: true in a cluster, else false
    #[arg(long, env, value_name = "true|false", value_parser = value_parsers::boolean)]
    pub(crate) leader_election_enabled: Option<bool>,

    /// Namespace of the Lease. Default: NAMESPACE
    #[arg(long, env, value_name = "NAME")]
    pub(crate) leader_election_namespace: Option<String>,

    /// Name of the Lease
    #[arg(long, env, value_name = "NAME", default_value = "smart-router-leader")]
    pub(crate) leader_election_lock_name: String,

    /// How long the Lease is valid without a renewal
    #[arg(long, env, value_name = "DURATION", default_value = "15s")]
    pub(crate) leader_election_duration: HumanDuration,

    /// How long the leader tries to renew the Lease before it steps down; less than
    /// LEADER_ELECTION_DURATION
    #[arg(long, env, value_name = "DURATION", default_value = "10s")]
    pub(crate) leader_election_renew_deadline: HumanDuration,

    /// Interval at which a replica tries to acquire or renew the Lease; less than
    /// LEADER_ELECTION_RENEW_DEADLINE
    #[arg(long, env, value_name = "DURATION", default_value = "2s")]
    pub(crate) leader_election_retry_period: HumanDuration,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Logs")]
pub(crate) struct LogSettings {
    /// Lowest level of log lines
    #[arg(
        long, env, value_name = "off|error|warn|info|debug|trace", default_value = "info",
        value_parser = log_level
    )]
    pub(crate) log_level: LevelFilter,

    /// Format of log lines, which go to standard error. Default: json; on a terminal console
    #[arg(long, env, value_name = "FORMAT", value_enum)]
    pub(crate) log_format: Option<LogFormat>,
}

fn log_level(text: &str) -> Result<LevelFilter, String> {
    text.parse().map_err(|_| "off, error, warn, info, debug or trace".into())
}
