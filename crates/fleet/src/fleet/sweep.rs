//! The sweep ends overdue queue entries, reservations, leases of calls and gateways, drains and
//! quarantines. The audit derives the indexes again.

use super::{AbandonedCall, Call, Change, EndCause, EndedCall, Fleet, pod_health::outcome_of};
use crate::{
    Millis,
    names::{CallSid, PodName, ReservationId},
};

/// The result of a sweep.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Swept {
    /// Waiting calls that missed their poll deadline.
    pub abandoned: Vec<AbandonedCall>,
    /// Calls whose lease, or whose gateway's lease, expired.
    pub expired: Vec<EndedCall>,
    /// Pods whose drain expired.
    pub undrained: Vec<PodName>,
    /// Pods whose quarantine expired.
    pub restored: Vec<PodName>,
    /// Reservations that expired.
    pub reservations: Vec<ReservationId>,
}

impl Swept {
    /// The largest count of one kind: below the sweep's limit, nothing overdue is left.
    pub fn max_count(&self) -> usize {
        let (calls, pods) = (&self.expired, &self.undrained);
        let most = calls.len().max(pods.len()).max(self.abandoned.len()).max(self.restored.len());
        most.max(self.reservations.len())
    }
}

/// The result of an audit.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Audited {
    pub pods: usize,
    /// Pods whose indexes differed from their facts.
    pub repaired: usize,
}

impl Fleet {
    /// Ends queue entries, reservations, leases, drains and quarantines past their deadline, oldest first, at
    /// most `limit` of each.
    pub fn sweep(&mut self, limit: usize, now: Millis) -> Swept {
        let mut swept = Swept::default();
        for _ in 0..limit {
            let Some(call) = self.queue.overdue(now).cloned() else { break };
            let since = self.queue.get(&call).map_or(now, |entry| entry.since);
            self.record(Change::LeftQueue { call: call.clone() });
            swept.abandoned.push(AbandonedCall { call, waited: now.saturating_sub(since) });
        }
        let due = self.leases.iter().take_while(|(until, _)| *until <= now).take(limit);
        let due: Vec<CallSid> = due.map(|(_, call)| call.clone()).collect();
        for call in due {
            let cause = match self.calls.get(&call) {
                Some(facts) if facts.queue_entry.is_some() => EndCause::Abandoned,
                Some(facts) if facts.expects_stream => EndCause::Unattached,
                Some(facts) if facts.provisional => EndCause::Unconfirmed,
                // The call may have been released; its gateway did not detach the stream.
                Some(Call { stream: Some(stream), .. }) => stream.end_cause(EndCause::Lease),
                _ => EndCause::Lease,
            };
            if let Some(ended) = self.end(&call, cause, now) {
                self.record_outcome(&ended.pod, outcome_of(cause, ended.lasted), now);
                self.reassign_and_hand_off(&ended.pod);
                swept.expired.push(ended);
            }
        }
        self.sweep_gateways(limit, now, &mut swept);
        // After the leases: an overdue waiting call that gets a slot here ends with the next sweep.
        swept.reservations = self.sweep_reservations(limit, now);
        for _ in 0..limit {
            let Some((_, pod)) = self.drains.first().filter(|(until, _)| *until <= now).cloned()
            else {
                break;
            };
            self.record(Change::Draining { pod: pod.clone(), until: None, surplus: false });
            self.reassign_and_hand_off(&pod);
            swept.undrained.push(pod);
        }
        for _ in 0..limit {
            let due = self.quarantines.first().filter(|(until, _)| *until <= now);
            let Some((_, pod)) = due.cloned() else { break };
            // The failure count stays: one more failure quarantines the pod again.
            let failures = self.pods.get(&pod).map_or(0, |pod| pod.failures);
            let quarantined_until = None;
            self.record(Change::Health { pod: pod.clone(), failures, quarantined_until });
            self.reassign_and_hand_off(&pod);
            swept.restored.push(pod);
        }
        swept
    }

    /// The names of all pods, in no order.
    pub fn pod_names(&self) -> Vec<PodName> {
        self.pods.keys().cloned().collect()
    }

    /// Derives the indexes of these pods from their facts.
    pub fn audit(&mut self, names: &[PodName]) -> Audited {
        let mut audited = Audited { pods: names.len(), repaired: 0 };
        for name in names {
            audited.repaired += usize::from(self.place(name));
            self.reassign_and_hand_off(name);
        }
        audited
    }
}
