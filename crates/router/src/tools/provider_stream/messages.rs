//! Messages of each provider: those of one stream, and the audio of an agent.

use std::{
    borrow::Cow,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::body::Bytes;
use data_encoding::BASE64;
use serde::Deserialize;
use tokio_tungstenite::tungstenite::Message;

use super::{
    format::MediaFormat,
    marker::{MARKER_LEN, MARKER_TEXT_LEN, Marker, call_tag},
};
use telephony::Provider;

/// Texts of a provider. Words that begin with `$` are replaced: `$call`, `$stream` and `$account`
/// for the whole stream, `$sequence`, `$chunk` and `$time` (milliseconds) with each message.
/// `$audio` is the audio in base64.
struct Texts {
    opening: &'static [&'static str],
    /// Empty for binary audio.
    media: &'static str,
    /// Empty if the provider only closes the WebSocket.
    stop: &'static str,
}

const TWILIO: Texts = Texts {
    opening: &[
        r#"{"event":"connected","protocol":"Call","version":"1.0.0"}"#,
        r#"{"event":"start","sequenceNumber":"1","start":{"accountSid":"$account","streamSid":"$stream","callSid":"$call","tracks":["inbound"],"mediaFormat":{"encoding":"audio/x-mulaw","sampleRate":8000,"channels":1},"customParameters":{}},"streamSid":"$stream"}"#,
    ],
    media: r#"{"event":"media","sequenceNumber":"$sequence","media":{"track":"inbound","chunk":"$chunk","timestamp":"$time","payload":"$audio"},"streamSid":"$stream"}"#,
    stop: r#"{"event":"stop","sequenceNumber":"$sequence","stop":{"accountSid":"$account","callSid":"$call"},"streamSid":"$stream"}"#,
};

const TELNYX: Texts = Texts {
    opening: &[
        r#"{"event":"connected","version":"1.0.0"}"#,
        r#"{"event":"start","sequence_number":"1","start":{"user_id":"$account","call_control_id":"$call","media_format":{"encoding":"PCMU","sample_rate":8000,"channels":1}},"stream_id":"$stream"}"#,
    ],
    media: r#"{"event":"media","sequence_number":"$sequence","media":{"track":"inbound","chunk":"$chunk","timestamp":"$time","payload":"$audio"},"stream_id":"$stream"}"#,
    stop: r#"{"event":"stop","sequence_number":"$sequence","stop":{"user_id":"$account","call_control_id":"$call"},"stream_id":"$stream"}"#,
};

const PLIVO: Texts = Texts {
    opening: &[
        r#"{"event":"start","sequenceNumber":1,"start":{"callId":"$call","streamId":"$stream","accountId":"$account","tracks":["inbound"],"mediaFormat":{"encoding":"audio/x-mulaw","sampleRate":8000}},"extra_headers":""}"#,
    ],
    media: r#"{"event":"media","sequenceNumber":$sequence,"streamId":"$stream","media":{"track":"inbound","timestamp":"$time","chunk":$chunk,"payload":"$audio"},"extra_headers":""}"#,
    stop: r#"{"event":"stop","sequenceNumber":$sequence,"streamId":"$stream"}"#,
};

const EXOTEL: Texts = Texts {
    opening: &[
        r#"{"event":"connected"}"#,
        r#"{"event":"start","sequence_number":"1","stream_sid":"$stream","start":{"stream_sid":"$stream","call_sid":"$call","account_sid":"$account","from":"+910000000001","to":"+910000000002","media_format":{"encoding":"audio/x-raw","sample_rate":"8000","bit_rate":"16"}}}"#,
    ],
    media: r#"{"event":"media","sequence_number":"$sequence","stream_sid":"$stream","media":{"chunk":"$chunk","timestamp":"$time","payload":"$audio"}}"#,
    stop: r#"{"event":"stop","sequence_number":"$sequence","stream_sid":"$stream","stop":{"call_sid":"$call","account_sid":"$account","reason":"callended"}}"#,
};

const VONAGE: Texts = Texts {
    opening: &[
        r#"{"event":"websocket:connected","content-type":"audio/l16;rate=16000","call_sid":"$call"}"#,
    ],
    media: "",
    stop: "",
};

const JAMBONZ: Texts = Texts {
    opening: &[
        r#"{"callSid":"$call","direction":"inbound","from":"+10000000001","to":"+10000000002","accountSid":"$account","callStatus":"in-progress","sampleRate":8000,"mixType":"mono"}"#,
    ],
    media: "",
    stop: "",
};

fn texts(provider: Provider) -> &'static Texts {
    match provider {
        Provider::Twilio | Provider::SignalWire => &TWILIO,
        Provider::Telnyx => &TELNYX,
        Provider::Plivo => &PLIVO,
        Provider::Exotel => &EXOTEL,
        Provider::Vonage => &VONAGE,
        Provider::Jambonz => &JAMBONZ,
    }
}

