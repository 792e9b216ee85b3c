//! `smart-router call`: one call from the outside, step by step.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use futures_util::{SinkExt, StreamExt};
use hyper::StatusCode;
use serde_json::{Value, json};
use tokio_tungstenite::{client_async, tungstenite::Message};

use super::{
    print,
    router::{RouterArgs, no_answer},
};
use crate::{client::Client, config::HumanDuration};

/// Twilio sends 20 ms of sound in a frame: 160 bytes, here of silence.
const FRAME: Duration = Duration::from_millis(20);
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub(super) struct CallArgs {
    #[command(flatten)]
    router: RouterArgs,
    /// Id of the call. Default: a new one
    #[arg(long, value_name = "SID")]
    call_sid: Option<String>,
    /// Merchant the call is for
    #[arg(long, value_name = "ID")]
    merchant: Option<String>,
    /// Name of the provider in the stream URL
    #[arg(long, value_name = "NAME", default_value = "twilio")]
    provider: String,
    /// Template the agent is asked for
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
    /// How long to talk
    #[arg(long, value_name = "TIME", default_value = "2s")]
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
        "provider": args.provider,
        "template": args.template,
    });

    tell(&format!("1. call {call_sid} asks {} for a pod", args.router.router))?;
    let asked = Instant::now();
    let (status, answer) = client.post("/api/v1/allocate", &request).await.map_err(no_answer)?;
    if status != StatusCode::OK {
        bail!("the router refused with {status}: {answer}");
    }
    let text = |field: &str| answer[field].as_str().unwrap_or_default().to_owned();
    let (pod, pool, ws_url) = (text("pod_name"), text("source_pool"), text("ws_url"));
    let again = if answer["was_existing"] == true { ", which it had before" } else { "" };
    tell(&format!("   {pod} from {pool}{again} ({})", ms(asked.elapsed())))?;

    tell(&format!("2. stream to {ws_url}"))?;
    let dialled = Instant::now();
    let dial = async {
        let stream = client.connect(&ws_url.parse()?).await?;
        anyhow::Ok(client_async(&ws_url, stream).await?)
    };
    let (mut socket, _) = tokio::time::timeout(PATIENCE, dial)
        .await
        .context("the agent does not answer")?
        .with_context(|| format!("the agent at {ws_url} refused the stream"))?;
    tell(&format!("   connected ({})", ms(dialled.elapsed())))?;

    tell(&format!("3. talk for {}", args.talk))?;
    let stream_sid = format!("MZ{:08x}", crate::random_u32());
    let start = json!({"streamSid": stream_sid, "callSid": call_sid, "call_sid": call_sid, "callId": call_sid});
    socket
        .send(text_frame(&json!({"event": "connected", "protocol": "Call", "version": "1.0.0"})))
        .await?;
    socket
        .send(text_frame(&json!({"event": "start", "streamSid": stream_sid, "start": start})))
        .await?;
    let (mut sent, mut slowest) = (0, Duration::ZERO);
    let talking = Instant::now();
    while talking.elapsed() < args.talk.0 {
        let media = json!({"event": "media", "streamSid": stream_sid, "media": {"payload": "/".repeat(216), "chunk": sent.to_string()}});
        let spoke = Instant::now();
        socket.send(text_frame(&media)).await?;
        sent += 1;
        let heard =
            tokio::time::timeout(PATIENCE, socket.next()).await.context("the agent fell silent")?;
        if !matches!(heard, Some(Ok(Message::Text(_)))) {
            bail!("the agent hung up after {sent} frames");
        }
        slowest = slowest.max(spoke.elapsed());
        tokio::time::sleep(FRAME).await;
    }
    tell(&format!("   {sent} frames sent and heard back, the slowest in {}", ms(slowest)))?;

    tell("4. hang up")?;
    socket.send(text_frame(&json!({"event": "stop", "streamSid": stream_sid}))).await?;
    socket.close(None).await?;
    let released = wait_for_release(&client, &call_sid).await?;
    tell(&format!("   the call is over and {pod} is free again ({})", ms(released)))?;
    let (_, status) = client.get("/api/v1/status").await.map_err(no_answer)?;
    let stand = standing(&status, &pool);
    tell(&format!("   {pool}: {} of {} available", stand["available"], stand["assigned"]))?;
    Ok(())
}

async fn wait_for_release(client: &Client, call_sid: &str) -> anyhow::Result<Duration> {
    let hung_up = Instant::now();
    while hung_up.elapsed() < PATIENCE {
        let (status, _) =
            client.get(&format!("/api/v1/calls/{call_sid}")).await.map_err(no_answer)?;
        match status {
            StatusCode::NOT_FOUND => return Ok(hung_up.elapsed()),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                bail!("the token may not look at calls: give one of the role admin")
            }
            _ => {}
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    bail!("the agent did not release the call")
}

fn standing<'a>(status: &'a Value, pool: &str) -> &'a Value {
    match pool.split_once(':') {
        Some(("merchant", id)) => &status["merchants"][id],
        Some((_, tier)) => &status["pools"][tier],
        None => &Value::Null,
    }
}

fn tell(line: &str) -> anyhow::Result<()> {
    print(&format!("{line}\n"))
}

fn text_frame(frame: &Value) -> Message {
    Message::Text(frame.to_string().into())
}

fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1_000.0)
}
