//! Checks and describes the settings of the media gateway.

use std::time::Duration;

use super::{Config, ConfigError, Settings, duration_or_off};
use crate::{
    human_duration::HumanDuration,
    media::{AgentTls, MediaConfig},
};

/// Default time in which the stream of a call must reach the gateway.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Default number of further pods of a call whose pod is lost.
const RETRIES: u32 = 2;
/// A gateway sends several heartbeats per lease, and the sweep runs once a second.
const MIN_LEASE: Duration = Duration::from_secs(3);

/// A gateway renews the lease of a call three times, and the sweep runs once a second.
const MIN_CALL_LEASE: Duration = Duration::from_secs(1);

/// Whether the gateway carries the streams.
pub(super) fn is_on(settings: &Settings) -> bool {
    settings.streams.voice_agent_base_url.is_none()
}

pub(super) fn media(settings: &Settings) -> Result<Option<MediaConfig>, ConfigError> {
    let streams = &settings.streams;
    if !is_on(settings) {
        return match &streams.media_url {
            None => Ok(None),
            Some(url) => Err(ConfigError::new(
                "MEDIA_URL",
                url,
                "either MEDIA_URL or VOICE_AGENT_BASE_URL, not both: the second leads past the \
                 media gateway",
            )),
        };
    }
    if streams.media_lease.0 < MIN_LEASE {
        return Err(ConfigError::new("MEDIA_LEASE", streams.media_lease, "at least 3s"));
    }
    if settings.fleet.lease_ttl.0 < MIN_CALL_LEASE {
        return Err(ConfigError::new("LEASE_TTL", settings.fleet.lease_ttl, "at least 1s"));
    }
    if let (false, Some(path)) = (streams.agent_tls, &streams.agent_ca_file) {
        return Err(ConfigError::new("AGENT_CA_FILE", path.display(), "AGENT_TLS=on as well"));
    }
    let public = settings.edge.public_url.as_deref();
    // https:// becomes wss://, http:// becomes ws://.
    let public = public.and_then(|url| url.strip_prefix("http")).map(|rest| format!("ws{rest}"));
    Ok(Some(MediaConfig {
        url: streams.media_url.clone().or(public),
        max_frame: streams.media_max_frame,
        idle_timeout: streams.media_idle_timeout.0,
        lease: streams.media_lease.0,
        drain_time: streams.media_drain_time.0,
        wrap_up: streams.wrap_up_time.0,
        max_streams: streams.max_streams.map(|number| number.get()),
        agent_tls: streams.agent_tls.then(|| AgentTls { authority: streams.agent_ca_file.clone() }),
    }))
}

/// The time in which a stream must start, if calls are provisional.
pub(super) fn connect_timeout(settings: &Settings) -> Option<HumanDuration> {
    let default = is_on(settings).then_some(HumanDuration(CONNECT_TIMEOUT));
    settings.calls.connect_timeout.or(default)
}

/// How many times a call gets another pod.
pub(super) fn retries(settings: &Settings) -> u32 {
    let default = if is_on(settings) { RETRIES } else { 0 };
    settings.calls.retry_on_disconnect.unwrap_or(default)
}

pub(super) fn describe(config: &Config) -> [(&'static str, String); 9] {
    let Config { media, settings, .. } = config;
    let s = &settings.streams;
    let url = media.as_ref().map(|_| config.media_url(settings.http.http_port));
    let ca_file = s.agent_ca_file.as_ref().map(|path| path.display().to_string());
    [
        ("MEDIA_URL", url.unwrap_or_default()),
        ("MEDIA_MAX_FRAME", s.media_max_frame.to_string()),
        ("MEDIA_IDLE_TIMEOUT", s.media_idle_timeout.to_string()),
        ("MEDIA_LEASE", s.media_lease.to_string()),
        ("MEDIA_DRAIN_TIME", duration_or_off(s.media_drain_time)),
        ("WRAP_UP_TIME", s.wrap_up_time.to_string()),
        ("MAX_STREAMS", s.max_streams.map(|it| it.to_string()).unwrap_or_default()),
        ("AGENT_TLS", if s.agent_tls { "on" } else { "off" }.into()),
        ("AGENT_CA_FILE", ca_file.unwrap_or_default()),
    ]
}
