//! Messages of a provider that the gateway understands: the opening messages, which a second
//! agent needs as the first did, and the end of the stream. They are recognised by content,
//! not by the provider's name.

use serde::Deserialize;

use crate::frame::{Header, Opcode, Sender, apply_mask};

/// Most bytes of opening messages that are kept.
pub const MAX_OPENING: usize = 16 << 10;
/// Text messages longer than this are not looked at for the end of the stream: media and
/// custom messages are longer, end messages much shorter.
const MAX_STOP: usize = 1 << 10;

/// Role of a text message of a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// Comes before `start`.
    Prologue,
    /// Ends the opening: `start`, or the only message before binary audio.
    Start,
    /// The stream has ended; the provider closes next.
    Stop,
    Other,
}

/// The provider of a stream, as far as its opening shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum Dialect {
    /// Not seen yet.
    #[default]
    Unknown,
    Twilio,
    SignalWire,
    Telnyx,
    Plivo,
    Exotel,
    Vonage,
    Jambonz,
    /// No provider that is known.
    Other,
}

impl Dialect {
    const ALL: [Self; 9] = [
        Self::Unknown,
        Self::Twilio,
        Self::SignalWire,
        Self::Telnyx,
        Self::Plivo,
        Self::Exotel,
        Self::Vonage,
        Self::Jambonz,
        Self::Other,
    ];

    pub(crate) fn from_number(number: u8) -> Self {
        Self::ALL.get(number as usize).copied().unwrap_or_default()
    }

    pub(crate) fn from_name(name: &str) -> Self {
        Self::ALL.into_iter().find(|known| known.as_str() == name).unwrap_or(Self::Other)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Twilio => "twilio",
            Self::SignalWire => "signalwire",
            Self::Telnyx => "telnyx",
            Self::Plivo => "plivo",
            Self::Exotel => "exotel",
            Self::Vonage => "vonage",
            Self::Jambonz => "jambonz",
            Self::Other => "other",
        }
    }

    /// Recognises the provider by the names of the fields in its last opening message.
    fn of(text: &[u8]) -> Self {
        let Ok(message) = serde_json::from_slice::<Start>(text) else { return Self::Other };
        match (message.event.as_deref(), message.start) {
            (Some("websocket:connected"), _) => Self::Vonage,
            (Some("start"), Some(start)) if start.call_sid_snake.is_some() => Self::Exotel,
            (Some("start"), Some(start)) if start.call_control_id.is_some() => Self::Telnyx,
            (Some("start"), Some(start)) if start.call_id.is_some() => Self::Plivo,
            (Some("start"), Some(start)) if start.call_sid.is_some() => {
                // Twilio's ids of streams begin with MZ; SignalWire's are UUIDs.
                let id = message.stream_sid.or(start.stream_sid).unwrap_or_default();
                if id.starts_with("MZ") { Self::Twilio } else { Self::SignalWire }
            }
            (None, _) if message.call_sid.is_some() => Self::Jambonz,
            _ => Self::Other,
        }
    }
}

/// Fields of opening messages by which providers differ.
#[derive(Deserialize)]
struct Start {
    event: Option<String>,
    #[serde(rename = "streamSid")]
    stream_sid: Option<String>,
    #[serde(rename = "streamId")]
    stream_id: Option<String>,
    #[serde(rename = "stream_sid")]
    stream_sid_snake: Option<String>,
    #[serde(rename = "callSid")]
    call_sid: Option<String>,
    start: Option<StartFields>,
}

#[derive(Deserialize)]
struct StartFields {
    #[serde(rename = "streamSid")]
    stream_sid: Option<String>,
    #[serde(rename = "streamId")]
    stream_id: Option<String>,
    #[serde(rename = "stream_sid")]
    stream_sid_snake: Option<String>,
    #[serde(rename = "callSid")]
    call_sid: Option<String>,
    #[serde(rename = "callId")]
    call_id: Option<String>,
    #[serde(rename = "call_sid")]
    call_sid_snake: Option<String>,
    call_control_id: Option<String>,
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    event: Option<std::borrow::Cow<'a, str>>,
}

/// Classifies a text message.
pub fn classify(text: &[u8]) -> Message {
    let Ok(message) = serde_json::from_slice::<Event<'_>>(text) else {
        // No JSON: an unknown provider with a greeting.
        return Message::Start;
    };
    match message.event.as_deref() {
        Some("connected") => Message::Prologue,
        Some("stop") => Message::Stop,
        Some("media" | "dtmf" | "mark" | "playedStream" | "clearedAudio") => Message::Other,
        // `start` (Twilio and its relatives, Plivo, Exotel), `websocket:connected` (Vonage),
        // or an object without an event (jambonz).
        _ => Message::Start,
    }
}

