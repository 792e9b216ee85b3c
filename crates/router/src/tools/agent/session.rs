//! One stream of one call, from the first frame to the close.

use std::{future::Future, sync::Arc, time::Duration};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Map, Value};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_tungstenite::tungstenite::{
    Message,
    protocol::{CloseFrame, frame::coding::CloseCode},
};

use super::{Agents, streams::StreamId, websocket::Socket};
use fleet::names::{CallSid, PodName};

/// How long a frame may take to be sent.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the close handshake may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// An agent's reaction to a frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Reaction {
    Echo,
    /// The frame names the call of the stream.
    Named(CallSid),
    Ignore,
    HangUp,
}

/// Serves a stream, and releases the call when either side closes it.
pub(super) async fn run(
    agents: Arc<Agents>,
    pod: PodName,
    stream: StreamId,
    socket: impl Future<Output = hyper::Result<Socket>>,
) {
    let mut socket = match socket.await {
        Ok(socket) => socket,
        Err(error) => {
            tracing::warn!(%pod, %error, "the WebSocket upgrade failed");
            return agents.hang_up(&pod, stream).await;
        }
    };
    let close = echo(&agents, &pod, stream, &mut socket).await;
    agents.hang_up(&pod, stream).await;
    if let Some((code, reason)) = close {
        let handshake = async {
            let closed = socket.close(Some(CloseFrame { code, reason: reason.into() })).await;
            while closed.is_ok() && socket.next().await.is_some() {}
        };
        let _ = timeout(CLOSE_TIMEOUT, handshake).await;
    }
}

/// Echoes frames until one side closes; returns the close code if it is this side.
async fn echo(
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
                    // A client that does not read for this long is gone.
                    Reaction::Echo => timeout(SEND_TIMEOUT, socket.send(message)).await.ok()?.ok()?,
                    Reaction::Named(named) => agents.assign_call(pod, stream, named).await,
                    Reaction::HangUp => return Some((CloseCode::Normal, "bye")),
                    Reaction::Ignore => {}
                }
            }
            _ = renewal.tick() => match agents.renew(pod, stream).await {
                Ok(true) => {}
                Ok(false) => return Some((CloseCode::Normal, "the call is over")),
                Err(error) => tracing::warn!(%pod, %error, "the agent could not renew its call"),
            },
            () = agents.stopping.cancelled() => return Some((CloseCode::Away, "the agent stops")),
        }
    }
}

/// Returns the call that a frame names.
fn call_of(fields: &Map<String, Value>) -> Option<CallSid> {
    let names = ["callSid", "call_sid", "callId"];
    names.iter().find_map(|name| fields.get(*name)?.as_str()?.parse().ok())
}

/// Frames are JSON with an `event`, as Twilio, Plivo and Exotel send them; Vonage and jambonz name
/// the call in their first frame and send binary audio. Other frames come from a manual WebSocket
/// client and are echoed.
pub fn react(message: &Message) -> Reaction {
    let text = match message {
        Message::Text(text) => text.as_str(),
        Message::Binary(_) => return Reaction::Echo,
        // The next read answers a close and returns the end of the stream.
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
