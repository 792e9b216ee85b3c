//! One stream of one call, from the first frame to the close.

use std::{future::Future, sync::Arc, time::Duration};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Map, Value};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_tungstenite::tungstenite::{
    Message,
    protocol::{CloseFrame, frame::coding::CloseCode},
};

use super::{Agents, audio, streams::StreamId, websocket::Socket};
use fleet::names::{CallSid, PodName};

/// How long a frame may take to be sent.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the close handshake may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// An agent's reaction to a frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Reaction {
    /// Send the same message back.
    Echo,
    /// Send this message: it plays the caller's audio back.
    Play(Message),
    /// The frame names the call of the stream.
    Named(CallSid),
    Ignore,
    HangUp,
}

/// Serves a stream until either side closes it, and then releases its call. `stream` is `None` for
/// a stream from the gateway, which renews and releases the call itself.
pub(super) async fn run(
    agents: Arc<Agents>,
    pod: PodName,
    stream: Option<StreamId>,
    socket: impl Future<Output = hyper::Result<Socket>>,
) {
    let closing = match socket.await {
        Ok(mut socket) => {
            let close = echo(&agents, &pod, stream, &mut socket).await;
            close.map(|close| (socket, close))
        }
        Err(error) => {
            tracing::warn!(%pod, %error, "the WebSocket upgrade failed");
            None
        }
    };
    if let Some(stream) = stream {
        agents.hang_up(&pod, stream).await;
    }
    if let Some((mut socket, (code, reason))) = closing {
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
    stream: Option<StreamId>,
    socket: &mut Socket,
) -> Option<(CloseCode, &'static str)> {
    let mut renewal = interval(agents.renew_interval);
    renewal.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            message = socket.next() => {
                let message = message?.ok()?;
                let reply = match (react(&message), stream) {
                    (Reaction::Echo, _) => message,
                    (Reaction::Play(reply), _) => reply,
                    (Reaction::Named(named), Some(stream)) => {
                        agents.assign_call(pod, stream, named).await;
                        continue;
                    }
                    (Reaction::HangUp, _) => return Some((CloseCode::Normal, "bye")),
                    (Reaction::Named(_) | Reaction::Ignore, _) => continue,
                };
                // A client that does not read for this long is gone.
                timeout(SEND_TIMEOUT, socket.send(reply)).await.ok()?.ok()?;
            }
            _ = renewal.tick() => {
                let Some(stream) = stream else { continue };
                match agents.renew(pod, stream).await {
                    Ok(true) => {}
                    Ok(false) => return Some((CloseCode::Normal, "the call is over")),
                    Err(error) => {
                        tracing::warn!(%pod, %error, "the agent could not renew its call");
                    }
                }
            }
            () = agents.stopping.cancelled() => return Some((CloseCode::Away, "the agent stops")),
        }
    }
}

/// Returns the call that a frame names.
fn call_of(fields: &Map<String, Value>) -> Option<CallSid> {
    let names = ["callSid", "call_sid", "callId", "call_control_id"];
    names.iter().find_map(|name| fields.get(*name)?.as_str()?.parse().ok())
}

/// Frames are JSON with an `event`, as Twilio, SignalWire, Telnyx, Plivo and Exotel send them;
/// Vonage and jambonz name the call in their first frame and send binary audio, which plays as it
/// is. Other frames come from a manual WebSocket client and are echoed.
pub fn react(message: &Message) -> Reaction {
    let text = match message {
        Message::Text(text) => text.as_str(),
        Message::Binary(_) => return Reaction::Echo,
        // The next read answers a close and returns the end of the stream.
        _ => return Reaction::Ignore,
    };
    if let Some(play) = audio::echo(text) {
        return Reaction::Play(Message::text(play));
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn play(text: &str) -> Value {
        match react(&Message::text(text)) {
            Reaction::Play(Message::Text(text)) => serde_json::from_str(&text).unwrap(),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn audio_is_played_back_in_the_form_of_its_provider() {
        use serde_json::json;
        for (media, played) in [
            (
                r#"{"event":"media","sequenceNumber":"4","media":{"track":"inbound","chunk":"2","timestamp":"5","payload":"AAAA"},"streamSid":"MZ1"}"#,
                json!({"event": "media", "streamSid": "MZ1", "media": {"payload": "AAAA"}}),
            ),
            (
                r#"{"event":"media","sequence_number":"3","stream_sid":"MZ1","media":{"chunk":"2","timestamp":"200","payload":"AAAA"}}"#,
                json!({"event": "media", "stream_sid": "MZ1", "media": {"payload": "AAAA"}}),
            ),
            (
                r#"{"event":"media","sequence_number":"4","media":{"track":"inbound","chunk":"2","timestamp":"5","payload":"AAAA"},"stream_id":"32DE"}"#,
                json!({"event": "media", "media": {"payload": "AAAA"}}),
            ),
            (
                r#"{"event":"media","sequenceNumber":42,"streamId":"8765","media":{"track":"inbound","timestamp":"1705312200000","chunk":41,"payload":"AAAA"}}"#,
                json!({"event": "playAudio", "media": {"contentType": "audio/x-mulaw", "sampleRate": 8000, "payload": "AAAA"}}),
            ),
        ] {
            assert_eq!(play(media), played);
        }
        let audio = Message::binary(vec![0; 640]);
        assert_eq!(react(&audio), Reaction::Echo);
    }

    #[test]
    fn messages_of_a_manual_client_are_echoed_unchanged() {
        for text in [
            "hello?",
            "17",
            r#"{"hello": "world"}"#,
            r#"{"event":"media","media":{"payload":"AAAA"}}"#,
            r#"{"event":"media","media":{},"streamSid":"MZ1"}"#,
            r#"{"event":"media","streamSid":7,"media":{"payload":"AAAA"}}"#,
        ] {
            assert_eq!(react(&Message::text(text)), Reaction::Echo, "{text}");
        }
    }

    #[test]
    fn the_first_message_of_each_provider_names_the_call() {
        for text in [
            r#"{"event":"start","start":{"streamSid":"MZ1","callSid":"C1"},"streamSid":"MZ1"}"#,
            r#"{"event":"start","stream_sid":"MZ1","start":{"call_sid":"C1"}}"#,
            r#"{"event":"start","start":{"call_control_id":"C1"},"stream_id":"32DE"}"#,
            r#"{"event":"start","start":{"callId":"C1","streamId":"8765"}}"#,
            r#"{"event":"websocket:connected","content-type":"audio/l16;rate=16000","call_sid":"C1"}"#,
            r#"{"callSid":"C1","callId":"sip-id@host","sampleRate":8000,"mixType":"mono"}"#,
        ] {
            assert_eq!(react(&Message::text(text)), Reaction::Named("C1".parse().unwrap()));
        }
    }

    #[test]
    fn stop_hangs_up_and_other_events_are_ignored() {
        assert_eq!(react(&Message::text(r#"{"event":"stop"}"#)), Reaction::HangUp);
        for event in ["connected", "dtmf", "mark", "playedStream", "clearedAudio"] {
            let text = format!(r#"{{"event":"{event}","streamSid":"MZ1"}}"#);
            assert_eq!(react(&Message::text(text)), Reaction::Ignore, "{event}");
        }
    }
}
