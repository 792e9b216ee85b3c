//! The history of streams, as callers and agents saw them.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::history::{Action, History};

/// A stream that an agent served.
#[derive(Debug, Clone)]
pub(crate) struct AgentStream {
    pub pod: String,
    pub call: String,
    /// `X-Pod-Attempt`.
    pub ordinal: u32,
    pub from: Duration,
    /// The end, before the gateway could know of it if the agent or the pod ended the stream.
    pub to: Option<Duration>,
    /// Sequence number of the last frame.
    pub last_frame: Option<u64>,
    /// Messages before the first frame.
    pub opening: Vec<String>,
    /// Deviations with their invariant.
    pub errors: Vec<(&'static str, String)>,
}

/// The end of a stream as its caller saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallEnd {
    /// The caller or the agent ended the call.
    Ended,
    /// The gateway refused the stream; without a status, it could not be reached.
    Refused(Option<u16>),
    /// The stream was closed in mid-call, with a close code if there was one.
    Cut(Option<u16>),
    /// The stream was open, but no frame came back from an agent.
    NoEcho,
}

/// A stream that a caller opened.
#[derive(Debug, Clone)]
pub(crate) struct CallerStream {
    pub call: String,
    pub gateway: usize,
    pub opened: Duration,
    pub ended: Duration,
    pub end: CallEnd,
    /// The caller came back after its gateway was lost.
    pub is_return: bool,
    /// Deviations with their invariant.
    pub errors: Vec<(&'static str, String)>,
}

/// The pod of a call as a router reported it.
#[derive(Debug, Clone)]
pub(crate) struct PodReport {
    pub call: String,
    pub pod: Option<String>,
    pub began: Duration,
    pub ended: Duration,
    /// The response to the allocation of a new call.
    pub is_allocation: bool,
}

/// A time in which a fault explains deviations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Disturbance {
    /// The gateway with the fault; all of them without one.
    pub gateway: Option<usize>,
    pub from: Duration,
    pub to: Duration,
    /// New streams may be refused.
    pub refuses: bool,
    /// Open streams may be cut.
    pub cuts: bool,
    /// Pods may serve two calls, and routers may not know the pod of a stream.
    pub overlaps: bool,
}

pub(crate) struct Recorder {
    pub history: History,
    agents: Mutex<Vec<Arc<Mutex<AgentStream>>>>,
    pub callers: Mutex<Vec<CallerStream>>,
    pub reports: Mutex<Vec<PodReport>>,
    pub disturbances: Mutex<Vec<Disturbance>>,
    /// Pods with a fault: their failures are not in error.
    pub faulty_pods: Mutex<Vec<String>>,
}

impl Recorder {
    pub(crate) fn new() -> Self {
        Self {
            history: History::new(),
            agents: Mutex::default(),
            callers: Mutex::default(),
            reports: Mutex::default(),
            disturbances: Mutex::default(),
            faulty_pods: Mutex::default(),
        }
    }

    pub(crate) fn now(&self) -> Duration {
        self.history.now()
    }

    pub(crate) fn add_agent_stream(&self, stream: AgentStream) -> Arc<Mutex<AgentStream>> {
        let stream = Arc::new(Mutex::new(stream));
        self.agents.lock().unwrap().push(stream.clone());
        stream
    }

    pub(crate) fn agent_streams(&self) -> Vec<AgentStream> {
        self.agents.lock().unwrap().iter().map(|it| it.lock().unwrap().clone()).collect()
    }

    pub(crate) fn has_open_agent_streams(&self) -> bool {
        self.agents.lock().unwrap().iter().any(|it| it.lock().unwrap().to.is_none())
    }

    pub(crate) fn disturb(&self, disturbance: Disturbance) {
        self.disturbances.lock().unwrap().push(disturbance);
    }

    pub(crate) fn mark_faulty(&self, pod: &str) {
        let mut pods = self.faulty_pods.lock().unwrap();
        if !pods.iter().any(|other| other == pod) {
            pods.push(pod.to_owned());
        }
    }

    /// Adds the streams to the history, for reports of violations.
    pub(crate) fn write_history(&self) {
        for stream in self.agent_streams() {
            let what = format!(
                "agent: pod attempt {}, until {:?}, last frame {:?}",
                stream.ordinal,
                stream.to.map(|to| to.as_millis()),
                stream.last_frame
            );
            let action = Action::Stream { call: stream.call, pod: stream.pod, what };
            self.history.record(stream.from, action);
        }
        for stream in self.callers.lock().unwrap().clone() {
            let what = format!(
                "caller: gateway {}, until {}, {:?}",
                stream.gateway,
                stream.ended.as_millis(),
                stream.end
            );
            let action = Action::Stream { call: stream.call, pod: String::new(), what };
            self.history.record(stream.opened, action);
        }
        for report in self.reports.lock().unwrap().clone() {
            let kind = if report.is_allocation { "allocated" } else { "found" };
            let what = format!("router: {kind}, until {}", report.ended.as_millis());
            let pod = report.pod.unwrap_or_default();
            self.history.record(report.began, Action::Stream { call: report.call, pod, what });
        }
    }
}
