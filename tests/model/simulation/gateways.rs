//! Media gateways, one per router: they attach the streams of calls, send heartbeats, renew calls,
//! fail over when a pod is lost, and may die or be cut off from the store.
//!
//! A stream is *covered* while the store certainly knows it: from a reply until a lease may have
//! ended. Streams of a gateway that is cut off for longer than its lease are not covered.

use std::collections::BTreeMap;

use fleet::Millis;

use super::{
    LEASE, Simulation,
    events::Event,
    requests::{Op, Reply},
    router::Requester,
};

/// Lease of a gateway; not shorter than that of a call.
pub(super) const GATEWAY_LEASE: Millis = 4_000;
const BEAT_INTERVAL: Millis = 1_000;
/// Requests of one failover whose reply is lost.
const MAX_FAILOVER_TRIES: u8 = 3;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    Attaching,
    Serving,
    /// A failover to a stream of this id is under way.
    Moving {
        next: u64,
        tries: u8,
    },
}

#[derive(Debug, Clone)]
struct Stream {
    id: u64,
    phase: Phase,
    pod: usize,
    opened: Millis,
    covered_from: Option<Millis>,
    /// The lease of the call lasts at least until then.
    leased_until: Millis,
}

#[derive(Debug, Default)]
pub(super) struct Gateway {
    streams: BTreeMap<u32, Stream>,
    /// The lease of the gateway lasts at least until then.
    leased_until: Millis,
    /// No message reaches the store, or comes from it, until then.
    pub(super) cut_off_until: Millis,
}

impl Gateway {
    /// Ends the coverage of streams whose lease may have ended.
    fn expire(&mut self, now: Millis) {
        for stream in self.streams.values_mut() {
            if now >= self.leased_until.min(stream.leased_until) {
                stream.covered_from = None;
            }
        }
    }
}

impl Simulation {
    fn gateway_sends(&mut self, router: usize, op: Op) {
        let requester = Requester::Gateway {
            router,
            incarnation: self.routers[router].incarnation(),
            sent: self.now,
        };
        self.start_request(router, requester, op);
    }

    /// A provider opens the stream of a call.
    pub(crate) fn stream_opens(&mut self, router: usize, call: u32) {
        if self.has_hung_up(call) || self.gateways[router].streams.contains_key(&call) {
            return;
        }
        let stream = Stream {
            id: self.new_stream_id(),
            phase: Phase::Attaching,
            pod: 0,
            opened: self.now,
            covered_from: None,
            leased_until: 0,
        };
        let id = stream.id;
        self.gateways[router].streams.insert(call, stream);
        let gateway = (router, self.routers[router].incarnation());
        self.gateway_sends(router, Op::Attach { call, gateway, stream: id, connected: None });
    }

    fn new_stream_id(&mut self) -> u64 {
        self.last_stream += 1;
        self.last_stream
    }

    /// A provider closes the streams of its call.
    pub(crate) fn close_streams(&mut self, call: u32) {
        self.checker.stream_closes(call, self.now);
        for router in 0..self.gateways.len() {
            self.close_stream(router, call);
        }
    }

    /// Ends a stream. Its failover may have reached the store: the next id is detached as well.
    fn close_stream(&mut self, router: usize, call: u32) {
        let Some(stream) = self.gateways[router].streams.remove(&call) else { return };
        self.checker.stream_closes(call, self.now);
        self.gateway_sends(router, Op::Detach { call, stream: stream.id });
        if let Phase::Moving { next, .. } = stream.phase {
            self.gateway_sends(router, Op::Detach { call, stream: next });
        }
    }

    pub(crate) fn gateway_beats(&mut self, router: usize) {
        self.at(self.now + BEAT_INTERVAL, Event::GatewayBeats { router });
        self.gateways[router].expire(self.now);
        if self.gateways[router].streams.is_empty() {
            return;
        }
        let gateway = (router, self.routers[router].incarnation());
        self.gateway_sends(router, Op::Heartbeat { gateway });
        let is_serving = |(_, stream): &(&u32, &Stream)| stream.phase == Phase::Serving;
        let serving = self.gateways[router].streams.iter().filter(is_serving);
        let serving: Vec<(u32, usize)> = serving.map(|(call, it)| (*call, it.pod)).collect();
        for (call, pod) in serving {
            self.gateway_sends(router, Op::Renew { call, pod });
        }
    }

