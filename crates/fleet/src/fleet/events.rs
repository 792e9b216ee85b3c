//! What happened, in the words of people: one event for each thing worth telling.

use std::{collections::VecDeque, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::{Change, Fleet, PodFacts, Refusal, Tried, Why, calls::Allocate};
use crate::{
    Millis,
    names::{CallSid, MerchantId, PodName, Pool},
};

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident $text:literal)*) => {
        /// What kind of thing happened.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Kind {
            $($(#[$doc])* $kind,)*
        }

        impl Kind {
            pub const ALL: &[Self] = &[$(Self::$kind),*];

            pub fn as_str(self) -> &'static str {
                match self { $(Self::$kind => $text,)* }
            }
        }
    };
}

kinds! {
    /// A call was given a pod; the steps tried before.
    Allocated "allocated"
    /// A call that waited was handed a pod.
    Handed "handed"
    /// It came for the pod that it was handed.
    Fetched "fetched"
    /// Its stream has started.
    Confirmed "confirmed"
    /// A call waits; the steps tried before.
    Waiting "waiting"
    /// It no longer waits, and has no pod.
    Left "left"
    /// A call was refused; why, and the steps tried.
    Refused "refused"
    /// A call ended; why, and how long it lasted (ms).
    Ended "ended"
    /// A pod takes no new calls; until when (s).
    Drained "drained"
    Undrained "undrained"
    /// A pod is new, or another of its name; its address.
    Joined "joined"
    Ready "ready"
    NotReady "not_ready"
    Terminating "terminating"
    Gone "gone"
    /// A pod is in another pool.
    Moved "moved"
    /// Calls fare badly on a pod, and it is given none; until when (s).
    Quarantined "quarantined"
    /// It is given calls again.
    Restored "restored"
    /// Another leader, or another list of pods; its epoch.
    Leader "leader"
    /// The pods come from another origin; which.
    Origin "origin"
    /// Another tier table is in force.
    Tiers "tiers"
    MerchantSet "merchant_set"
    MerchantDeleted "merchant_deleted"
}

impl FromStr for Kind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.iter().copied().find(|kind| kind.as_str() == text).ok_or(())
    }
}

/// Something that happened, to whom.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Event {
    pub kind: Kind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<CallSid>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodName>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Pool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merchant: Option<MerchantId>,
    /// What belongs to the kind.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

impl Event {
    fn new(kind: Kind) -> Self {
        Self { kind, call: None, pod: None, pool: None, merchant: None, detail: String::new() }
    }

    fn of_call(kind: Kind, call: &CallSid, merchant: Option<&MerchantId>) -> Self {
        Self { call: Some(call.clone()), merchant: merchant.cloned(), ..Self::new(kind) }
    }

    fn of_pod(kind: Kind, pod: &PodName) -> Self {
        Self { pod: Some(pod.clone()), ..Self::new(kind) }
    }

    fn with(self, detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), ..self }
    }

    /// An event as Redis has it: call, pod, pool, merchant and more, between spaces. `None`
    /// for one that this version does not know.
    pub fn read(kind: &str, text: &str) -> Option<Self> {
        let mut parts = text.splitn(5, ' ');
        let mut next = || parts.next().unwrap_or_default();
        Some(Self {
            kind: kind.parse().ok()?,
            call: next().parse().ok(),
            pod: next().parse().ok(),
            pool: next().parse().ok(),
            merchant: next().parse().ok(),
            detail: next().to_owned(),
        })
    }
}

/// Where an event stands: when it happened (ms), and which of that moment it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct EventId {
    pub at: Millis,
    pub number: u64,
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}-{}", self.at, self.number)
    }
}

impl FromStr for EventId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (at, number) = text.split_once('-').ok_or(())?;
        let parse = |text: &str| {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten().ok_or(())
        };
        let id = Self { at: parse(at)?, number: parse(number)? };
        // (nothing comes after the last there could be)
        if id.at < Millis::MAX { Ok(id) } else { Err(()) }
    }
}

/// An event and where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logged {
    pub id: EventId,
    /// When it happened (ms). Earlier than its id says after the clock was set back: ids rise.
    pub at: Millis,
    pub event: Event,
}

/// The last events.
#[derive(Debug)]
pub struct EventLog {
    kept: VecDeque<Logged>,
    most: usize,
    last: EventId,
}

impl EventLog {
    pub fn keeping(most: usize) -> Self {
        Self { kept: VecDeque::new(), most, last: EventId::default() }
    }

    pub fn push(&mut self, event: Event, now: Millis) {
        if self.most == 0 {
            return;
        }
        self.last = if now > self.last.at {
            EventId { at: now, number: 0 }
        } else {
            EventId { number: self.last.number + 1, ..self.last }
        };
        if self.kept.len() == self.most {
            self.kept.pop_front();
        }
        self.kept.push_back(Logged { id: self.last, at: now, event });
    }

    /// The first events after one.
    pub fn after(&self, id: EventId, most: usize) -> Vec<Logged> {
        let from = self.kept.partition_point(|logged| logged.id <= id);
        self.kept.range(from..).take(most).cloned().collect()
    }

    /// The last events before one (before none: the last of all), the latest first.
    pub fn before(&self, id: Option<EventId>, most: usize) -> Vec<Logged> {
        let to = id.map_or(self.kept.len(), |id| self.kept.partition_point(|it| it.id < id));
        self.kept.range(..to).rev().take(most).cloned().collect()
    }
}

