//! `smart-router drain`: drains a pod and waits for its calls, for use in a preStop hook. A hook
//! that fails lets Kubernetes stop the container with all its calls, so that transient errors are
//! retried until the wait ends.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use clap::Args;
use hyper::StatusCode;
use serde_json::json;
use tokio::time::timeout;

use super::{
    inspect::pretty,
    print,
    router_client::{Failed, RouterArgs, no_answer, refused},
};
use crate::human_duration::HumanDuration;

/// Pause before a retry.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// How long a response may take beyond the wait.
const RESPONSE_MARGIN: Duration = Duration::from_secs(10);
/// Longest wait that a router accepts.
const MAX_WAIT: Duration = Duration::from_secs(3600);
/// Exit code when calls are left at the end of the wait.
const CALLS_LEFT: u8 = 5;

#[derive(Debug, Args)]
pub(super) struct DrainArgs {
    /// Pod to drain
    #[arg(value_name = "POD", required_unless_present = "pod_name")]
    pod: Option<String>,
    /// Pod to drain, by flag or variable, for hooks
    #[arg(long, env, value_name = "NAME")]
    pod_name: Option<String>,
    /// Wait until the pod has no call left, at most 1h; 5m if no duration is given. Errors are
    /// retried until then. Default: do not wait
    #[arg(
        long,
        value_name = "DURATION",
        num_args = 0..=1,
        default_missing_value = "5m",
        value_parser = wait
    )]
    wait: Option<HumanDuration>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

fn wait(text: &str) -> Result<HumanDuration, String> {
    let wait: HumanDuration = text.parse()?;
    if wait.0 <= MAX_WAIT { Ok(wait) } else { Err("a duration of at most 1h".into()) }
}

pub(super) async fn drain(args: DrainArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    let pod = args.pod.or(args.pod_name).unwrap_or_default();
    let deadline = args.wait.map(|wait| Instant::now() + wait.0);
    let mut logged = String::new();
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let wait = left.map(|left| format!("{}ms", left.as_millis().max(1)));
        let body = json!({"pod_name": pod, "wait": wait});
        let answer = timeout(
            left.unwrap_or_default() + RESPONSE_MARGIN,
            client.post("/api/v1/drain", &body),
        );
        let answer =
            answer.await.unwrap_or_else(|_| Err(anyhow!("the router did not answer in time")));
        let is_over = deadline.is_none_or(|deadline| Instant::now() >= deadline);
        let failed = match answer {
            Ok((StatusCode::OK, answer)) => {
                let message = answer["message"].as_str().unwrap_or_default();
                if answer["drained"] == true || deadline.is_none() {
                    let text = format!("{pod}: {message}\n");
                    return print(if args.json { pretty(&answer) } else { text }.as_str());
                }
                Failed { code: CALLS_LEFT, text: message.into() }
            }
            // A retry can't succeed.
            Ok((status @ StatusCode::BAD_REQUEST, answer)) => {
                return Err(refused(status, &answer).into());
            }
            Ok((status, answer)) => {
                let Failed { code, text } = refused(status, &answer);
                Failed { code, text: format!("the router answered {}: {text}", status.as_u16()) }
            }
            Err(error) => no_answer(error),
        };
        let Failed { code, text } = failed;
        match args.wait {
            None => return Err(Failed { code, text }.into()),
            Some(wait) if is_over => {
                let text = format!("gave up after {wait}: {text}");
                return Err(Failed { code, text }.into());
            }
            Some(_) if text != logged => eprintln!("{text}; retrying"),
            Some(_) => {}
        }
        logged = text;
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        tokio::time::sleep(RETRY_PAUSE.min(left.unwrap_or(RETRY_PAUSE))).await;
    }
}
