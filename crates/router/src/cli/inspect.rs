//! `status`, `pods`, `calls`, `events`: commands that read state.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::Args;
use hyper::Method;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

use crate::client::Client;

use super::{
    event_line::event_line,
    print,
    router_client::{Failed, RouterArgs, all_pages, listen, no_answer, request, text},
    table::{short_duration, table},
};

#[derive(Debug, Args)]
pub(super) struct StatusArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

pub(super) async fn status(args: StatusArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    let status = request(&client, Method::GET, "/status", None).await?;
    if args.json {
        return print(&pretty(&status));
    }
    print(&status_text(&status))
}

/// Formats a status as a table of pools, with totals.
pub(super) fn status_text(status: &Value) -> String {
    let pools = |group: &str, prefix: &str| -> Vec<Vec<String>> {
        let pools = status[group].as_object().into_iter().flatten();
        pools.map(|(name, pool)| pool_row(&format!("{prefix}{name}"), pool)).collect()
    };
    let mut rows = pools("pools", "");
    rows.extend(pools("merchants", "merchant:"));
    format!(
        "{}\n{} live calls, {} waiting; {}\n",
        table(&POOL_TITLES, &rows),
        text(&status["active_calls"]),
        text(&status["waiting"]),
        leader_text(status)
    )
}

fn leader_text(status: &Value) -> String {
    match (status["is_leader"] == true, status["leader"].as_str()) {
        (true, Some(name)) => format!("this router is the leader ({name})"),
        // Without a Lease every replica does the leader's work.
        (true, None) => "this router is the leader".into(),
        (false, Some(name)) => format!("{name} is the leader"),
        (false, None) => "the leader is unknown".into(),
    }
}

pub(super) const POOL_TITLES: [&str; 9] =
    ["POOL", "TYPE", "PODS", "TARGET", "CALLS", "FREE", "DRAINING", "OUT", "WAITING"];

pub(super) fn pool_row(name: &str, pool: &Value) -> Vec<String> {
    let number = |field: &str| pool[field].as_u64().unwrap_or(0);
    vec![
        name.to_owned(),
        text(&pool["type"]),
        text(&pool["assigned"]),
        text(&pool["target"]),
        text(&pool["active_calls"]),
        text(&pool["free_slots"]),
        text(&pool["draining"]),
        (number("not_ready") + number("quarantined")).to_string(),
        text(&pool["waiting"]),
    ]
}

