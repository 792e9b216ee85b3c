//! Pod health: consecutive failures quarantine a pod (outlier ejection).

use super::{Change, EndCause, Fleet, Pod};
use crate::{
    Millis,
    names::PodName,
    rules::{EARLY_FAILURE, QUARANTINE_FAILURES, QUARANTINE_SHARE, QUARANTINE_TIME},
};

/// The outcome of a call for the health of its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PodOutcome {
    Success,
    Failure,
}

/// The outcome of an ended call; `None` if its end does not count.
pub(super) fn outcome_of(cause: EndCause, lasted: Millis) -> Option<PodOutcome> {
    match cause {
        EndCause::Unconfirmed | EndCause::Unreachable | EndCause::PodLost => {
            Some(PodOutcome::Failure)
        }
        EndCause::Agent => Some(PodOutcome::Success),
        EndCause::Provider if lasted >= EARLY_FAILURE => Some(PodOutcome::Success),
        // A broken stream counts once no report of a cause is expected: see `early_failure`.
        _ => None,
    }
}

/// The outcome of a stream that broke without a reported cause: an early failure, or `None`.
pub(super) fn early_failure(lasted: Millis) -> Option<PodOutcome> {
    (lasted < EARLY_FAILURE).then_some(PodOutcome::Failure)
}

impl Fleet {
    /// Records the outcome of a call for its pod. A success resets the pod's health; consecutive
    /// failures quarantine the pod, unless too many of its pool are quarantined.
    pub(super) fn record_outcome(
        &mut self,
        name: &PodName,
        outcome: Option<PodOutcome>,
        now: Millis,
    ) {
        let (Some(outcome), Some(pod)) = (outcome, self.pods.get(name)) else { return };
        if outcome == PodOutcome::Success {
            return self.reset_health(name);
        }
        let failures = pod.failures + 1;
        let is_due = pod.quarantined_until.is_none() && failures >= QUARANTINE_FAILURES;
        let until = Some(now + QUARANTINE_TIME).filter(|_| is_due && self.may_quarantine(name));
        let quarantined_until = until.or(pod.quarantined_until);
        self.record(Change::Health { pod: name.clone(), failures, quarantined_until });
    }

    /// Whether one more pod of the pod's pool may be quarantined.
    fn may_quarantine(&self, name: &PodName) -> bool {
        let pool = self.pods.get(name).and_then(|pod| pod.pool.as_ref());
        let index = pool.and_then(|pool| self.pools.get(pool));
        index.is_some_and(|index| (index.quarantined + 1) * QUARANTINE_SHARE <= index.assigned)
    }

    /// Resets the failures and the quarantine of a pod.
    pub(super) fn reset_health(&mut self, name: &PodName) {
        let is_unhealthy = |pod: &Pod| pod.failures > 0 || pod.quarantined_until.is_some();
        if self.pods.get(name).is_some_and(is_unhealthy) {
            let (failures, quarantined_until) = (0, None);
            self.record(Change::Health { pod: name.clone(), failures, quarantined_until });
        }
    }
}
