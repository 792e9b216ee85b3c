//! `smart-router call`: places one test call, step by step.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use clap::Args;
use hyper::StatusCode;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};

use super::{
    call_pods::{CallPods, read_call},
    print,
    router_client::{RouterArgs, no_answer},
};
use crate::{
    client::Client,
    human_duration::HumanDuration,
    tools::provider_stream::{Clip, MediaFormat, ProviderStream, Recording, StreamError},
};
use telephony::{Secret, secrets};

/// How long the stream may take to connect.
/// Longer than the router tries to connect pods, so that its own answer arrives.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the call may take to be released. The gateway waits for its agent to close.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause before the audio of a call that is allocated at connect: the router drops audio that comes
/// before the agent is connected.
const AGENT_PAUSE: Duration = Duration::from_millis(300);

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
    /// Custom value for the agent, in the header X-Param-NAME; may be repeated
    #[arg(long = "param", value_name = "NAME=VALUE", value_parser = parameter)]
    parameters: Vec<(String, String)>,
    /// Duration of the conversation. Default: 2s, or that of --audio; silence follows the audio
    #[arg(long, value_name = "DURATION")]
    talk: Option<HumanDuration>,
    /// Audio of the caller (WAV, at most 2 minutes), converted to the provider's encoding and sent
    /// at real pace. Default: silence, marked so that its echo can be checked
    #[arg(long, value_name = "FILE")]
    audio: Option<PathBuf>,
    /// Write the agent's audio to this file (WAV), without pauses between its messages
    #[arg(long, value_name = "FILE", requires = "audio")]
    record: Option<PathBuf>,
    /// Open the stream at /connect/{provider} instead of allocating the call first
    #[arg(long)]
    connect: bool,
    /// URL of the media process for --connect. Default: that of the router
    #[arg(long, value_name = "URL", requires = "connect")]
    media_url: Option<String>,
    /// Secret for --connect; the first one of a list
    #[arg(long, env = "CONNECT_SECRET", hide_env_values = true, value_name = "SECRET")]
    connect_secret: Option<Secret>,
}

/// A call with its stream.
struct PlacedCall {
    pods: CallPods,
    stream: ProviderStream,
}

fn parameter(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    pair.ok_or_else(|| "NAME=VALUE".into())
}

const NO_API: &str = "this process serves no API: give the router with --router and the media \
                      process with --media-url";

/// Duration of a conversation without a clip.
const TALK: Duration = Duration::from_secs(2);

/// The conversation of a call.
enum Talk {
    /// Marked silence, of which an agent that echoes returns each frame.
    Marked,
    Clip {
        clip: Clip,
        recording: Option<Recording>,
    },
}

impl CallArgs {
    fn talk(&self) -> anyhow::Result<Talk> {
        let Some(path) = &self.audio else {
            return Ok(Talk::Marked);
        };
        let clip = Clip::read(path, self.provider)?;
        let record = self.record.as_ref().map(|path| Recording::create(path, self.provider));
        Ok(Talk::Clip { clip, recording: record.transpose()? })
    }
}

pub(super) async fn call(args: CallArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    let talk = args.talk()?;
    let call_sid = args
        .call_sid
        .clone()
        .unwrap_or_else(|| format!("CA{:08x}{:08x}", crate::random_u32(), crate::random_u32()));
    let placed = match args.connect {
        true => place_at_connect(&client, &args, &call_sid).await?,
        false => allocate_and_open(&client, &args, &call_sid).await?,
    };
    let PlacedCall { mut pods, mut stream } = placed;
    pods.refresh(&client, &call_sid).await?;

    let verdict = match talk {
        Talk::Marked => talk_marked(&mut stream, &args).await?,
        Talk::Clip { clip, recording } => talk_clip(&mut stream, &args, &clip, recording).await?,
    };

    print_line("4. hang up")?;
    stream.hang_up().await.context("the stream did not close")?;
    let (released, ended) = wait_for_release(&client, &call_sid).await?;
    pods.follow(&ended)?;
    let CallPods { pod, pool, .. } = pods;
    print_line(&format!("   the call has ended and {pod} is free again ({})", ms(released)))?;
    let (_, status) = client.get("/api/v1/status").await.map_err(no_answer)?;
    let counts = pool_status(&status, &pool);
    print_line(&format!("   {pool}: {} of {} available", counts["available"], counts["assigned"]))?;
    verdict.map_err(|problem| anyhow::anyhow!("{problem}: is {pod} an agent that echoes?"))
}

