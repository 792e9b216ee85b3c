//! Deferred writes: releases, detaches and confirmations that failed, and compensating releases for
//! allocations that may have happened although their callers were refused. They are flushed once
//! Redis is available.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use futures_util::future::join_all;

use super::{
    Redis,
    calls::{pod_attempt_text, release_args},
    client::Failure,
    reply::FunctionReply,
    retry::{Deadline, REQUEST_TIMEOUT},
    streams::detach_args,
};
use crate::StoreError;
use fleet::{
    Confirm, Detach, EndCause, Millis, Release,
    names::{CallSid, Fingerprint},
};

/// Capacity; beyond it the oldest write is dropped, and the lease ends its call.
const MAX_DEFERRED: usize = 100_000;
/// Writes that are flushed concurrently, at most.
const FLUSH_BATCH: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DeferredWrite {
    /// Ends the call, unless it began after `requested_at` (Redis's clock): a later call under the
    /// same id is a different one.
    Release {
        release: Release,
        requested_at: Option<Millis>,
    },
    Confirm(Confirm),
    /// Ends the call of a stream. It names the stream, so it cannot end another call.
    Detach(Detach),
    /// Ends the call if it still stems from this request. It is delayed until the request can no
    /// longer reach Redis: the release must not overtake the allocation.
    CompensateAllocation {
        call: CallSid,
        request_id: String,
        /// Fingerprint of a signed request, to be removed from replay protection: its caller got no
        /// reply and may send it again.
        fingerprint: Option<Fingerprint>,
    },
}

#[derive(Debug, Default)]
pub(super) struct DeferredWrites {
    due: VecDeque<DeferredWrite>,
    /// Compensating releases and when they are due, in that order.
    delayed: VecDeque<(Instant, DeferredWrite)>,
    pub dropped: u64,
}

impl DeferredWrites {
    pub(super) fn push(&mut self, write: DeferredWrite) {
        if self.len() == MAX_DEFERRED {
            if self.due.pop_front().is_none() {
                self.delayed.pop_front();
            }
            self.dropped += 1;
        }
        if matches!(write, DeferredWrite::CompensateAllocation { .. }) {
            // A caller may disconnect while its request is still in flight.
            self.delayed.push_back((Instant::now() + REQUEST_TIMEOUT, write));
        } else {
            self.due.push_back(write);
        }
    }

    /// Returns the number of writes that are due.
    pub(super) fn count_due(&mut self) -> usize {
        while let Some((_, write)) = self.delayed.pop_front_if(|(due, _)| *due <= Instant::now()) {
            self.due.push_back(write);
        }
        self.due.len()
    }

    /// Time until the next delayed write is due.
    pub(super) fn next_due(&self) -> Option<Duration> {
        self.delayed.front().map(|(due, _)| due.saturating_duration_since(Instant::now()))
    }

    /// Time until all delayed writes are due.
    pub(super) fn last_due(&self) -> Option<Duration> {
        self.delayed.back().map(|(due, _)| due.saturating_duration_since(Instant::now()))
    }

    /// Takes the oldest writes that are due. The caller puts back those that fail.
    pub(super) fn take(&mut self, limit: usize) -> Vec<DeferredWrite> {
        let count = limit.min(self.due.len());
        self.due.drain(..count).collect()
    }

    pub(super) fn put_back(&mut self, writes: Vec<DeferredWrite>) {
        writes.into_iter().rev().for_each(|write| self.due.push_front(write));
    }

    pub(super) fn len(&self) -> usize {
        self.due.len() + self.delayed.len()
    }
}

impl Redis {
    /// Queues a write and wakes the maintenance task to flush it.
    pub(super) fn enqueue(&self, write: DeferredWrite) {
        let count = {
            let mut deferred = self.deferred();
            deferred.push(write);
            deferred.len()
        };
        self.client.metrics.deferred.set(count as i64);
        self.client.maintenance_due.notify_one();
    }

    /// Flushes the writes that are due now.
    pub(super) async fn flush_deferred(&self) -> Result<(), StoreError> {
        let dropped = std::mem::take(&mut self.deferred().dropped);
        if dropped > 0 {
            tracing::error!(
                dropped,
                "too many deferred writes; the oldest were dropped, and leases will end those calls"
            );
        }
        let due = self.deferred().count_due();
        let mut flushed = 0;
        while flushed < due {
            // Live requests have priority: half of the concurrency limit.
            let batch = FLUSH_BATCH.min(self.client.concurrency_limit() / 2);
            let writes = self.deferred().take(batch.min(due - flushed));
            let outcomes = join_all(writes.iter().map(|write| self.flush_one(write))).await;
            let error = outcomes.iter().find_map(|outcome| outcome.as_ref().err().cloned());
            let failed = writes.into_iter().zip(outcomes).filter(|(_, outcome)| outcome.is_err());
            let failed: Vec<DeferredWrite> = failed.map(|(write, _)| write).collect();
            flushed += batch;
            self.deferred().put_back(failed);
            self.client.metrics.deferred.set(self.deferred().len() as i64);
            if let Some(error) = error {
                return Err(error);
            }
        }
        if due > 0 {
            tracing::info!(count = due, "flushed deferred writes");
        }
        Ok(())
    }

    /// Flushes all deferred writes before the program exits, if Redis is available.
    pub(super) async fn flush_before_exit(&self) {
        let last_due = self.deferred().last_due();
        tokio::time::sleep(last_due.unwrap_or_default()).await;
        if self.client.is_up()
            && let Err(error) = self.flush_deferred().await
        {
            tracing::warn!(
                %error,
                "cannot flush deferred writes before exit; leases will end those calls"
            );
        }
    }

    /// Runs a deferred write. A write that Redis would always refuse is dropped: it must not block
    /// the others and the recovery.
    async fn flush_one(&self, write: &DeferredWrite) -> Result<(), StoreError> {
        let outcome = match write {
            DeferredWrite::Confirm(confirm) => {
                let args = self.confirm_args(confirm);
                let args = args.each_ref().map(String::as_str);
                self.client.run_unchecked(&self.functions().confirm, &args, Deadline::None).await
            }
            DeferredWrite::Detach(detach) => {
                let args = detach_args(detach);
                self.client.run_unchecked(&self.functions().detach, &args, Deadline::None).await
            }
            DeferredWrite::Release { release, requested_at } => {
                self.flush_release(release, "", *requested_at, None).await
            }
            DeferredWrite::CompensateAllocation { call, request_id, fingerprint } => {
                let release =
                    Release { cause: EndCause::Abandoned, ..Release::new(call.clone(), None) };
                self.flush_release(&release, request_id, None, fingerprint.as_ref()).await
            }
        };
        match outcome.map(drop).map_err(StoreError::from) {
            Err(StoreError::Failed(error)) => {
                tracing::error!(?write, error, "Redis refused a deferred write; dropping it");
                Ok(())
            }
            outcome => outcome,
        }
    }

    async fn flush_release(
        &self,
        release: &Release,
        request_id: &str,
        requested_at: Option<Millis>,
        fingerprint: Option<&Fingerprint>,
    ) -> Result<FunctionReply, Failure> {
        let pod_attempt = pod_attempt_text(release.pod_attempt);
        let requested_at = requested_at.map(|at| at.to_string()).unwrap_or_default();
        let mut args = release_args(release, request_id, &pod_attempt, &requested_at).to_vec();
        args.extend(fingerprint.map(Fingerprint::as_str));
        self.client.run_unchecked(&self.functions().release, &args, Deadline::None).await
    }
}
