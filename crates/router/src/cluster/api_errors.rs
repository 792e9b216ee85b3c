//! Errors of the Kubernetes API: each is reported once until a request succeeds.

use std::{
    fmt,
    time::{Duration, Instant},
};

use kube::{Error, runtime::watcher};

use super::{cause_of, explain, is_status};

/// How long a 403 is retried, and reported as transient. An API server that starts answers 403 to valid
/// requests until it has loaded the Roles, in a large cluster for some seconds.
pub(crate) const FORBIDDEN_GRACE: Duration = Duration::from_secs(5);

const NO_ANSWER: &str = "the Kubernetes API does not answer";

/// An error to log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Report {
    /// May resolve by itself.
    Transient(String),
    Lasting(String),
}

impl Report {
    /// Logs the error; `failure` names the operation that failed and what follows.
    pub(crate) fn log(&self, failure: &str) {
        match self {
            Self::Transient(error) => tracing::info!(
                error,
                "{failure}; an API server that starts refuses valid requests for a moment"
            ),
            Self::Lasting(error) => tracing::warn!(error, "{failure}"),
        }
    }
}

/// A failed request, for a task outside of this module.
#[derive(Debug)]
pub(crate) enum ApiFailure {
    Error {
        error: Error,
        /// The permissions that the request needs.
        rule: String,
    },
    /// No response in time.
    Timeout,
}

impl fmt::Display for ApiFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error { error, rule } => f.write_str(&explain(error, rule)),
            Self::Timeout => f.write_str(NO_ANSWER),
        }
    }
}

/// The identity of an error. Requests of one task get the same status with different texts, such
/// as the list and the watch of the same objects.
#[derive(Debug, PartialEq, Eq)]
enum Cause {
    Status { code: u16, rule: String, is_transient: bool },
    Text(String),
}

/// Errors of one task that uses the API, from the first failure to the next success.
#[derive(Debug, Default)]
pub(crate) struct ApiErrors {
    reported: Option<Cause>,
    since: Option<Instant>,
    forbidden_since: Option<Instant>,
}

impl ApiErrors {
    /// Records an error; returns a report if it is new. `rule` names the permissions that the
    /// request needs.
    pub(crate) fn record(&mut self, error: &Error, rule: &str) -> Option<Report> {
        self.record_at(error, rule, Instant::now())
    }

    fn record_at(&mut self, error: &Error, rule: &str, now: Instant) -> Option<Report> {
        let is_forbidden = is_status(Some(error), 403);
        if !is_forbidden {
            self.forbidden_since = None;
        }
        let is_transient =
            is_forbidden && now < *self.forbidden_since.get_or_insert(now) + FORBIDDEN_GRACE;
        let (cause, report) = match error {
            Error::Api(status) => {
                let (code, rule) = (status.code, rule.to_owned());
                let report = match is_transient {
                    true => Report::Transient(status.message.clone()),
                    false => Report::Lasting(explain(error, &rule)),
                };
                (Cause::Status { code, rule, is_transient }, report)
            }
            other => {
                let text = explain(other, rule);
                (Cause::Text(text.clone()), Report::Lasting(text))
            }
        };
        self.report(cause, report, now)
    }

    /// Whether requests have been answered with 403 for longer than a starting API server does.
    pub(super) fn is_forbidden(&self) -> bool {
        self.forbidden_since.is_some_and(|since| since.elapsed() >= FORBIDDEN_GRACE)
    }

    /// Records an error of a watch.
    pub(super) fn record_watch_error(
        &mut self,
        error: &watcher::Error,
        rule: &str,
    ) -> Option<Report> {
        match cause_of(error) {
            Some(error) => self.record(error, rule),
            None => self.report_text(error.to_string()),
        }
    }

    /// Records a failed request.
    pub(crate) fn record_failure(&mut self, failure: &ApiFailure) -> Option<Report> {
        match failure {
            ApiFailure::Error { error, rule } => self.record(error, rule),
            ApiFailure::Timeout => self.record_timeout(),
        }
    }

    /// Records a request without a response in time.
    pub(crate) fn record_timeout(&mut self) -> Option<Report> {
        self.report_text(NO_ANSWER.into())
    }

    fn report_text(&mut self, text: String) -> Option<Report> {
        self.report(Cause::Text(text.clone()), Report::Lasting(text), Instant::now())
    }

    fn report(&mut self, cause: Cause, report: Report, now: Instant) -> Option<Report> {
        self.since.get_or_insert(now);
        if self.reported.as_ref() == Some(&cause) {
            return None;
        }
        self.reported = Some(cause);
        Some(report)
    }

    /// Clears the errors after a success; returns the time since the first of them.
    pub(crate) fn clear(&mut self) -> Option<Duration> {
        std::mem::take(self).since.map(|since| since.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn status(code: u16) -> Error {
        Error::Api(Box::new(Status::failure("refused", "Reason").with_code(code)))
    }

    #[test]
    fn a_403_names_the_missing_permission_only_when_it_lasts() {
        let (mut errors, now) = (ApiErrors::default(), Instant::now());
        let transient = Some(Report::Transient("refused".into()));
        assert_eq!(errors.record_at(&status(403), "to list", now), transient);
        assert_eq!(errors.record_at(&status(403), "to list", now + FORBIDDEN_GRACE / 2), None);
        let Some(Report::Lasting(text)) =
            errors.record_at(&status(403), "to list", now + FORBIDDEN_GRACE)
        else {
            panic!("the error is not transient");
        };
        assert!(text.contains("a Role that allows to list"), "{text}");
        assert_eq!(errors.record_at(&status(403), "to list", now + 2 * FORBIDDEN_GRACE), None);
    }

    #[test]
    fn the_same_status_with_another_text_is_not_new() {
        let forbidden =
            |text: &str| Error::Api(Box::new(Status::failure(text, "Forbidden").with_code(403)));
        let (mut errors, now) = (ApiErrors::default(), Instant::now());
        for (after, is_new) in [(0, true), (1, false), (5, true), (6, false)] {
            let now = now + Duration::from_secs(after);
            let report = errors.record_at(&forbidden("cannot watch"), "to read pods", now);
            assert_eq!(report.is_some(), is_new, "after {after} s");
            assert_eq!(errors.record_at(&forbidden("cannot list"), "to read pods", now), None);
        }
        let later = now + Duration::from_secs(7);
        assert!(errors.record_at(&forbidden("cannot get"), "to get nodes", later).is_some());
    }

    #[test]
    fn each_error_is_reported_once_until_a_request_succeeds() {
        let mut errors = ApiErrors::default();
        assert!(errors.clear().is_none());
        assert!(errors.record(&status(500), "").is_some());
        assert!(errors.record(&status(500), "").is_none());
        assert!(errors.record(&status(503), "").is_some());
        assert!(errors.clear().is_some());
        assert!(errors.clear().is_none());
        assert!(errors.record(&status(503), "").is_some());
    }
}
