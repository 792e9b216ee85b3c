//! The invariant checker: it compares the responses that clients, operators and leaders received
//! with each other and with the cluster, and never reads the store.
//!
//! A call *holds* a pod from the response to its allocation until a release is sent, its lease may
//! have ended, or the agent ends.

use fleet::Millis;

use super::{
    CAP, LEASE,
    network::max_request_delay,
    requests::{Op, Reply},
};

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Violation {
    pub invariant: &'static str,
    pub message: String,
    pub pod: Option<usize>,
    pub call: Option<u32>,
    pub step: u64,
}

/// A pod that a call certainly has.
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
    /// Whether its last allocated pod is shared.
    is_shared: Option<bool>,
    /// Allocate requests that routers have not finished, that they have started, and the end of the
    /// last.
    pending: u32,
    started: u32,
    finished_at: Millis,
    first_release: Option<Millis>,
    /// When the first response to a release arrived.
    released_at: Option<Millis>,
    /// When the first compensating release was acknowledged.
    compensated_at: Option<Millis>,
}

#[derive(Debug, Clone, Default)]
struct Pod {
    incarnation: Option<(u32, u32)>,
    /// The last incarnation that the store acknowledged, and when.
    known: Option<((u32, u32), Millis)>,
    /// The UID that the store acknowledged as terminating, and when.
    terminating: Option<(u32, Millis)>,
    /// The interval in which it certainly drains.
    drained: Option<(Millis, Millis)>,
    undrain_sent: Option<Millis>,
    calls: Vec<u32>,
}

pub(super) struct InvariantChecker {
    calls: Vec<Call>,
    pods: Vec<Pod>,
    /// The highest epoch that the store has acknowledged.
    epoch: u64,
    pub violations: Vec<Violation>,
    pub step: u64,
    /// Number of times that a call began to hold a pod.
    pub holdings: u64,
}

impl InvariantChecker {
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

    pub(super) fn violated(
        &mut self,
        invariant: &'static str,
        pod: Option<usize>,
        call: Option<u32>,
        message: String,
    ) {
        self.violations.push(Violation { invariant, message, pod, call, step: self.step });
    }

    pub(super) fn pod_changes(&mut self, pod: usize, incarnation: Option<(u32, u32)>) {
        if self.pods[pod].incarnation == incarnation {
            return;
        }
        let it = &mut self.pods[pod];
        (it.incarnation, it.terminating, it.drained) = (incarnation, None, None);
        for call in std::mem::take(&mut it.calls) {
            self.calls[call as usize].holding = None;
        }
    }

    pub(super) fn allocate_started(&mut self, call: u32) {
        let call = self.call(call);
        call.pending += 1;
        call.started += 1;
    }

    pub(super) fn allocate_finished(&mut self, call: u32, at: Millis) {
        let call = self.call(call);
        call.pending -= 1;
        call.finished_at = call.finished_at.max(at);
    }

    pub(super) fn compensated(&mut self, call: u32, now: Millis) {
        self.call(call).compensated_at.get_or_insert(now);
    }

    pub(super) fn release_sent(&mut self, call: u32, now: Millis) {
        self.end_holding(call);
        self.call(call).first_release.get_or_insert(now);
    }

    /// The stream of a call ends, and the call with it.
    pub(super) fn stream_closes(&mut self, call: u32, now: Millis) {
        self.release_sent(call, now);
    }

    /// The call moves to another pod.
    pub(super) fn stream_moves(&mut self, call: u32) {
        self.end_holding(call);
    }

    fn end_holding(&mut self, call: u32) {
        if let Some(holding) = self.call(call).holding.take() {
            self.pods[holding.pod].calls.retain(|other| *other != call);
        }
    }

    /// The pod that a call holds now.
    fn holding(&mut self, call: u32, now: Millis) -> Option<Holding> {
        let holding = self.call(call).holding?;
        if now < holding.until {
            return Some(holding);
        }
        self.end_holding(call);
        None
    }

    pub(super) fn client_receives(
        &mut self,
        sent: Millis,
        op: &Op,
        reply: Option<&Reply>,
        now: Millis,
    ) {
        let (Some(call), Some(reply)) = (op.call(), reply) else { return };
        match (op, reply) {
            (Op::Allocate { .. }, Reply::Allocated { pod, is_shared, is_new }) => {
                self.allocated(call, *pod, *is_shared, *is_new, sent, now);
            }
            (Op::Renew { pod, .. }, Reply::Renewed) => {
                match self.call(call).holding.as_mut().filter(|it| it.pod == *pod) {
                    Some(holding) => holding.until = holding.until.max(sent + LEASE),
                    None => self.begin_holding(call, *pod, sent, now),
                }
            }
            // The renewal may name the call's previous pod.
            (Op::Renew { pod, .. }, _)
                if self.call(call).holding.is_some_and(|it| it.pod == *pod) =>
            {
                self.check_lookup(call, None, sent, now);
            }
            (Op::Find { .. }, Reply::Found { pod }) => {
                self.check_lookup(call, *pod, sent, now);
                if let Some(pod) = *pod {
                    self.check_live(call, pod, sent);
                }
            }
            (Op::Release { .. }, Reply::Released { pod }) => {
                self.check_live(call, *pod, sent);
                self.call(call).released_at.get_or_insert(now);
            }
            // A release with a pod may name the call's previous pod.
            (Op::Release { pod: None, .. }, _) => {
                self.call(call).released_at.get_or_insert(now);
            }
            _ => {}
        }
    }

