//! Requests to the store, and its replies.

use fleet::Millis;

use super::cluster::PodState;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Op {
    Allocate {
        call: u32,
        is_merchant: bool,
        request_id: u64,
    },
    Release {
        call: u32,
        pod: Option<usize>,
        /// Of a compensating release: the request that the call must stem from.
        request_id: Option<u64>,
    },
    Renew {
        call: u32,
        pod: usize,
    },
    Find {
        call: u32,
    },
    Drain {
        pod: usize,
        ttl: Millis,
    },
    Undrain {
        pod: usize,
    },
    Epoch {
        epoch: u64,
    },
    Observe {
        pod: usize,
        state: PodState,
        epoch: Option<u64>,
    },
    Remove {
        pod: usize,
        uid: u32,
        epoch: Option<u64>,
    },
    Move {
        pod: usize,
        uid: u32,
        to: &'static str,
        epoch: Option<u64>,
    },
    /// A gateway is its router with the router's incarnation.
    Attach {
        call: u32,
        gateway: (usize, u32),
        stream: u64,
        /// The pod of a stream that is connected, and the age of the stream.
        connected: Option<(usize, Millis)>,
    },
    Detach {
        call: u32,
        stream: u64,
    },
    Heartbeat {
        gateway: (usize, u32),
    },
    Failover {
        call: u32,
        gateway: (usize, u32),
        stream: u64,
        next: u64,
    },
    /// Reads the UID of a pod in the store.
    Uid {
        pod: usize,
    },
}

impl Op {
    pub(crate) fn call(&self) -> Option<u32> {
        match self {
            Self::Allocate { call, .. } | Self::Release { call, .. } => Some(*call),
            Self::Renew { call, .. } | Self::Find { call } => Some(*call),
            Self::Attach { call, .. } | Self::Detach { call, .. } => Some(*call),
            Self::Failover { call, .. } => Some(*call),
            _ => None,
        }
    }

    pub(crate) fn pod(&self) -> Option<usize> {
        match self {
            Self::Release { pod, .. } => *pod,
            Self::Renew { pod, .. } | Self::Drain { pod, .. } | Self::Undrain { pod } => Some(*pod),
            Self::Observe { pod, .. } | Self::Remove { pod, .. } => Some(*pod),
            Self::Move { pod, .. } | Self::Uid { pod } => Some(*pod),
            _ => None,
        }
    }

    /// Whether the store may run the request only while its caller waits.
    pub(crate) fn has_deadline(&self) -> bool {
        !matches!(self, Self::Release { .. } | Self::Detach { .. })
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Reply {
    Allocated {
        pod: usize,
        is_shared: bool,
        is_new: bool,
    },
    Refused,
    Released {
        pod: usize,
    },
    NotFound,
    Renewed,
    Found {
        pod: Option<usize>,
    },
    Drained {
        until: Millis,
    },
    Undrained,
    UnknownPod,
    /// A leader's write was accepted.
    Accepted,
    NoSuchPod,
    Fenced,
    Uid {
        uid: Option<u32>,
    },
    Attached {
        pod: usize,
    },
    /// The number of the gateway's calls, and its orders: is the call displaced, or has it ended.
    Extended {
        calls: usize,
        ending: Vec<(u32, bool)>,
    },
    /// The request arrived after its deadline and did not run.
    Late,
}