/// The result of a conversation: a problem of the agent's audio is reported after the hang-up.
type Verdict = Result<(), String>;

/// Sends marked frames and counts those that come back.
async fn talk_marked(stream: &mut ProviderStream, args: &CallArgs) -> anyhow::Result<Verdict> {
    let talk = args.talk.unwrap_or(HumanDuration(TALK));
    print_line(&format!("3. send audio for {talk} as {}", args.provider))?;
    let mut slowest = Duration::ZERO;
    let talked =
        stream.talk(talk.0, Duration::ZERO, |echo| slowest = slowest.max(echo.round_trip)).await;
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
    if echoes.lost() + echoes.foreign + echoes.out_of_order + echoes.duplicated > 0 {
        return Ok(Err(format!(
            "{} frames were not echoed, {} out of order, {} more than once, {} from another call",
            echoes.lost(),
            echoes.out_of_order,
            echoes.duplicated,
            echoes.foreign
        )));
    }
    Ok(Ok(()))
}

/// Sends a clip, and records the agent's audio. An agent need not echo here.
async fn talk_clip(
    stream: &mut ProviderStream,
    args: &CallArgs,
    clip: &Clip,
    recording: Option<Recording>,
) -> anyhow::Result<Verdict> {
    let talk = args.talk.map_or(clip.duration(), |talk| talk.0);
    let file = args.audio.as_deref().unwrap_or_else(|| "".as_ref()).display();
    print_line(&format!("3. send {file} for {} as {}", seconds(talk), args.provider))?;
    let (heard, played) = stream.play(clip, talk, Duration::ZERO).await;
    let similarity = clip.compare(&heard);
    print_line(&format!(
        "   {} of audio came back; correlation with {file}: {:.3}",
        seconds(heard.duration()),
        similarity.correlation
    ))?;
    if let (Some(recording), Some(path)) = (recording, &args.record) {
        let written = recording.write(&heard);
        written.with_context(|| format!("cannot write {}", path.display()))?;
        print_line(&format!("   recorded in {}", path.display()))?;
    }
    match played {
        Err(StreamError::Closed(Some(1_000))) => print_line("   the agent hung up")?,
        played => played.context("the stream ended before the call")?,
    }
    Ok(match heard.duration() {
        Duration::ZERO => Err("no audio came back".into()),
        _ => Ok(()),
    })
}

/// Allocates a pod to the call, and opens its stream.
async fn allocate_and_open(
    client: &Client,
    args: &CallArgs,
    call_sid: &str,
) -> anyhow::Result<PlacedCall> {
    let request = json!({
        "call_sid": call_sid,
        "merchant_id": args.merchant,
        "provider": args.provider.to_string(),
        "template": args.template,
        "parameters": args.parameters.iter().cloned().collect::<BTreeMap<_, _>>(),
    });

    print_line(&format!("1. allocate a pod for call {call_sid} at {}", args.router.router))?;
    let started = Instant::now();
    let (status, answer) = client.post("/api/v1/allocate", &request).await.map_err(no_answer)?;
    match status {
        StatusCode::OK => {}
        StatusCode::NOT_FOUND => bail!(NO_API),
        _ => bail!("the router refused with {status}: {answer}"),
    }
    let text = |field: &str| answer[field].as_str().unwrap_or_default().to_owned();
    let (pod, pool, ws_url) = (text("pod_name"), text("source_pool"), text("ws_url"));
    let existing = if answer["was_existing"] == true { ", allocated before" } else { "" };
    print_line(&format!("   {pod} from {pool}{existing} ({})", ms(started.elapsed())))?;

    print_line(&format!("2. connect the stream to {ws_url}"))?;
    let started = Instant::now();
    let opened = tokio::time::timeout(CONNECT_TIMEOUT, open(client, &ws_url, args, call_sid)).await;
    let mut pods = CallPods::new(pod, pool);
    if !matches!(opened, Ok(Ok(_))) {
        pods.refresh_failures(client, call_sid).await?;
    }
    let stream = opened.context("the stream was not accepted in time")?.with_context(|| {
        format!("`smart-router calls {call_sid}` shows why the router refused the stream")
    })?;
    print_line(&format!("   connected ({})", ms(started.elapsed())))?;
    Ok(PlacedCall { pods, stream })
}

