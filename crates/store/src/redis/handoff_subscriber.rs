//! Hears, from whichever replica's script, that a call was handed a pod.

use std::{sync::Arc, time::Duration};

use futures_util::StreamExt;

use super::Redis;
use fleet::names::CallSid;

/// How long to wait before a lost subscription is tried again.
const PAUSE: Duration = Duration::from_millis(200);

impl Redis {
    /// Passes on what the scripts publish. Who waits also asks from time to time, so
    /// a message that is lost costs time only.
    pub(super) async fn hear_of_handed(self: Arc<Self>) {
        let channel = self.key("handed");
        let mut said = String::new();
        loop {
            let heard = tokio::select! {
                heard = self.hear(&channel) => heard,
                () = self.stopping.cancelled() => return,
            };
            if let Err(error) = heard
                && self.link.is_up()
                && error.to_string() != said
            {
                said = error.to_string();
                tracing::warn!(%error, "cannot hear of pods handed to waiting calls; long polls are answered later");
            }
            tokio::select! {
                () = tokio::time::sleep(PAUSE) => {}
                () = self.stopping.cancelled() => return,
            }
        }
    }

    async fn hear(&self, channel: &str) -> Result<(), redis::RedisError> {
        let mut subscription = self.link.subscription().await?;
        subscription.subscribe(channel).await?;
        // Something may have been said before.
        self.wakes.wake_all();
        let mut messages = subscription.into_on_message();
        while let Some(message) = messages.next().await {
            if let Ok(call) = message.get_payload::<String>()
                && let Ok(call) = call.parse::<CallSid>()
            {
                self.wakes.wake(&call);
            }
        }
        Ok(())
    }
}
