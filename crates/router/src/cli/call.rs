//! `smart-router call`: places one test call, step by step.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use hyper::StatusCode;
use serde_json::{Value, json};

use super::{
    print,
    router_client::{RouterArgs, no_answer},
};
use crate::{
    client::Client,
    human_duration::HumanDuration,
    tools::provider_stream::{MediaFormat, ProviderStream},
};

/// How long the stream may take to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the call may take to be released. The gateway waits for its agent to close.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(super) struct CallArgs {
    #[command(flatten)]
    router: RouterArgs,
    /// Id of the call. Default: a random one
    #[arg(long, value_name = "SID")]
    call_sid: Option<String>,
    /// Merchant of the call
    #[arg(long, value_name = "ID")]
    merchant: Option<String>,
    /// Provider whose media messages the call uses: twilio, plivo, exotel, signalwire, telnyx,
    /// vonage or jambonz
    #[arg(long, value_name = "NAME", default_value = "twilio")]
    provider: MediaFormat,
    /// Template in the stream URL
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
    /// Duration of the conversation
    #[arg(long, value_name = "DURATION", default_value = "2s")]
    talk: HumanDuration,
}

pub(super) async fn call(args: CallArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    let call_sid = args
        .call_sid
        .clone()
        .unwrap_or_else(|| format!("CA{:08x}{:08x}", crate::random_u32(), crate::random_u32()));
    let request = json!({
        "call_sid": call_sid,
        "merchant_id": args.merchant,
        "provider": args.provider.to_string(),
        "template": args.template,
    });

    print_line(&format!("1. allocate a pod for call {call_sid} at {}", args.router.router))?;
    let started = Instant::now();
    let (status, answer) = client.post("/api/v1/allocate", &request).await.map_err(no_answer)?;
    if status != StatusCode::OK {
        bail!("the router refused with {status}: {answer}");
    }
    let text = |field: &str| answer[field].as_str().unwrap_or_default().to_owned();
    let (pod, pool, ws_url) = (text("pod_name"), text("source_pool"), text("ws_url"));
    let existing = if answer["was_existing"] == true { ", allocated before" } else { "" };
    print_line(&format!("   {pod} from {pool}{existing} ({})", ms(started.elapsed())))?;

    print_line(&format!("2. connect the stream to {ws_url}"))?;
    let started = Instant::now();
    let mut stream =
        tokio::time::timeout(CONNECT_TIMEOUT, open(&client, &ws_url, &args, &call_sid))
            .await
            .context("the stream was not accepted in time")?
            .with_context(|| format!("{ws_url} refused the stream"))?;
    print_line(&format!("   connected ({})", ms(started.elapsed())))?;

    print_line(&format!("3. send audio for {} as {}", args.talk, args.provider))?;
    let mut slowest = Duration::ZERO;
    let talked = stream
        .talk(args.talk.0, Duration::ZERO, |echo| slowest = slowest.max(echo.round_trip))
        .await;
    let echoes = stream.echoes().clone();
    let counts = match echoes.lost() {
        0 => format!("{} frames sent and echoed", echoes.sent),
        _ => format!("{} frames sent, {} echoed", echoes.sent, echoes.echoed),
    };
    let own = match echoes.unmarked {
        0 => String::new(),
        count => format!("; {count} messages with the agent's own audio"),
    };
    print_line(&format!("   {counts}, the slowest in {}{own}", ms(slowest)))?;
    talked.context("the stream ended before the call")?;

    print_line("4. hang up")?;
    stream.hang_up().await.context("the stream did not close")?;
    let released = wait_for_release(&client, &call_sid).await?;
    print_line(&format!("   the call has ended and {pod} is free again ({})", ms(released)))?;
    let (_, status) = client.get("/api/v1/status").await.map_err(no_answer)?;
    let counts = pool_status(&status, &pool);
    print_line(&format!("   {pool}: {} of {} available", counts["available"], counts["assigned"]))?;
    if echoes.lost() + echoes.foreign + echoes.out_of_order + echoes.duplicated > 0 {
        bail!(
            "{} frames were not echoed, {} out of order, {} more than once, {} from another call: is {pod} an agent that echoes?",
            echoes.lost(),
            echoes.out_of_order,
            echoes.duplicated,
            echoes.foreign
        );
    }
    Ok(())
}

async fn open(
    client: &Client,
    ws_url: &str,
    args: &CallArgs,
    call_sid: &str,
) -> anyhow::Result<ProviderStream> {
    let connection = client.connect(&ws_url.parse()?).await?;
    Ok(ProviderStream::open(connection, ws_url, args.provider, call_sid).await?)
}

async fn wait_for_release(client: &Client, call_sid: &str) -> anyhow::Result<Duration> {
    let hung_up = Instant::now();
    while hung_up.elapsed() < RELEASE_TIMEOUT {
        let (status, _) =
            client.get(&format!("/api/v1/calls/{call_sid}")).await.map_err(no_answer)?;
        match status {
            StatusCode::NOT_FOUND => return Ok(hung_up.elapsed()),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                bail!("the token may not read calls: use one with the role admin")
            }
            _ => {}
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    bail!("the call was not released")
}

fn pool_status<'a>(status: &'a Value, pool: &str) -> &'a Value {
    match pool.split_once(':') {
        Some(("merchant", id)) => &status["merchants"][id],
        Some((_, tier)) => &status["pools"][tier],
        None => &Value::Null,
    }
}

fn print_line(line: &str) -> anyhow::Result<()> {
    print(&format!("{line}\n"))
}

fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1_000.0)
}
