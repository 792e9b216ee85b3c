//! Calls come and go: allocate and release.

use serde::{Deserialize, Serialize};

use super::{
    Cause, Change, Fleet, Hold, Place, Reason, Signed, Tried,
    call_history::{broke_soon, speaks_for},
    change::is_default,
};
use crate::{
    Millis,
    merchant::{self, Limit, Malformed},
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::{Kind, Strategy},
};

/// A live call: its record and the deadline of its lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    pub(super) pod: PodName,
    /// The pool the pod was drawn from.
    pub(super) pool: Pool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) merchant: Option<MerchantId>,
    pub(super) at: Millis,
    pub(super) until: Millis,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) tried: Vec<Tried>,
    /// Its stream has not started yet.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) provisional: bool,
    /// How many pods it has been given by now, if that is looked at.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) attempts: u32,
    /// The place it had, until it comes for the pod it was handed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) place: Option<Place>,
}

impl Call {
    pub(super) fn allocation(&self) -> Allocation {
        Allocation {
            pod: self.pod.clone(),
            pool: self.pool.clone(),
            was_existing: true,
            tried: self.tried.clone(),
            malformed_merchant: None,
            attempt: self.attempts,
            waited: None,
        }
    }
}

/// A call asks for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocate {
    pub call: CallSid,
    pub merchant: Option<MerchantId>,
    pub lease_ttl: Millis,
    /// Its stream has to start before the call is sure of its pod: the lease is
    /// short until then.
    pub provisional: bool,
    /// The call comes back when its stream is gone: how it ended is remembered.
    pub returns: bool,
    /// It may wait.
    pub hold: Option<Hold>,
    /// It had a pod, and its stream is gone.
    pub after: Option<After>,
    /// The request is signed by a provider.
    pub signed: Option<Signed>,
}

/// The attempt before this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct After {
    pub pod: PodName,
    pub attempt: u32,
    /// Nobody will explain any more why the stream is gone.
    pub is_final: bool,
    /// So often a call may have another pod.
    pub retries: u32,
}

impl After {
    /// That was the last attempt.
    fn is_last(&self) -> bool {
        self.attempt > self.retries
    }
}

impl Allocate {
    /// A call that wants a pod and nothing else.
    pub fn new(call: CallSid, merchant: Option<MerchantId>, lease_ttl: Millis) -> Self {
        let (provisional, returns, hold, after, signed) = (false, false, None, None, None);
        Self { call, merchant, lease_ttl, provisional, returns, hold, after, signed }
    }

    /// The number of the attempt that begins; 0 where nobody counts.
    pub fn attempts(&self) -> u32 {
        let before = self.after.as_ref().map_or(0, |after| after.attempt);
        if self.returns { before + 1 } else { 0 }
    }
}

/// A call has a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    pub pod: PodName,
    pub pool: Pool,
    /// The call had this pod before it asked.
    pub was_existing: bool,
    /// The steps of the chain that were tried in vain.
    pub tried: Vec<Tried>,
    /// The merchant's document could not be used; the default chain was.
    pub malformed_merchant: Option<Malformed>,
    /// Which pod of the call this is; 0 where nobody counts.
    pub attempt: u32,
    /// How long it waited for it.
    pub waited: Option<Millis>,
}

/// A call has no pod (yet).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub tried: Vec<Tried>,
    pub malformed_merchant: Option<Malformed>,
    pub why: Why,
}

/// Why a call has no pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// No pool of the chain has one.
    NoPods,
    /// The merchant has as much as it may; no step was tried.
    Limit(Limit),
    /// There is none, and no place to wait either.
    QueueFull,
    /// It has waited, for as long as it may.
    TimeOver { waited: Millis },
    /// It has a place in the queue until then.
    Waiting { is_new: bool, until: Millis },
    /// Its stream is gone because the call is over.
    Over,
    /// Its stream is gone, and it may soon be known why.
    Unsettled,
    /// Its stream is gone once too often.
    Spent,
    /// The same signed request began a call before, which is over.
    Replayed,
}

