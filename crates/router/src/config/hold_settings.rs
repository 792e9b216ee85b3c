//! Checks the settings of the hold queue.

use super::{ConfigError, Settings};
use crate::hold_config::HoldConfig;

pub(super) fn hold_config(settings: &Settings) -> Option<HoldConfig> {
    let message = settings.calls.hold_message.trim();
    Some(HoldConfig {
        time: settings.calls.hold_time?.millis(),
        poll_interval: settings.calls.hold_poll.0,
        max_waiting: settings.calls.hold_max,
        max_waiting_per_merchant: max_waiting_per_merchant(settings),
        message: if message == "none" { String::new() } else { message.to_owned() },
        audio: settings.calls.hold_audio.clone(),
    })
}

pub(super) fn max_waiting_per_merchant(settings: &Settings) -> usize {
    settings.calls.hold_max_per_merchant.unwrap_or(settings.calls.hold_max.div_ceil(2))
}

pub(super) fn hold(settings: &Settings) -> Result<Option<HoldConfig>, ConfigError> {
    let hold = hold_config(settings);
    match settings.calls.hold_time {
        Some(time) if settings.calls.hold_poll > time => Err(ConfigError::new(
            "HOLD_POLL",
            settings.calls.hold_poll,
            format!("at most HOLD_TIME, which is {time}"),
        )),
        _ => Ok(hold),
    }
}
