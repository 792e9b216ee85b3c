//! The history of a run: requests of clients and operators with their results, and faults.

use std::{
    fmt,
    sync::Mutex,
    time::{Duration, Instant},
};

use super::http::Failure;

/// The result of an allocate request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Allocated {
        pod: String,
    },
    /// A well-formed refusal: no pod is free, or the store is unavailable.
    Refused(u16),
    /// A response that the caller's format does not allow.
    Malformed(String),
    Failed(Failure),
}

/// The result of any other request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplyStatus {
    Success,
    NotFound,
    Refused,
    Failed(Failure),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    Allocate {
        call: String,
        router: usize,
        outcome: Outcome,
    },
    Release {
        call: String,
        status: ReplyStatus,
    },
    Renew {
        call: String,
        /// The pod in the request, if any.
        pod: Option<String>,
        status: ReplyStatus,
    },
    Lookup {
        call: String,
        found: Option<String>,
    },
    Drain {
        pod: String,
        status: ReplyStatus,
    },
    Undrain {
        pod: String,
    },
    PodRemoved {
        pod: String,
    },
    PodAdded {
        pod: String,
    },
    /// The store has the new pod.
    PodStored {
        pod: String,
    },
    /// A router reports the pod as not ready or terminating.
    PodOutOfService {
        pod: String,
    },
    /// The pod is about to become ready.
    PodInService {
        pod: String,
    },
    /// Another request that must be answered in time.
    Probe {
        name: String,
        router: Option<usize>,
        error: Option<String>,
    },
    /// A media stream, or a router's report of its pod.
    Stream {
        call: String,
        pod: String,
        what: String,
    },
    /// Redis has lost its data.
    StoreLost,
    Fault(String),
}

#[derive(Debug, Clone)]
pub(crate) struct Event {
    pub began: Duration,
    pub ended: Duration,
    pub action: Action,
}

impl Event {
    pub(crate) fn is_about(&self, subject: &str) -> bool {
        match &self.action {
            Action::Allocate { call, outcome, .. } => {
                call == subject || matches!(outcome, Outcome::Allocated { pod } if pod == subject)
            }
            Action::Release { call, .. } | Action::Renew { call, .. } => call == subject,
            Action::Lookup { call, .. } => call == subject,
            Action::Drain { pod, .. } | Action::Undrain { pod } => pod == subject,
            Action::PodRemoved { pod }
            | Action::PodAdded { pod }
            | Action::PodStored { pod }
            | Action::PodOutOfService { pod }
            | Action::PodInService { pod } => pod == subject,
            Action::Stream { call, pod, .. } => call == subject || pod == subject,
            Action::Probe { .. } => false,
            Action::StoreLost | Action::Fault(_) => true,
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (began, ended) = (self.began.as_millis(), self.ended.as_millis());
        write!(f, "{began:>6}–{ended:<6} ms  {:?}", self.action)
    }
}

pub(crate) struct History {
    started: Instant,
    events: Mutex<Vec<Event>>,
}

impl History {
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), events: Mutex::default() }
    }

    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Records an action that began at `began` and ends now.
    pub(crate) fn record(&self, began: Duration, action: Action) {
        let event = Event { began, ended: self.now(), action };
        self.events.lock().unwrap().push(event);
    }

    pub(crate) fn fault(&self, what: impl Into<String>) {
        self.record(self.now(), Action::Fault(what.into()));
    }

    /// All events, sorted by their begin.
    pub(crate) fn events(&self) -> Vec<Event> {
        let mut events = self.events.lock().unwrap().clone();
        events.sort_by_key(|event| event.began);
        events
    }
}

/// A violated invariant.
#[derive(Debug, Clone)]
pub(crate) struct Violation {
    pub invariant: &'static str,
    pub message: String,
    /// Calls and pods whose events show the violation.
    pub subjects: Vec<String>,
}
