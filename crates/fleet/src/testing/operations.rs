//! Random operations on a fleet, for property tests and differential tests.

use super::dice::Dice;
pub use super::outbound_operations::{OutboundOperation, RESERVATION_TTL, all_reservation_ids};
use crate::{
    Allocate, Attach, CapacityUpdate, Claim, Claimant, Confirm, ConnectedStream, Detach, EndCause,
    Failover, Fleet, Hold, Millis, PodFacts, PodFailure, PodOrigin, PodWriter, PrescaleOrder,
    PreviousPod, Release, RemovalMode, Renew, SignedRequest,
    names::{CallSid, GatewayId, MerchantId, OrderId, PodName, Pool, StreamId},
    tiers::{DocumentSource, Tiers},
};

pub const LEASE_TTL: Millis = 10_000;
pub const CONNECT_TIMEOUT: Millis = 3_000;
pub const GATEWAY_LEASE: Millis = 4_000;
/// Lasts for a large part of a test run.
pub const REREGISTRATION_WINDOW: Millis = 300_000;

const TABLES: [&str; 7] = [
    r#"{"tiers": {"gold": {"target": 2, "min": 1, "max": 4}, "basic": {"type": "shared", "target": 2,
        "max_concurrent": 3}, "acme": {"target": 1}}, "default_chain": ["gold", "basic"]}"#,
    r#"{"tiers": {"gold": {"type": "shared", "target": 2, "max_concurrent": 2, "strategy": "pack"},
        "basic": {"target": 2}}, "default_chain": ["basic", "gold"]}"#,
    r#"{"basic": {"type": "shared", "target": 9, "max_concurrent": 1}}"#,
    r#"{"gold": 1, "silver": 1, "basic": 1}"#,
    // As the one before, with bounds.
    r#"{"gold": {"target": 1, "inbound_reserve": 1}, "silver": {"target": 1}, "basic": {"target": 1, "max": 2}}"#,
    r#"{"tiers": {"gold": {"target": 1}, "basic": {"target": 3},
        "loose": {"type": "shared", "target": 1}}, "default_chain": ["gold"]}"#,
    r#"{"tiers": {"gold": {"target": 2, "workload": "statefulset/gold"}, "basic": {"target": 1},
        "acme": {"target": 3, "workload": "statefulset/acme"},
        "iron": {"type": "shared", "target": 9, "workload": "deployment/iron"}},
        "default_chain": ["gold", "basic", "iron"]}"#,
];