impl Why {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoPods => "no_pods",
            Self::Limit(limit) => limit.as_str(),
            Self::QueueFull => "queue_full",
            Self::TimeOver { .. } => "time_over",
            Self::Waiting { .. } => "waiting",
            Self::Over => "over",
            Self::Unsettled => "unsettled",
            Self::Spent => "spent",
            Self::Replayed => "replayed",
        }
    }
}

/// A call is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    pub call: CallSid,
    /// Given by callers who know: if the call is elsewhere, it is not theirs.
    pub pod: Option<PodName>,
    /// Which of the call's attempts is over, if that was told.
    pub attempt: Option<u32>,
    /// Who says so: the agent, the provider, or the stream's own end.
    pub cause: Cause,
}

impl Release {
    /// What an agent says.
    pub fn new(call: CallSid, pod: Option<PodName>) -> Self {
        Self { call, pod, attempt: None, cause: Cause::Agent }
    }
}

/// A call gave its pod back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released {
    pub pod: PodName,
    /// The pool the pod was drawn from.
    pub source_pool: Pool,
    /// The pool the pod belongs to now.
    pub pool: Pool,
    /// The pod stays out of its pool.
    pub was_draining: bool,
    pub lasted: Millis,
}

/// No such call is live (on that pod).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no such call")]
pub struct CallNotFound;

/// Why a release gave no pod back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotReleased {
    /// No such call is live (on that pod).
    NotFound,
    /// It was waiting, and has left.
    Waited { waited: Millis },
}

/// What is known of a call that asks.
#[derive(PartialEq)]
enum Account {
    New,
    /// It had a pod before.
    Known,
    /// It has just left this one.
    Left(PodName),
}

/// The pod drawn, its pool, the steps tried before, and a document set aside.
type Choice = (PodName, Pool, Vec<Tried>, Option<Malformed>);

impl Fleet {
    /// Gives the call a pod, or says again which one it has.
    pub fn allocate(&mut self, request: &Allocate, now: Millis) -> Result<Allocation, Refusal> {
        let outcome = self.answer(request, now);
        self.note_seen(request, &outcome, now);
        if let Err(refusal) = &outcome {
            self.tell_refused(request, refusal);
        }
        outcome
    }

    fn answer(&mut self, request: &Allocate, now: Millis) -> Result<Allocation, Refusal> {
        let refusal = |why| Refusal { tried: Vec::new(), malformed_merchant: None, why };
        if self.is_replay(request, now) {
            return Err(refusal(Why::Replayed));
        }
        let account = match &request.after {
            None => Account::New,
            Some(after) => self.settle_account(&request.call, after, now).map_err(refusal)?,
        };
        if let Some(fetched) = self.fetch(request, now) {
            return Ok(fetched);
        }
        if let Some(call) = self.calls.get(&request.call) {
            let allocation = call.allocation();
            if call.provisional && request.provisional {
                // A new document has gone out: its stream has its whole time.
                let until = now + request.lease_ttl;
                self.record(Change::Spared { call: request.call.clone(), until });
            }
            return Ok(allocation);
        }
        if let Some(refusal) = self.poll(request, now) {
            return Err(refusal);
        }
        let is_rescue = account != Account::New;
        let outcome = match self.choose(request, is_rescue, now) {
            Ok(choice) => Ok(self.give(request, choice, is_rescue, now)),
            Err(refusal) if refusal.why == Why::NoPods => {
                Err(self.wait(request, refusal, is_rescue, now))
            }
            Err(refusal) => Err(refusal),
        };
        // What the call had goes to others only now: it may need it again.
        if let Account::Left(pod) = account {
            self.settle(&pod);
        }
        outcome
    }

