//! `smart-router drain`: takes a pod out of service, and waits for its calls. What a
//! preStop hook runs: a hook that fails lets Kubernetes stop the container with all its calls,
//! so that what may pass is asked again until the time is over.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use clap::Args;
use hyper::StatusCode;
use serde_json::json;
use tokio::time::timeout;

use super::{
    look::pretty,
    print,
    router::{Failed, RouterArgs, no_answer, refused},
};
use crate::config::HumanDuration;

/// How long to wait before a router that refused or did not answer is asked again.
const PAUSE: Duration = Duration::from_secs(1);
/// How much longer than the wait an answer may take.
const ANSWER: Duration = Duration::from_secs(10);
/// Routers wait no longer.
const LONGEST: Duration = Duration::from_secs(3600);
/// How the program exits when the time is over and calls are left.
const CALLS_LEFT: u8 = 5;

#[derive(Debug, Args)]
pub(super) struct DrainArgs {
    /// The pod
    #[arg(value_name = "POD", required_unless_present = "pod_name")]
    pod: Option<String>,
    /// The same by name or variable, for hooks
    #[arg(long, env, value_name = "NAME")]
    pod_name: Option<String>,
    /// How long to wait until the pod has no call left, at most 1h; 5m without a time. A router that refuses or does not answer is asked again until then. Default: not at all
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "5m", value_parser = wait)]
    wait: Option<HumanDuration>,
    /// For machines
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

fn wait(text: &str) -> Result<HumanDuration, String> {
    let wait: HumanDuration = text.parse()?;
    if wait.0 <= LONGEST { Ok(wait) } else { Err("a length of time, at most 1h".into()) }
}

pub(super) async fn drain(args: DrainArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    let pod = args.pod.or(args.pod_name).unwrap_or_default();
    let until = args.wait.map(|wait| Instant::now() + wait.0);
    let mut reported = String::new();
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let wait = left.map(|left| format!("{}ms", left.as_millis().max(1)));
        let body = json!({"pod_name": pod, "wait": wait});
        let answer =
            timeout(left.unwrap_or_default() + ANSWER, client.post("/api/v1/drain", &body));
        let answer = answer.await.unwrap_or_else(|_| Err(anyhow!("the router does not answer")));
        let is_over = until.is_none_or(|until| Instant::now() >= until);
        let failed = match answer {
            Ok((StatusCode::OK, answer)) => {
                let message = answer["message"].as_str().unwrap_or_default();
                if answer["drained"] == true || until.is_none() {
                    let text = format!("{pod}: {message}\n");
                    return print(if args.json { pretty(&answer) } else { text }.as_str());
                }
                Failed { code: CALLS_LEFT, text: message.into() }
            }
            // Waiting does not make a bad request a good one.
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
            Some(_) if text != reported => eprintln!("{text}; asking again"),
            Some(_) => {}
        }
        reported = text;
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        tokio::time::sleep(PAUSE.min(left.unwrap_or(PAUSE))).await;
    }
}
