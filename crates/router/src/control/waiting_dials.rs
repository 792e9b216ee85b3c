//! Reports of waiting diallers: the capacity policy counts those of all routers.

use std::{sync::Arc, time::Duration};

use super::{Control, ticks};

/// Interval of the reports, a third of their lifetime in the store.
const REPORT_INTERVAL: Duration = Duration::from_secs(2);

impl Control {
    /// Reports the dials that wait for a pod at this router while there are any, until shutdown. A
    /// report that fails expires.
    pub(super) async fn report_waiting_dials(self: Arc<Self>) {
        let router = format!("{}_{:08x}", self.identity, crate::random_u32());
        let (mut ticks, mut is_reported) = (ticks(REPORT_INTERVAL), false);
        while self.next_tick(&mut ticks).await {
            let waiting = self.dial_queues.waiting_for_pods();
            if waiting.is_empty() && !is_reported {
                continue;
            }
            match self.store.report_waiting_dials(&router, &waiting).await {
                Ok(()) => is_reported = !waiting.is_empty(),
                Err(error) => {
                    is_reported = true;
                    tracing::debug!(%error, "cannot report waiting diallers; retrying");
                }
            }
        }
        if is_reported {
            // The polls end with the router. Otherwise the report expires.
            let _ = self.store.report_waiting_dials(&router, &[]).await;
        }
    }
}
