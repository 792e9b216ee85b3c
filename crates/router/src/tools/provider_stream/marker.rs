//! Mark at the beginning of a frame's audio. An echo carries it back, so that the receiver can
//! tell the call and the position of each frame, and its round-trip time.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use data_encoding::BASE64;

/// Distinguishes marked audio from an agent's own.
const MAGIC: [u8; 4] = *b"\xffSRm";
/// Size in bytes. A multiple of three: its base64 text is independent of the audio after it.
pub(super) const MARKER_LEN: usize = 24;
/// Size as base64 text.
pub(super) const MARKER_TEXT_LEN: usize = MARKER_LEN / 3 * 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Marker {
    /// Identifies the call; see [`call_tag`].
    pub(super) call: u64,
    /// Number of the frame in its stream, from 0.
    pub(super) sequence: u32,
    /// When the frame was sent, since the beginning of its stream.
    pub(super) sent: Duration,
}

/// A number that identifies a call id.
pub(super) fn call_tag(call: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    call.hash(&mut hasher);
    hasher.finish()
}

impl Marker {
    pub(super) fn to_bytes(self) -> [u8; MARKER_LEN] {
        let mut bytes = [0; MARKER_LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.sequence.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.call.to_be_bytes());
        bytes[16..].copy_from_slice(&(self.sent.as_micros() as u64).to_be_bytes());
        bytes
    }

    /// Appends the marker as base64.
    pub(super) fn write_base64(self, out: &mut String) {
        BASE64.encode_append(&self.to_bytes(), out);
    }

    /// Reads the marker of a frame's audio.
    pub(super) fn from_audio(audio: &[u8]) -> Option<Self> {
        let (magic, rest) = audio.get(..MARKER_LEN)?.split_first_chunk::<4>()?;
        let (sequence, rest) = rest.split_first_chunk::<4>()?;
        let (call, sent) = rest.split_first_chunk::<8>()?;
        (*magic == MAGIC).then_some(Self {
            call: u64::from_be_bytes(*call),
            sequence: u32::from_be_bytes(*sequence),
            sent: Duration::from_micros(u64::from_be_bytes(sent.try_into().ok()?)),
        })
    }

    /// Reads the marker of a frame's audio in base64.
    pub(super) fn from_base64(text: &str) -> Option<Self> {
        let mut bytes = [0; MARKER_LEN];
        let text = text.as_bytes().get(..MARKER_TEXT_LEN)?;
        BASE64.decode_mut(text, &mut bytes).ok()?;
        Self::from_audio(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_read_back_from_audio_and_from_base64() {
        let sent = Duration::from_micros(1_234_567);
        let marker = Marker { call: call_tag("CA1"), sequence: 70_000, sent };
        let mut audio = marker.to_bytes().to_vec();
        audio.extend([0xff; 136]);
        assert_eq!(Marker::from_audio(&audio), Some(marker));
        let mut text = String::new();
        marker.write_base64(&mut text);
        assert_eq!(text.len(), MARKER_TEXT_LEN);
        assert!(BASE64.encode(&audio).starts_with(&text));
        assert_eq!(Marker::from_base64(&BASE64.encode(&audio)), Some(marker));
    }

    #[test]
    fn other_audio_has_no_marker() {
        assert_eq!(Marker::from_audio(&[0xff; 160]), None);
        assert_eq!(Marker::from_audio(&[]), None);
        for text in ["", "AAAA", &"/".repeat(216), &"é".repeat(50), &"=".repeat(40)] {
            assert_eq!(Marker::from_base64(text), None, "{text}");
        }
    }
}