    /// Cuts a gateway off from the store.
    pub(crate) fn gateway_cut_off(&mut self, router: usize) {
        let pause = self.dice.between(3_000, 20_000);
        let next = self.dice.roll(self.gateways.len());
        self.at(self.now + pause, Event::GatewayCutOff { router: next });
        if !self.is_fault_free {
            let time = self.dice.between(500, 3 * GATEWAY_LEASE);
            self.log(None, None, || format!("g{router}: cut off for {time} ms"));
            self.gateways[router].cut_off_until = self.now + time;
        }
    }

    /// A gateway dies with its router.
    pub(crate) fn gateway_dies(&mut self, router: usize) {
        let gateway = std::mem::take(&mut self.gateways[router]);
        for call in gateway.streams.into_keys() {
            self.checker.stream_closes(call, self.now);
        }
    }

    /// The agent of a pod has ended: its streams fail over.
    pub(crate) fn agent_ends(&mut self, pod: usize) {
        for router in 0..self.gateways.len() {
            let streams = self.gateways[router].streams.iter();
            let lost: Vec<u32> = streams
                .filter(|(_, it)| it.pod == pod && it.phase == Phase::Serving)
                .map(|(call, _)| *call)
                .collect();
            for call in lost {
                self.move_stream(router, call);
            }
        }
    }

    fn move_stream(&mut self, router: usize, call: u32) {
        let next = self.new_stream_id();
        let Some(stream) = self.gateways[router].streams.get_mut(&call) else { return };
        stream.covered_from = None;
        stream.phase = Phase::Moving { next, tries: 1 };
        let stream = stream.id;
        self.checker.stream_moves(call);
        let gateway = (router, self.routers[router].incarnation());
        self.gateway_sends(router, Op::Failover { call, gateway, stream, next });
    }

    fn attach_again(&mut self, router: usize, call: u32) {
        let Some(stream) = self.gateways[router].streams.get(&call) else { return };
        if stream.phase == Phase::Serving {
            let connected = Some((stream.pod, self.now - stream.opened));
            let gateway = (router, self.routers[router].incarnation());
            let stream = stream.id;
            self.gateway_sends(router, Op::Attach { call, gateway, stream, connected });
        }
    }

    pub(crate) fn gateway_receives(&mut self, requester: Requester, op: Op, reply: Option<Reply>) {
        let Requester::Gateway { router, incarnation, sent } = requester else { return };
        if incarnation != self.routers[router].incarnation() {
            return;
        }
        self.gateways[router].expire(self.now);
        self.log(op.pod(), op.call(), || format!("g{router}: reply to {op:?}: {reply:?}"));
        if matches!(reply, Some(Reply::Attached { .. } | Reply::Extended { .. })) {
            let leased = &mut self.gateways[router].leased_until;
            *leased = (*leased).max(sent + GATEWAY_LEASE);
        }
        match op {
            Op::Attach { call, stream, connected, .. } => {
                self.attach_answered(router, call, stream, connected, reply, sent);
            }
            Op::Failover { call, next, .. } => {
                self.failover_answered(router, op, call, next, reply, sent);
            }
            Op::Heartbeat { .. } => {
                if let Some(Reply::Extended { calls, ending }) = reply {
                    self.heartbeat_answered(router, calls, ending);
                }
            }
            Op::Renew { call, pod } => {
                let stream = self.gateways[router].streams.get_mut(&call);
                let Some(stream) = stream.filter(|it| it.pod == pod) else { return };
                if stream.phase != Phase::Serving {
                    return;
                }
                match reply {
                    Some(Reply::Renewed) => {
                        stream.leased_until = stream.leased_until.max(sent + LEASE);
                    }
                    Some(_) => self.attach_again(router, call),
                    None => {}
                }
            }
            _ => {}
        }
    }

    fn heartbeat_answered(&mut self, router: usize, calls: usize, ending: Vec<(u32, bool)>) {
        for (call, is_displaced) in ending {
            let stream = self.gateways[router].streams.get(&call);
            match stream.map(|stream| stream.phase) {
                Some(Phase::Serving) if is_displaced => self.move_stream(router, call),
                Some(_) if !is_displaced => self.close_stream(router, call),
                _ => {}
            }
        }
        let streams = &self.gateways[router].streams;
        if calls < streams.len() {
            for call in streams.keys().copied().collect::<Vec<u32>>() {
                self.attach_again(router, call);
            }
        }
    }

