//! The role of a process: a router, or `smart-router media`.

use super::{ConfigError, Settings};

/// The part of the service that a process provides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessRole {
    /// API, webhooks, dashboard and media streams, with the background work of the fleet.
    Router,
    /// Media streams only, for the routers of the same Redis. It knows no source of pods: the
    /// routers write them.
    Media,
}

impl ProcessRole {
    /// Checks the settings that the role requires.
    pub(super) fn check(self, settings: &Settings) -> Result<(), ConfigError> {
        if self == Self::Router {
            return Ok(());
        }
        if settings.store.redis_url.is_none() {
            return Err(ConfigError::new(
                "REDIS_URL",
                "",
                "the Redis of the routers, because smart-router media serves the streams of their \
                 calls",
            ));
        }
        match &settings.streams.voice_agent_base_url {
            None => Ok(()),
            Some(url) => Err(ConfigError::new(
                "VOICE_AGENT_BASE_URL",
                url,
                "it to be unset for smart-router media: it leads streams past the media gateway",
            )),
        }
    }
}
