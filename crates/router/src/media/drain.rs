//! The drain of a stopping gateway: it admits no stream, and relays the open ones until they end
//! or their time is over. Heartbeats, renewals and orders of the store go on meanwhile.

use tokio::time::sleep;

use super::Gateway;
use media::stats::Order;

impl Gateway {
    /// Whether a stream is open, or about to open or to close.
    pub(crate) fn has_streams(&self) -> bool {
        !self.tasks.is_empty()
    }

    /// Number of open streams.
    pub(crate) fn stream_count(&self) -> usize {
        self.streams.count()
    }

    /// Relays the open streams until they end, at most for the drain time, and then orders the
    /// rest to close.
    pub(crate) async fn drain(&self) {
        self.tasks.close();
        if self.tasks.is_empty() {
            return;
        }
        self.stream_metrics().draining.set(1);
        if !self.drain_time.is_zero() {
            tracing::info!(
                streams = self.streams.count(),
                drain_time_s = self.drain_time.as_secs(),
                "draining: relaying the open media streams until they end; a second signal closes \
                 them at once with 1012"
            );
        }
        let reason = tokio::select! {
            () = self.tasks.wait() => {
                self.drain_ended.cancel();
                return tracing::info!("drained: the last media stream has ended");
            }
            () = self.drain_ended.cancelled() => "a second signal was received",
            () = sleep(self.drain_time) => "MEDIA_DRAIN_TIME is over",
        };
        self.drain_ended.cancel();
        tracing::info!(
            streams = self.streams.count(),
            reason,
            "closing the remaining media streams with 1012"
        );
        self.streams.order_all(Order::Stop);
    }

    /// Ends the drain, now or when it begins. Returns false if no stream is open, or if the drain
    /// has ended already.
    pub(crate) fn end_drain(&self) -> bool {
        let has_effect = self.has_streams() && !self.drain_ended.is_cancelled();
        self.drain_ended.cancel();
        has_effect
    }
}
