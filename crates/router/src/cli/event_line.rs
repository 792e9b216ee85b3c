//! Events as lines of text. Machine-readable details become words; `--json` keeps them.

use serde_json::Value;

use super::{router_client::text, table::short_duration};
use fleet::{EndCause, EventKind};

/// Formats an event as one line.
pub(super) fn event_line(event: &Value) -> String {
    let at = event["at"].as_u64().unwrap_or(0);
    let (hours, minutes, seconds) =
        (at / 3_600_000 % 24, at / 60_000 % 60, at as f64 / 1_000.0 % 60.0);
    let kind = text(&event["event"]);
    let fields = ["call_sid", "pod_name", "pool", "merchant_id"];
    let fields = fields.iter().filter_map(|field| event[*field].as_str()).map(str::to_owned);
    let detail = event["detail"].as_str().map(|detail| detail_words(&kind, detail));
    let rest: Vec<String> = fields.chain(detail).collect();
    format!("{hours:02}:{minutes:02}:{seconds:06.3}  {kind:<16}  {}\n", rest.join("  "))
}

/// The detail of an event in words, if it has a fixed format; otherwise as it is.
fn detail_words(kind: &str, detail: &str) -> String {
    match kind.parse() {
        Ok(EventKind::Attached) => format!("its stream opened through {detail}"),
        Ok(EventKind::Ending) => {
            format!("its stream is being closed: {}", end_cause_words(detail))
        }
        Ok(EventKind::FailedOver) => {
            let (cause, former) = detail.split_once(' ').unwrap_or((detail, ""));
            format!("moved from {former}: {}", end_cause_words(cause))
        }
        Ok(EventKind::PodFailed) => format!("the pod failed: {detail}"),
        Ok(EventKind::Ended) => end_words(detail),
        Ok(EventKind::Desired) => desired_words(detail),
        Ok(EventKind::Scaled) => scaled_words(detail),
        Ok(EventKind::ReservationEnded) => reservation_words(detail),
        Ok(EventKind::Origin) => format!("new origin of the pods: {detail}"),
        _ => detail.to_owned(),
    }
}

/// The end of a reservation: `R1 given_back 5000` as `R1 given back, after 5.0s`.
fn reservation_words(detail: &str) -> String {
    let parts: Vec<&str> = detail.split(' ').collect();
    let [id, cause, lasted] = parts[..] else { return detail.to_owned() };
    let seconds = lasted.parse::<u64>().map_or(0.0, |millis| millis as f64 / 1_000.0);
    format!("{id} {}, after {seconds:.1}s", cause.replace('_', " "))
}

/// A changed decision: `12 10 forecast` as `12 pods desired instead of 10: forecast`.
fn desired_words(detail: &str) -> String {
    let mut parts = detail.splitn(3, ' ');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(desired), Some(before), Some(reason)) => {
            let reason = reason.replace('_', " ");
            format!("{desired} pods desired instead of {before}: {reason}")
        }
        _ => detail.to_owned(),
    }
}

/// A change of a workload: `deployment/gold 2 5 forecast` as `deployment/gold scaled from 2 to 5
/// pods: forecast`.
fn scaled_words(detail: &str) -> String {
    let parts: Vec<&str> = detail.split(' ').collect();
    let [workload, from, to, reason, rest @ ..] = &parts[..] else { return detail.to_owned() };
    let verb = if rest.contains(&"dry_run") { "would be scaled" } else { "scaled" };
    format!("{workload} {verb} from {from} to {to} pods: {}", reason.replace('_', " "))
}

/// The end of a call: `agent 53000` as `released by the agent, after 53s`.
fn end_words(detail: &str) -> String {
    let (cause, lasted) = detail.split_once(' ').unwrap_or((detail, ""));
    let cause = end_cause_words(cause);
    match lasted.parse::<u64>() {
        Ok(millis @ ..10_000) => format!("{cause}, after {:.1}s", millis as f64 / 1_000.0),
        Ok(millis) => format!("{cause}, after {}", short_duration((millis / 1_000) as i64)),
        Err(_) => cause.to_owned(),
    }
}

/// The words of an end cause, as on the dashboard.
fn end_cause_words(cause: &str) -> &str {
    let Ok(known) = cause.parse() else { return cause };
    match known {
        EndCause::Agent => "released by the agent",
        EndCause::Provider => "ended by the provider",
        EndCause::Operator => "released by an operator",
        EndCause::Stream => "stream ended",
        EndCause::Broken => "stream disconnected",
        EndCause::Lease => "lease expired",
        EndCause::Unconfirmed => "stream never started",
        EndCause::Unattached => "no stream came in time",
        EndCause::Gateway => "its gateway stopped or was lost",
        EndCause::Unreachable => "the pod could not be connected",
        EndCause::PodLost => "the connection to the pod was lost",
        EndCause::Displaced => "the pod serves an earlier stream",
        EndCause::PodGone => "pod removed",
        EndCause::Abandoned => "hand-off not accepted",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn line(kind: &str, detail: &str) -> String {
        let event = json!({"at": 0, "event": kind, "call_sid": "CA1", "detail": detail});
        event_line(&event).split_once("CA1  ").unwrap().1.trim_end().to_owned()
    }

    #[test]
    fn details_of_events_are_words() {
        for (kind, detail, words) in [
            ("attached", "router-1-5f3a09c2", "its stream opened through router-1-5f3a09c2"),
            ("ending", "operator", "its stream is being closed: released by an operator"),
            ("ended", "unattached 30004", "no stream came in time, after 30s"),
            ("ended", "gateway 240000", "its gateway stopped or was lost, after 4m"),
            ("ended", "unreachable 120", "the pod could not be connected, after 0.1s"),
            ("ended", "pod_lost 9999", "the connection to the pod was lost, after 10.0s"),
            (
                "failed_over",
                "pod_lost voice-agent-3",
                "moved from voice-agent-3: the connection to the pod was lost",
            ),
            ("pod_failed", "closed with 1011", "the pod failed: closed with 1011"),
            ("ended", "agent", "released by the agent"),
            ("desired", "12 10 pods_not_ready", "12 pods desired instead of 10: pods not ready"),
            ("desired", "12", "12"),
            ("scaled", "deployment/a 2 5 min", "deployment/a scaled from 2 to 5 pods: min"),
            (
                "scaled",
                "deployment/a 5 2 keep dry_run",
                "deployment/a would be scaled from 5 to 2 pods: keep",
            ),
            ("scaled", "7", "7"),
            ("reservation_ended", "R1 given_back 5000", "R1 given back, after 5.0s"),
            ("reservation_ended", "R1", "R1"),
            ("origin", "list", "new origin of the pods: list"),
            // Causes and kinds of later versions, and details without a fixed format.
            ("ended", "new_cause 20000", "new_cause, after 20s"),
            ("new_kind", "agent 5", "agent 5"),
            ("allocated", "gold=at_capacity", "gold=at_capacity"),
        ] {
            assert_eq!(line(kind, detail), words);
        }
    }
}