/// `gold=at_capacity basic=empty`
fn tried_text(tried: &[Tried]) -> String {
    let steps: Vec<String> =
        tried.iter().map(|it| format!("{}={}", it.step, it.reason.as_str())).collect();
    steps.join(" ")
}

impl Fleet {
    /// From now on keeps what is worth telling, for [`Fleet::take_events`].
    pub fn keep_events(&mut self) {
        self.events = Some(Vec::new());
    }

    /// What has happened since the last time, in order.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.events.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(super) fn tell(&mut self, event: impl FnOnce(&Self) -> Option<Event>) {
        let Some(mut events) = self.events.take() else { return };
        events.extend(event(self));
        self.events = Some(events);
    }

    /// A call was refused, for good or for now.
    pub(super) fn tell_refused(&mut self, request: &Allocate, refusal: &Refusal) {
        if matches!(refusal.why, Why::Waiting { .. } | Why::Unsettled) {
            return;
        }
        let steps = tried_text(&refusal.tried);
        let why = refusal.why.as_str();
        let detail = if steps.is_empty() { why.to_owned() } else { format!("{why} {steps}") };
        let event = Event::of_call(Kind::Refused, &request.call, request.merchant.as_ref());
        self.tell(|_| Some(event.with(detail)));
    }

    /// What a change means to people, before it is made; nothing if it is a detail.
    pub(super) fn meaning(&self, change: &Change) -> Option<Event> {
        Some(match change {
            Change::Call { call, facts } => {
                let kind = if facts.place.is_some() { Kind::Handed } else { Kind::Allocated };
                Event {
                    pod: Some(facts.pod.clone()),
                    pool: Some(facts.pool.clone()),
                    ..Event::of_call(kind, call, facts.merchant.as_ref())
                }
                .with(tried_text(&facts.tried))
            }
            Change::Fetched { call, .. } => {
                let facts = self.calls.get(call)?;
                Event {
                    pod: Some(facts.pod.clone()),
                    pool: Some(facts.pool.clone()),
                    ..Event::of_call(Kind::Fetched, call, facts.merchant.as_ref())
                }
            }
            Change::Renewed { call, .. } => {
                let facts = self.calls.get(call).filter(|facts| facts.provisional)?;
                Event {
                    pod: Some(facts.pod.clone()),
                    ..Event::of_call(Kind::Confirmed, call, facts.merchant.as_ref())
                }
            }
            Change::Ended { call, at, cause } => {
                let facts = self.calls.get(call)?;
                Event {
                    pod: Some(facts.pod.clone()),
                    ..Event::of_call(Kind::Ended, call, facts.merchant.as_ref())
                }
                .with(format!(
                    "{} {}",
                    cause.as_str(),
                    at.saturating_sub(facts.at)
                ))
            }
            Change::Waits { call, place } => {
                Event::of_call(Kind::Waiting, call, place.merchant.as_ref())
                    .with(tried_text(&place.tried))
            }
            Change::Left { call } => {
                let place = self.queue.get(call)?;
                Event::of_call(Kind::Left, call, place.merchant.as_ref())
            }
            Change::Draining { pod, until: Some(until) } => {
                Event::of_pod(Kind::Drained, pod).with((until / 1_000).to_string())
            }
            Change::Draining { pod, until: None } => Event::of_pod(Kind::Undrained, pod),
            Change::Pod { pod, facts } => return self.pod_event(pod, facts),
            Change::Home { pod, pool } => {
                Event { pool: Some(pool.clone()), ..Event::of_pod(Kind::Moved, pod) }
            }
            Change::Gone { pod } => Event::of_pod(Kind::Gone, pod),
            Change::Health { pod, quarantined_until, .. } => {
                return self.quarantine_event(pod, *quarantined_until);
            }
            Change::Epoch { epoch } => Event::new(Kind::Leader).with(epoch.to_string()),
            Change::Origin { origin } => Event::new(Kind::Origin).with(origin.to_string()),
            Change::Tiers { by, .. } => Event::new(Kind::Tiers).with(by),
            Change::Merchant { id, document, by } => {
                let kind =
                    if document.is_some() { Kind::MerchantSet } else { Kind::MerchantDeleted };
                Event { merchant: Some(id.clone()), ..Event::new(kind).with(by) }
            }
            Change::Began { .. }
            | Change::List { .. }
            | Change::Spared { .. }
            | Change::Remembered { .. }
            | Change::Forgotten { .. }
            | Change::Seen { .. }
            | Change::Polled { .. }
            | Change::Told { .. }
            | Change::Time { .. }
            | Change::Shifted { .. } => return None,
        })
    }

    fn pod_event(&self, pod: &PodName, facts: &PodFacts) -> Option<Event> {
        let known = self.pods.get(pod).map(|known| &known.facts);
        let Some(known) = known.filter(|known| known.uid == facts.uid) else {
            return Some(Event::of_pod(Kind::Joined, pod).with(&facts.address));
        };
        let kind = match facts.ready {
            _ if facts.terminating && !known.terminating => Kind::Terminating,
            ready if ready == known.ready => return None,
            true => Kind::Ready,
            false => Kind::NotReady,
        };
        Some(Event::of_pod(kind, pod))
    }

    fn quarantine_event(&self, pod: &PodName, until: Option<Millis>) -> Option<Event> {
        match (self.pods.get(pod)?.quarantined_until, until) {
            (None, Some(until)) => {
                Some(Event::of_pod(Kind::Quarantined, pod).with((until / 1_000).to_string()))
            }
            (Some(_), None) => Some(Event::of_pod(Kind::Restored, pod)),
            _ => None,
        }
    }
}
