//! What callers, operators and leaders were told by the store, and what the cluster did. The
//! check of these promises never looks at the store.
//!
//! A call certainly has a pod from the moment its client was told, until a release was sent, its
//! lease may have ended, or its pod died.

use fleet::Millis;

use super::{
    CAP, LEASE,
    network::LONGEST_WAY,
    requests::{Answer, Op},
};

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Violation {
    pub invariant: &'static str,
    pub what: String,
    pub pod: Option<usize>,
    pub call: Option<u32>,
    pub step: u64,
}

/// A call that certainly has a pod.
#[derive(Debug, Clone, Copy)]
struct Holding {
    pod: usize,
    is_shared: bool,
    from: Millis,
    until: Millis,
}

#[derive(Debug, Clone, Default)]
struct Call {
    holding: Option<Holding>,
    /// What kind of pod it was told of.
    is_shared: Option<bool>,
    /// Allocations that a router has under way, has begun, and when the last was over.
    open: u32,
    opened: u32,
    closed_at: Millis,
    first_release: Option<Millis>,
    /// When a client was told that it is over.
    released_at: Option<Millis>,
    /// An allocation that nobody was told of was taken back.
    taken_back: Option<Millis>,
}

#[derive(Debug, Clone, Default)]
struct Pod {
    life: Option<(u32, u32)>,
    /// Which life of it the store has taken note of, and since when that is known.
    known: Option<((u32, u32), Millis)>,
    /// Since when it is known that the store knows it to be terminating.
    terminating: Option<(u32, Millis)>,
    /// From when until when it certainly drains.
    drained: Option<(Millis, Millis)>,
    undrain_sent: Option<Millis>,
    calls: Vec<u32>,
}

pub(super) struct Promises {
    calls: Vec<Call>,
    pods: Vec<Pod>,
    /// The highest epoch that the store is known to have taken.
    epoch: u64,
    pub violations: Vec<Violation>,
    pub step: u64,
    /// How many times a call was certain of its pod.
    pub holdings: u64,
}

impl Promises {
    pub(super) fn new(pods: usize) -> Self {
        Self {
            calls: Vec::new(),
            pods: vec![Pod::default(); pods],
            epoch: 0,
            violations: Vec::new(),
            step: 0,
            holdings: 0,
        }
    }

    fn call(&mut self, call: u32) -> &mut Call {
        let call = call as usize;
        if self.calls.len() <= call {
            self.calls.resize(call + 1, Call::default());
        }
        &mut self.calls[call]
    }

    pub(super) fn broken(
        &mut self,
        invariant: &'static str,
        pod: Option<usize>,
        call: Option<u32>,
        what: String,
    ) {
        self.violations.push(Violation { invariant, what, pod, call, step: self.step });
    }

    pub(super) fn pod_changes(&mut self, pod: usize, life: Option<(u32, u32)>) {
        if self.pods[pod].life == life {
            return;
        }
        let it = &mut self.pods[pod];
        (it.life, it.terminating, it.drained) = (life, None, None);
        for call in std::mem::take(&mut it.calls) {
            self.calls[call as usize].holding = None;
        }
    }

    pub(super) fn allocate_opens(&mut self, call: u32) {
        let call = self.call(call);
        call.open += 1;
        call.opened += 1;
    }

    pub(super) fn allocate_closes(&mut self, call: u32, at: Millis) {
        let call = self.call(call);
        call.open -= 1;
        call.closed_at = call.closed_at.max(at);
    }

    pub(super) fn taken_back(&mut self, call: u32, now: Millis) {
        self.call(call).taken_back.get_or_insert(now);
    }

    pub(super) fn release_sent(&mut self, call: u32, now: Millis) {
        self.drop_holding(call);
        self.call(call).first_release.get_or_insert(now);
    }

    fn drop_holding(&mut self, call: u32) {
        if let Some(holding) = self.call(call).holding.take() {
            self.pods[holding.pod].calls.retain(|other| *other != call);
        }
    }