    fn attach_answered(
        &mut self,
        router: usize,
        call: u32,
        id: u64,
        connected: Option<(usize, Millis)>,
        reply: Option<Reply>,
        sent: Millis,
    ) {
        let stream = self.gateways[router].streams.get(&call).filter(|stream| stream.id == id);
        let Some(stream) = stream.cloned() else { return };
        let phase = if connected.is_some() { Phase::Serving } else { Phase::Attaching };
        match reply {
            _ if stream.phase != phase => {}
            Some(Reply::Attached { pod }) => self.serve(router, call, id, pod, sent),
            // A connected stream is attached again with the next heartbeat.
            None if connected.is_some() => {}
            Some(Reply::UnknownPod) => {}
            // Its pod serves an earlier call.
            Some(Reply::Refused) if connected.is_some() => self.move_stream(router, call),
            // The attach may have taken effect.
            _ => self.close_stream(router, call),
        }
    }

    fn failover_answered(
        &mut self,
        router: usize,
        op: Op,
        call: u32,
        next: u64,
        reply: Option<Reply>,
        sent: Millis,
    ) {
        let Some(stream) = self.gateways[router].streams.get_mut(&call) else { return };
        let Phase::Moving { next: expected, tries } = stream.phase else { return };
        if expected != next {
            return;
        }
        match reply {
            Some(Reply::Attached { pod }) => self.serve(router, call, next, pod, sent),
            None if tries < MAX_FAILOVER_TRIES => {
                stream.phase = Phase::Moving { next, tries: tries + 1 };
                self.gateway_sends(router, op);
            }
            _ => self.close_stream(router, call),
        }
    }

    /// Connects a stream to the pod that the store named.
    fn serve(&mut self, router: usize, call: u32, id: u64, pod: usize, sent: Millis) {
        let now = self.now;
        let Some(stream) = self.gateways[router].streams.get_mut(&call) else { return };
        let is_same = stream.phase == Phase::Serving;
        if is_same && stream.pod != pod {
            // The call had ended, and was allocated again by a repeated request.
            stream.id = id;
            return self.move_stream(router, call);
        }
        (stream.id, stream.pod, stream.phase) = (id, pod, Phase::Serving);
        stream.leased_until = stream.leased_until.max(sent + LEASE);
        if stream.covered_from.is_none() && self.checker.is_known(pod, sent) {
            stream.covered_from = Some(now);
        }
        self.gateways[router].expire(now);
        if self.cluster.slots[pod].state.is_none() {
            return self.move_stream(router, call);
        }
        let is_covered = |gateway: &Gateway| {
            gateway.streams.get(&call).is_some_and(|stream| stream.covered_from.is_some())
        };
        let covered = self.gateways.iter().filter(|gateway| is_covered(gateway)).count();
        if covered > 1 {
            let message = format!("c{call} has {covered} attached streams");
            self.checker.violated("I12", Some(pod), Some(call), message);
        }
    }

    /// I13, I14: the store names the pod of every covered stream.
    pub(super) fn check_streams(&mut self) {
        let mut found = Vec::new();
        for gateway in &mut self.gateways {
            gateway.expire(self.now);
            for (call, stream) in &gateway.streams {
                if stream.covered_from.is_none() {
                    continue;
                }
                let named = self.store.pod_of(*call);
                if named != Some(stream.pod) {
                    let invariant = if named.is_some() { "I14" } else { "I13" };
                    let message = format!("p{} serves c{call}; stored: {named:?}", stream.pod);
                    found.push((invariant, stream.pod, *call, message));
                }
            }
        }
        for (invariant, pod, call, message) in found {
            self.checker.violated(invariant, Some(pod), Some(call), message);
        }
    }

    /// I13: a client got an exclusive pod that certainly served the stream of another call.
    pub(super) fn check_allocated(&mut self, call: u32, pod: usize, sent: Millis) {
        let now = self.now;
        let mut served = None;
        for gateway in &mut self.gateways {
            gateway.expire(now);
            let is_other = |(other, stream): &(&u32, &Stream)| {
                **other != call
                    && stream.pod == pod
                    && stream.phase == Phase::Serving
                    && stream.covered_from.is_some_and(|from| from <= sent)
            };
            served = served.or(gateway.streams.iter().find(is_other).map(|(other, _)| *other));
        }
        if let Some(other) = served {
            let message = format!("p{pod} serves the stream of c{other} and was given to c{call}");
            self.checker.violated("I13", Some(pod), Some(call), message);
        }
    }
}
