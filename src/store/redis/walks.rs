//! What takes more than one script: everything that is read or done page by page.

use std::collections::BTreeMap;

use super::{Redis, link::Timeliness, reply::pod_row};
use crate::{
    domain::{
        Millis,
        fleet::{PodStatus, PoolStatus},
        names::Pool,
        tiers::Tiers,
    },
    store::StoreError,
};

/// Calls that are spared in one step.
const SPARED: &str = "100";

impl Redis {
    /// All pods, page by page. A pod that moves meanwhile may come twice.
    pub(super) async fn all_pods(&self) -> Result<Vec<PodStatus>, StoreError> {
        let mut pods = BTreeMap::new();
        let mut cursor = "0".to_owned();
        loop {
            let mut answer = self.run(&self.scripts.pods, &[&cursor, "40"]).await?;
            cursor = answer.text()?;
            for row in answer.list()? {
                match pod_row(row) {
                    Ok(pod) => drop(pods.insert(pod.name.clone(), pod)),
                    Err(error) => tracing::warn!(%error, "a pod cannot be read"),
                }
            }
            if cursor == "0" {
                return Ok(pods.into_values().collect());
            }
        }
    }

    pub(super) async fn spare_all(&self, time: Millis) -> Result<(), StoreError> {
        let time = time.to_string();
        for which in ["calls", "waiting"] {
            let mut from = "-inf".to_owned();
            while !from.is_empty() {
                let args = [which, from.as_str(), SPARED, &time];
                let script = &self.scripts.spare;
                let mut answer = self.link.attempt(script, &args, Timeliness::InTime).await?;
                from = answer.text()?;
            }
        }
        Ok(())
    }

    pub(super) async fn status_of(
        &self,
        pool: Pool,
        tiers: &Tiers,
        counts: [u64; 6],
    ) -> Result<PoolStatus, StoreError> {
        let [assigned, available, draining, not_ready, quarantined, waiting] =
            counts.map(|count| count as usize);
        let (mut active_calls, mut free_slots) = (0, 0);
        let mut cursor = (assigned > 0).then(|| "0".to_owned());
        while let Some(from) = cursor {
            let args = [&pool.as_tier_value(), from.as_str(), "200"];
            let mut answer = self.run(&self.scripts.pool_load, &args).await?;
            cursor = Some(answer.text()?).filter(|next| next != "0");
            active_calls += answer.number()? as usize;
            free_slots += answer.number()? as usize;
        }
        Ok(PoolStatus {
            kind: tiers.kind(&pool),
            target: tiers.target(&pool),
            assigned,
            available,
            draining,
            not_ready,
            quarantined,
            waiting,
            active_calls,
            free_slots,
            pool,
        })
    }
}
