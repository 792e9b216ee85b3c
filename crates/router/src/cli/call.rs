//! `smart-router call`: places one test call, step by step.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use futures_util::{SinkExt, StreamExt};
use hyper::StatusCode;
use serde_json::{Value, json};
use tokio_tungstenite::{client_async, tungstenite::Message};

use super::{
    print,
    router_client::{RouterArgs, no_answer},
};
use crate::{client::Client, human_duration::HumanDuration};

/// Interval of media frames: Twilio sends 20 ms of audio per frame, 160 bytes, here of silence.
const FRAME_INTERVAL: Duration = Duration::from_millis(20);
/// How long the agent may take to connect, to echo a frame and to release the call.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

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
    /// Provider in the stream URL
    #[arg(long, value_name = "NAME", default_value = "twilio")]
    provider: String,
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
        "provider": args.provider,
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
    let connect = async {
        let stream = client.connect(&ws_url.parse()?).await?;
        anyhow::Ok(client_async(&ws_url, stream).await?)
    };
    let (mut socket, _) = tokio::time::timeout(RESPONSE_TIMEOUT, connect)
        .await
        .context("the agent did not accept the stream in time")?
        .with_context(|| format!("the agent at {ws_url} refused the stream"))?;
    print_line(&format!("   connected ({})", ms(started.elapsed())))?;

    print_line(&format!("3. send audio for {}", args.talk))?;
    let stream_sid = format!("MZ{:08x}", crate::random_u32());
    let start = json!({"streamSid": stream_sid, "callSid": call_sid, "call_sid": call_sid, "callId": call_sid});
    socket
        .send(text_frame(&json!({"event": "connected", "protocol": "Call", "version": "1.0.0"})))
        .await?;
    socket
        .send(text_frame(&json!({"event": "start", "streamSid": stream_sid, "start": start})))
        .await?;
    let (mut sent, mut slowest) = (0, Duration::ZERO);
    let started = Instant::now();
    while started.elapsed() < args.talk.0 {
        let media = json!({"event": "media", "streamSid": stream_sid, "media": {"payload": "/".repeat(216), "chunk": sent.to_string()}});
        let sent_at = Instant::now();
        socket.send(text_frame(&media)).await?;
        sent += 1;
        let echo = tokio::time::timeout(RESPONSE_TIMEOUT, socket.next())
            .await
            .context("the agent did not echo a frame in time")?;
        if !matches!(echo, Some(Ok(Message::Text(_)))) {
            bail!("the agent closed the stream after {sent} frames");
        }
        slowest = slowest.max(sent_at.elapsed());
        tokio::time::sleep(FRAME_INTERVAL).await;
    }
    print_line(&format!("   {sent} frames sent and echoed, the slowest in {}", ms(slowest)))?;

    print_line("4. hang up")?;
    socket.send(text_frame(&json!({"event": "stop", "streamSid": stream_sid}))).await?;
    socket.close(None).await?;
    let released = wait_for_release(&client, &call_sid).await?;
    print_line(&format!("   the call has ended and {pod} is free again ({})", ms(released)))?;
    let (_, status) = client.get("/api/v1/status").await.map_err(no_answer)?;
    let counts = pool_status(&status, &pool);
    print_line(&format!("   {pool}: {} of {} available", counts["available"], counts["assigned"]))?;
    Ok(())
}

async fn wait_for_release(client: &Client, call_sid: &str) -> anyhow::Result<Duration> {
    let hung_up = Instant::now();
    while hung_up.elapsed() < RESPONSE_TIMEOUT {
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
    bail!("the agent did not release the call")
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

fn text_frame(frame: &Value) -> Message {
    Message::Text(frame.to_string().into())
}

fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1_000.0)
}
