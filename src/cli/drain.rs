//! `smart-router drain`: takes a pod out of service, and waits for its calls. What a
//! preStop hook runs.

use std::time::{Duration, Instant};

use clap::Args;
use hyper::StatusCode;
use serde_json::json;

use super::{
    look::pretty,
    print,
    router::{Failed, RouterArgs, no_answer, refused},
};
use crate::config::Span;

/// How long to wait before a router that did not answer is asked again.
const PAUSE: Duration = Duration::from_secs(1);
/// Routers wait no longer.
const LONGEST: Duration = Duration::from_secs(3600);
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
    /// How long to wait until the pod has no call left, at most 1h; 5m without a time. Default: not at all
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "5m", value_parser = wait)]
    wait: Option<Span>,
    /// For machines
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

fn wait(text: &str) -> Result<Span, String> {
    let span: Span = text.parse()?;
    if span.0 <= LONGEST { Ok(span) } else { Err("a length of time, at most 1h".into()) }
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
                if args.json {
                    return print(&pretty(&answer));
                }
                return print(&format!("{pod}: {message}\n"));
            }
            // A router that stops answers at once; another goes on waiting.
            Ok((StatusCode::OK, _)) => {}
            Ok((status, answer)) if status.is_client_error() || is_last => {
                return Err(refused(status, &answer).into());
            }
            Ok((status, _)) => eprintln!("the router answered {status}; asking again"),
            Err(error) if is_last => return Err(no_answer(error).into()),
            Err(error) => eprintln!("{error:#}; asking again"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}
