//! Operations of gateways on the store.

use fleet::{
    Attach, AttachRefused, CallLookup, ConnectedStream, Detach, EndCause, Failover, Millis,
    PodFailure,
    names::{GatewayId, StreamId},
};

use super::{
    InjectedDefect, LEASE,
    gateways::GATEWAY_LEASE,
    requests::{Op, Reply},
    store::Store,
};

fn gateway_id((router, incarnation): (usize, u32)) -> GatewayId {
    format!("g{router}-{incarnation}").parse().expect("valid name")
}

fn stream_id(stream: u64) -> StreamId {
    format!("{stream:016x}").parse().expect("valid id")
}

impl Store {
    /// The pod of a call.
    pub(super) fn pod_of(&mut self, call: u32) -> Option<usize> {
        let sid = self.sid(call);
        match self.facts.fleet.find(&sid) {
            Some(CallLookup::Live(live)) => Some(self.number_of(&live.pod)),
            _ => None,
        }
    }

    /// Whether a call has to leave the pod.
    pub(super) fn has_displaced_call(&self, pod: &str) -> bool {
        let fleet = &self.facts.fleet;
        let is_displaced = |call: &fleet::names::CallSid| {
            let stream = fleet.call(call).and_then(|call| call.stream);
            stream.is_some_and(|stream| stream.ending == Some(EndCause::Displaced))
        };
        let name = self.pods.iter().find(|name| name.as_str() == pod);
        let on = name.and_then(|name| fleet.pod(name));
        on.is_some_and(|on| on.calls.iter().any(|it| is_displaced(&it.call)))
    }

    pub(super) fn stream_step(&mut self, op: &Op, now: Millis) -> Reply {
        match op {
            Op::Attach { call, gateway, stream, connected } => {
                let connected = connected.map(|(pod, age)| ConnectedStream {
                    pod: self.pods[pod].clone(),
                    age,
                    failovers: 0,
                    merchant: None,
                });
                let request = Attach {
                    call: self.sid(*call),
                    pod_attempt: 0,
                    gateway: gateway_id(*gateway),
                    gateway_lease: GATEWAY_LEASE,
                    stream: stream_id(*stream),
                    lease_ttl: LEASE,
                    connected,
                };
                self.attach(*call, &request, now)
            }
            Op::Detach { call, stream } => {
                let (call, stream) = (self.sid(*call), stream_id(*stream));
                let request = Detach {
                    call,
                    stream,
                    cause: EndCause::Provider,
                    failure: PodFailure::default(),
                };
                match self.facts.fleet.detach(&request, now) {
                    Ok(released) => Reply::Released { pod: self.number_of(&released.pod) },
                    Err(_) => Reply::NotFound,
                }
            }
            Op::Heartbeat { gateway } => {
                let has_lease = self.defect != Some(InjectedDefect::HeartbeatWithoutLease);
                let lease = if has_lease { GATEWAY_LEASE } else { 1 };
                let beat = self.facts.fleet.heartbeat(&gateway_id(*gateway), lease, &[], now);
                let number = |call: &str| call[1..].parse().expect("calls are named c0, c1, …");
                let order = |(call, cause): (fleet::names::CallSid, EndCause)| {
                    (number(call.as_str()), cause == EndCause::Displaced)
                };
                Reply::Extended {
                    calls: beat.calls,
                    ending: beat.ending.into_iter().map(order).collect(),
                }
            }
            Op::Failover { call, gateway, stream, next } => {
                let request = Failover {
                    call: self.sid(*call),
                    stream: stream_id(*stream),
                    next: stream_id(*next),
                    gateway: gateway_id(*gateway),
                    gateway_lease: GATEWAY_LEASE,
                    failure: PodFailure::default(),
                    cause: EndCause::PodLost,
                    max_retries: 9,
                    lease_ttl: LEASE,
                };
                match self.facts.fleet.failover(&request, now) {
                    Ok(attached) => {
                        let pod = self.number_of(&attached.pod);
                        let is_other = self.defect == Some(InjectedDefect::FailoverToOtherPod);
                        Reply::Attached { pod: (pod + usize::from(is_other)) % self.pods.len() }
                    }
                    Err(_) => Reply::NotFound,
                }
            }
            _ => unreachable!("an operation of gateways"),
        }
    }

    fn attach(&mut self, call: u32, request: &Attach, now: Millis) -> Reply {
        let attached = self.facts.fleet.attach(request, now);
        match attached {
            Ok(attached) => {
                // The stream is connected: a compensating release must not end the call any more.
                self.facts.request_ids.remove(&call);
                Reply::Attached { pod: self.number_of(&attached.pod) }
            }
            Err(AttachRefused::AlreadyAttached)
                if self.defect == Some(InjectedDefect::AttachTwice) =>
            {
                self.pod_of(call).map_or(Reply::NotFound, |pod| Reply::Attached { pod })
            }
            Err(AttachRefused::UnknownPod) => Reply::UnknownPod,
            Err(AttachRefused::NoPods) => Reply::Refused,
            Err(_) => Reply::NotFound,
        }
    }
}
