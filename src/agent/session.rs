//! One stream of one call, from the first frame to the hang-up.

use std::{future::Future, sync::Arc, time::Duration};

use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use tokio::time::{MissedTickBehavior, interval};
use tokio_tungstenite::tungstenite::{
    Message,
    protocol::{CloseFrame, frame::coding::CloseCode},
};

use super::{Agents, upgrade::Socket};
use crate::domain::names::{CallSid, PodName};

/// How long the other side may take to answer our close.
const FAREWELL: Duration = Duration::from_secs(1);

/// What an agent does about a frame.
enum Reaction {
    Echo,
    /// The stream says which call it is.
    Named(CallSid),
    Ignore,
    HangUp,
}

/// Speaks with the caller, and releases the call when one of both hangs up.
pub async fn run(
    agents: Arc<Agents>,
    pod: PodName,
    mut call: CallSid,
    socket: impl Future<Output = hyper::Result<Socket>>,
) {
    let mut socket = match socket.await {
        Ok(socket) => socket,
        Err(error) => {
            tracing::warn!(call_sid = %call, %pod, %error, "the stream never came");
            return agents.release(&pod, &call).await;
        }
    };
    let farewell = converse(&agents, &pod, &mut call, &mut socket).await;
    agents.release(&pod, &call).await;
    if let Some((code, reason)) = farewell {
        let part = async {
            let closed = socket.close(Some(CloseFrame { code, reason: reason.into() })).await;
            while closed.is_ok() && socket.next().await.is_some() {}
        };
        let _ = tokio::time::timeout(FAREWELL, part).await;
    }
}

/// Talks until one side hangs up; how we say goodbye, if it is us.
async fn converse(
    agents: &Agents,
    pod: &PodName,
    call: &mut CallSid,
    socket: &mut Socket,
) -> Option<(CloseCode, &'static str)> {
    let mut renewal = interval(agents.renew_interval());
    renewal.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            message = socket.next() => {
                let message = message?.ok()?;
                match react(&message) {
                    Reaction::Echo => socket.send(message).await.ok()?,
                    Reaction::Named(named) if named != *call => agents.correct(pod, call, named).await,
                    Reaction::HangUp => return Some((CloseCode::Normal, "bye")),
                    _ => {}
                }
            }
            _ = renewal.tick() => match agents.renew(pod, call).await {
                Ok(true) => {}
                Ok(false) => return Some((CloseCode::Normal, "the call is over")),
                Err(error) => tracing::warn!(call_sid = %call, %pod, %error, "agent could not renew the call"),
            },
            () = agents.stopping.cancelled() => return Some((CloseCode::Away, "the agent stops")),
        }
    }
}

/// Frames are JSON with an `event`, as Twilio, Plivo and Exotel send them. What
/// is not comes from a person with a WebSocket client, who hears it back.
fn react(message: &Message) -> Reaction {
    let text = match message {
        Message::Text(text) => text.as_str(),
        Message::Binary(_) => return Reaction::Echo,
        // A close is answered by the next read, which then finds the end.
        _ => return Reaction::Ignore,
    };
    let Ok(Value::Object(frame)) = serde_json::from_str(text) else {
        return Reaction::Echo;
    };
    match frame.get("event").and_then(Value::as_str) {
        Some("media") => Reaction::Echo,
        Some("stop") => Reaction::HangUp,
        Some("start") => {
            let start = frame.get("start").unwrap_or(&Value::Null);
            let names = ["callSid", "call_sid", "callId"];
            let named = names.iter().find_map(|name| start.get(name)?.as_str()?.parse().ok());
            named.map_or(Reaction::Ignore, Reaction::Named)
        }
        Some(_) => Reaction::Ignore,
        None => Reaction::Echo,
    }
}