#[derive(Debug, Args)]
pub(super) struct PodsArgs {
    /// Filter by pool: gold, merchant:acme
    #[arg(long, value_name = "POOL")]
    pool: Option<String>,
    /// Filter by state: available, busy, draining, not_ready, terminating, quarantined
    #[arg(long, value_name = "STATE")]
    state: Option<String>,
    /// Maximum number of rows
    #[arg(long, value_name = "NUMBER", default_value_t = 1_000)]
    limit: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

pub(super) async fn pods(args: PodsArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    let path = path("/pods", &[("pool", &args.pool), ("state", &args.state)]);
    let pods = all_pages(&client, &path, "pods", args.limit).await?;
    if pods.is_empty() {
        check_pool(&client, args.pool.as_deref()).await?;
    }
    if args.json {
        return print(&pretty(&Value::Array(pods)));
    }
    let now = now();
    let rows: Vec<Vec<String>> = pods
        .iter()
        .map(|pod| {
            let calls = pod["calls"].as_array().map(Vec::as_slice).unwrap_or_default();
            let first = calls.iter().filter_map(|call| call["lease_expires_at"].as_i64()).min();
            vec![
                text(&pod["pod_name"]),
                text(&pod["tier"]),
                text(&pod["state"]),
                format!("{}/{}", calls.len(), text(&pod["cap"])),
                first.map_or("-".into(), |until| short_duration(until - now)),
                calls.iter().map(|call| text(&call["call_sid"])).collect::<Vec<_>>().join(" "),
            ]
        })
        .collect();
    print(&table(&["POD", "POOL", "STATE", "CALLS", "LEASE", "WHICH"], &rows))
}

#[derive(Debug, Args)]
pub(super) struct CallsArgs {
    /// Show the events of this call instead
    #[arg(value_name = "CALL")]
    call: Option<String>,
    /// List calls that wait for a pod
    #[arg(long)]
    waiting: bool,
    /// Filter by pool: gold, merchant:acme
    #[arg(long, value_name = "POOL")]
    pool: Option<String>,
    /// Filter by merchant
    #[arg(long, value_name = "ID")]
    merchant: Option<String>,
    /// Filter by pod
    #[arg(long, value_name = "NAME")]
    pod: Option<String>,
    /// Maximum number of rows
    #[arg(long, value_name = "NUMBER", default_value_t = 100)]
    limit: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

pub(super) async fn calls(args: CallsArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    if let Some(call) = &args.call {
        let path = format!("/api/v1/calls/{}", encoded(call));
        let (status, answer) = client.get(&path).await.map_err(no_answer)?;
        // For an ended call, the 404 response contains its events.
        let story = match &answer["details"] {
            details if details["events"].is_array() => details.clone(),
            _ if status.is_success() => answer,
            _ => request(&client, Method::GET, &format!("/calls/{}", encoded(call)), None).await?,
        };
        if args.json {
            return print(&pretty(&story));
        }
        return print(&call_text(call, &story)?);
    }
    let state = args.waiting.then(|| "waiting".to_owned());
    let path = path(
        "/calls",
        &[
            ("state", &state),
            ("pool", &args.pool),
            ("merchant", &args.merchant),
            ("pod", &args.pod),
        ],
    );
    let calls = all_pages(&client, &path, "calls", args.limit).await?;
    if calls.is_empty() {
        check_pool(&client, args.pool.as_deref()).await?;
    }
    if args.json {
        return print(&pretty(&Value::Array(calls)));
    }
    let now = now();
    let since = |value: &Value| value.as_i64().map_or("-".into(), |at| short_duration(now - at));
    let left = |value: &Value| value.as_i64().map_or("-".into(), |at| short_duration(at - now));
    let tried = |call: &Value| {
        let steps = call["tried"].as_array().into_iter().flatten();
        let steps: Vec<String> = steps
            .map(|step| format!("{}={}", text(&step["step"]), text(&step["reason"])))
            .collect();
        if steps.is_empty() { "-".to_owned() } else { steps.join(" ") }
    };
    let (titles, rows): ([&str; 6], Vec<Vec<String>>) = if args.waiting {
        let row = |call: &Value| {
            vec![
                text(&call["call_sid"]),
                text(&call["merchant_id"]),
                since(&call["waiting_since"]),
                left(&call["waiting_until"]),
                tried(call),
                String::new(),
            ]
        };
        (["CALL", "MERCHANT", "WAITS", "LEFT", "TRIED", ""], calls.iter().map(row).collect())
    } else {
        let row = |call: &Value| {
            vec![
                text(&call["call_sid"]),
                text(&call["pod_name"]),
                text(&call["source_pool"]).trim_start_matches("pool:").to_owned(),
                text(&call["merchant_id"]),
                since(&call["allocated_at"]),
                format!("{}  {}", left(&call["lease_expires_at"]), tried(call)),
            ]
        };
        (
            ["CALL", "POD", "POOL", "MERCHANT", "AGE", "LEASE, TRIED"],
            calls.iter().map(row).collect(),
        )
    };
    print(&table(&titles, &rows))
}

/// Formats a call with its stream and its events.
fn call_text(call: &str, story: &Value) -> anyhow::Result<String> {
    let events = story["events"].as_array().context("the response has no events: EVENTS is off")?;
    let stream = stream_text(&story["stream"]);
    let lines: String = events.iter().map(event_line).collect();
    Ok(format!("{call} is {}\n{stream}{lines}", text(&story["state"])))
}

/// Formats the stream of a call as one line; empty without a stream.
fn stream_text(stream: &Value) -> String {
    let Some(since) = stream["since"].as_i64() else { return String::new() };
    let (age, gateway) = (short_duration(now() - since), text(&stream["gateway"]));
    let ending =
        if stream["is_ending"] == true { "ending: its stream is being closed; " } else { "" };
    let figures = &stream["figures"];
    let carried = if figures.is_null() {
        "no figures yet".to_owned()
    } else {
        let side = |name: &str| {
            let [frames, bytes, gap] =
                ["frames", "bytes", "longest_gap_ms"].map(|it| text(&figures[name][it]));
            format!("{frames} frames ({bytes} bytes, longest gap {gap} ms)")
        };
        let (provider, agent) = (side("from_provider"), side("from_agent"));
        format!("{} sent {provider}, the agent {agent}", text(&figures["provider"]))
    };
    format!("{ending}stream for {age}, relayed by {gateway}: {carried}\n")
}

#[derive(Debug, Args)]
pub(super) struct EventsArgs {
    /// Stream new events until interrupted
    #[arg(long, short)]
    follow: bool,
    /// Filter by kind: allocated, ended, refused, drained, …
    #[arg(long, value_name = "KIND")]
    event: Option<String>,
    /// Filter by call
    #[arg(long, value_name = "ID")]
    call: Option<String>,
    /// Filter by pod
    #[arg(long, value_name = "NAME")]
    pod: Option<String>,
    /// Filter by merchant
    #[arg(long, value_name = "ID")]
    merchant: Option<String>,
    /// Number of past events
    #[arg(long, value_name = "NUMBER", default_value_t = 20)]
    limit: usize,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    router: RouterArgs,
}

pub(super) async fn events(args: EventsArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    let limit = Some(args.limit.to_string());
    let filters = [
        ("event", &args.event),
        ("call", &args.call),
        ("pod", &args.pod),
        ("merchant", &args.merchant),
    ];
    let page = path("/events", &[&filters[..], &[("limit", &limit)]].concat());
    let mut answer = request(&client, Method::GET, &page, None).await?;
    let shown = |event: &Value| if args.json { format!("{event}\n") } else { event_line(event) };
    let last = answer["events"].as_array_mut().context("the response has no list of events")?;
    last.reverse();
    print(&last.iter().map(shown).collect::<String>())?;
    if !args.follow {
        return Ok(());
    }
    let after = last.last().map(|event| text(&event["id"]));
    let path = path("/events", &[&filters[..], &[("after", &after)]].concat());
    let mut stream = listen(&client, &path).await?;
    while let Some((_, data)) = stream.next().await.map_err(no_answer)? {
        let event: Value = serde_json::from_str(&data)?;
        print(&shown(&event))?;
    }
    Err(no_answer(anyhow::anyhow!("the router closed the event stream")).into())
}

/// Fails if an empty result is due to an unknown pool.
async fn check_pool(client: &Client, pool: Option<&str>) -> anyhow::Result<()> {
    let Some(pool) = pool else { return Ok(()) };
    let status = request(client, Method::GET, "/status", None).await?;
    let name = pool.trim_start_matches("pool:");
    let (group, name) = match name.strip_prefix("merchant:") {
        Some(id) => ("merchants", id),
        None => ("pools", name),
    };
    if status[group].get(name).is_some() {
        return Ok(());
    }
    Err(Failed {
        code: 3,
        text: format!("unknown pool {pool}: `smart-router status` lists all pools"),
    }
    .into())
}

/// Appends the filters that are set to a path.
fn path(path: &str, filters: &[(&str, &Option<String>)]) -> String {
    let given = filters.iter().filter_map(|(name, value)| {
        value.as_ref().map(|value| format!("{name}={}", encoded(value)))
    });
    let given: Vec<String> = given.collect();
    if given.is_empty() { path.to_owned() } else { format!("{path}?{}", given.join("&")) }
}

pub(super) fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

pub(super) fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_call_shows_its_stream() {
        let side = json!({"frames": 50, "bytes": 19_100, "longest_gap_ms": 41});
        let mut stream = json!({
            "gateway": "router-1-5f3a09c2", "stream": "9c1e5f0a77b3d244", "since": now() - 300,
            "is_ending": false,
            "figures": {"provider": "twilio", "from_provider": side, "from_agent": side},
        });
        let carried = "50 frames (19100 bytes, longest gap 41 ms)";
        let line = format!("twilio sent {carried}, the agent {carried}\n");
        let head = "stream for 5m, relayed by router-1-5f3a09c2: ";
        assert_eq!(stream_text(&stream), format!("{head}{line}"));
        stream["figures"] = Value::Null;
        stream["is_ending"] = json!(true);
        let line = "no figures yet\n";
        let ending = "ending: its stream is being closed; ";
        assert_eq!(stream_text(&stream), format!("{ending}{head}{line}"));
        assert_eq!(stream_text(&Value::Null), "");
    }
}
