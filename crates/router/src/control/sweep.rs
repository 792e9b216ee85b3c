//! The sweep and the audit.

use super::Control;
use fleet::{EndCause, EndedCall};

/// Expired leases, drains and quarantines ended per step.
const BATCH_SIZE: usize = 100;

impl Control {
    /// Ends expired leases, queue entries, quarantines and drains.
    pub(crate) async fn sweep(&self) {
        loop {
            let swept = match self.store.sweep(BATCH_SIZE).await {
                Ok(swept) => swept,
                Err(error) => return tracing::warn!(%error, "sweep failed; retrying in a second"),
            };
            swept.expired.iter().for_each(|ended| self.record_swept(ended));
            for gone in &swept.abandoned {
                self.metrics.abandoned(gone.waited);
                tracing::info!(
                    call_sid = %gone.call, waited_ms = gone.waited,
                    "a waiting call stopped polling; removed it from the queue"
                );
            }
            for reservation in &swept.reservations {
                self.metrics.outbound.ended("expired");
                tracing::info!(%reservation, "a reservation expired; its slot and line are free");
            }
            for pod in &swept.restored {
                tracing::info!(%pod, "a quarantine ended");
            }
            for pod in &swept.undrained {
                tracing::info!(%pod, "a drain ended");
            }
            if swept.max_count() < BATCH_SIZE {
                return;
            }
        }
    }

    /// Counts and logs a call that the sweep ended.
    fn record_swept(&self, ended: &EndedCall) {
        let EndedCall { call, pod, source_pool: pool, lasted: lasted_ms, cause } = ended;
        match cause {
            EndCause::Unconfirmed => {
                self.metrics.unconfirmed(ended);
                tracing::warn!(
                    call_sid = %call, %pod, %pool, lasted_ms,
                    "the stream did not start in time; the pod is free again"
                );
            }
            EndCause::Unattached => {
                self.metrics.unconfirmed(ended);
                tracing::warn!(
                    call_sid = %call, %pod, %pool, lasted_ms,
                    "no stream of the call reached the media gateway in time; the pod is free again"
                );
            }
            EndCause::Gateway => {
                self.metrics.gateway_lost(ended);
                tracing::warn!(
                    call_sid = %call, %pod, %pool, lasted_ms,
                    "the media gateway of the stream sends no heartbeats; ended the call, the pod \
                     is free again"
                );
            }
            EndCause::Abandoned => {
                self.metrics.abandoned(*lasted_ms);
                tracing::info!(
                    call_sid = %call, %pod, %pool,
                    "a waiting call did not accept its hand-off; the pod is free again"
                );
            }
            EndCause::Lease => {
                self.metrics.expired(ended);
                tracing::warn!(
                    call_sid = %call, %pod, %pool, lasted_ms,
                    "a lease expired without release or renewal; the pod is free again"
                );
            }
            // The cause of the release.
            cause => {
                self.metrics.call_lasted(pool, *lasted_ms);
                tracing::warn!(
                    call_sid = %call, %pod, %pool, lasted_ms, cause = cause.as_str(),
                    "the media gateway did not close the stream of a released call; the pod is \
                     free again"
                );
            }
        }
    }

    /// Derives all indexes from the facts again.
    pub(crate) async fn audit(&self) {
        match self.store.audit().await {
            Ok(audited) if audited.repaired > 0 => {
                self.metrics.zombies_recovered.inc_by(audited.repaired as u64);
                tracing::warn!(
                    repaired = audited.repaired,
                    pods = audited.pods,
                    "the audit repaired indexes"
                );
            }
            Ok(audited) => tracing::debug!(pods = audited.pods, "audited"),
            Err(error) => tracing::warn!(%error, "audit failed; retrying at the next interval"),
        }
    }
}
