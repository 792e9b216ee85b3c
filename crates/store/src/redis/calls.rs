//! The life of a call as its scripts: what they are told, and what they answer.

use std::sync::atomic::Ordering;

use super::{
    Redis,
    client::{Failure, Timeliness},
    deferred_writes::Debt,
    operations::{flag, unexpected},
    reply::Reply as Answer,
};
use crate::StoreError;
use fleet::{
    Allocate, Allocation, Confirm, Confirmed, NotReleased, Refusal, Release, Released, Why,
    merchant::{Limit, Malformed},
    names::Pool,
};

impl Redis {
    pub(super) async fn allocate_call(
        &self,
        request: &Allocate,
    ) -> Result<Result<Allocation, Refusal>, StoreError> {
        let attempt =
            format!("{:08x}-{}", self.process, self.attempts.fetch_add(1, Ordering::Relaxed));
        let merchant = request.merchant.as_ref().map_or("", |merchant| merchant.as_str());
        let (lease, life) = (request.lease_ttl.to_string(), self.record_life(request.lease_ttl));
        let stage = if request.provisional { "provisional" } else { "" };
        let (number, hold, after, signed) = (
            number_text(Some(request.attempts()).filter(|number| *number > 0)),
            hold(request),
            after(request),
            signed(request),
        );
        let args = [
            request.call.as_str(),
            merchant,
            &lease,
            &life,
            &attempt,
            stage,
            &number,
            &hold,
            &after,
            &signed,
        ];
        let args = without_empty_end(&args);
        let unheard = Unheard { store: self, request, attempt: &attempt };
        let mut outcome = self.link.run(&self.scripts.allocate, args, Timeliness::InTime).await;
        if let Err(Failure::NotRun(error @ StoreError::Full(_))) = &outcome {
            // A full Redis takes no new calls; those it has are told so.
            let error = error.clone();
            outcome = self.link.run(&self.scripts.ask_again, args, Timeliness::InTime).await;
            if outcome.as_ref().is_ok_and(|answer| answer.word == "unknown") {
                unheard.settle();
                return Err(error);
            }
        }
        let found = match outcome {
            Ok(answer) => self.found(answer),
            Err(Failure::NotRun(error @ (StoreError::Unavailable(_) | StoreError::Busy))) => {
                Err(error)
            }
            Err(failure) => return Err(failure.into()),
        };
        let answer = match found {
            Ok(answer) => answer,
            Err(error) => {
                unheard.settle();
                return Err(error);
            }
        };
        let outcome = allocation(answer)?;
        unheard.settle();
        Ok(outcome)
    }
}

/// An allocation that may have happened, and of which nobody will be told, because the
/// caller has hung up or the answer makes no sense: it is taken back, unless it is settled.
struct Unheard<'a> {
    store: &'a Redis,
    request: &'a Allocate,
    attempt: &'a str,
}

impl Unheard<'_> {
    fn settle(self) {
        std::mem::forget(self);
    }
}

impl Drop for Unheard<'_> {
    fn drop(&mut self) {
        let Allocate { call, signed, .. } = self.request;
        self.store.owe(Debt::Doubt {
            call: call.clone(),
            attempt: self.attempt.to_owned(),
            fingerprint: signed.as_ref().map(|signed| signed.fingerprint.clone()),
        });
    }
}

fn allocation(mut answer: Answer) -> Result<Result<Allocation, Refusal>, StoreError> {
    Ok(match answer.word.as_str() {
        "refused" => Err(Refusal {
            tried: answer.tried()?,
            malformed_merchant: malformed(answer.text()?),
            why: why(&mut answer)?,
        }),
        "new" | "existing" => Ok(Allocation {
            was_existing: answer.word == "existing",
            pod: answer.parse()?,
            pool: answer.parse()?,
            tried: answer.tried()?,
            attempt: answer.parse_some()?.unwrap_or(0),
            waited: answer.parse_some()?,
            malformed_merchant: malformed(answer.text_if_any()?),
        }),
        _ => return Err(unexpected(&answer)),
    })
}