    /// The stream of a call is gone. Ends what is left of that attempt, if the call
    /// shall have another.
    fn settle_account(
        &mut self,
        call: &CallSid,
        after: &After,
        now: Millis,
    ) -> Result<Account, Why> {
        if let Some(live) = self.calls.get(call) {
            let is_that = live.pod == after.pod && live.attempts == after.attempt;
            if !is_that || live.place.is_some() {
                return Ok(Account::Known);
            }
            if !after.is_final {
                return Err(Why::Unsettled);
            }
            if let Some(ended) = self.end(call, Cause::Broken, now) {
                self.fared(&ended.pod, broke_soon(ended.lasted), now);
                if after.is_last() {
                    self.settle(&ended.pod);
                    return Err(Why::Spent);
                }
                self.find_home(&ended.pod);
                return Ok(Account::Left(ended.pod));
            }
        }
        if self.queue.get(call).is_some() {
            return Ok(Account::Known);
        }
        // A call of which nothing is known is a new one.
        let mut account = Account::New;
        if let Some(end) = self.ends.get(call, now) {
            account = Account::Known;
            if end.attempts != after.attempt || end.cause.is_final() {
                return Err(Why::Over);
            }
            if end.cause.may_be_explained() && !after.is_final {
                return Err(Why::Unsettled);
            }
            if end.cause == Cause::Stream {
                let end = super::End { cause: Cause::Broken, ..end.clone() };
                let (pod, lasted) = (end.pod.clone(), end.lasted);
                self.record(Change::Remembered { call: call.clone(), end });
                self.fared(&pod, broke_soon(lasted), now);
            }
        }
        if after.is_last() { Err(Why::Spent) } else { Ok(account) }
    }

    /// Gives a new call the pod that was chosen for it.
    fn give(
        &mut self,
        request: &Allocate,
        choice: Choice,
        is_rescue: bool,
        now: Millis,
    ) -> Allocation {
        let (pod, pool, tried, malformed_merchant) = choice;
        if !is_rescue {
            self.admitted(request, now);
        }
        let facts = Call {
            pod,
            pool,
            merchant: request.merchant.clone(),
            at: now,
            until: now + request.lease_ttl,
            tried,
            provisional: request.provisional,
            attempts: request.attempts(),
            place: None,
        };
        let allocation =
            Allocation { was_existing: false, malformed_merchant, ..facts.allocation() };
        self.record(Change::Call { call: request.call.clone(), facts });
        self.start_over(request);
        allocation
    }

    /// A stream that is to come is not the one that never came.
    pub(super) fn start_over(&mut self, request: &Allocate) {
        if request.provisional && self.ends.contains(&request.call) {
            self.record(Change::Forgotten { call: request.call.clone() });
        }
    }

    /// Walks the chain of a new call to the first pod that may take it. One whose
    /// stream is gone goes back to the same pod only if there is no other.
    fn choose(&self, request: &Allocate, is_rescue: bool, now: Millis) -> Result<Choice, Refusal> {
        let merchant = request.merchant.as_ref().and_then(|id| self.merchants.get(id));
        let malformed_merchant = merchant.and_then(|merchant| merchant.config.clone().err());
        let refusal =
            |tried, why| Refusal { tried, malformed_merchant: malformed_merchant.clone(), why };
        if !is_rescue && let Some(limit) = self.exceeded(request, now) {
            return Err(refusal(Vec::new(), Why::Limit(limit)));
        }
        let mut tried = Vec::new();
        let avoided = request.after.as_ref().map(|after| Some(&after.pod));
        for avoid in avoided.into_iter().chain([None]) {
            tried.clear();
            for step in merchant::chain(&self.tiers, self.config_of(request.merchant.as_ref())) {
                let drawn = match self.tiers.resolve(step) {
                    None => Err(Reason::Unknown),
                    Some(pool) => {
                        self.draw(&pool, avoid, &request.call).map(|pod| (pod.clone(), pool))
                    }
                };
                match drawn {
                    Ok((pod, pool)) => return Ok((pod, pool, tried, malformed_merchant)),
                    Err(reason) => tried.push(Tried { step: step.clone(), reason }),
                }
            }
        }
        Err(refusal(tried, Why::NoPods))
    }

