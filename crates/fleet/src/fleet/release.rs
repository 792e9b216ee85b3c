//! Release: the end of a call that its agent, its provider or an operator reports.

use super::{Change, EndCause, Fleet, calls::Call, pod_health::outcome_of};
use crate::{
    Millis,
    names::{CallSid, PodName, Pool},
};

/// A request to end a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    pub call: CallSid,
    /// If given, the release applies only while the call is on this pod.
    pub pod: Option<PodName>,
    /// If given, the release applies only to this pod attempt.
    pub pod_attempt: Option<u32>,
    pub cause: EndCause,
}

impl Release {
    /// A release by the agent.
    pub fn new(call: CallSid, pod: Option<PodName>) -> Self {
        Self { call, pod, pod_attempt: None, cause: EndCause::Agent }
    }
}

/// A released call and its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released {
    pub pod: PodName,
    /// The pool from which the pod was allocated.
    pub source_pool: Pool,
    /// The current pool of the pod.
    pub pool: Pool,
    /// The pod is draining or terminating and takes no new calls.
    pub was_draining: bool,
    pub lasted: Millis,
    /// A stream is attached: the call ends when its gateway has closed the stream.
    pub is_ending: bool,
}

/// The call is not live, or not on the given pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no such call")]
pub struct CallNotFound;

/// The reason why a release freed no pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotReleased {
    /// The call is not live, or not on the given pod.
    NotFound,
    /// The call was waiting or handed off, and left the queue.
    WasWaiting { waited: Millis },
    /// The call was a dial without an answer; its reservation has ended.
    WasDialed,
}

impl Fleet {
    /// Ends a call and frees its pod. Idempotent: a repeat returns [`NotReleased::NotFound`]. The
    /// pod of an attached call is free when its gateway has detached the stream.
    pub fn release(&mut self, request: &Release, now: Millis) -> Result<Released, NotReleased> {
        let is_match = |call: &&Call| {
            request.pod.as_ref().is_none_or(|pod| *pod == call.pod)
                && request.pod_attempt.is_none_or(|pod_attempt| pod_attempt == call.pod_attempt)
        };
        let Some(call) = self.calls.get(&request.call) else {
            return Err(self.release_inactive(request, now));
        };
        let Some(call) = Some(call).filter(is_match) else { return Err(NotReleased::NotFound) };
        if call.stream.is_some() {
            return Ok(self.end_stream(request, now));
        }
        self.end_released(request, now)
    }

    /// Ends a live call and frees its pod.
    pub(super) fn end_released(
        &mut self,
        request: &Release,
        now: Millis,
    ) -> Result<Released, NotReleased> {
        let call = self.calls.get(&request.call).ok_or(NotReleased::NotFound)?;
        let (name, source_pool) = (call.pod.clone(), call.pool.clone());
        let (lasted, waited) = (
            now.saturating_sub(call.at),
            call.queue_entry.as_ref().map(|entry| now.saturating_sub(entry.since)),
        );
        let cause = if waited.is_some() { EndCause::Abandoned } else { request.cause };
        self.record(Change::Ended { call: request.call.clone(), at: now, cause });
        self.record_outcome(&name, outcome_of(cause, lasted), now);
        self.reassign_and_hand_off(&name);
        if let Some(waited) = waited {
            return Err(NotReleased::WasWaiting { waited });
        }
        Ok(self.released(name, source_pool, lasted))
    }

    pub(super) fn released(&self, name: PodName, source_pool: Pool, lasted: Millis) -> Released {
        let pod = self.pods.get(&name);
        Released {
            pool: pod.and_then(|pod| pod.pool.clone()).unwrap_or_else(|| source_pool.clone()),
            was_draining: pod.is_some_and(|pod| pod.is_leaving()),
            pod: name,
            source_pool,
            lasted,
            is_ending: false,
        }
    }

    /// Handles the release of a call without a pod: it leaves the queue, or the release updates
    /// the cause in the call history.
    fn release_inactive(&mut self, request: &Release, now: Millis) -> NotReleased {
        if let Some(entry) = self.queue.get(&request.call)
            && request.pod.is_none()
        {
            let waited = now.saturating_sub(entry.since);
            self.record(Change::LeftQueue { call: request.call.clone() });
            return NotReleased::WasWaiting { waited };
        }
        if let Some(end) = self.history.get(&request.call, now)
            && request.pod.as_ref().is_none_or(|pod| *pod == end.pod)
            && request.pod_attempt.is_none_or(|pod_attempt| pod_attempt == end.pod_attempt)
            && end.cause.updated_by(request.cause) != end.cause
        {
            let cause = end.cause.updated_by(request.cause);
            let end = super::CallEnd { cause, ..end.clone() };
            self.record(Change::CallEndRecorded { call: request.call.clone(), end });
        }
        if request.pod.is_none() && self.end_dial(&request.call, now) {
            return NotReleased::WasDialed;
        }
        NotReleased::NotFound
    }
}
