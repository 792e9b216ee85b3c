//! `smart-router top`: pools, rates and events live in a terminal.

use std::{collections::VecDeque, io::Write, time::Duration};

use clap::Args;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};

use super::{
    event_line::event_line,
    inspect::{POOL_TITLES, pool_row},
    print,
    router_client::{RouterArgs, listen, no_answer, text},
    table::table,
};
use crate::{client::Messages, terminal};

#[derive(Debug, Args)]
pub(super) struct TopArgs {
    #[command(flatten)]
    router: RouterArgs,
}

/// Pause before a reconnect to the router.
const RECONNECT_PAUSE: Duration = Duration::from_secs(1);
/// Events held for display.
const MAX_EVENTS: usize = 200;
/// Lines printed without a terminal.
const PLAIN_LINES: usize = 40;
/// Escape sequences that enter and leave the alternate screen.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// The alternate screen; left when dropped.
struct Screen;

impl Screen {
    fn enter() -> Self {
        let _ = write!(std::io::stdout(), "{ENTER}");
        Self
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut out = std::io::stdout();
        let _ = write!(out, "{LEAVE}").and_then(|()| out.flush());
    }
}

pub(super) async fn top(args: TopArgs) -> anyhow::Result<()> {
    let client = args.router.client()?;
    // A refusal at the start is an error; later the stream is reopened.
    let stream = listen(&client, "/live").await?;
    if !terminal::takes_escapes(&std::io::stdout()) {
        return print_once(stream).await;
    }
    let (mut stream, mut live) = (Some(stream), LiveState::default());
    let mut terminate = signal(SignalKind::terminate())?;
    let _screen = Screen::enter();
    loop {
        let message = async {
            match &mut stream {
                Some(stream) => stream.next().await,
                None => {
                    tokio::time::sleep(RECONNECT_PAUSE).await;
                    stream = Some(listen(&client, "/live").await?);
                    Ok(Some(Default::default()))
                }
            }
        };
        let message = tokio::select! {
            message = message => message,
            _ = tokio::signal::ctrl_c() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
        };
        match message {
            Ok(Some((name, data))) => live.apply(&name, &data)?,
            Ok(None) | Err(_) => {
                stream = None;
                live.is_disconnected = true;
            }
        }
        let size = terminal_size::terminal_size();
        let (width, height) = size.map_or((100, 30), |(width, height)| (width.0, height.0));
        print(&format!("\x1b[H{}", view(&live, width.into(), height.into())))?;
    }
}

/// Prints the state once, without a terminal.
async fn print_once(mut stream: Messages) -> anyhow::Result<()> {
    let mut live = LiveState::default();
    while !live.is_complete() {
        let message = stream.next().await.map_err(no_answer)?;
        let Some((name, data)) = message else {
            return Err(no_answer(anyhow::anyhow!("the router closed the event stream")).into());
        };
        live.apply(&name, &data)?;
    }
    print(&lines(&live, PLAIN_LINES).iter().map(|line| format!("{line}\n")).collect::<String>())
}

/// The last state and events of the router.
#[derive(Default)]
struct LiveState {
    state: Value,
    events: VecDeque<Value>,
    /// The past events were received, if there are any.
    has_events: bool,
    /// The stream is closed.
    is_disconnected: bool,
}

impl LiveState {
    /// Whether every part of the view has data.
    fn is_complete(&self) -> bool {
        !self.state.is_null() && self.has_events
    }

    fn apply(&mut self, name: &str, data: &str) -> anyhow::Result<()> {
        match name {
            "state" => {
                self.state = serde_json::from_str(data)?;
                self.is_disconnected = false;
            }
            "events" => {
                let page: Value = serde_json::from_str(data)?;
                self.has_events = true;
                self.events.extend(page["events"].as_array().into_iter().flatten().cloned());
                let extra = self.events.len().saturating_sub(MAX_EVENTS);
                self.events.drain(..extra);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Renders `height` lines; the latest events fill the lines below the pools.
fn lines(live: &LiveState, height: usize) -> Vec<String> {
    let LiveState { state, events, is_disconnected, .. } = live;
    let rate = |name: &str| text(&state["rates"][name]);
    let latency = |name: &str| text(&state["latency_ms"]["allocate"][name]);
    let store = match state["store"]["is_up"].as_bool() {
        None => "unknown",
        Some(true) => "up",
        Some(false) => "DOWN",
    };
    // Absent without a media gateway.
    let streams = state["streams"].as_u64().map(|count| format!(", {count} streams here"));
    let streams = streams.unwrap_or_default();
    let mut lines = vec![
        format!(
            "smart-router {}   {} live calls, {} waiting{streams}   store {} {store}",
            text(&state["router"]["name"]),
            text(&state["active_calls"]),
            text(&state["waiting"]),
            text(&state["store"]["kind"]),
        ),
        format!(
            "per second: {} allocated, {} ended, {} refused, {} expired   allocate p50 {} ms, p99 {} ms",
            rate("allocated"),
            rate("ended"),
            rate("refused"),
            rate("expired"),
            latency("p50"),
            latency("p99"),
        ),
        String::new(),
    ];
    if *is_disconnected {
        lines.push("! the router does not answer; showing its last state".into());
    }
    for warning in state["warnings"].as_array().into_iter().flatten() {
        lines.push(format!("! {}", text(&warning["text"])));
    }
    let pools = state["pools"].as_array().into_iter().flatten();
    let rows: Vec<Vec<String>> = pools
        .map(|pool| {
            let prefix = if pool["is_merchant"] == true { "merchant:" } else { "" };
            pool_row(&format!("{prefix}{}", text(&pool["name"])), pool)
        })
        .collect();
    lines.extend(table(&POOL_TITLES, &rows).lines().map(str::to_owned));
    lines.push(String::new());
    let free_lines = height.saturating_sub(lines.len() + 1);
    lines.extend(
        events.iter().rev().take(free_lines).map(|event| event_line(event).trim_end().to_owned()),
    );
    lines
}

/// Renders a full screen: each line is cut to the width and cleared to its end.
fn view(live: &LiveState, width: usize, height: usize) -> String {
    let mut lines = lines(live, height);
    lines.resize(height, String::new());
    let cut = |line: &String| {
        let line: String = line.chars().take(width).collect();
        format!("{line}\x1b[K")
    };
    lines.iter().take(height).map(cut).collect::<Vec<_>>().join("\r\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_screen_has_exactly_its_lines_and_columns() {
        let state = json!({
            "router": {"name": "r"}, "active_calls": 3, "waiting": 0, "streams": 2,
            "store": {"kind": "redis", "is_up": false},
            "pools": [{"name": "gold", "type": "exclusive", "assigned": 4}],
            "warnings": [{"text": "the store is out"}],
        });
        let event = json!({"at": 3_661_001, "event": "allocated", "call_sid": "CA1"});
        let events: VecDeque<Value> = std::iter::repeat_n(event, 50).collect();
        let live = LiveState { state, events, has_events: true, is_disconnected: true };
        assert!(lines(&live, 20)[0].contains("3 live calls, 0 waiting, 2 streams here"));
        let screen = view(&live, 40, 20);
        let lines: Vec<&str> = screen.split("\r\n").collect();
        assert_eq!(lines.len(), 20);
        assert!(lines.iter().all(|line| line.trim_end_matches("\x1b[K").chars().count() <= 40));
        assert!(screen.contains("! the store is out") && screen.contains("! the router does"));
        assert!(screen.contains("01:01:01.001  allocated"));
    }
}
