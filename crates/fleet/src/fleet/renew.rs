//! Lease renewal, re-registration of unknown calls, confirmation, and extension after an outage.

use super::{Call, Change, EndCause, Fleet};
use crate::{
    Millis, assignment,
    names::{CallSid, PodName, Pool},
};

/// A request to renew leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Renew {
    pub calls: Vec<CallSid>,
    /// The pod that renews its calls; `None` for other clients.
    pub pod: Option<PodName>,
    pub lease_ttl: Millis,
}

/// The result of a renewal.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Renewed {
    /// The new deadline of the renewed leases.
    pub until: Millis,
    /// Calls that are not live, or not on that pod.
    pub unknown: Vec<CallSid>,
    /// Unknown calls that were re-registered on the pod.
    pub registered: Vec<CallSid>,
    /// Calls whose pod is unknown within the re-registration window: renew again later.
    pub retry: Vec<CallSid>,
}

/// The reason why an unknown call is not re-registered.
pub(super) enum NotReregistered {
    /// The call has ended. For a renewal by a pod: or the re-registration window is over.
    CallEnded,
    /// The pod is unknown too, and may be observed soon.
    PodUnknown,
    /// The pod has no free slot.
    NoSlot,
}

impl Fleet {
    /// Renews the leases of live calls. Within the re-registration window, a renewal by a pod
    /// registers unknown calls: the store may have lost them.
    pub fn renew(&mut self, request: &Renew, now: Millis) -> Renewed {
        let mut renewed = Renewed { until: now + request.lease_ttl, ..Renewed::default() };
        for call in &request.calls {
            let on = self.calls.get(call).map(|known| &known.pod);
            let is_match = request.pod.as_ref().is_none_or(|pod| on == Some(pod));
            let outcome = match (on, &request.pod) {
                (Some(_), _) if is_match => {
                    self.record(Change::Renewed { call: call.clone(), until: renewed.until });
                    continue;
                }
                (None, Some(pod)) => self.reregister(call, pod, renewed.until, now),
                _ => Err(NotReregistered::CallEnded),
            };
            match outcome {
                Ok(()) => &mut renewed.registered,
                Err(NotReregistered::PodUnknown) => &mut renewed.retry,
                Err(_) => &mut renewed.unknown,
            }
            .push(call.clone());
        }
        renewed
    }

    fn reregister(
        &mut self,
        call: &CallSid,
        pod: &PodName,
        until: Millis,
        now: Millis,
    ) -> Result<(), NotReregistered> {
        if now >= self.trusting_until {
            return Err(NotReregistered::CallEnded);
        }
        let pool = self.reregistration_pool(call, pod, now)?;
        self.leave_queue(call);
        self.record(Change::Call {
            call: call.clone(),
            facts: Call {
                pod: pod.clone(),
                pool,
                merchant: None,
                at: now,
                until,
                tried: Vec::new(),
                provisional: false,
                expects_stream: false,
                pod_attempt: 0,
                failovers: 0,
                queue_entry: None,
                stream: None,
                is_returned: true,
                number: None,
            },
        });
        Ok(())
    }

    /// The pool of a pod that may register an unknown call: the store may have lost the call. The
    /// pod need not be in service, because it serves the call already.
    pub(super) fn reregistration_pool(
        &mut self,
        call: &CallSid,
        pod: &PodName,
        now: Millis,
    ) -> Result<Pool, NotReregistered> {
        if now < self.trusting_until && self.recently_ended.contains(call) {
            return Err(NotReregistered::CallEnded);
        }
        let known = self.pods.get(pod).ok_or(NotReregistered::PodUnknown)?;
        if known.pool.is_none() {
            let pool = assignment::default_pool(&self.tiers, |pool| self.assigned(pool));
            let pool = pool.ok_or(NotReregistered::NoSlot)?;
            self.record(Change::PoolAssigned { pod: pod.clone(), pool });
        }
        self.pool_below_cap(pod).ok_or(NotReregistered::NoSlot)
    }

