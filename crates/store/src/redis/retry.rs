//! The retry protocol of one request: a state machine without I/O and without a clock. The Redis
//! client drives it with real connections and timers, the simulator with simulated ones.
//!
//! A request has a timeout and at most two tries within it. A request with an enforced deadline
//! carries the end of its current try as `not_after`; Redis does not run it later. A try without a
//! reply is waited out until that moment, so that it cannot take effect after the second try or
//! after the caller was refused.

use std::time::Duration;

/// Time for one request: both tries, and establishing a connection.
pub const REQUEST_TIMEOUT: Duration = Duration::from_millis(750);
/// End of the first try.
const FIRST_TRY_TIMEOUT: Duration = Duration::from_millis(400);

/// Whether Redis may run a request after its caller has given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deadline {
    /// Only until the end of the current try.
    Enforced,
    /// At any time: the effect is correct whenever it happens.
    None,
}

/// The end of a try without a usable reply, or of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// No connection was available in time, so nothing was sent.
    NotSent,
    /// Redis received the request after its deadline and did not run it.
    Expired,
    /// This server refused the request without running it; another one may accept it.
    Redirected,
    /// Redis refused the request without running it, and would refuse it again.
    Refused,
    /// The request failed while it ran, or its reply is malformed.
    FailedMidway,
    /// The connection broke, or the reply did not arrive before the end of the try.
    NoReply {
        /// Redis replies to other requests: a second try would only add load.
        is_overloaded: bool,
    },
    /// The wait of [`Action::Wait`] is over.
    Waited,
}

/// The next thing to do. All times count from the start of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Send the request and wait for its reply until `until`.
    Send { until: Duration, not_after: Option<Duration> },
    /// Wait: the request may still reach Redis before `until`.
    Wait { until: Duration },
    /// Report a failure.
    GiveUp { may_have_run: bool },
}

/// One request and its tries.
#[derive(Debug, Clone, Copy)]
pub struct Retry {
    deadline: Deadline,
    is_last_try: bool,
    may_have_run: bool,
    /// End of the current try.
    until: Duration,
}

impl Retry {
    /// Starts a request with its first try.
    pub fn start(deadline: Deadline) -> (Self, Action) {
        let retry =
            Self { deadline, is_last_try: false, may_have_run: false, until: FIRST_TRY_TIMEOUT };
        (retry, retry.send())
    }

    pub fn on(&mut self, event: Event) -> Action {
        match event {
            Event::NotSent | Event::Expired | Event::Redirected | Event::Waited => self.next_try(),
            Event::Refused => self.give_up(),
            Event::FailedMidway => {
                self.may_have_run = true;
                self.give_up()
            }
            Event::NoReply { is_overloaded } => {
                self.may_have_run = true;
                self.is_last_try |= is_overloaded;
                match self.deadline {
                    Deadline::Enforced => Action::Wait { until: self.until },
                    Deadline::None => self.next_try(),
                }
            }
        }
    }

    fn next_try(&mut self) -> Action {
        if self.is_last_try {
            return self.give_up();
        }
        (self.is_last_try, self.until) = (true, REQUEST_TIMEOUT);
        self.send()
    }

    fn send(&self) -> Action {
        let not_after = match self.deadline {
            Deadline::Enforced => Some(self.until),
            Deadline::None => None,
        };
        Action::Send { until: self.until, not_after }
    }

    fn give_up(&self) -> Action {
        Action::GiveUp { may_have_run: self.may_have_run }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_REPLY: Event = Event::NoReply { is_overloaded: false };
    const SECOND_ENFORCED: Action =
        Action::Send { until: REQUEST_TIMEOUT, not_after: Some(REQUEST_TIMEOUT) };
    const SECOND_WITHOUT_DEADLINE: Action =
        Action::Send { until: REQUEST_TIMEOUT, not_after: None };

    /// The actions of a request that sees these events.
    fn actions<const N: usize>(deadline: Deadline, events: [Event; N]) -> [Action; N] {
        let (mut retry, first) = Retry::start(deadline);
        let not_after = (deadline == Deadline::Enforced).then_some(FIRST_TRY_TIMEOUT);
        assert_eq!(first, Action::Send { until: FIRST_TRY_TIMEOUT, not_after });
        events.map(|event| retry.on(event))
    }

    #[test]
    fn a_request_that_was_never_sent_gets_two_tries_and_did_not_run() {
        for event in [Event::NotSent, Event::Expired, Event::Redirected] {
            assert_eq!(
                actions(Deadline::Enforced, [event, event]),
                [SECOND_ENFORCED, Action::GiveUp { may_have_run: false }],
                "{event:?}"
            );
        }
    }

    #[test]
    fn a_try_without_a_reply_is_waited_out_if_its_deadline_is_enforced() {
        assert_eq!(
            actions(Deadline::Enforced, [NO_REPLY, Event::Waited, NO_REPLY, Event::Waited]),
            [
                Action::Wait { until: FIRST_TRY_TIMEOUT },
                SECOND_ENFORCED,
                Action::Wait { until: REQUEST_TIMEOUT },
                Action::GiveUp { may_have_run: true },
            ]
        );
    }

    #[test]
    fn a_request_without_a_deadline_is_retried_at_once() {
        assert_eq!(
            actions(Deadline::None, [NO_REPLY, NO_REPLY]),
            [SECOND_WITHOUT_DEADLINE, Action::GiveUp { may_have_run: true }]
        );
    }

    #[test]
    fn an_overloaded_redis_gets_no_second_try() {
        let overloaded = Event::NoReply { is_overloaded: true };
        let unknown = Action::GiveUp { may_have_run: true };
        assert_eq!(actions(Deadline::None, [overloaded]), [unknown]);
        assert_eq!(
            actions(Deadline::Enforced, [overloaded, Event::Waited]),
            [Action::Wait { until: FIRST_TRY_TIMEOUT }, unknown]
        );
    }

    #[test]
    fn a_refused_request_is_not_retried_and_did_not_run() {
        assert_eq!(
            actions(Deadline::Enforced, [Event::Refused]),
            [Action::GiveUp { may_have_run: false }]
        );
    }

    #[test]
    fn a_request_that_fails_while_it_runs_is_not_retried() {
        assert_eq!(
            actions(Deadline::None, [Event::FailedMidway]),
            [Action::GiveUp { may_have_run: true }]
        );
    }

    #[test]
    fn a_first_try_without_a_reply_leaves_the_outcome_unknown() {
        for last in [Event::NotSent, Event::Expired, Event::Redirected, Event::Refused] {
            let [.., end] = actions(Deadline::Enforced, [NO_REPLY, Event::Waited, last]);
            assert_eq!(end, Action::GiveUp { may_have_run: true }, "{last:?}");
        }
    }
}
