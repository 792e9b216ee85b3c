//! Allocate, release and confirm: the arguments of their Redis functions, and the replies.

use std::sync::atomic::Ordering;

use super::{
    Redis,
    client::Failure,
    deferred_writes::DeferredWrite,
    operations::{flag, unexpected},
    outbound::reservation_use,
    reply::FunctionReply,
    retry::Deadline,
};
use crate::StoreError;
use fleet::{
    Allocate, Allocation, Confirm, Confirmed, NotReleased, PreviousPod, Refusal, RefusalReason,
    Release, Released,
    merchant::{Limit, Malformed},
    names::{PhoneNumber, Pool},
};

impl Redis {
    pub(super) async fn allocate_call(
        &self,
        request: &Allocate,
    ) -> Result<Result<Allocation, Refusal>, StoreError> {
        let request_id = format!(
            "{:08x}-{}",
            self.instance,
            self.next_request_id.fetch_add(1, Ordering::Relaxed)
        );
        let merchant = request.merchant.as_ref().map_or("", |merchant| merchant.as_str());
        let (lease, expiry) =
            (request.lease_ttl.to_string(), self.record_expiry(request.lease_ttl));
        let stage = match (request.provisional, request.expects_stream) {
            (true, true) => "unattached",
            (true, false) => "provisional",
            (false, _) => "",
        };
        let (pod_attempt, hold, previous, signed) = (
            pod_attempt_text(Some(request.pod_attempt(0)).filter(|number| *number > 0)),
            hold(request),
            previous_pod(request),
            signed(request),
        );
        let numbers: Vec<&str> = request.numbers.iter().map(PhoneNumber::as_str).collect();
        let numbers = numbers.join(" ");
        let args = [
            request.call.as_str(),
            merchant,
            &lease,
            &expiry,
            &request_id,
            stage,
            &pod_attempt,
            &hold,
            &previous,
            &signed,
            request.reservation.as_ref().map_or("", |id| id.as_str()),
            &numbers,
        ];
        let args = trim_empty_args(&args);
        let compensation = CompensateOnDrop { store: self, request, request_id: &request_id };
        let mut outcome =
            self.client.run(&self.functions().allocate, args, Deadline::Enforced).await;
        if let Err(Failure::NotRun(error @ StoreError::Full(_))) = &outcome {
            // A full Redis refuses new calls. A repeat for an existing call still gets its pod.
            let error = error.clone();
            outcome = self
                .client
                .run(&self.functions().allocate_when_full, args, Deadline::Enforced)
                .await;
            if outcome.as_ref().is_ok_and(|reply| reply.word == "unknown") {
                compensation.cancel();
                return Err(error);
            }
        }
        let reply = match outcome {
            Ok(reply) => self.check_initialized(reply),
            Err(Failure::NotRun(error @ (StoreError::Unavailable(_) | StoreError::Busy))) => {
                Err(error)
            }
            Err(failure) => return Err(failure.into()),
        };
        let reply = match reply {
            Ok(reply) => reply,
            Err(error) => {
                compensation.cancel();
                return Err(error);
            }
        };
        let outcome = allocation(reply)?;
        compensation.cancel();
        Ok(outcome)
    }
}

/// Queues a compensating release when it is dropped: the allocation may have happened, but the
/// caller disconnected or the reply was lost or malformed.
struct CompensateOnDrop<'a> {
    store: &'a Redis,
    request: &'a Allocate,
    request_id: &'a str,
}

impl CompensateOnDrop<'_> {
    fn cancel(self) {
        std::mem::forget(self);
    }
}

impl Drop for CompensateOnDrop<'_> {
    fn drop(&mut self) {
        let Allocate { call, signed, .. } = self.request;
        self.store.enqueue(DeferredWrite::CompensateAllocation {
            call: call.clone(),
            request_id: self.request_id.to_owned(),
            fingerprint: signed.as_ref().map(|signed| signed.fingerprint.clone()),
        });
    }
}

fn allocation(mut reply: FunctionReply) -> Result<Result<Allocation, Refusal>, StoreError> {
    Ok(match reply.word.as_str() {
        "refused" => Err(Refusal {
            tried: reply.tried()?,
            malformed_merchant: malformed(reply.text()?),
            reason: refusal_reason(&mut reply)?,
            reservation: reservation_use(&reply.text_if_any()?)?,
        }),
        "new" | "existing" => Ok(Allocation {
            was_existing: reply.word == "existing",
            pod: reply.parse()?,
            pool: reply.parse()?,
            tried: reply.tried()?,
            pod_attempt: reply.parse_some()?.unwrap_or(0),
            waited: reply.parse_some()?,
            malformed_merchant: malformed(reply.text_if_any()?),
            reservation: reservation_use(&reply.text_if_any()?)?,
        }),
        _ => return Err(unexpected(&reply)),
    })
}

impl Redis {
    pub(super) async fn release_call(
        &self,
        request: &Release,
    ) -> Result<Result<Released, NotReleased>, StoreError> {
        let (pod_attempt, requested_at) =
            (pod_attempt_text(request.pod_attempt), self.client.clock.now());
        let args = release_args(request, "", &pod_attempt, "");
        let args = trim_empty_args(&args);
        let reply = self.client.run(&self.functions().release, args, Deadline::None).await;
        let reply = reply.map_err(StoreError::from);
        if let Err(StoreError::Unavailable(_) | StoreError::Busy) = &reply {
            self.enqueue(DeferredWrite::Release { release: request.clone(), requested_at });
        }
        released(reply?)
    }