/// Opens the stream at `/connect`, and waits until the router has allocated a pod to its call.
async fn place_at_connect(
    client: &Client,
    args: &CallArgs,
    call_sid: &str,
) -> anyhow::Result<PlacedCall> {
    let (status, _) = client.get("/api/v1/status").await.map_err(no_answer)?;
    if status == StatusCode::NOT_FOUND {
        bail!(NO_API);
    }
    let base = args.media_url.as_ref().unwrap_or(&args.router.router).trim_end_matches('/');
    let base = if base.starts_with("ws") { base.replacen("ws", "http", 1) } else { base.into() };
    let media = args.router.client_of(&base)?;
    let mut url = format!("{}/connect/{}", base.replacen("http", "ws", 1), args.provider);
    print_line(&format!("1. connect the stream of call {call_sid} to {url}"))?;
    let secret = args.connect_secret.as_ref();
    if let Some(secret) = secret.and_then(|list| secrets::entries(list.expose()).next()) {
        url.extend(["/", secret]);
    }
    url.push_str(&connect_query(args));
    let started = Instant::now();
    let stream = tokio::time::timeout(CONNECT_TIMEOUT, open(&media, &url, args, call_sid))
        .await
        .context("the stream was not accepted in time")?
        .with_context(|| match args.connect_secret {
            Some(_) => "the router's log has the reason why it refused the stream",
            None => "set --connect-secret to the router's CONNECT_SECRET: it refused the stream",
        })?;
    print_line(&format!("   connected ({})", ms(started.elapsed())))?;

    print_line("2. wait for the pod of the call")?;
    while started.elapsed() < CONNECT_TIMEOUT {
        let (_, found) = read_call(client, call_sid).await?;
        if found["stream"].is_object() {
            let text = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
            let (pod, pool) = (text("pod_name"), text("source_pool"));
            print_line(&format!("   {pod} from {pool} ({})", ms(started.elapsed())))?;
            tokio::time::sleep(AGENT_PAUSE).await;
            return Ok(PlacedCall { pods: CallPods::new(pod, pool), stream });
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    bail!("the call got no pod in time: the router's log has the reason")
}

/// The query of a stream URL at `/connect`, with its question mark.
fn connect_query(args: &CallArgs) -> String {
    let named = [("merchant_id", &args.merchant), ("template", &args.template)];
    let named = named.into_iter().filter_map(|(name, value)| Some((name.into(), value.as_ref()?)));
    let parameters = args.parameters.iter().map(|(name, value)| (format!("param.{name}"), value));
    let encode = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let pairs: Vec<String> = named
        .chain(parameters)
        .map(|(name, value)| format!("{}={}", encode(&name), encode(value)))
        .collect();
    if pairs.is_empty() { String::new() } else { format!("?{}", pairs.join("&")) }
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

/// Waits until the call has ended. Returns how long that took, and the response with its events.
async fn wait_for_release(client: &Client, call_sid: &str) -> anyhow::Result<(Duration, Value)> {
    let hung_up = Instant::now();
    while hung_up.elapsed() < RELEASE_TIMEOUT {
        let (status, call) = read_call(client, call_sid).await?;
        match status {
            StatusCode::NOT_FOUND => return Ok((hung_up.elapsed(), call)),
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

pub(super) fn print_line(line: &str) -> anyhow::Result<()> {
    print(&format!("{line}\n"))
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1_000.0)
}