    /// The pod of a pool that takes the next call.
    pub(super) fn draw(
        &self,
        pool: &Pool,
        avoid: Option<&PodName>,
        call: &CallSid,
    ) -> Result<&PodName, Reason> {
        let view = self.pools.get(pool).ok_or(Reason::Empty)?;
        let (cap, is_pack) = match self.tiers.kind(pool) {
            None => return Err(Reason::Unknown),
            Some(Kind::Exclusive | Kind::Dedicated) => (1, false),
            Some(Kind::Shared { max_concurrent, strategy }) => {
                (max_concurrent as usize, strategy == Strategy::Pack)
            }
        };
        let mut with_room = view.open.range(..(cap, 0)).filter(|(_, pod)| Some(*pod) != avoid);
        let drawn = if is_pack { with_room.next_back() } else { with_room.next() };
        let Some(((calls, _), due)) = drawn else {
            return Err(match (view.in_service(), view.leaving) {
                (0, 0) => Reason::Empty,
                (0, _) => Reason::AllDraining,
                _ => Reason::AtCapacity,
            });
        };
        let Some(favoured) = self.favoured.get(call) else { return Ok(due) };
        let as_good = view.open.range((*calls, 0)..(*calls + 1, 0)).map(|(_, pod)| pod);
        Ok(as_good.filter(|pod| Some(*pod) != avoid).find(|pod| *pod == favoured).unwrap_or(due))
    }

    /// Ends a call at its own request and gives the pod back.
    pub fn release(&mut self, request: &Release, now: Millis) -> Result<Released, NotReleased> {
        let is_theirs = |call: &&Call| {
            request.pod.as_ref().is_none_or(|pod| *pod == call.pod)
                && request.attempt.is_none_or(|attempt| attempt == call.attempts)
        };
        let Some(call) = self.calls.get(&request.call) else {
            return Err(self.release_late(request, now));
        };
        let Some(call) = Some(call).filter(is_theirs) else { return Err(NotReleased::NotFound) };
        let (name, source_pool) = (call.pod.clone(), call.pool.clone());
        let (lasted, since) = (
            now.saturating_sub(call.at),
            call.place.as_ref().map(|place| now.saturating_sub(place.since)),
        );
        let cause = if since.is_some() { Cause::Abandoned } else { request.cause };
        self.record(Change::Ended { call: request.call.clone(), at: now, cause });
        self.fared(&name, speaks_for(cause, lasted), now);
        self.settle(&name);
        if let Some(waited) = since {
            return Err(NotReleased::Waited { waited });
        }
        let pod = self.pods.get(&name);
        Ok(Released {
            pool: pod.and_then(|pod| pod.tier.clone()).unwrap_or_else(|| source_pool.clone()),
            was_draining: pod.is_some_and(|pod| pod.is_leaving()),
            pod: name,
            source_pool,
            lasted,
        })
    }

    /// A release of a call that has no pod: it leaves the queue, or explains why
    /// its stream is gone.
    fn release_late(&mut self, request: &Release, now: Millis) -> NotReleased {
        if let Some(place) = self.queue.get(&request.call)
            && request.pod.is_none()
        {
            let waited = now.saturating_sub(place.since);
            self.record(Change::Left { call: request.call.clone() });
            return NotReleased::Waited { waited };
        }
        if let Some(end) = self.ends.get(&request.call, now)
            && request.pod.as_ref().is_none_or(|pod| *pod == end.pod)
            && request.attempt.is_none_or(|attempt| attempt == end.attempts)
            && end.cause.explained_by(request.cause) != end.cause
        {
            let cause = end.cause.explained_by(request.cause);
            let end = super::End { cause, ..end.clone() };
            self.record(Change::Remembered { call: request.call.clone(), end });
        }
        NotReleased::NotFound
    }
}
