//! Subscribes to the channels on which Redis functions announce hand-offs, drains and ending
//! streams of all replicas.

use super::keys;
use std::{str::FromStr, sync::Arc, time::Duration};

use fleet::names::{CallSid, GatewayId, PodName};
use futures_util::StreamExt;

use super::Redis;

/// Pause before a lost subscription is re-established.
const RESUBSCRIBE_DELAY: Duration = Duration::from_millis(200);

impl Redis {
    /// Passes notifications on to their listeners. Listeners also poll, so a lost message only
    /// delays them.
    pub(super) async fn follow_notifications(self: Arc<Self>) {
        let mut reported = String::new();
        loop {
            let ended = tokio::select! {
                ended = self.receive_notifications() => ended,
                () = self.stopping.cancelled() => return,
            };
            if let Err(error) = ended
                && self.client.is_up()
                && error.to_string() != reported
            {
                reported = error.to_string();
                tracing::warn!(
                    %error,
                    "cannot subscribe to notifications; long polls, drains and gateways poll instead"
                );
            }
            tokio::select! {
                () = tokio::time::sleep(RESUBSCRIBE_DELAY) => {}
                () = self.stopping.cancelled() => return,
            }
        }
    }

    async fn receive_notifications(&self) -> Result<(), redis::RedisError> {
        let [handed, drained, ending] =
            [keys::HANDED, keys::DRAINED, keys::ENDING].map(|channel| self.key(channel));
        let mut subscription = self.client.subscription().await?;
        subscription.subscribe(&[&handed, &drained, &ending]).await?;
        // Messages before the subscription are lost.
        self.handoffs.notify_all();
        self.drains.notify_all();
        self.endings.notify_all();
        let mut messages = subscription.into_on_message();
        while let Some(message) = messages.next().await {
            let Ok(payload) = message.get_payload::<String>() else { continue };
            if message.get_channel_name() == handed {
                if let Ok(call) = CallSid::from_str(&payload) {
                    self.handoffs.notify(&call);
                }
            } else if message.get_channel_name() == ending {
                if let Ok(gateway) = GatewayId::from_str(&payload) {
                    self.endings.notify(&gateway);
                }
            } else if let Ok(pod) = PodName::from_str(&payload) {
                self.drains.notify(&pod);
            }
        }
        Ok(())
    }
}