/// Part of a media message that changes with each message.
#[derive(Debug, Clone, Copy)]
enum Slot {
    Sequence,
    Chunk,
    Time,
    Audio,
}

/// A media message, serialised except for its slots.
enum Template {
    /// Each text is followed by its slot; the last text has none.
    Text { parts: Vec<(String, Slot)>, rest: String },
    /// The message is the audio itself.
    Binary,
}

/// Audio of a media message.
#[derive(Clone, Copy)]
enum Audio<'a> {
    /// Silence with a marker.
    Marked(Marker),
    Plain(&'a [u8]),
}

/// Messages of one stream, in the provider's format.
pub(super) struct ProviderMessages {
    format: MediaFormat,
    call: String,
    stream: String,
    template: Template,
    silence: Vec<u8>,
    /// Base64 of the silence after a marker.
    silence_text: String,
    /// Number of media messages so far.
    sent: u32,
    /// Time of the first message in the provider's count (milliseconds).
    first_time: u64,
}

/// A message of an agent, as the provider understands it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AgentMessage {
    /// Audio that is an echo.
    Echo(Marker),
    /// The agent's own audio.
    Audio,
    /// A message that plays nothing.
    Other,
}

/// Fields of agents' messages; each provider has its own name for the stream.
#[derive(Deserialize)]
struct AgentJson<'a> {
    #[serde(borrow)]
    event: Cow<'a, str>,
    #[serde(borrow, default, rename = "streamSid")]
    twilio_stream: Option<Cow<'a, str>>,
    #[serde(borrow, default, rename = "stream_sid")]
    exotel_stream: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    media: Option<AgentAudio<'a>>,
}

#[derive(Deserialize)]
struct AgentAudio<'a> {
    #[serde(borrow)]
    payload: Cow<'a, str>,
}

impl ProviderMessages {
    pub(super) fn new(format: MediaFormat, call: &str) -> Self {
        let random = || format!("{:08x}{:08x}", crate::random_u32(), crate::random_u32());
        let stream = match format.provider {
            Provider::Plivo | Provider::Telnyx => {
                let digits = random() + &random();
                format!("{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..])
            }
            _ => format!("MZ{}{}", random(), random()),
        };
        // Plivo counts from 1970, the others from the beginning of the stream.
        let first_time = match format.provider {
            Provider::Plivo => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                now.as_millis() as u64
            }
            _ => 0,
        };
        let call = escaped(call);
        let template = template(format, &call, &stream);
        let silence = format.silence();
        let silence_text = BASE64.encode(&silence[MARKER_LEN..]);
        Self { format, call, stream, template, silence, silence_text, sent: 0, first_time }
    }

    /// Messages before the first audio.
    pub(super) fn opening(&self) -> Vec<Message> {
        let texts = texts(self.format.provider).opening.iter();
        texts.map(|text| Message::text(fill(text, &self.call, &self.stream))).collect()
    }

    /// The next media message, with a marker, sent at this time since the beginning of the stream.
    pub(super) fn media(&mut self, sent: Duration) -> Message {
        let marker = Marker { call: call_tag(&self.call), sequence: self.sent, sent };
        self.next_media(Audio::Marked(marker))
    }

    /// The next media message, with this audio.
    pub(super) fn media_with(&mut self, audio: &[u8]) -> Message {
        self.next_media(Audio::Plain(audio))
    }

    fn next_media(&mut self, audio: Audio<'_>) -> Message {
        let time = self.time();
        self.sent += 1;
        let Template::Text { parts, rest } = &self.template else {
            return Message::Binary(Bytes::from(match audio {
                Audio::Marked(marker) => {
                    let mut marked = self.silence.clone();
                    marked[..MARKER_LEN].copy_from_slice(&marker.to_bytes());
                    marked
                }
                Audio::Plain(audio) => audio.to_vec(),
            }));
        };
        let len: usize = parts.iter().map(|(text, _)| text.len()).sum();
        let audio_len = MARKER_TEXT_LEN + self.silence_text.len();
        let mut text = String::with_capacity(len + rest.len() + audio_len + 40);
        for (part, slot) in parts {
            text.push_str(part);
            match (slot, audio) {
                // The start message has number 1.
                (Slot::Sequence, _) => push_number(&mut text, u64::from(self.sent) + 1),
                (Slot::Chunk, _) => push_number(&mut text, u64::from(self.sent)),
                (Slot::Time, _) => push_number(&mut text, time),
                (Slot::Audio, Audio::Marked(marker)) => {
                    marker.write_base64(&mut text);
                    text.push_str(&self.silence_text);
                }
                (Slot::Audio, Audio::Plain(audio)) => BASE64.encode_append(audio, &mut text),
            }
        }
        text.push_str(rest);
        Message::text(text)
    }