    /// What a call certainly has now.
    fn holding(&mut self, call: u32, now: Millis) -> Option<Holding> {
        let holding = self.call(call).holding?;
        if now < holding.until {
            return Some(holding);
        }
        self.drop_holding(call);
        None
    }

    pub(super) fn client_hears(
        &mut self,
        sent: Millis,
        op: &Op,
        answer: Option<&Answer>,
        now: Millis,
    ) {
        let (Some(call), Some(answer)) = (op.call(), answer) else { return };
        match (op, answer) {
            (Op::Allocate { .. }, Answer::Given { pod, is_shared, is_new }) => {
                self.told(call, *pod, *is_shared, *is_new, sent, now);
            }
            (Op::Renew { pod, .. }, Answer::Renewed) => {
                match self.call(call).holding.as_mut().filter(|it| it.pod == *pod) {
                    Some(holding) => holding.until = holding.until.max(sent + LEASE),
                    None => self.holds(call, *pod, sent, now),
                }
            }
            // It may have asked for the pod that it had before.
            (Op::Renew { pod, .. }, _)
                if self.call(call).holding.is_some_and(|it| it.pod == *pod) =>
            {
                self.must_be_known(call, None, sent, now);
            }
            (Op::Find { .. }, Answer::Found { pod }) => {
                self.must_be_known(call, *pod, sent, now);
                if let Some(pod) = *pod {
                    self.must_be_live(call, pod, sent);
                }
            }
            (Op::Release { .. }, Answer::Released { pod }) => {
                self.must_be_live(call, *pod, sent);
                self.call(call).released_at.get_or_insert(now);
            }
            // One that names a pod may have named one that the call no longer has.
            (Op::Release { pod: None, .. }, _) => {
                self.call(call).released_at.get_or_insert(now);
            }
            _ => {}
        }
    }

    /// A client was told that it has a pod.
    fn told(
        &mut self,
        call: u32,
        pod: usize,
        is_shared: bool,
        is_new: bool,
        sent: Millis,
        now: Millis,
    ) {
        self.call(call).is_shared = Some(is_shared);
        if let Some(before) = self.holding(call, now) {
            if before.pod != pod && (before.from <= sent || self.is_known(pod, sent)) {
                let what = format!("c{call} has p{} and was given p{pod}", before.pod);
                self.broken("I2", Some(pod), Some(call), what);
            }
            return;
        }
        if !is_new {
            // It is not known how old its lease is: a renewal will tell.
            return;
        }
        let it = &self.pods[pod];
        if it.drained.is_some_and(|(from, until)| from <= sent && now < until) {
            self.broken(
                "I5",
                Some(pod),
                Some(call),
                format!("c{call} was given p{pod}, which drains"),
            );
        }
        let it = &self.pods[pod];
        let is_same = |uid: u32| it.life.is_none_or(|life| life.0 == uid);
        if it.terminating.is_some_and(|(uid, since)| since <= sent && is_same(uid)) {
            let what = format!("c{call} was given p{pod}, which terminates");
            self.broken("I5", Some(pod), Some(call), what);
        }
        self.holds(call, pod, sent, now);
    }

    /// Whether the store had taken note of the agent that is there now.
    fn is_known(&self, pod: usize, then: Millis) -> bool {
        let it = &self.pods[pod];
        it.known.is_some_and(|(life, at)| Some(life) == it.life && at <= then)
    }

