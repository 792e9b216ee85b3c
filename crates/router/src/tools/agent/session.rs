//! One stream of one call, from the first frame to the hang-up.

use std::{future::Future, sync::Arc, time::Duration};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Map, Value};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_tungstenite::tungstenite::{
    Message,
    protocol::{CloseFrame, frame::coding::CloseCode},
};

use super::{Agents, streams::StreamId, upgrade::Socket};
use fleet::names::{CallSid, PodName};

/// How long a caller may take to hear what we say.
const DEAF: Duration = Duration::from_secs(5);
/// How long the other side may take to answer our close.
const FAREWELL: Duration = Duration::from_secs(1);

/// What an agent does about a frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Reaction {
    Echo,
    /// The stream says which call it is.
    Named(CallSid),
    Ignore,
    HangUp,
}

/// Speaks with the caller, and releases the call when one of both hangs up.
pub(super) async fn run(
    agents: Arc<Agents>,
    pod: PodName,
    stream: StreamId,
    socket: impl Future<Output = hyper::Result<Socket>>,
) {
    let mut socket = match socket.await {
        Ok(socket) => socket,
        Err(error) => {
            tracing::warn!(%pod, %error, "the stream never came");
            return agents.hang_up(&pod, stream).await;
        }
    };
    let farewell = converse(&agents, &pod, stream, &mut socket).await;
    agents.hang_up(&pod, stream).await;
    if let Some((code, reason)) = farewell {
        let part = async {
            let closed = socket.close(Some(CloseFrame { code, reason: reason.into() })).await;
            while closed.is_ok() && socket.next().await.is_some() {}
        };
        let _ = timeout(FAREWELL, part).await;
    }
}

/// Talks until one side hangs up; how we say goodbye, if it is us.
async fn converse(
    agents: &Agents,
    pod: &PodName,
    stream: StreamId,
    socket: &mut Socket,
) -> Option<(CloseCode, &'static str)> {
    let mut renewal = interval(agents.renew_interval);
    renewal.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            message = socket.next() => {
                let message = message?.ok()?;
                match react(&message) {
                    // Who does not listen for so long is not on the line.
                    Reaction::Echo => timeout(DEAF, socket.send(message)).await.ok()?.ok()?,
                    Reaction::Named(named) => agents.name(pod, stream, named).await,
                    Reaction::HangUp => return Some((CloseCode::Normal, "bye")),
                    Reaction::Ignore => {}
                }
            }
            _ = renewal.tick() => match agents.renew(pod, stream).await {
                Ok(true) => {}
                Ok(false) => return Some((CloseCode::Normal, "the call is over")),
                Err(error) => tracing::warn!(%pod, %error, "agent could not renew its call"),
            },
            () = agents.stopping.cancelled() => return Some((CloseCode::Away, "the agent stops")),
        }
    }
}

/// The call that a stream says it is.
fn call_of(fields: &Map<String, Value>) -> Option<CallSid> {
    let names = ["callSid", "call_sid", "callId"];
    names.iter().find_map(|name| fields.get(*name)?.as_str()?.parse().ok())
}

/// Frames are JSON with an `event`, as Twilio, Plivo and Exotel send them; Vonage
/// and jambonz name the call in their first frame and send sound as it is. What is
/// nothing of this comes from a person with a WebSocket client, who hears it back.
pub fn react(message: &Message) -> Reaction {
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
            let start = frame.get("start").and_then(Value::as_object);
            start.and_then(call_of).map_or(Reaction::Ignore, Reaction::Named)
        }
        Some("websocket:connected") => call_of(&frame).map_or(Reaction::Ignore, Reaction::Named),
        Some(_) => Reaction::Ignore,
        None => call_of(&frame).map_or(Reaction::Echo, Reaction::Named),
    }
}
