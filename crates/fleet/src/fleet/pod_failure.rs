//! The reason why a call could not use its pod, for the pod's author: an event in the story of the
//! call and of the pod.

use std::fmt;

use super::{Event, EventKind, Fleet};
use crate::names::CallSid;

/// Size limit (bytes) of a reason.
const MAX_REASON: usize = 200;

/// A sentence of bounded size without control characters; empty if no pod has failed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodFailure(String);

impl PodFailure {
    pub fn new(reason: &impl fmt::Display) -> Self {
        let text = reason.to_string();
        let mut text: String =
            text.chars().map(|it| if it.is_control() { ' ' } else { it }).collect();
        text.truncate(text.floor_char_boundary(MAX_REASON));
        Self(text)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Fleet {
    /// Records the failure of a call's pod.
    pub(super) fn record_pod_failure(&mut self, call: &CallSid, failure: &PodFailure) {
        let detail = failure.as_str();
        self.record_event(|fleet| {
            let facts = fleet.calls.get(call).filter(|_| !detail.is_empty())?;
            let event = Event::of_live_call(EventKind::PodFailed, call, facts);
            Some(event.with_detail(detail))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_one_line_of_bounded_size() {
        assert_eq!(PodFailure::new(&"no\r\nanswer").as_str(), "no  answer");
        let long = PodFailure::new(&"é".repeat(MAX_REASON));
        assert_eq!(long.as_str(), "é".repeat(MAX_REASON / 2));
        assert_eq!(PodFailure::default().as_str(), "");
    }
}
