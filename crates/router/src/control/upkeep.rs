//! The sweep and the audit.

use super::Control;
use fleet::Cause;

/// So many overdue leases are ended in one step.
const BATCH: usize = 100;

impl Control {
    /// Ends the leases and drains whose time has come.
    pub(crate) async fn sweep(&self) {
        loop {
            let swept = match self.store.sweep(BATCH).await {
                Ok(swept) => swept,
                Err(error) => return tracing::warn!(%error, "cannot sweep"),
            };
            for ended in &swept.expired {
                let (call, pod, pool) = (&ended.call, &ended.pod, &ended.source_pool);
                let lasted_ms = ended.lasted;
                match ended.cause {
                    Cause::Unconfirmed => {
                        self.metrics.unconfirmed(ended);
                        tracing::warn!(call_sid = %call, %pod, %pool, lasted_ms, "a stream never started; its pod is free again");
                    }
                    Cause::Abandoned => {
                        self.metrics.abandoned(lasted_ms);
                        tracing::info!(call_sid = %call, %pod, %pool, "a call did not come for the pod it waited for");
                    }
                    _ => {
                        self.metrics.expired(ended);
                        tracing::warn!(call_sid = %call, %pod, %pool, lasted_ms, "a lease ran out: no release, no renewal");
                    }
                }
            }
            for gone in &swept.abandoned {
                self.metrics.abandoned(gone.waited);
                tracing::info!(call_sid = %gone.call, waited_ms = gone.waited, "a call no longer waits: it has stopped asking");
            }
            for pod in &swept.restored {
                tracing::info!(%pod, "a quarantine ran out");
            }
            for pod in &swept.undrained {
                tracing::info!(%pod, "a drain ran out");
            }
            if swept.most() < BATCH {
                return;
            }
        }
    }

    /// Derives all views from the facts again.
    pub(crate) async fn audit(&self) {
        match self.store.audit().await {
            Ok(audited) if audited.repaired > 0 => {
                self.metrics.zombies_recovered.inc_by(audited.repaired as u64);
                tracing::warn!(
                    repaired = audited.repaired,
                    pods = audited.pods,
                    "the audit repaired views"
                );
            }
            Ok(audited) => tracing::debug!(pods = audited.pods, "audited"),
            Err(error) => tracing::warn!(%error, "cannot audit"),
        }
    }
}