    /// A client received an allocation.
    fn allocated(
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
                let message = format!("c{call} holds p{} and was allocated p{pod}", before.pod);
                self.violated("I2", Some(pod), Some(call), message);
            }
            return;
        }
        if !is_new {
            // The end of its lease is unknown until a renewal.
            return;
        }
        let it = &self.pods[pod];
        if it.drained.is_some_and(|(from, until)| from <= sent && now < until) {
            self.violated(
                "I5",
                Some(pod),
                Some(call),
                format!("c{call} was allocated p{pod}, which drains"),
            );
        }
        let it = &self.pods[pod];
        let is_same = |uid: u32| it.incarnation.is_none_or(|incarnation| incarnation.0 == uid);
        if it.terminating.is_some_and(|(uid, since)| since <= sent && is_same(uid)) {
            let message = format!("c{call} was allocated p{pod}, which terminates");
            self.violated("I5", Some(pod), Some(call), message);
        }
        self.begin_holding(call, pod, sent, now);
    }

    /// Whether the store had acknowledged the current incarnation of a pod.
    pub(super) fn is_known(&self, pod: usize, then: Millis) -> bool {
        let it = &self.pods[pod];
        it.known.is_some_and(|(incarnation, at)| Some(incarnation) == it.incarnation && at <= then)
    }

    /// A call holds a pod from now on, if that is certain.
    fn begin_holding(&mut self, call: u32, pod: usize, sent: Millis, now: Millis) {
        let is_known = self.is_known(pod, sent);
        let Some(is_shared) = self.call(call).is_shared else { return };
        if self.call(call).first_release.is_some() || !is_known || now >= sent + LEASE {
            return;
        }
        let others: Vec<u32> = self.pods[pod].calls.clone();
        let others: Vec<u32> =
            others.into_iter().filter(|other| self.holding(*other, now).is_some()).collect();
        let capacity = if is_shared { CAP } else { 1 };
        let is_mixed = others.iter().any(|other| {
            self.calls[*other as usize].holding.is_some_and(|it| it.is_shared != is_shared)
        });
        if others.len() >= capacity || is_mixed {
            let message = format!("p{pod} serves {others:?} and was allocated to c{call}");
            self.violated(if is_shared { "I3" } else { "I1" }, Some(pod), Some(call), message);
        }
        self.end_holding(call);
        self.pods[pod].calls.push(call);
        self.holdings += 1;
        let holding = Holding { pod, is_shared, from: now, until: sent + LEASE };
        self.call(call).holding = Some(holding);
    }

    /// Checks the result of a lookup against the pod that the call holds.
    fn check_lookup(&mut self, call: u32, found: Option<usize>, sent: Millis, now: Millis) {
        let Some(holding) = self.holding(call, now).filter(|it| it.from <= sent) else { return };
        if found != Some(holding.pod) {
            let message =
                format!("c{call} holds p{}, and the store returned {found:?}", holding.pod);
            self.violated(
                if found.is_some() { "I2" } else { "I7" },
                Some(holding.pod),
                Some(call),
                message,
            );
        }
    }

    /// Checks that a call reported as live has not been reported as ended.
    fn check_live(&mut self, call: u32, pod: usize, sent: Millis) {
        let it = self.call(call).clone();
        let is_over = it.released_at.is_some_and(|at| at <= sent);
        let since = it.first_release.unwrap_or(0);
        if is_over && it.pending == 0 && it.finished_at < since {
            let message = format!("c{call} was released, but is live on p{pod}");
            self.violated("I6", Some(pod), Some(call), message);
        }
        let is_alone = it.started == 1 && it.first_release.is_none();
        if is_alone && it.compensated_at.is_some_and(|at| at <= sent) {
            let message = format!("c{call} was compensated, but is live on p{pod}");
            self.violated("I4", Some(pod), Some(call), message);
        }
    }

    pub(super) fn undrain_sent(&mut self, pod: usize, now: Millis) {
        self.pods[pod].undrain_sent = Some(now);
        self.pods[pod].drained = None;
    }

    pub(super) fn drained(&mut self, pod: usize, sent: Millis, until: Millis, now: Millis) {
        // An undrain may be in flight, and the drain may have applied to a previous pod.
        let is_certain =
            self.pods[pod].undrain_sent.is_none_or(|at| at + max_request_delay() < sent);
        if is_certain && self.is_known(pod, sent) {
            self.pods[pod].drained = Some((now, until));
        }
    }

    pub(super) fn is_replaced(&self, epoch: u64) -> bool {
        epoch < self.epoch
    }

    /// The store accepted a leader's write.
    pub(super) fn leader_wrote(&mut self, op: &Op, epoch: u64, is_replaced: bool, now: Millis) {
        if is_replaced {
            let message = format!("epoch {epoch} was superseded, but wrote {op:?}");
            self.violated("I9", op.pod(), None, message);
        }
        self.epoch = self.epoch.max(epoch);
        if let Op::Observe { pod, state, .. } = op {
            let it = &mut self.pods[*pod];
            if it.known.is_none_or(|(incarnation, _)| incarnation != state.incarnation()) {
                it.known = Some((state.incarnation(), now));
            }
            if state.is_terminating && it.terminating.is_none_or(|(uid, _)| uid != state.uid) {
                it.terminating = Some((state.uid, now));
            }
        }
    }

    /// Checks, after all faults have ended, that each pod was allocated up to its capacity.
    pub(super) fn check_capacity(&mut self, allocated: &[(usize, bool)]) {
        for (pod, (count, is_shared)) in allocated.iter().enumerate() {
            let capacity = if *is_shared { CAP } else { 1 };
            if *count != capacity {
                let message = format!(
                    "p{pod} is ready and idle, but was allocated {count} of {capacity} calls"
                );
                self.violated("I4", Some(pod), None, message);
            }
        }
    }
}
