//! What time and mishaps ask for: the sweep ends what is overdue, the audit
//! derives every view again.

use super::{EndedCall, Fleet, Missed, calls::REMEMBERED};
use crate::domain::{Millis, fleet::Change, names::PodName};

/// What a sweep ended.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Swept {
    /// Calls whose lease ran out.
    pub expired: Vec<EndedCall>,
    /// Pods whose drain ran out.
    pub undrained: Vec<PodName>,
}

/// What an audit found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Audited {
    pub pods: usize,
    /// Pods whose views disagreed with the facts.
    pub repaired: usize,
}

impl Fleet {
    /// Ends the leases and drains whose deadline has come, oldest first, at
    /// most `most` of each.
    pub fn sweep(&mut self, most: usize, now: Millis) -> Swept {
        let mut swept = Swept::default();
        for _ in 0..most {
            let Some((_, call)) = self.leases.first().filter(|(until, _)| *until <= now).cloned()
            else {
                break;
            };
            let known = self.calls.get(&call);
            let (merchant, provisional) =
                known.map_or((None, false), |call| (call.merchant.clone(), call.provisional));
            if let Some(mut ended) = self.end(&call, now) {
                ended.unconfirmed = provisional;
                if provisional {
                    self.missed.retain(|_, missed| now < missed.at + REMEMBERED);
                    let missed = Missed { pod: ended.pod.clone(), merchant, at: now };
                    self.missed.insert(call, missed);
                }
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
