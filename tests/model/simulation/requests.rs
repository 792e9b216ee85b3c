//! What the store is asked, and what it answers.

use fleet::Millis;

use super::cluster::Seen;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Op {
    Allocate {
        call: u32,
        is_merchant: bool,
        attempt: u64,
    },
    Release {
        call: u32,
        pod: Option<usize>,
        stems_from: Option<u64>,
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
        seen: Seen,
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
    /// Which pod of that name the store has.
    Uid {
        pod: usize,
    },
}

impl Op {
    pub(crate) fn call(&self) -> Option<u32> {
        match self {
            Self::Allocate { call, .. } | Self::Release { call, .. } => Some(*call),
            Self::Renew { call, .. } | Self::Find { call } => Some(*call),
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

    /// What it does is right whenever it happens; all else only while its caller waits.
    pub(crate) fn is_timeless(&self) -> bool {
        matches!(self, Self::Release { .. })
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Answer {
    Given {
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
    /// The write of a leader was taken.
    Taken,
    NotThere,
    Fenced,
    Uid {
        uid: Option<u32>,
    },
    Late,
}