const MERCHANTS: [Option<&str>; 24] = [
    None,
    Some(r#"{"pool": "acme"}"#),
    Some(r#"{"pool": "acme", "dedicated_only": true}"#),
    Some(r#"{"fallback": ["nowhere", "merchant:m1", "basic", "loose"]}"#),
    Some(r#"{"fallback": ["acme", "gold"], "tier": 7, "pool": ""}"#),
    Some(r#"{"pool": "acme", "fallback": [], "dedicated_only": null}"#),
    Some("not a document"),
    Some(r#"{"fallback": "gold"}"#),
    Some(r#"{"fallback": {}}"#),
    Some(r#"{"fallback": ["a b"]}"#),
    Some(r#"{"pool": 7}"#),
    Some(r#"[]"#),
    Some(r#"{"pool": "acme", "max_calls": 2}"#),
    Some(r#"{"max_calls": 1, "max_rate": 5}"#),
    Some(r#"{"max_rate": 1}"#),
    Some(r#"{"max_rate": 2.0, "max_calls": 3}"#),
    Some(r#"{"max_rate": 0}"#),
    Some(r#"{"max_calls": 1.5}"#),
    Some(r#"{"pool": "acme", "priority": NaN}"#),
    Some(r#"{"pool": "acme", "priority": 0x10}"#),
    Some(r#"{"priority": 5}"#),
    Some(r#"{"priority": -3.0, "max_calls": 4}"#),
    Some(r#"{"priority": 101}"#),
    Some(r#"{"priority": "1"}"#),
];

/// Only pinned pods join the merchant pool of a tier with a workload, which needs several to choose
/// from.
const PINS: [Option<&str>; 10] = [
    None,
    None,
    Some("basic"),
    Some("gold"),
    Some("acme"),
    Some("acme"),
    Some("acme"),
    Some("acme"),
    Some("merchant:m1"),
    Some("nowhere"),
];

/// An operation of a client, an agent, a leader or an operator, or the passage of time.
#[derive(Debug, Clone)]
pub enum Operation {
    Allocate(Allocate),
    Release(Release),
    Renew(Renew),
    Confirm(Confirm),
    ExtendPending {
        time: Millis,
    },
    Attach(Attach),
    Failover(Failover),
    Detach(Detach),
    Heartbeat {
        gateway: GatewayId,
        relayed: Vec<CallSid>,
    },
    Drain {
        pod: PodName,
        ttl: Millis,
    },
    Undrain {
        pod: PodName,
    },
    /// `None` returns the pod.
    Surplus {
        pod: PodName,
        uid: String,
        ttl: Option<Millis>,
        writer: Writer,
    },
    Observe {
        pod: PodName,
        facts: PodFacts,
        writer: Writer,
    },
    Remove {
        pod: PodName,
        uid: String,
        mode: RemovalMode,
        writer: Writer,
    },
    Move {
        pod: PodName,
        uid: String,
        to: Pool,
        writer: Writer,
    },
    Claim(Claim),
    Tiers {
        tiers: Tiers,
        expected: Option<Tiers>,
    },
    Merchant {
        id: MerchantId,
        document: Option<&'static str>,
        expected: Option<&'static str>,
    },
    Capacity {
        update: CapacityUpdate,
        writer: Writer,
    },
    Prescale(PrescaleOrder),
    DeletePrescale {
        id: OrderId,
    },
    Outbound(OutboundOperation),
    Sweep {
        limit: usize,
    },
    Audit,
    Advance {
        time: Millis,
    },
}

/// The owned form of [`PodWriter`].
#[derive(Debug, Clone)]
pub struct Writer {
    pub origin: PodOrigin,
    pub epoch: u64,
}

impl Writer {
    pub fn get(&self) -> PodWriter<'_> {
        PodWriter { origin: &self.origin, epoch: self.epoch }
    }
}

impl Dice {
    /// The next operation on a fleet.
    pub fn operation(&mut self, fleet: &mut Fleet, now: Millis) -> Operation {
        match self.roll(82) {
            0..=13 => {
                let request = self.allocate(fleet);
                Operation::Allocate(self.with_reservation(request, fleet))
            }
            14..=20 => Operation::Release(self.release()),
            21..=23 => {
                let calls = (0..=self.roll(3)).map(|_| self.call()).collect();
                let pod = (self.roll(2) == 0).then(|| self.pod());
                Operation::Renew(Renew { calls, pod, lease_ttl: LEASE_TTL })
            }
            24..=25 => Operation::Drain { pod: self.pod(), ttl: 1 + self.roll(15_000) as u64 },
            26..=27 => Operation::Undrain { pod: self.pod() },
            28..=34 => {
                let (pod, facts) = (self.pod(), self.facts());
                Operation::Observe { pod, facts, writer: self.writer(fleet, now) }
            }
            35 => {
                let (pod, uid) = (self.pod(), format!("u{}", self.roll(2)));
                let mode = [RemovalMode::Immediate, RemovalMode::WhenIdle][self.roll(2)];
                Operation::Remove { pod, uid, mode, writer: self.writer(fleet, now) }
            }
            36 => {
                let (pod, uid) = (self.pod(), format!("u{}", self.roll(2)));
                let to = ["gold", "basic", "merchant:acme", "loose"][self.roll(4)].parse().unwrap();
                Operation::Move { pod, uid, to, writer: self.writer(fleet, now) }
            }
            37 => {
                let (tiers, known) = (self.table(), self.table());
                Operation::Tiers { tiers, expected: (self.roll(2) == 0).then_some(known) }
            }
            38 => {
                let (id, document) = (self.merchant(), MERCHANTS[self.roll(MERCHANTS.len())]);
                let known = MERCHANTS[self.roll(MERCHANTS.len())].unwrap_or_default();
                let expected = (self.roll(2) == 0).then_some(known);
                Operation::Merchant { id, document, expected }
            }
            39..=40 => Operation::Sweep { limit: 1 + self.roll(3) },
            41 => Operation::Audit,
            42 => Operation::Claim(self.claim(fleet, now)),
            43..=45 => {
                let (call, pod_attempt) = (self.call(), self.roll(3) as u32);
                let pod_attempt = self.sometimes(pod_attempt);
                Operation::Confirm(Confirm {
                    call,
                    pod: self.pod(),
                    pod_attempt,
                    lease_ttl: LEASE_TTL,
                })
            }
            46 => Operation::ExtendPending { time: CONNECT_TIMEOUT },
            47..=50 => Operation::Attach(self.attach(fleet)),
            51..=53 => Operation::Detach(self.detach(fleet)),
            54..=55 => {
                let relayed = (0..self.roll(4)).map(|_| self.call()).collect();
                Operation::Heartbeat { gateway: self.gateway(), relayed }
            }
            56..=59 => Operation::Failover(self.failover(fleet)),
            60 => {
                let update = self.capacity_update();
                Operation::Capacity { update, writer: self.writer(fleet, now) }
            }
            61 if self.roll(3) > 0 => Operation::Prescale(self.prescale(now)),
            61 => Operation::DeletePrescale { id: self.order_id() },
            62..=64 => {
                let (pod, uid) = (self.pod(), format!("u{}", self.roll(8) / 7));
                let ttl = (self.roll(3) > 0).then(|| 1 + self.roll(15_000) as u64);
                Operation::Surplus { pod, uid, ttl, writer: self.writer(fleet, now) }
            }
            65..=77 => Operation::Outbound(self.outbound(fleet)),
            _ => Operation::Advance { time: 1 + self.roll(2_000) as u64 },
        }
    }

    fn capacity_update(&mut self) -> CapacityUpdate {
        let text = |number: usize| format!("{{\"number\": {number}}}");
        CapacityUpdate {
            holder: format!("r{}", self.roll(3)),
            lease: self.roll(4_000) as Millis,
            decisions: text(self.roll(100)),
            states: (0..self.roll(3)).map(|_| (self.pool(), text(self.roll(100)))).collect(),
            events: (0..self.roll(3)).map(|_| (self.pool(), "3 2 forecast".into())).collect(),
        }
    }

    fn prescale(&mut self, now: Millis) -> PrescaleOrder {
        let (id, pool, pods) = (self.order_id(), self.pool(), self.roll(50) as u32);
        PrescaleOrder { id, pool, pods, until: now + self.roll(20_000) as Millis }
    }

    fn order_id(&mut self) -> OrderId {
        format!("{:08x}", self.roll(6)).parse().unwrap()
    }

    fn pool(&mut self) -> Pool {
        ["gold", "basic", "merchant:acme"][self.roll(3)].parse().unwrap()
    }

    fn table(&mut self) -> Tiers {
        table(self.roll(TABLES.len()))
    }

    fn facts(&mut self) -> PodFacts {
        PodFacts {
            uid: format!("u{}", self.roll(8) / 7),
            address: "a:1".into(),
            ready: self.roll(5) > 0,
            terminating: self.roll(10) == 0,
            at_risk: self.roll(4) == 0,
            restarts: (self.roll(10) / 9) as u32,
            pin: PINS[self.roll(PINS.len())].map(|pin| pin.parse().unwrap()),
        }
    }

    fn release(&mut self) -> Release {
        let pod = self.pod();
        let (call, pod_attempt) = (self.call(), self.roll(3) as u32);
        Release {
            call,
            pod: self.sometimes(pod),
            pod_attempt: (self.roll(4) == 0).then_some(pod_attempt),
            cause: [EndCause::Agent, EndCause::Provider, EndCause::Operator, EndCause::Stream]
                [self.roll(4)],
        }
    }

    /// An attach, mostly of the pod attempt that is live or has ended.
    fn attach(&mut self, fleet: &Fleet) -> Attach {
        let call = self.call();
        let live = fleet.call(&call).map(|live| (live.pod, live.pod_attempt));
        let known = live.or(fleet.last_pod_attempt(&call)).filter(|_| self.roll(6) > 0);
        let (pod, pod_attempt) = known.unwrap_or((self.pod(), self.roll(3) as u32));
        Attach {
            call,
            pod_attempt,
            gateway: self.gateway(),
            gateway_lease: GATEWAY_LEASE,
            stream: self.stream(),
            lease_ttl: LEASE_TTL,
            connected: (self.roll(3) == 0).then(|| self.connected(pod)),
        }
    }

    fn connected(&mut self, pod: PodName) -> ConnectedStream {
        let (age, failovers) = (self.roll(20_000) as Millis, (self.roll(6) / 4) as u32);
        let merchant = self.merchant();
        ConnectedStream { pod, age, failovers, merchant: self.sometimes(merchant) }
    }

    fn pod_failure(&mut self) -> PodFailure {
        const REASONS: [&str; 3] = ["", "the agent answered 404", "no connection to a:1: é"];
        PodFailure::new(&REASONS[self.roll(REASONS.len())])
    }

    /// A failover, mostly of the stream that is attached.
    fn failover(&mut self, fleet: &Fleet) -> Failover {
        const CAUSES: [EndCause; 3] =
            [EndCause::Unreachable, EndCause::PodLost, EndCause::Displaced];
        let (call, other) = (self.call(), self.stream());
        let attached = fleet.call(&call).and_then(|call| call.stream);
        let stream =
            attached.filter(|_| self.roll(6) > 0).map_or(other, |attached| attached.stream);
        Failover {
            call,
            stream,
            next: self.stream(),
            gateway: self.gateway(),
            gateway_lease: GATEWAY_LEASE,
            cause: CAUSES[self.roll(3)],
            failure: self.pod_failure(),
            max_retries: self.roll(4) as u32,
            lease_ttl: LEASE_TTL,
        }
    }

    /// A detach, mostly of the stream that is attached.
    fn detach(&mut self, fleet: &Fleet) -> Detach {
        const CAUSES: [EndCause; 5] = [
            EndCause::Agent,
            EndCause::Provider,
            EndCause::Gateway,
            EndCause::Unreachable,
            EndCause::PodLost,
        ];
        let (call, other) = (self.call(), self.stream());
        let attached = fleet.call(&call).and_then(|call| call.stream);
        let stream =
            attached.filter(|_| self.roll(6) > 0).map_or(other, |attached| attached.stream);
        let cause = CAUSES[self.roll(CAUSES.len())];
        Detach { call, stream, cause, failure: self.pod_failure() }
    }

    fn gateway(&mut self) -> GatewayId {
        format!("g{}", self.roll(3)).parse().unwrap()
    }

    fn stream(&mut self) -> StreamId {
        format!("{:016x}", self.roll(4)).parse().unwrap()
    }

    fn pod(&mut self) -> PodName {
        format!("p-{}", self.roll(7)).parse().unwrap()
    }

    pub(super) fn call(&mut self) -> CallSid {
        format!("c{}", self.roll(14)).parse().unwrap()
    }

    pub(super) fn merchant(&mut self) -> MerchantId {
        format!("m{}", self.roll(3)).parse().unwrap()
    }

    fn origin(&mut self) -> PodOrigin {
        let origins = ["simulated", "list", "kubernetes/ns", "kubernetes/ns/a", "kubernetes/ns/b"];
        origins[self.roll(5)].parse().unwrap()
    }

    /// A writer of pods: mostly the current one, else one with another origin or epoch.
    fn writer(&mut self, fleet: &mut Fleet, now: Millis) -> Writer {
        let is_owner = self.roll(12) > 0;
        loop {
            let origin = self.origin();
            let by = Claimant::Leader { epoch: None };
            let query = Claim { origin: origin.clone(), by, force: false };
            match fleet.claim_pods(&query, now) {
                Ok(epoch) if self.roll(12) == 0 => {
                    return Writer { origin, epoch: (epoch + 1).saturating_sub(2) };
                }
                Ok(epoch) => {
                    let epoch = epoch + (self.roll(12) / 11) as u64;
                    return Writer { origin, epoch };
                }
                Err(_) if is_owner => {}
                Err(_) => return Writer { origin, epoch: self.roll(3) as u64 },
            }
        }
    }

    fn claim(&mut self, fleet: &mut Fleet, now: Millis) -> Claim {
        let Writer { origin, epoch } = self.writer(fleet, now);
        let by = match self.roll(3) {
            0 => Claimant::Leader { epoch: self.sometimes(epoch) },
            _ => Claimant::List { digest: format!("d{}", self.roll(3)), is_new: self.roll(3) == 0 },
        };
        let origin = if self.roll(8) == 0 { self.origin() } else { origin };
        Claim { origin, by, force: self.roll(4) == 0 }
    }

    fn allocate(&mut self, fleet: &Fleet) -> Allocate {
        let (call, merchant, provisional) = (self.call(), self.merchant(), self.roll(3) == 0);
        let hold = Hold {
            time: 500 + self.roll(8_000) as u64,
            poll_timeout: 1_000 + self.roll(3_000) as u64,
            max_waiting: 3 + self.roll(3),
            max_waiting_per_merchant: 1 + self.roll(2),
        };
        // Mostly the pod attempt that is live or has ended, as a provider reports its end.
        let live = fleet.call(&call).map(|live| (live.pod, live.pod_attempt));
        let known = live.or(fleet.last_pod_attempt(&call)).filter(|_| self.roll(4) > 0);
        let (pod, pod_attempt) = known.unwrap_or((self.pod(), self.roll(4) as u32));
        let previous = PreviousPod {
            pod,
            pod_attempt,
            is_settled: self.roll(2) == 0,
            max_retries: self.roll(4) as u32,
        };
        let (may_return, is_reconnect) = (self.roll(2) == 0, self.roll(4) == 0);
        // Few fingerprints, so that calls share them.
        let signed = SignedRequest {
            fingerprint: format!("signed-{:09}", self.roll(12)).parse().unwrap(),
            window: 1_000 + self.roll(20_000) as u64,
        };
        Allocate {
            merchant: self.sometimes(merchant),
            lease_ttl: if provisional { CONNECT_TIMEOUT } else { LEASE_TTL },
            provisional,
            expects_stream: provisional && self.roll(2) == 0,
            may_return: may_return || is_reconnect,
            hold: (self.roll(2) == 0).then_some(hold),
            previous: is_reconnect.then_some(previous),
            signed: (self.roll(4) == 0).then_some(signed),
            reservation: None,
            numbers: self.numbers(),
            call,
        }
    }

    pub(super) fn sometimes<T>(&mut self, value: T) -> Option<T> {
        (self.roll(3) == 0).then_some(value)
    }
}

/// One of seven tier tables.
pub fn table(index: usize) -> Tiers {
    Tiers::parse(TABLES[index], DocumentSource::Settings).unwrap().0
}