    /// The end of the stream; `None` if the provider only closes the WebSocket.
    pub(super) fn stop(&self) -> Option<Message> {
        let text = texts(self.format.provider).stop;
        let sequence = (u64::from(self.sent) + 2).to_string();
        let text = fill(text, &self.call, &self.stream).replace("$sequence", &sequence);
        (!text.is_empty()).then(|| Message::text(text))
    }

    pub(super) fn call_tag(&self) -> u64 {
        call_tag(&self.call)
    }

    fn time(&self) -> u64 {
        self.first_time + u64::from(self.sent) * self.format.frame_duration().as_millis() as u64
    }

    /// Reads a message of the agent. An unchanged copy of the provider's own message counts as
    /// audio: a plain WebSocket echo server sends it.
    pub(super) fn read(&self, message: &Message) -> AgentMessage {
        match message {
            Message::Binary(audio) if self.format.is_binary() => {
                Marker::from_audio(audio).map_or(AgentMessage::Audio, AgentMessage::Echo)
            }
            Message::Text(text) if !self.format.is_binary() => match self.payload(text) {
                Some(payload) => {
                    Marker::from_base64(&payload).map_or(AgentMessage::Audio, AgentMessage::Echo)
                }
                None => AgentMessage::Other,
            },
            _ => AgentMessage::Other,
        }
    }

    /// Returns the decoded audio of an agent's message; `None` for a message that plays nothing.
    pub(super) fn audio(&self, message: &Message) -> Option<Vec<u8>> {
        match message {
            Message::Binary(audio) if self.format.is_binary() => Some(audio.to_vec()),
            Message::Text(text) if !self.format.is_binary() => {
                BASE64.decode(self.payload(text)?.as_bytes()).ok()
            }
            _ => None,
        }
    }

    /// Returns the audio of an agent's message if the provider would play it.
    fn payload<'a>(&self, text: &'a str) -> Option<Cow<'a, str>> {
        let message: AgentJson<'_> = serde_json::from_str(text).ok()?;
        let is_own = |stream: &Option<Cow<'_, str>>| stream.as_deref() == Some(&self.stream);
        let plays = match (self.format.provider, &*message.event) {
            (Provider::Twilio | Provider::SignalWire, "media") => is_own(&message.twilio_stream),
            (Provider::Exotel, "media") => is_own(&message.exotel_stream),
            (Provider::Telnyx, "media") | (Provider::Plivo, "media" | "playAudio") => true,
            _ => false,
        };
        message.media.filter(|_| plays).map(|media| media.payload)
    }
}

/// Escapes a text for a JSON string.
fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Fills in the names of the stream.
fn fill(text: &str, call: &str, stream: &str) -> String {
    let text = text.replace("$account", "AC00000000000000000000000000000000");
    text.replace("$stream", stream).replace("$call", call)
}

fn template(format: MediaFormat, call: &str, stream: &str) -> Template {
    let text = texts(format.provider).media;
    if text.is_empty() {
        return Template::Binary;
    }
    let text = fill(text, call, stream);
    let slots = [
        ("$sequence", Slot::Sequence),
        ("$chunk", Slot::Chunk),
        ("$time", Slot::Time),
        ("$audio", Slot::Audio),
    ];
    let (mut parts, mut rest) = (Vec::new(), text.as_str());
    let next = |rest: &str| {
        let found = slots.iter().filter_map(|&(word, slot)| Some((rest.find(word)?, word, slot)));
        found.min_by_key(|(at, ..)| *at)
    };
    while let Some((at, word, slot)) = next(rest) {
        parts.push((rest[..at].to_owned(), slot));
        rest = &rest[at + word.len()..];
    }
    Template::Text { parts, rest: rest.to_owned() }
}

