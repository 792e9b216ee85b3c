//! `smart-router drain`: takes a pod out of service, and waits for its calls. What a
//! preStop hook runs.

use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;
use hyper::StatusCode;
use serde_json::json;

use super::router::{Failed, RouterArgs};
use crate::config::Span;

/// How long to wait before a router that did not answer is asked again.
const PAUSE: Duration = Duration::from_secs(1);
/// How the program exits when the time is over and calls are left.
const CALLS_LEFT: u8 = 5;

#[derive(Debug, Args)]
pub struct DrainArgs {
    /// The pod
    #[arg(value_name = "POD", required_unless_present = "pod_name")]
    pod: Option<String>,
    /// The same by name or variable, for hooks
    #[arg(long, env, value_name = "NAME")]
    pod_name: Option<String>,
    /// How long to wait until the pod has no call left. Default: not at all
    #[arg(long, value_name = "TIME")]
    wait: Option<Span>,
    #[command(flatten)]
    router: RouterArgs,
}

pub async fn drain(args: DrainArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    let pod = args.pod.or(args.pod_name).unwrap_or_default();
    let until = args.wait.map(|wait| Instant::now() + wait.0);
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let wait = left.map(|left| format!("{}ms", left.as_millis().max(1)));
        let body = json!({"pod_name": pod, "wait": wait});
        let is_last = left.is_none_or(|left| left <= PAUSE);
        match client.post("/api/v1/drain", &body).await {
            Ok((StatusCode::OK, answer)) if answer["drained"] == true || is_last => {
                let message = answer["message"].as_str().unwrap_or_default();
                if until.is_some() && answer["drained"] != true {
                    let text = format!("the time is over: {message}");
                    return Err(Failed { code: CALLS_LEFT, text }.into());
                }
                println!("{pod}: {message}");
                return Ok(());
            }
            // A router that stops answers at once; another goes on waiting.
            Ok((StatusCode::OK, _)) => {}
            Ok((status, answer)) if status.is_client_error() || is_last => {
                bail!("the router answered {status}: {answer}");
            }
            Ok((status, _)) => eprintln!("the router answered {status}; asking again"),
            Err(error) if is_last => return Err(error),
            Err(error) => eprintln!("{error:#}; asking again"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}
