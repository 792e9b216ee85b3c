//! Errors of the cluster, each logged once, and their end.

use std::time::{Duration, Instant};

use kube::{Error, runtime::watcher};

use super::{cause_of, explain, is_status};

/// How long a 403 may last before it is reported as a missing right. An API server that
/// starts answers 403 to valid requests until it has read the Roles, in a large cluster for
/// some seconds.
const FORBIDDEN_GRACE: Duration = Duration::from_secs(5);

/// An error as it is logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// It may pass by itself.
    Transient(String),
    Lasting(String),
}

impl Report {
    /// Logs it; `what` says what can't be done.
    pub fn log(&self, what: &str) {
        match self {
            Self::Transient(error) => tracing::info!(
                error,
                "{what}; an API server that starts refuses valid requests for a moment"
            ),
            Self::Lasting(error) => tracing::warn!(error, "{what}"),
        }
    }
}

/// The errors of one task that talks to the cluster, from the first to the next success.
#[derive(Debug, Default)]
pub struct Trouble {
    reported: Option<Report>,
    since: Option<Instant>,
    forbidden_since: Option<Instant>,
}

impl Trouble {
    /// Notes an error; answers what to report, if that is news. `rule` names the rights that
    /// the request needs.
    pub fn met(&mut self, error: &Error, rule: &str) -> Option<Report> {
        self.met_at(error, rule, Instant::now())
    }

    fn met_at(&mut self, error: &Error, rule: &str, now: Instant) -> Option<Report> {
        let is_forbidden = is_status(Some(error), 403);
        if !is_forbidden {
            self.forbidden_since = None;
        } else if now < *self.forbidden_since.get_or_insert(now) + FORBIDDEN_GRACE {
            let text = match error {
                Error::Api(status) => status.message.clone(),
                other => other.to_string(),
            };
            return self.report(Report::Transient(text), now);
        }
        self.report(Report::Lasting(explain(error, rule)), now)
    }

    /// The same for an error of a watch.
    pub fn met_watching(&mut self, error: &watcher::Error, rule: &str) -> Option<Report> {
        match cause_of(error) {
            Some(error) => self.met(error, rule),
            None => self.report(Report::Lasting(error.to_string()), Instant::now()),
        }
    }

    /// The cluster did not answer in time.
    pub fn no_answer(&mut self) -> Option<Report> {
        self.report(Report::Lasting("the cluster does not answer".into()), Instant::now())
    }

    fn report(&mut self, report: Report, now: Instant) -> Option<Report> {
        self.since.get_or_insert(now);
        if self.reported.as_ref() == Some(&report) {
            return None;
        }
        self.reported = Some(report.clone());
        Some(report)
    }

    /// A request succeeded; answers how long none had, if there was an error before.
    pub fn over(&mut self) -> Option<Duration> {
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
    fn a_403_names_the_missing_right_only_when_it_lasts() {
        let (mut trouble, now) = (Trouble::default(), Instant::now());
        let transient = Some(Report::Transient("refused".into()));
        assert_eq!(trouble.met_at(&status(403), "to list", now), transient);
        assert_eq!(trouble.met_at(&status(403), "to list", now + FORBIDDEN_GRACE / 2), None);
        let Some(Report::Lasting(text)) =
            trouble.met_at(&status(403), "to list", now + FORBIDDEN_GRACE)
        else {
            panic!("it lasts");
        };
        assert!(text.contains("a Role that allows to list"), "{text}");
        assert_eq!(trouble.met_at(&status(403), "to list", now + 2 * FORBIDDEN_GRACE), None);
    }

    #[test]
    fn each_error_is_reported_once_until_a_request_succeeds() {
        let mut trouble = Trouble::default();
        assert!(trouble.over().is_none());
        assert!(trouble.met(&status(500), "").is_some());
        assert!(trouble.met(&status(500), "").is_none());
        assert!(trouble.met(&status(503), "").is_some());
        assert!(trouble.over().is_some());
        assert!(trouble.over().is_none());
        assert!(trouble.met(&status(503), "").is_some());
    }
}