fn push_number(text: &mut String, number: u64) {
    use std::fmt::Write;
    let _ = write!(text, "{number}");
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn messages(provider: Provider) -> ProviderMessages {
        ProviderMessages::new(provider.into(), "CA1")
    }

    fn json(message: &Message) -> Value {
        match message {
            Message::Text(text) => serde_json::from_str(text).unwrap(),
            other => panic!("not a text: {other:?}"),
        }
    }

    #[test]
    fn texts_are_complete_json_for_every_provider() {
        for provider in Provider::ALL {
            let mut messages = messages(provider);
            let mut all = messages.opening();
            all.extend([messages.media(Duration::ZERO), messages.media(Duration::ZERO)]);
            all.extend(messages.stop());
            for text in all.iter().filter_map(|message| message.to_text().ok()) {
                assert!(!text.contains('$'), "{text}");
                assert!(text.is_empty() || serde_json::from_str::<Value>(text).is_ok(), "{text}");
            }
            let opening = messages.opening();
            let last = opening.last().unwrap().to_text().unwrap();
            assert!(last.contains(r#":"CA1""#), "{last}");
        }
    }

    #[test]
    fn numbers_of_a_stream_count_up() {
        let mut twilio = messages(Provider::Twilio);
        twilio.media(Duration::ZERO);
        let second = json(&twilio.media(Duration::ZERO));
        assert_eq!(
            (&second["sequenceNumber"], &second["media"]["chunk"], &second["media"]["timestamp"]),
            (&json!("3"), &json!("2"), &json!("20"))
        );
        assert_eq!(json(&twilio.stop().unwrap())["sequenceNumber"], "4");
        let mut plivo = messages(Provider::Plivo);
        let first = json(&plivo.media(Duration::ZERO));
        assert_eq!((&first["sequenceNumber"], &first["media"]["chunk"]), (&json!(2), &json!(1)));
    }

    #[test]
    fn media_has_the_size_of_the_providers_frames() {
        for provider in Provider::ALL {
            let mut messages = messages(provider);
            let format = MediaFormat::from(provider);
            let audio = match messages.media(Duration::ZERO) {
                Message::Binary(audio) => audio.to_vec(),
                text => {
                    let payload = json(&text)["media"]["payload"].as_str().unwrap().to_owned();
                    BASE64.decode(payload.as_bytes()).unwrap()
                }
            };
            assert_eq!(audio.len(), format.silence().len(), "{provider}");
            assert_eq!(audio[MARKER_LEN..], format.silence()[MARKER_LEN..], "{provider}");
        }
    }

    /// The agent's form of outbound audio, as documented by each provider.
    fn played(provider: Provider, messages: &ProviderMessages, media: &Message) -> Message {
        let payload = || json(media)["media"]["payload"].clone();
        let stream = &messages.stream;
        let play = match provider {
            Provider::Vonage | Provider::Jambonz => return media.clone(),
            Provider::Twilio | Provider::SignalWire => {
                json!({"event": "media", "streamSid": stream, "media": {"payload": payload()}})
            }
            Provider::Exotel => {
                json!({"event": "media", "stream_sid": stream, "media": {"payload": payload()}})
            }
            Provider::Telnyx => json!({"event": "media", "media": {"payload": payload()}}),
            Provider::Plivo => json!({"event": "playAudio", "media":
                {"contentType": "audio/x-mulaw", "sampleRate": 8000, "payload": payload()}}),
        };
        Message::text(play.to_string())
    }

    #[test]
    fn an_echo_is_recognised_in_every_format() {
        for provider in Provider::ALL {
            let mut messages = messages(provider);
            messages.media(Duration::ZERO);
            let sent = Duration::from_micros(123_456);
            let media = messages.media(sent);
            let marker = Marker { call: call_tag("CA1"), sequence: 1, sent };
            let echo = played(provider, &messages, &media);
            assert_eq!(messages.read(&echo), AgentMessage::Echo(marker), "{provider}");
            assert_eq!(messages.read(&media), AgentMessage::Echo(marker), "{provider}: unchanged");
            for opening in messages.opening() {
                assert_eq!(messages.read(&opening), AgentMessage::Other, "{provider}");
            }
        }
    }

    #[test]
    fn audio_of_a_clip_comes_back_as_it_was_sent() {
        for provider in Provider::ALL {
            let mut messages = messages(provider);
            let len = MediaFormat::from(provider).silence().len();
            let audio: Vec<u8> = (0..len).map(|it| it as u8).collect();
            let media = messages.media_with(&audio);
            let echo = played(provider, &messages, &media);
            assert_eq!(messages.audio(&echo), Some(audio), "{provider}");
            for opening in messages.opening() {
                assert_eq!(messages.audio(&opening), None, "{provider}");
            }
        }
    }

    #[test]
    fn audio_that_the_provider_would_not_play_is_no_echo() {
        let [mut one, other] = [messages(Provider::Twilio), messages(Provider::Twilio)];
        let media = one.media(Duration::ZERO);
        let echo = played(Provider::Twilio, &one, &media);
        assert_eq!(other.read(&echo), AgentMessage::Other, "another stream");
        let telnyx = played(Provider::Telnyx, &one, &media);
        assert_eq!(one.read(&telnyx), AgentMessage::Other, "no stream");
        assert_eq!(one.read(&Message::binary(vec![0; 160])), AgentMessage::Other);
        let own =
            json!({"event": "media", "streamSid": one.stream, "media": {"payload": "/////w=="}});
        assert_eq!(one.read(&Message::text(own.to_string())), AgentMessage::Audio);
        for text in ["", "hello", r#"{"event":"clear","streamSid":"MZ1"}"#] {
            assert_eq!(one.read(&Message::text(text)), AgentMessage::Other, "{text}");
        }
    }
}
