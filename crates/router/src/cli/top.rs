//! `smart-router top`: pools, calls and events in a terminal, live.

use std::{collections::VecDeque, io::Write, time::Duration};

use clap::Args;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};

use super::{
    look::{POOL_TITLES, event_line, pool_row},
    print,
    router::{RouterArgs, listen, no_answer, text},
    table::table,
};
use crate::{client::Messages, terminal};

#[derive(Debug, Args)]
pub(super) struct TopArgs {
    #[command(flatten)]
    router: RouterArgs,
}

/// How long to wait before a router that is gone is asked again.
const PAUSE: Duration = Duration::from_secs(1);
/// As many events are remembered; more lines no terminal has.
const MOST: usize = 200;
/// Lines that are printed where there is no screen.
const FEW: usize = 40;
/// The screen of its own that a full view has, and the way back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// Gives the terminal back whatever happens.
struct Screen;

impl Screen {
    fn take() -> Self {
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
    // Who is refused at the start hears it; later a router may come and go.
    let stream = listen(&client, "/live").await?;
    if !terminal::takes_escapes(&std::io::stdout()) {
        return once(stream).await;
    }
    let (mut stream, mut seen) = (Some(stream), Seen::default());
    let mut terminate = signal(SignalKind::terminate())?;
    let _screen = Screen::take();
    loop {
        let told = async {
            match &mut stream {
                Some(stream) => stream.next().await,
                None => {
                    tokio::time::sleep(PAUSE).await;
                    stream = Some(listen(&client, "/live").await?);
                    Ok(Some(Default::default()))
                }
            }
        };
        let told = tokio::select! {
            told = told => told,
            _ = tokio::signal::ctrl_c() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
        };
        match told {
            Ok(Some((name, data))) => seen.take(&name, &data)?,
            Ok(None) | Err(_) => {
                stream = None;
                seen.is_lost = true;
            }
        }
        let size = terminal_size::terminal_size();
        let (width, height) = size.map_or((100, 30), |(width, height)| (width.0, height.0));
        print(&format!("\x1b[H{}", view(&seen, width.into(), height.into())))?;
    }
}

/// Prints one view, for what is no screen.
async fn once(mut stream: Messages) -> anyhow::Result<()> {
    let mut seen = Seen::default();
    while !seen.is_whole() {
        let told = stream.next().await.map_err(no_answer)?;
        let Some((name, data)) = told else {
            return Err(no_answer(anyhow::anyhow!("the router has ended the stream")).into());
        };
        seen.take(&name, &data)?;
    }
    print(&lines(&seen, FEW).iter().map(|line| format!("{line}\n")).collect::<String>())
}

/// What the router has said.
#[derive(Default)]
struct Seen {
    state: Value,
    events: VecDeque<Value>,
    /// It has said which events there were, if any.
    has_events: bool,
    /// It no longer says anything.
    is_lost: bool,
}

impl Seen {
    /// Whether there is something to show in every part of a view.
    fn is_whole(&self) -> bool {
        !self.state.is_null() && self.has_events
    }

    fn take(&mut self, name: &str, data: &str) -> anyhow::Result<()> {
        match name {
            "state" => {
                self.state = serde_json::from_str(data)?;
                self.is_lost = false;
            }
            "events" => {
                let told: Value = serde_json::from_str(data)?;
                self.has_events = true;
                self.events.extend(told["events"].as_array().into_iter().flatten().cloned());
                let extra = self.events.len().saturating_sub(MOST);
                self.events.drain(..extra);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Renders the screen in `height` lines; the latest events fill what the rest leaves.
fn lines(seen: &Seen, height: usize) -> Vec<String> {
    let Seen { state, events, is_lost, .. } = seen;
    let rate = |name: &str| text(&state["rates"][name]);
    let latency = |name: &str| text(&state["latency_ms"]["allocate"][name]);
    let store = match state["store"]["is_up"].as_bool() {
        None => "not heard of yet",
        Some(true) => "up",
        Some(false) => "OUT",
    };
    let mut lines = vec![
        format!(
            "smart-router {}   {} live calls, {} waiting   store {} {store}",
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
    if *is_lost {
        lines.push("! the router does not answer; this is what it said last".into());
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
    let room = height.saturating_sub(lines.len() + 1);
    lines.extend(
        events.iter().rev().take(room).map(|event| event_line(event).trim_end().to_owned()),
    );
    lines
}

/// A full screen: each line cut to its width and cleared to its end.
fn view(seen: &Seen, width: usize, height: usize) -> String {
    let mut lines = lines(seen, height);
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
    fn a_screen_is_filled_and_never_overfilled() {
        let state = json!({
            "router": {"name": "r"}, "active_calls": 3, "waiting": 0,
            "store": {"kind": "redis", "is_up": false},
            "pools": [{"name": "gold", "type": "exclusive", "assigned": 4}],
            "warnings": [{"text": "the store is out"}],
        });
        let event = json!({"at": 3_661_001, "event": "allocated", "call_sid": "CA1"});
        let events: VecDeque<Value> = std::iter::repeat_n(event, 50).collect();
        let seen = Seen { state, events, has_events: true, is_lost: true };
        let screen = view(&seen, 40, 20);
        let lines: Vec<&str> = screen.split("\r\n").collect();
        assert_eq!(lines.len(), 20);
        assert!(lines.iter().all(|line| line.trim_end_matches("\x1b[K").chars().count() <= 40));
        assert!(screen.contains("! the store is out") && screen.contains("! the router does"));
        assert!(screen.contains("01:01:01.001  allocated"));
    }
}
