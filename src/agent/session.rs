//! One stream of one call, from the first frame to the hang-up.

use std::{future::Future, sync::Arc};

use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use tokio::time::{MissedTickBehavior, interval};
use tokio_tungstenite::tungstenite::{
    Message,
    protocol::{CloseFrame, frame::coding::CloseCode},
};

use super::{Agents, upgrade::Socket};
use crate::domain::names::{CallSid, PodName};

/// What an agent does about a frame.
enum Reaction {
    Echo,
    /// The stream says which call it is.
    Named(CallSid),
    Ignore,
    HangUp,
}

/// Speaks with the caller, and releases the call when the socket is closed.
pub async fn run(
    agents: Arc<Agents>,
    pod: PodName,
    mut call: CallSid,
    socket: impl Future<Output = hyper::Result<Socket>>,
) {
    match socket.await {
        Ok(socket) => converse(&agents, &pod, &mut call, socket).await,
        Err(error) => tracing::warn!(call_sid = %call, %pod, %error, "the stream never came"),
    }
    agents.release(&pod, &call).await;
}

async fn converse(agents: &Agents, pod: &PodName, call: &mut CallSid, mut socket: Socket) {
    let mut renewal = interval(agents.renew_interval());
    renewal.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let farewell = tokio::select! {
            message = socket.next() => {
                let Some(Ok(message)) = message else { return };
                match react(&message) {
                    Reaction::Echo if socket.send(message).await.is_err() => return,
                    Reaction::Named(named) if named != *call => {
                        agents.correct(pod, call, named).await;
                        continue;
                    }
                    Reaction::HangUp => (CloseCode::Normal, "bye"),
                    _ => continue,
                }
            }
            _ = renewal.tick() => match agents.renew(pod, call).await {
                Ok(false) => (CloseCode::Normal, "the call is over"),
                Ok(true) => continue,
                Err(error) => {
                    tracing::warn!(call_sid = %call, %pod, %error, "agent could not renew the call");
                    continue;
                }
            },
            () = agents.stopping.cancelled() => (CloseCode::Away, "the agent stops"),
        };
        let (code, reason) = farewell;
        let _ = socket.close(Some(CloseFrame { code, reason: reason.into() })).await;
        return;
    }
}

/// Frames are JSON with an `event`, as Twilio, Plivo and Exotel send them. What
/// is not comes from a person with a WebSocket client, who hears it back.
fn react(message: &Message) -> Reaction {
    let text = match message {
        Message::Text(text) => text.as_str(),
        Message::Binary(_) => return Reaction::Echo,
        Message::Close(_) => return Reaction::HangUp,
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