    /// The pool of a pod with a free slot, in service or not.
    pub(super) fn pool_below_cap(&self, pod: &PodName) -> Option<Pool> {
        let pod = self.pods.get(pod)?;
        let pool = pod.pool.clone()?;
        let cap = self.tiers.kind(&pool).map_or(1, |kind| kind.cap());
        (pod.calls.len() < cap as usize).then_some(pool)
    }
}

/// A report that the stream of a call has started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confirm {
    pub call: CallSid,
    pub pod: PodName,
    /// If given, the report applies only to this pod attempt.
    pub pod_attempt: Option<u32>,
    pub lease_ttl: Millis,
}

/// The result of a confirmation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Confirmed {
    /// The call is live and no longer provisional.
    Live,
    /// The provisional allocation had expired; the pod was free and is allocated again.
    Reallocated { pool: Pool },
    /// The call is over or on another pod, or its pod is no longer free.
    Unknown,
}

impl Fleet {
    /// Confirms a provisional call: its stream has started. A late confirmation reallocates the pod
    /// if it has a free slot.
    pub fn confirm(&mut self, request: &Confirm, now: Millis) -> Confirmed {
        let until = now + request.lease_ttl;
        if let Some(call) = self.calls.get(&request.call) {
            let is_other_attempt =
                request.pod_attempt.is_some_and(|pod_attempt| pod_attempt != call.pod_attempt);
            if call.pod != request.pod || is_other_attempt {
                return Confirmed::Unknown;
            }
            if call.provisional {
                self.record(Change::Renewed { call: request.call.clone(), until });
            }
            return Confirmed::Live;
        }
        let ended = self.history.get(&request.call, now);
        let expired = ended.filter(|end| {
            let is_same_attempt =
                request.pod_attempt.is_none_or(|pod_attempt| pod_attempt == end.pod_attempt);
            end.pod == request.pod && end.cause == EndCause::Unconfirmed && is_same_attempt
        });
        let Some(expired) = expired else { return Confirmed::Unknown };
        let (merchant, pod_attempt) = (expired.merchant.clone(), expired.pod_attempt);
        let number = expired.number.clone();
        let Some(pool) = self.pool_with_free_slot(&request.pod) else { return Confirmed::Unknown };
        self.leave_queue(&request.call);
        self.record(Change::CallEndDropped { call: request.call.clone() });
        self.record(Change::Call {
            call: request.call.clone(),
            facts: Call {
                pod: request.pod.clone(),
                pool: pool.clone(),
                merchant,
                at: now,
                until,
                tried: Vec::new(),
                provisional: false,
                expects_stream: false,
                pod_attempt,
                failovers: 0,
                queue_entry: None,
                stream: None,
                is_returned: true,
                number,
            },
        });
        Confirmed::Reallocated { pool }
    }

    /// The pool of a pod in service with a free slot.
    pub(super) fn pool_with_free_slot(&self, pod: &PodName) -> Option<Pool> {
        self.pods.get(pod).filter(|pod| pod.is_serving())?;
        self.pool_below_cap(pod).filter(|pool| self.tiers.kind(pool).is_some())
    }

    /// Extends pending calls by at least `time` after an outage: the leases of provisional and
    /// handed-off calls, and the poll deadlines of waiting calls. They could not confirm or poll.
    pub fn extend_pending(&mut self, time: Millis, now: Millis) {
        let until = now + time;
        let pending =
            self.calls.iter().filter(|(_, it)| it.provisional || it.queue_entry.is_some());
        let early: Vec<CallSid> =
            pending.filter(|(_, it)| it.until < until).map(|(call, _)| call.clone()).collect();
        for call in early {
            self.record(Change::PendingExtended { call, until });
        }
        let waiting = self.queue.iter().filter(|(_, entry)| entry.poll_by < until);
        let early: Vec<CallSid> = waiting.map(|(call, _)| call.clone()).collect();
        for call in early {
            self.record(Change::Polled { call, poll_by: until });
        }
    }
}
