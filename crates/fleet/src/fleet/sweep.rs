//! What time and mishaps ask for: the sweep ends what is overdue, the audit
//! derives every view again.

use super::{Abandoned, Cause, Change, EndedCall, Fleet, call_history::speaks_for};
use crate::{
    Millis,
    names::{CallSid, PodName},
};

/// What a sweep ended.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Swept {
    /// Calls that waited, and did not ask again.
    pub abandoned: Vec<Abandoned>,
    /// Calls whose lease ran out.
    pub expired: Vec<EndedCall>,
    /// Pods whose drain ran out.
    pub undrained: Vec<PodName>,
    /// Pods whose quarantine ran out.
    pub restored: Vec<PodName>,
}

impl Swept {
    /// How many of one kind there were at most.
    pub fn most(&self) -> usize {
        let (calls, pods) = (&self.expired, &self.undrained);
        calls.len().max(pods.len()).max(self.abandoned.len()).max(self.restored.len())
    }
}

/// What an audit found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Audited {
    pub pods: usize,
    /// Pods whose views disagreed with the facts.
    pub repaired: usize,
}

impl Fleet {
    /// Ends the places, leases, drains and quarantines whose deadline has come,
    /// oldest first, at most `most` of each.
    pub fn sweep(&mut self, most: usize, now: Millis) -> Swept {
        let mut swept = Swept::default();
        for _ in 0..most {
            let Some(call) = self.queue.overdue(now).cloned() else { break };
            let since = self.queue.get(&call).map_or(now, |place| place.since);
            self.record(Change::Left { call: call.clone() });
            swept.abandoned.push(Abandoned { call, waited: now.saturating_sub(since) });
        }
        let due = self.leases.iter().take_while(|(until, _)| *until <= now).take(most);
        let due: Vec<CallSid> = due.map(|(_, call)| call.clone()).collect();
        for call in due {
            let cause = match self.calls.get(&call) {
                Some(facts) if facts.place.is_some() => Cause::Abandoned,
                Some(facts) if facts.provisional => Cause::Unconfirmed,
                _ => Cause::Lease,
            };
            if let Some(ended) = self.end(&call, cause, now) {
                self.fared(&ended.pod, speaks_for(cause, ended.lasted), now);
                self.settle(&ended.pod);
                swept.expired.push(ended);
            }
        }
        for _ in 0..most {
            let Some((_, pod)) = self.drains.first().filter(|(until, _)| *until <= now).cloned()
            else {
                break;
            };
            self.record(Change::Draining { pod: pod.clone(), until: None });
            self.settle(&pod);
            swept.undrained.push(pod);
        }
        for _ in 0..most {
            let due = self.quarantines.first().filter(|(until, _)| *until <= now);
            let Some((_, pod)) = due.cloned() else { break };
            // One more bad call, and it is back there.
            let failures = self.pods.get(&pod).map_or(0, |pod| pod.failures);
            let quarantined_until = None;
            self.record(Change::Health { pod: pod.clone(), failures, quarantined_until });
            self.settle(&pod);
            swept.restored.push(pod);
        }
        swept
    }

    /// All pods, in no order: what an audit walks through.
    pub fn pod_names(&self) -> Vec<PodName> {
        self.pods.keys().cloned().collect()
    }

    /// Derives the views of some pods from their facts again.
    pub fn audit(&mut self, names: &[PodName]) -> Audited {
        let mut audited = Audited { pods: names.len(), repaired: 0 };
        for name in names {
            audited.repaired += usize::from(self.place(name));
            self.settle(name);
        }
        audited
    }
}
