//! The messages of a call in the shape of Twilio's: `connected`, `start`, then media frames that
//! carry their call and the time at which they were sent.

use media::frame::{Opcode, write_frame};

/// Payload of a media frame.
pub(crate) const MEDIA_LEN: usize = 382;
/// A media message up to its audio.
const BEFORE_AUDIO: &str = r#"{"event":"media","sequenceNumber":"1001","media":{"track":"inbound","chunk":"1000","timestamp":"19980","payload":""#;
/// Base64 of 160 bytes of µ-law audio, which are 20 ms.
const AUDIO_LEN: usize = 216;
/// Any mask but zero, which a relay could treat as a special case.
pub(crate) const MASK: [u8; 4] = [0x37, 0xFA, 0x21, 0x3D];
/// Hexadecimal digits of the time, then of the call.
const TIME_DIGITS: usize = 16;
const CALL_DIGITS: usize = 8;
/// Headers of media frames: two bytes, two of length, and the mask of a client.
const SERVER_HEADER: usize = 4;
const CLIENT_HEADER: usize = 8;
/// A media frame as the client receives it.
pub(crate) const ECHO_LEN: usize = SERVER_HEADER + MEDIA_LEN;

/// `connected` and `start` of a call, masked.
pub(crate) fn opening(call: usize) -> [Vec<u8>; 2] {
    let connected = r#"{"event":"connected","protocol":"Call","version":"1.0.0"}"#.to_owned();
    let start = format!(
        r#"{{"event":"start","sequenceNumber":"1","start":{{"accountSid":"AC{call:032x}","streamSid":"MZ{call:032x}","callSid":"CA{call:032x}","tracks":["inbound"],"mediaFormat":{{"encoding":"audio/x-mulaw","sampleRate":8000,"channels":1}},"customParameters":{{}}}},"streamSid":"MZ{call:032x}"}}"#
    );
    [connected, start].map(|text| {
        let mut frame = Vec::new();
        write_frame(&mut frame, Opcode::Text, text.as_bytes(), Some(MASK));
        frame
    })
}

/// A serialised media frame of one call; only the time in it changes.
pub(crate) struct MediaFrame(Vec<u8>);

impl MediaFrame {
    pub(crate) fn new(call: usize) -> Self {
        let audio = format!("{:0>TIME_DIGITS$}{call:0>CALL_DIGITS$x}{:/<1$}", 0, AUDIO_LEN);
        let audio = &audio[..AUDIO_LEN];
        let text = format!(r#"{BEFORE_AUDIO}{audio}"}},"streamSid":"MZ{call:032x}"}}"#);
        assert_eq!(text.len(), MEDIA_LEN);
        let mut bytes = Vec::new();
        write_frame(&mut bytes, Opcode::Text, text.as_bytes(), Some(MASK));
        Self(bytes)
    }

    /// The frame with the time at which it is sent.
    pub(crate) fn at(&mut self, nanos: u64) -> &[u8] {
        let digits = &mut self.0[CLIENT_HEADER + BEFORE_AUDIO.len()..][..TIME_DIGITS];
        for (index, digit) in digits.iter_mut().enumerate() {
            let value = (nanos >> (4 * (TIME_DIGITS - 1 - index))) & 0xF;
            let plain = b"0123456789abcdef"[value as usize];
            *digit = plain ^ MASK[(BEFORE_AUDIO.len() + index) % MASK.len()];
        }
        &self.0
    }
}

/// Call and time of an echoed media frame, or `None` if the frame is another one.
pub(crate) fn read_echo(frame: &[u8]) -> Option<(usize, u64)> {
    let (header, payload) = frame.split_at_checked(SERVER_HEADER)?;
    let [0x81, 126, high, low] = *header else {
        return None;
    };
    if usize::from(u16::from_be_bytes([high, low])) != MEDIA_LEN {
        return None;
    }
    let number = |at: usize, digits: usize| {
        let text = std::str::from_utf8(payload.get(at..at + digits)?).ok()?;
        u64::from_str_radix(text, 16).ok()
    };
    let time = number(BEFORE_AUDIO.len(), TIME_DIGITS)?;
    Some((number(BEFORE_AUDIO.len() + TIME_DIGITS, CALL_DIGITS)? as usize, time))
}
