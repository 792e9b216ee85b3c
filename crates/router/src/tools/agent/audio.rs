//! Audio of a provider, and the message that plays it to the caller.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// A media message. Each provider has its own name for the stream, which tells the providers
/// apart.
#[derive(Deserialize)]
struct Media<'a> {
    #[serde(borrow)]
    event: Cow<'a, str>,
    #[serde(borrow, default, rename = "streamSid")]
    twilio_stream: Option<Cow<'a, str>>,
    #[serde(borrow, default, rename = "stream_sid")]
    exotel_stream: Option<Cow<'a, str>>,
    #[serde(borrow, default, rename = "stream_id")]
    telnyx_stream: Option<Cow<'a, str>>,
    #[serde(borrow, default, rename = "streamId")]
    plivo_stream: Option<Cow<'a, str>>,
    #[serde(borrow)]
    media: Payload<'a>,
}

#[derive(Deserialize)]
struct Payload<'a> {
    #[serde(borrow)]
    payload: Cow<'a, str>,
}

/// A message that plays audio.
#[derive(Serialize, Default)]
struct Play<'a> {
    event: &'static str,
    #[serde(rename = "streamSid", skip_serializing_if = "Option::is_none")]
    twilio_stream: Option<&'a str>,
    #[serde(rename = "stream_sid", skip_serializing_if = "Option::is_none")]
    exotel_stream: Option<&'a str>,
    media: Sound<'a>,
}

#[derive(Serialize, Default)]
struct Sound<'a> {
    #[serde(rename = "contentType", skip_serializing_if = "Option::is_none")]
    content_type: Option<&'static str>,
    #[serde(rename = "sampleRate", skip_serializing_if = "Option::is_none")]
    sample_rate: Option<u32>,
    payload: &'a str,
}

/// Returns the message that plays the audio of a media message back. `None` for other messages,
/// and for one without a stream, which comes from a manual client.
pub(super) fn echo(text: &str) -> Option<String> {
    let media: Media<'_> = serde_json::from_str(text).ok()?;
    if media.event != "media" {
        return None;
    }
    let sound = Sound { payload: &media.media.payload, ..Sound::default() };
    let play = Play { event: "media", media: sound, ..Play::default() };
    let play = if let Some(stream) = &media.twilio_stream {
        Play { twilio_stream: Some(stream), ..play }
    } else if let Some(stream) = &media.exotel_stream {
        Play { exotel_stream: Some(stream), ..play }
    } else if media.telnyx_stream.is_some() {
        play
    } else if media.plivo_stream.is_some() {
        // The format that the router's document requests from Plivo.
        let (content_type, sample_rate) = (Some("audio/x-mulaw"), Some(8_000));
        Play {
            event: "playAudio",
            media: Sound { content_type, sample_rate, ..play.media },
            ..play
        }
    } else {
        return None;
    };
    serde_json::to_string(&play).ok()
}
