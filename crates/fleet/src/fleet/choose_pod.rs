//! Selection of a pod: the chain of a call, the limits, and the pods of a pool.

use super::{
    Allocate, Fleet, Refusal, RefusalReason, SkipReason, SkippedStep,
    calls::{Choice, Continuation},
    indexes::is_lowest_of_sample,
};
use crate::{
    Millis, merchant,
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::{Strategy, TierKind},
};

/// How a walk of the chain treats slots that are held for dials.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum HeldSlots<'a> {
    /// A call without a reservation: it needs more free slots than are held.
    Respected,
    /// A call with a reservation: it may use the held slots of this pool.
    UsedIn(&'a Pool),
    /// A call that goes on, or a call with a reservation without any other pod.
    Used,
}

impl Fleet {
    /// Walks the chain to the first free pod. A reconnect gets its previous pod again if that has
    /// not failed, otherwise only if no other pod is free.
    pub(super) fn choose_pod(
        &self,
        request: &Allocate,
        continuation: &Continuation,
        now: Millis,
    ) -> Result<Choice, Refusal> {
        let merchant = request.merchant.as_ref().and_then(|id| self.merchants.get(id));
        let malformed_merchant = merchant.and_then(|merchant| merchant.config.clone().err());
        let refusal = |tried, reason| Refusal {
            tried,
            malformed_merchant: malformed_merchant.clone(),
            reason,
            reservation: None,
        };
        if !continuation.is_known
            && let Some(limit) = self.exceeded_limit(request, now)
        {
            return Err(refusal(Vec::new(), RefusalReason::Limit(limit)));
        }
        if let Some((pod, pool)) = self.kept_pod(continuation) {
            return Ok((pod, pool, Vec::new(), malformed_merchant));
        }
        let avoided = request.previous.as_ref().map(|previous| Some(&previous.pod));
        let mut skipped = Vec::new();
        // A call that goes on is served before calls that begin.
        let held = if continuation.is_known { HeldSlots::Used } else { HeldSlots::Respected };
        for avoid in avoided.into_iter().chain([None]) {
            match self.walk_chain(&request.call, request.merchant.as_ref(), avoid, held) {
                Ok((pod, pool, tried)) => return Ok((pod, pool, tried, malformed_merchant)),
                Err(tried) => skipped = tried,
            }
        }
        Err(refusal(skipped, RefusalReason::NoPods))
    }

    /// The pod that keeps its call, and its pool. A pod that the call leaves in the same step may be
    /// out of service: it serves the call already.
    fn kept_pod(&self, continuation: &Continuation) -> Option<(PodName, Pool)> {
        let pod = continuation.keeps.as_ref()?;
        let pool = match continuation.left {
            Some(_) => self.pool_below_cap(pod).filter(|pool| self.tiers.kind(pool).is_some()),
            None => self.pool_with_free_slot(pod),
        };
        Some((pod.clone(), pool?))
    }

    /// Walks the chain of a merchant to the first free pod other than `avoid`; the skipped steps if
    /// there is none.
    pub(super) fn walk_chain(
        &self,
        call: &CallSid,
        merchant: Option<&MerchantId>,
        avoid: Option<&PodName>,
        held: HeldSlots<'_>,
    ) -> Result<(PodName, Pool, Vec<SkippedStep>), Vec<SkippedStep>> {
        let mut tried = Vec::new();
        for step in merchant::chain(&self.tiers, self.merchant_config_of(merchant)) {
            let drawn = match self.tiers.resolve(step) {
                None => Err(SkipReason::Unknown),
                Some(pool) => match self.draw(&pool, avoid, call) {
                    Ok(_) if !self.may_use(&pool, held) => Err(SkipReason::Held),
                    drawn => drawn.map(|pod| (pod.clone(), pool)),
                },
            };
            match drawn {
                Ok((pod, pool)) => return Ok((pod, pool, tried)),
                Err(reason) => tried.push(SkippedStep { step: step.clone(), reason }),
            }
        }
        Err(tried)
    }

    /// Whether a call may use a free slot of the pool, in view of the held ones.
    fn may_use(&self, pool: &Pool, held: HeldSlots<'_>) -> bool {
        match held {
            HeldSlots::Respected => self.is_open(pool),
            HeldSlots::UsedIn(bound) => bound == pool || self.is_open(pool),
            HeldSlots::Used => true,
        }
    }

    /// The pod of a pool that takes the next call.
    pub(super) fn draw(
        &self,
        pool: &Pool,
        avoid: Option<&PodName>,
        call: &CallSid,
    ) -> Result<&PodName, SkipReason> {
        let index = self.pools.get(pool).ok_or(SkipReason::Empty)?;
        let (cap, is_pack) = match self.tiers.kind(pool) {
            None => return Err(SkipReason::Unknown),
            Some(TierKind::Exclusive | TierKind::Dedicated) => (1, false),
            Some(TierKind::Shared { max_concurrent, strategy }) => {
                (max_concurrent as usize, strategy == Strategy::Pack)
            }
        };
        let drawn = index.choices().into_iter().find_map(|pods| {
            let mut candidates = pods.range(..(cap, 0)).filter(|(_, pod)| Some(*pod) != avoid);
            let drawn = if is_pack { candidates.next_back() } else { candidates.next() };
            drawn.map(|((calls, _), pod)| (pods, *calls, pod))
        });
        let Some((pods, calls, drawn)) = drawn else {
            return Err(match (index.in_service(), index.leaving) {
                (0, 0) => SkipReason::Empty,
                (0, _) => SkipReason::AllDraining,
                _ => SkipReason::AtCapacity,
            });
        };
        let Some(preferred) = self.preferred.get(call) else { return Ok(drawn) };
        // Pods at risk are the last choice in any order.
        let is_ordered =
            self.tiers.prefers_low_ordinals(pool) && std::ptr::eq(pods, &index.available);
        let equivalent = pods.range((calls, 0)..(calls + 1, 0)).map(|(_, pod)| pod);
        Ok(equivalent
            .filter(|pod| Some(*pod) != avoid)
            .find(|pod| *pod == preferred)
            .filter(|pod| !is_ordered || is_lowest_of_sample(index, pod, avoid))
            .unwrap_or(drawn))
    }
}