/// Collects opening messages as the frames in which they came.
#[derive(Debug, Default)]
pub struct Opening {
    frames: Vec<u8>,
    is_complete: bool,
    dialect: Dialect,
}

impl Opening {
    /// The frames so far, for replay.
    pub fn frames(&self) -> &[u8] {
        &self.frames
    }

    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// The message that makes the provider drop the audio that it has not played yet; `None` before
    /// the opening is complete, and for providers without such a message.
    pub(crate) fn clear_message(&self) -> Option<String> {
        let stream = || self.stream_id();
        Some(match self.dialect {
            Dialect::Twilio | Dialect::SignalWire => {
                format!(r#"{{"event":"clear","streamSid":{}}}"#, stream()?)
            }
            Dialect::Exotel => format!(r#"{{"event":"clear","stream_sid":{}}}"#, stream()?),
            Dialect::Plivo => format!(r#"{{"event":"clearAudio","streamId":{}}}"#, stream()?),
            Dialect::Telnyx => r#"{"event":"clear"}"#.into(),
            Dialect::Vonage => r#"{"action":"clear"}"#.into(),
            Dialect::Jambonz => r#"{"type":"killAudio"}"#.into(),
            Dialect::Unknown | Dialect::Other => return None,
        })
    }

    /// The provider's id of the stream, as a JSON string.
    fn stream_id(&self) -> Option<String> {
        let text = self.last_message()?;
        let message: Start = serde_json::from_slice(&text).ok()?;
        let own = message.stream_sid.or(message.stream_id).or(message.stream_sid_snake);
        let id = own.or_else(|| {
            let start = message.start?;
            start.stream_sid.or(start.stream_id).or(start.stream_sid_snake)
        })?;
        serde_json::to_string(&id).ok()
    }

    /// The last opening message: the `start`, or the only one.
    pub(crate) fn last_message(&self) -> Option<Vec<u8>> {
        let (mut rest, mut last) = (self.frames.as_slice(), None);
        while let Ok(Some(header)) = Header::parse(rest, Sender::Client) {
            let (frame, others) = rest.split_at_checked(header.frame_len() as usize)?;
            last = Some((header, frame));
            rest = others;
        }
        let (header, frame) = last?;
        let mut text = frame[header.payload()].to_vec();
        apply_mask(&mut text, header.mask.unwrap_or_default());
        Some(text)
    }

    /// The provider; unknown while the opening is not complete.
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    fn complete(&mut self) {
        self.is_complete = true;
        self.frames.shrink_to_fit();
        if self.dialect == Dialect::Unknown {
            self.dialect = Dialect::Other;
        }
    }

    /// Ends an opening whose next frame is too large to be kept.
    pub(crate) fn skip_large(&mut self) {
        if !self.is_complete {
            self.complete();
        }
    }

    /// Looks at a data frame of the provider; returns whether it ends the stream.
    pub fn inspect(&mut self, header: &Header, frame: &[u8]) -> bool {
        if self.is_complete {
            return is_stop(header, frame);
        }
        match header.opcode {
            Opcode::Text if header.is_final => {
                let mut text = frame[header.payload()].to_vec();
                apply_mask(&mut text, header.mask.unwrap_or_default());
                let message = classify(&text);
                if self.frames.len() + frame.len() > MAX_OPENING {
                    self.complete();
                } else if matches!(message, Message::Prologue | Message::Start) {
                    self.frames.extend_from_slice(frame);
                }
                if message == Message::Start {
                    self.dialect = Dialect::of(&text);
                }
                if message != Message::Prologue {
                    self.complete();
                }
                message == Message::Stop
            }
            Opcode::Close | Opcode::Ping | Opcode::Pong => false,
            // Audio without an opening message, or a fragmented message: nothing to replay.
            _ => {
                self.complete();
                false
            }
        }
    }
}

/// Whether a frame is the provider's end message. The audio of a media message is base64 and
/// contains no quotation marks, so that a search for the quoted word is enough to rule it out.
fn is_stop(header: &Header, frame: &[u8]) -> bool {
    if header.opcode != Opcode::Text || !header.is_final || header.payload_len > MAX_STOP as u64 {
        return false;
    }
    let payload = &frame[header.payload()];
    let mut text = [0; MAX_STOP];
    let text = &mut text[..payload.len()];
    text.copy_from_slice(payload);
    apply_mask(text, header.mask.unwrap_or_default());
    memchr::memmem::find(text, b"\"stop\"").is_some() && classify(text) == Message::Stop
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::write_frame;

    fn inspect(opening: &mut Opening, opcode: Opcode, payload: &str) -> bool {
        let mut frame = Vec::new();
        write_frame(&mut frame, opcode, payload.as_bytes(), Some([9, 8, 7, 6]));
        let header = Header::parse(&frame, Sender::Client).unwrap().unwrap();
        opening.inspect(&header, &frame)
    }

    #[test]
    fn openings_of_all_providers_are_recognised() {
        let twilio =
            [r#"{"event":"connected","protocol":"Call"}"#, r#"{"event":"start","start":{}}"#];
        let plivo = [r#"{"sequenceNumber":0,"event":"start","start":{"callId":"c"}}"#];
        let vonage = [r#"{"event":"websocket:connected","content-type":"audio/l16;rate=16000"}"#];
        let jambonz = [r#"{"callSid":"c","sampleRate":8000}"#];
        for messages in [&twilio[..], &plivo, &vonage, &jambonz] {
            let mut opening = Opening::default();
            for message in messages {
                assert!(!opening.is_complete());
                assert!(!inspect(&mut opening, Opcode::Text, message));
            }
            assert!(opening.is_complete(), "{messages:?}");
            let len: usize = messages.iter().map(|it| it.len() + 6).sum();
            assert_eq!(opening.frames().len(), len);
            inspect(&mut opening, Opcode::Text, r#"{"event":"media"}"#);
            assert_eq!(opening.frames().len(), len);
        }
    }

    #[test]
    fn the_clear_message_is_that_of_the_provider() {
        for (start, expected) in [
            (
                r#"{"event":"start","streamSid":"MZ1","start":{"callSid":"CA1"}}"#,
                Some(r#"{"event":"clear","streamSid":"MZ1"}"#),
            ),
            (
                r#"{"event":"start","start":{"streamSid":"7d1","callSid":"c"}}"#,
                Some(r#"{"event":"clear","streamSid":"7d1"}"#),
            ),
            (
                r#"{"event":"start","start":{"callId":"c","streamId":"s\"1"}}"#,
                Some(r#"{"event":"clearAudio","streamId":"s\"1"}"#),
            ),
            (
                r#"{"event":"start","stream_sid":"s2","start":{"call_sid":"c"}}"#,
                Some(r#"{"event":"clear","stream_sid":"s2"}"#),
            ),
            (
                r#"{"event":"start","stream_id":"s","start":{"call_control_id":"v3"}}"#,
                Some(r#"{"event":"clear"}"#),
            ),
            (
                r#"{"event":"websocket:connected","content-type":"audio/l16;rate=16000"}"#,
                Some(r#"{"action":"clear"}"#),
            ),
            (r#"{"callSid":"c","sampleRate":8000}"#, Some(r#"{"type":"killAudio"}"#)),
            (r#"{"event":"start","start":{"callSid":"c"}}"#, None),
            (r#"{"hello":1}"#, None),
        ] {
            let mut opening = Opening::default();
            inspect(&mut opening, Opcode::Text, r#"{"event":"connected"}"#);
            assert_eq!(opening.clear_message(), None);
            inspect(&mut opening, Opcode::Text, start);
            assert_eq!(opening.clear_message().as_deref(), expected, "{start}");
        }
    }

    #[test]
    fn the_end_message_is_recognised_and_media_is_not() {
        let mut opening = Opening::default();
        inspect(&mut opening, Opcode::Text, r#"{"event":"start"}"#);
        for (text, is_stop) in [
            (r#"{"event":"stop","streamSid":"MZ1"}"#, true),
            (r#"{"sequence_number":3,"event":"stop","stop":{"reason":"callended"}}"#, true),
            (r#"{"event":"media","media":{"payload":"stop"}}"#, false),
            (r#"{"event":"dtmf","digit":"stop"}"#, false),
            (r#"{"event": "stop"#, false),
        ] {
            assert_eq!(inspect(&mut opening, Opcode::Text, text), is_stop, "{text}");
        }
    }

    #[test]
    fn openings_are_bounded() {
        let mut opening = Opening::default();
        let long = format!(r#"{{"event":"connected","x":"{}"}}"#, "a".repeat(9_000));
        inspect(&mut opening, Opcode::Text, &long);
        inspect(&mut opening, Opcode::Text, &long);
        assert!(opening.is_complete());
        assert!(opening.frames().len() <= MAX_OPENING);
    }

    #[test]
    fn a_frame_that_is_too_large_ends_the_opening() {
        let (connected, start) = (r#"{"event":"connected"}"#, r#"{"event":"start","start":{}}"#);
        let mut opening = Opening::default();
        inspect(&mut opening, Opcode::Text, connected);
        opening.skip_large();
        assert!(opening.is_complete());
        inspect(&mut opening, Opcode::Text, start);
        assert_eq!(opening.last_message().as_deref(), Some(connected.as_bytes()));
        let mut opened = Opening::default();
        inspect(&mut opened, Opcode::Text, start);
        opened.skip_large();
        assert_eq!(opened.last_message().as_deref(), Some(start.as_bytes()));
    }
}
