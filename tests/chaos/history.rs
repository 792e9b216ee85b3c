//! What clients, pods and operators were told, and when.

use std::{
    fmt,
    sync::Mutex,
    time::{Duration, Instant},
};

use super::http::Failure;

/// What came of a request for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Given {
        pod: String,
    },
    /// In good order: there is none, or the store is out.
    Refused(u16),
    /// An answer that is not what the caller understands.
    Nonsense(String),
    Failed(Failure),
}

/// What came of another request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Said {
    Yes,
    /// There is no such thing.
    Unknown,
    /// Not now.
    No,
    Failed(Failure),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum What {
    Allocate {
        call: String,
        router: usize,
        outcome: Outcome,
    },
    Release {
        call: String,
        said: Said,
    },
    Renew {
        call: String,
        /// Which pod said so, if it said its name.
        pod: Option<String>,
        said: Said,
    },
    LookUp {
        call: String,
        found: Option<String>,
    },
    Drain {
        pod: String,
        said: Said,
    },
    Undrain {
        pod: String,
    },
    PodGone {
        pod: String,
    },
    PodCame {
        pod: String,
    },
    /// The store knows the one that came.
    PodKnown {
        pod: String,
    },
    /// The routers have seen that a pod is not ready, or terminating.
    PodRests {
        pod: String,
    },
    /// It will be ready again.
    PodServes {
        pod: String,
    },
    /// Something that callers send and must hear an answer to in time.
    Other {
        what: String,
        /// Who was asked, if it was one.
        router: Option<usize>,
        wrong: Option<String>,
    },
    /// What Redis knew is gone.
    Wiped,
    Fault(String),
}

#[derive(Debug, Clone)]
pub(crate) struct Event {
    pub began: Duration,
    pub ended: Duration,
    pub what: What,
}

impl Event {
    pub(crate) fn is_about(&self, subject: &str) -> bool {
        match &self.what {
            What::Allocate { call, outcome, .. } => {
                call == subject || matches!(outcome, Outcome::Given { pod } if pod == subject)
            }
            What::Release { call, .. } | What::Renew { call, .. } => call == subject,
            What::LookUp { call, .. } => call == subject,
            What::Drain { pod, .. } | What::Undrain { pod } => pod == subject,
            What::PodGone { pod }
            | What::PodCame { pod }
            | What::PodKnown { pod }
            | What::PodRests { pod }
            | What::PodServes { pod } => pod == subject,
            What::Other { .. } => false,
            What::Wiped | What::Fault(_) => true,
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (began, ended) = (self.began.as_millis(), self.ended.as_millis());
        write!(f, "{began:>6}–{ended:<6} ms  {:?}", self.what)
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

    /// Notes what came of something that began then.
    pub(crate) fn note(&self, began: Duration, what: What) {
        let event = Event { began, ended: self.now(), what };
        self.events.lock().unwrap().push(event);
    }

    pub(crate) fn fault(&self, what: impl Into<String>) {
        self.note(self.now(), What::Fault(what.into()));
    }

    /// All of it, by when it began.
    pub(crate) fn events(&self) -> Vec<Event> {
        let mut events = self.events.lock().unwrap().clone();
        events.sort_by_key(|event| event.began);
        events
    }
}

/// What should not have happened, and to whom.
#[derive(Debug, Clone)]
pub(crate) struct Violation {
    pub invariant: &'static str,
    pub what: String,
    /// Calls and pods whose story shows it.
    pub subjects: Vec<String>,
}