impl Redis {
    pub(super) async fn release_call(
        &self,
        request: &Release,
    ) -> Result<Result<Released, NotReleased>, StoreError> {
        let (number, asked) = (number_text(request.attempt), self.link.clock.now());
        let args = release_args(request, "", &number, "");
        let args = without_empty_end(&args);
        let answer = self.link.run(&self.scripts.release, args, Timeliness::Whenever).await;
        let mut answer = match answer.map_err(StoreError::from) {
            Ok(answer) => answer,
            Err(error) => {
                if matches!(error, StoreError::Unavailable(_) | StoreError::Busy) {
                    self.owe(Debt::Release { release: request.clone(), asked });
                }
                return Err(error);
            }
        };
        match answer.word.as_str() {
            "not_found" => Ok(Err(NotReleased::NotFound)),
            "waited" => Ok(Err(NotReleased::Waited { waited: answer.number()? })),
            "released" => {
                let (pod, source_pool): (_, Pool) = (answer.parse()?, answer.parse()?);
                let lasted = answer.number()?;
                let pool = answer.parse_some()?.unwrap_or_else(|| source_pool.clone());
                let was_draining = answer.parse_some()? == Some(1);
                Ok(Ok(Released { pod, source_pool, pool, was_draining, lasted }))
            }
            _ => Err(unexpected(&answer)),
        }
    }

    pub(super) async fn confirm_call(&self, request: &Confirm) -> Result<Confirmed, StoreError> {
        let args = self.confirm_args(request);
        let args = args.each_ref().map(String::as_str);
        let answer = self.link.run(&self.scripts.confirm, &args, Timeliness::Whenever).await;
        let answer = answer.map_err(StoreError::from).and_then(|answer| self.found(answer));
        if let Err(StoreError::Unavailable(_) | StoreError::Busy) = &answer {
            // The stream is there, whether we can note it or not.
            self.owe(Debt::Confirm(request.clone()));
        }
        let mut answer = answer?;
        Ok(match answer.word.as_str() {
            "confirmed" => Confirmed::Sure,
            "retaken" => Confirmed::Retaken { pool: answer.parse()? },
            "unknown" => Confirmed::Unknown,
            _ => return Err(unexpected(&answer)),
        })
    }

    pub(super) fn confirm_args(&self, request: &Confirm) -> [String; 5] {
        [
            request.call.to_string(),
            request.pod.to_string(),
            request.lease_ttl.to_string(),
            self.record_life(request.lease_ttl),
            number_text(request.attempt),
        ]
    }
}

/// The number of an attempt; empty where nobody counts.
pub(super) fn number_text(attempt: Option<u32>) -> String {
    attempt.map(|attempt| attempt.to_string()).unwrap_or_default()
}

/// What need not be sent: scripts take what is not there for empty.
fn without_empty_end<'a, 'b>(args: &'a [&'b str]) -> &'a [&'b str] {
    &args[..args.iter().rposition(|arg| !arg.is_empty()).map_or(0, |last| last + 1)]
}

/// Call, cause, pod, the request it must stem from, the number of the attempt, when it was
/// asked for.
pub(super) fn release_args<'a>(
    request: &'a Release,
    stems_from: &'a str,
    number: &'a str,
    asked: &'a str,
) -> [&'a str; 6] {
    let pod = request.pod.as_ref().map_or("", |pod| pod.as_str());
    [request.call.as_str(), request.cause.as_str(), pod, stems_from, number, asked]
}

fn hold(request: &Allocate) -> String {
    request.hold.map_or(String::new(), |hold| {
        format!("{} {} {} {}", hold.time, hold.patience, hold.most, hold.most_per_merchant)
    })
}

fn after(request: &Allocate) -> String {
    request.after.as_ref().map_or(String::new(), |after| {
        let (attempt, retries) = (after.attempt, after.retries);
        format!("{} {attempt} {} {retries}", after.pod, flag(after.is_final))
    })
}

fn signed(request: &Allocate) -> String {
    request
        .signed
        .as_ref()
        .map_or(String::new(), |signed| format!("{} {}", signed.fingerprint, signed.window))
}

fn why(answer: &mut Answer) -> Result<Why, StoreError> {
    Ok(match answer.text()?.as_str() {
        "no_pods" => Why::NoPods,
        "max_calls" => Why::Limit(Limit::MaxCalls),
        "max_rate" => Why::Limit(Limit::MaxRate),
        "queue_full" => Why::QueueFull,
        "time_over" => Why::TimeOver { waited: answer.number()? },
        "waiting" => Why::Waiting { until: answer.number()?, is_new: answer.flag()? },
        "over" => Why::Over,
        "unsettled" => Why::Unsettled,
        "spent" => Why::Spent,
        "replayed" => Why::Replayed,
        _ => return Err(unexpected(answer)),
    })
}

fn malformed(text: String) -> Option<Malformed> {
    (!text.is_empty()).then(|| Malformed::new(text))
}
