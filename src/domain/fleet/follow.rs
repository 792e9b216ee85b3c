//! The fleet as a judge: it follows another store's decisions, if they were legal.

use super::{Allocate, Allocation, Fleet, Refusal};
use crate::domain::{
    Millis,
    names::{PodName, Pool},
};

/// A decision that the rules do not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Illegal {
    #[error("{0} may not be drawn: {1} is due")]
    Pick(PodName, PodName),
    #[error("the call should have been refused: {0:?}")]
    ShouldRefuse(Refusal),
}

impl Fleet {
    /// Allocates the pod that another store drew. Any pod of the same pool with
    /// as many calls as the one we would draw is as good.
    pub fn follow(
        &mut self,
        request: &Allocate,
        pick: &PodName,
        now: Millis,
    ) -> Result<Allocation, Illegal> {
        if self.calls.contains_key(&request.call) {
            return self.allocate(request, now).map_err(Illegal::ShouldRefuse);
        }
        let (due, pool, tried, malformed_merchant) =
            self.choose(request, now).map_err(Illegal::ShouldRefuse)?;
        let calls = |pod: &PodName| {
            self.pods.get(pod).and_then(|pod| pod.placed.as_ref()).map(|placed| placed.calls)
        };
        let is_open = self.available(&pool).iter().any(|(pod, _)| pod == pick);
        if !is_open || calls(pick) != calls(&due) {
            return Err(Illegal::Pick(pick.clone(), due));
        }
        Ok(self.give(request, (pick.clone(), pool, tried, malformed_merchant), now))
    }

    /// The available view of a pool: its pods and their live calls, by name.
    pub fn available(&self, pool: &Pool) -> Vec<(PodName, usize)> {
        let open = self.pools.get(pool).into_iter().flat_map(|view| &view.open);
        let mut pods: Vec<_> = open.map(|((calls, _), pod)| (pod.clone(), *calls)).collect();
        pods.sort();
        pods
    }
}