    /// A call has a pod from now on, if that is certain.
    fn holds(&mut self, call: u32, pod: usize, sent: Millis, now: Millis) {
        let is_known = self.is_known(pod, sent);
        let Some(is_shared) = self.call(call).is_shared else { return };
        if self.call(call).first_release.is_some() || !is_known || now >= sent + LEASE {
            return;
        }
        let others: Vec<u32> = self.pods[pod].calls.clone();
        let others: Vec<u32> =
            others.into_iter().filter(|other| self.holding(*other, now).is_some()).collect();
        let most = if is_shared { CAP } else { 1 };
        let is_mixed = others.iter().any(|other| {
            self.calls[*other as usize].holding.is_some_and(|it| it.is_shared != is_shared)
        });
        if others.len() >= most || is_mixed {
            let what = format!("p{pod} has {others:?} and was given c{call}");
            self.broken(if is_shared { "I3" } else { "I1" }, Some(pod), Some(call), what);
        }
        self.drop_holding(call);
        self.pods[pod].calls.push(call);
        self.holdings += 1;
        let holding = Holding { pod, is_shared, from: now, until: sent + LEASE };
        self.call(call).holding = Some(holding);
    }

    /// The store was asked for a call, and said where it is.
    fn must_be_known(&mut self, call: u32, found: Option<usize>, sent: Millis, now: Millis) {
        let Some(holding) = self.holding(call, now).filter(|it| it.from <= sent) else { return };
        if found != Some(holding.pod) {
            let what = format!("c{call} has p{}, and the store says {found:?}", holding.pod);
            self.broken(
                if found.is_some() { "I2" } else { "I7" },
                Some(holding.pod),
                Some(call),
                what,
            );
        }
    }

    /// The store said that a call is live: nobody may have been told otherwise.
    fn must_be_live(&mut self, call: u32, pod: usize, sent: Millis) {
        let it = self.call(call).clone();
        let is_over = it.released_at.is_some_and(|at| at <= sent);
        let since = it.first_release.unwrap_or(0);
        if is_over && it.open == 0 && it.closed_at < since {
            let what = format!("c{call} was released, and is live on p{pod}");
            self.broken("I6", Some(pod), Some(call), what);
        }
        let is_alone = it.opened == 1 && it.first_release.is_none();
        if is_alone && it.taken_back.is_some_and(|at| at <= sent) {
            let what = format!("c{call} was taken back, and is live on p{pod}");
            self.broken("I4", Some(pod), Some(call), what);
        }
    }

    pub(super) fn undrain_sent(&mut self, pod: usize, now: Millis) {
        self.pods[pod].undrain_sent = Some(now);
        self.pods[pod].drained = None;
    }

    pub(super) fn drained(&mut self, pod: usize, sent: Millis, until: Millis, now: Millis) {
        // An undrain may be on its way, and the drain may have been another pod's.
        let is_certain = self.pods[pod].undrain_sent.is_none_or(|at| at + LONGEST_WAY < sent);
        if is_certain && self.is_known(pod, sent) {
            self.pods[pod].drained = Some((now, until));
        }
    }

    pub(super) fn is_replaced(&self, epoch: u64) -> bool {
        epoch < self.epoch
    }

    /// The store took a leader's write.
    pub(super) fn leader_wrote(&mut self, op: &Op, epoch: u64, is_replaced: bool, now: Millis) {
        if is_replaced {
            let what = format!("epoch {epoch} was replaced, and wrote {op:?}");
            self.broken("I9", op.pod(), None, what);
        }
        self.epoch = self.epoch.max(epoch);
        if let Op::Observe { pod, seen, .. } = op {
            let it = &mut self.pods[*pod];
            if it.known.is_none_or(|(life, _)| life != seen.life()) {
                it.known = Some((seen.life(), now));
            }
            if seen.is_terminating && it.terminating.is_none_or(|(uid, _)| uid != seen.uid) {
                it.terminating = Some((seen.uid, now));
            }
        }
    }

    /// All is calm, and so many calls were given to each ready pod.
    pub(super) fn census(&mut self, given: &[(usize, bool)]) {
        for (pod, (count, is_shared)) in given.iter().enumerate() {
            let most = if *is_shared { CAP } else { 1 };
            if *count != most {
                let what =
                    format!("p{pod} is ready and idle, and was given {count} calls of {most}");
                self.broken("I4", Some(pod), None, what);
            }
        }
    }
}