    pub(super) async fn confirm_call(&self, request: &Confirm) -> Result<Confirmed, StoreError> {
        let args = self.confirm_args(request);
        let args = args.each_ref().map(String::as_str);
        let reply = self.client.run(&self.functions().confirm, &args, Deadline::None).await;
        let reply = reply.map_err(StoreError::from).and_then(|reply| self.check_initialized(reply));
        if let Err(StoreError::Unavailable(_) | StoreError::Busy) = &reply {
            // The stream has started even if Redis cannot record it now.
            self.enqueue(DeferredWrite::Confirm(request.clone()));
        }
        let mut reply = reply?;
        Ok(match reply.word.as_str() {
            "confirmed" => Confirmed::Live,
            "retaken" => Confirmed::Reallocated { pool: reply.parse()? },
            "unknown" => Confirmed::Unknown,
            _ => return Err(unexpected(&reply)),
        })
    }

    pub(super) fn confirm_args(&self, request: &Confirm) -> [String; 5] {
        [
            request.call.to_string(),
            request.pod.to_string(),
            request.lease_ttl.to_string(),
            self.record_expiry(request.lease_ttl),
            pod_attempt_text(request.pod_attempt),
        ]
    }
}

/// Reads the reply of a release or a detach.
pub(super) fn released(
    mut reply: FunctionReply,
) -> Result<Result<Released, NotReleased>, StoreError> {
    match reply.word.as_str() {
        "not_found" => Ok(Err(NotReleased::NotFound)),
        "dialed" => Ok(Err(NotReleased::WasDialed)),
        "waited" => Ok(Err(NotReleased::WasWaiting { waited: reply.number()? })),
        "released" => {
            let (pod, source_pool): (_, Pool) = (reply.parse()?, reply.parse()?);
            let lasted = reply.number()?;
            let pool = reply.parse_some()?.unwrap_or_else(|| source_pool.clone());
            let was_draining = reply.parse_some()? == Some(1);
            let is_ending = reply.parse_some()? == Some(1);
            Ok(Ok(Released { pod, source_pool, pool, was_draining, lasted, is_ending }))
        }
        _ => Err(unexpected(&reply)),
    }
}

/// A pod attempt as an argument; empty if the request has none.
pub(super) fn pod_attempt_text(pod_attempt: Option<u32>) -> String {
    pod_attempt.map(|number| number.to_string()).unwrap_or_default()
}

/// Trims empty trailing arguments: Redis functions read missing ones as empty.
fn trim_empty_args<'a, 'b>(args: &'a [&'b str]) -> &'a [&'b str] {
    &args[..args.iter().rposition(|arg| !arg.is_empty()).map_or(0, |last| last + 1)]
}

/// The arguments of a release. `request_id` restricts it to calls that stem from that request,
/// `requested_at` to calls that began before.
pub(super) fn release_args<'a>(
    request: &'a Release,
    request_id: &'a str,
    pod_attempt: &'a str,
    requested_at: &'a str,
) -> [&'a str; 6] {
    let pod = request.pod.as_ref().map_or("", |pod| pod.as_str());
    [request.call.as_str(), request.cause.as_str(), pod, request_id, pod_attempt, requested_at]
}

fn hold(request: &Allocate) -> String {
    request.hold.map_or(String::new(), |hold| {
        format!(
            "{} {} {} {}",
            hold.time, hold.poll_timeout, hold.max_waiting, hold.max_waiting_per_merchant
        )
    })
}

fn previous_pod(request: &Allocate) -> String {
    request.previous.as_ref().map_or(String::new(), |previous| {
        let PreviousPod { pod, pod_attempt, is_settled, max_retries } = previous;
        format!("{pod} {pod_attempt} {} {max_retries}", flag(*is_settled))
    })
}

fn signed(request: &Allocate) -> String {
    request
        .signed
        .as_ref()
        .map_or(String::new(), |signed| format!("{} {}", signed.fingerprint, signed.window))
}

fn refusal_reason(reply: &mut FunctionReply) -> Result<RefusalReason, StoreError> {
    Ok(match reply.text()?.as_str() {
        "no_pods" => RefusalReason::NoPods,
        "max_calls" => RefusalReason::Limit(Limit::MaxCalls),
        "max_rate" => RefusalReason::Limit(Limit::MaxRate),
        "queue_full" => RefusalReason::QueueFull,
        "time_over" => RefusalReason::HoldExpired { waited: reply.number()? },
        "waiting" => RefusalReason::Waiting { until: reply.number()?, is_new: reply.flag()? },
        "over" => RefusalReason::CallEnded,
        "unsettled" => RefusalReason::Unsettled,
        "spent" => RefusalReason::RetriesExhausted,
        "replayed" => RefusalReason::Replayed,
        _ => return Err(unexpected(reply)),
    })
}

fn malformed(text: String) -> Option<Malformed> {
    (!text.is_empty()).then(|| Malformed::new(text))
}
