//! WebSocket frame headers (RFC 6455, section 5). The relay forwards frames as they are, so it
//! needs boundaries, opcodes and masks, but decodes no payload except control frames and the
//! few text messages that it inspects.

use std::ops::Range;

/// Longest header: two bytes, eight of length, four of mask.
pub const MAX_HEADER: usize = 14;
/// Longest payload of a control frame.
pub const MAX_CONTROL_PAYLOAD: usize = 125;

/// The endpoint that sent a frame. Clients mask their frames, servers do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sender {
    Client,
    Server,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opcode {
    Continuation,
    Text,
    Binary,
    Close,
    Ping,
    Pong,
}

impl Opcode {
    fn parse(bits: u8) -> Option<Self> {
        Some(match bits {
            0x0 => Self::Continuation,
            0x1 => Self::Text,
            0x2 => Self::Binary,
            0x8 => Self::Close,
            0x9 => Self::Ping,
            0xA => Self::Pong,
            _ => return None,
        })
    }

    fn bits(self) -> u8 {
        match self {
            Self::Continuation => 0x0,
            Self::Text => 0x1,
            Self::Binary => 0x2,
            Self::Close => 0x8,
            Self::Ping => 0x9,
            Self::Pong => 0xA,
        }
    }

    pub fn is_control(self) -> bool {
        matches!(self, Self::Close | Self::Ping | Self::Pong)
    }
}

/// A violation of RFC 6455 that ends the connection with the close code 1002, or 1009 for
/// frames above the size limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("reserved bits are set")]
    ReservedBits,
    #[error("unknown opcode")]
    UnknownOpcode,
    #[error("frame of a client is not masked")]
    Unmasked,
    #[error("frame of a server is masked")]
    Masked,
    #[error("control frame is fragmented")]
    FragmentedControl,
    #[error("control frame is longer than 125 bytes")]
    LongControl,
    #[error("close frame has only half of a code")]
    HalfCloseCode,
    #[error("length has its highest bit set")]
    NegativeLength,
    #[error("continuation without a message to continue")]
    UnexpectedContinuation,
    #[error("new message inside a fragmented one")]
    InterruptedMessage,
    #[error("frame is larger than the limit")]
    TooLarge,
}

impl FrameError {
    pub fn close_code(self) -> u16 {
        if self == Self::TooLarge { 1009 } else { 1002 }
    }
}

/// A parsed frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub is_final: bool,
    pub opcode: Opcode,
    pub mask: Option<[u8; 4]>,
    pub payload_len: u64,
    /// Bytes of the header itself.
    pub len: usize,
}

impl Header {
    /// Parses the header at the start of `bytes`; `None` if more bytes are needed. Checks that
    /// need only the first two bytes are made as soon as those are there.
    pub fn parse(bytes: &[u8], sender: Sender) -> Result<Option<Self>, FrameError> {
        let [first, second, rest @ ..] = bytes else {
            return Ok(None);
        };
        if first & 0x70 != 0 {
            return Err(FrameError::ReservedBits);
        }
        let opcode = Opcode::parse(first & 0x0F).ok_or(FrameError::UnknownOpcode)?;
        let (is_final, is_masked) = (first & 0x80 != 0, second & 0x80 != 0);
        match (sender, is_masked) {
            (Sender::Client, false) => return Err(FrameError::Unmasked),
            (Sender::Server, true) => return Err(FrameError::Masked),
            _ => {}
        }
        let short_len = second & 0x7F;
        if opcode.is_control() {
            if !is_final {
                return Err(FrameError::FragmentedControl);
            }
            if usize::from(short_len) > MAX_CONTROL_PAYLOAD {
                return Err(FrameError::LongControl);
            }
            if opcode == Opcode::Close && short_len == 1 {
                return Err(FrameError::HalfCloseCode);
            }
        }
        let (payload_len, rest, length_bytes) = match short_len {
            126 => match rest.split_first_chunk::<2>() {
                Some((length, rest)) => (u64::from(u16::from_be_bytes(*length)), rest, 2),
                None => return Ok(None),
            },
            127 => match rest.split_first_chunk::<8>() {
                Some((length, rest)) => (u64::from_be_bytes(*length), rest, 8),
                None => return Ok(None),
            },
            short => (u64::from(short), rest, 0),
        };
        if payload_len >> 63 != 0 {
            return Err(FrameError::NegativeLength);
        }
        let mask = match is_masked {
            false => None,
            true => match rest.first_chunk::<4>() {
                Some(mask) => Some(*mask),
                None => return Ok(None),
            },
        };
        let len = 2 + length_bytes + if is_masked { 4 } else { 0 };
        Ok(Some(Self { is_final, opcode, mask, payload_len, len }))
    }

    /// Length of the whole frame.
    pub fn frame_len(&self) -> u64 {
        self.len as u64 + self.payload_len
    }

    /// Where the payload lies in the bytes of a complete frame.
    pub fn payload(&self) -> Range<usize> {
        self.len..self.len + self.payload_len as usize
    }
}

/// Tracks fragmented messages: a continuation needs an open message, and a new message must
/// not begin inside one. Control frames may come between fragments.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct MessageState {
    is_open: bool,
}

impl MessageState {
    /// Accounts for a frame.
    pub fn advance(&mut self, header: &Header) -> Result<(), FrameError> {
        if header.opcode.is_control() {
            return Ok(());
        }
        match (header.opcode == Opcode::Continuation, self.is_open) {
            (true, false) => return Err(FrameError::UnexpectedContinuation),
            (false, true) => return Err(FrameError::InterruptedMessage),
            _ => {}
        }
        self.is_open = !header.is_final;
        Ok(())
    }

    /// Whether a fragmented message is open.
    pub fn is_open(self) -> bool {
        self.is_open
    }
}

/// Applies a mask (its own inverse) to a payload.
pub fn apply_mask(payload: &mut [u8], mask: [u8; 4]) {
    let mut chunks = payload.chunks_exact_mut(4);
    for chunk in &mut chunks {
        for (byte, key) in chunk.iter_mut().zip(mask) {
            *byte ^= key;
        }
    }
    for (byte, key) in chunks.into_remainder().iter_mut().zip(mask) {
        *byte ^= key;
    }
}

/// Appends a frame of at most 65,535 bytes to `out`.
pub fn write_frame(out: &mut Vec<u8>, opcode: Opcode, payload: &[u8], mask: Option<[u8; 4]>) {
    out.push(0x80 | opcode.bits());
    let masked = if mask.is_some() { 0x80 } else { 0 };
    match payload.len() {
        len @ 0..=125 => out.push(masked | len as u8),
        len => {
            out.push(masked | 126);
            let len = u16::try_from(len).expect("own frames are short");
            out.extend_from_slice(&len.to_be_bytes());
        }
    }
    out.extend_from_slice(mask.as_ref().map_or(&[][..], |mask| mask));
    let begin = out.len();
    out.extend_from_slice(payload);
    if let Some(mask) = mask {
        apply_mask(&mut out[begin..], mask);
    }
}

/// Appends a close frame with a code and a short reason.
pub fn write_close(out: &mut Vec<u8>, code: u16, reason: &str, mask: Option<[u8; 4]>) {
    let mut payload = Vec::with_capacity(2 + reason.len());
    payload.extend_from_slice(&code.to_be_bytes());
    payload.extend_from_slice(reason.as_bytes());
    payload.truncate(MAX_CONTROL_PAYLOAD);
    write_frame(out, Opcode::Close, &payload, mask);
}

/// Close code of a frame without one (RFC 6455, 7.1.5).
pub const NO_STATUS: u16 = 1005;

/// The code in the (unmasked) payload of a close frame.
pub fn close_code(payload: &[u8]) -> u16 {
    payload.first_chunk::<2>().map_or(NO_STATUS, |code| u16::from_be_bytes(*code))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8], sender: Sender) -> Result<Option<Header>, FrameError> {
        Header::parse(bytes, sender)
    }

    #[test]
    fn headers_of_all_lengths_are_parsed() {
        for (len, header_len) in [(0, 2), (125, 2), (126, 4), (65_535, 4), (65_536, 10)] {
            let mut frame = vec![0x82];
            match len {
                0..=125 => frame.push(len as u8),
                126..=65_535 => {
                    frame.push(126);
                    frame.extend((len as u16).to_be_bytes());
                }
                _ => {
                    frame.push(127);
                    frame.extend((len as u64).to_be_bytes());
                }
            }
            let header = parse(&frame, Sender::Server).unwrap().unwrap();
            assert_eq!((header.len, header.payload_len), (header_len, len as u64));
            assert_eq!((header.opcode, header.is_final), (Opcode::Binary, true));
            for short in 0..frame.len() {
                assert_eq!(parse(&frame[..short], Sender::Server), Ok(None), "{short} bytes");
            }
        }
    }

    #[test]
    fn violations_are_named() {
        let cases: [(&[u8], Sender, FrameError); 9] = [
            (&[0xC1, 0x80], Sender::Client, FrameError::ReservedBits),
            (&[0x83, 0x80], Sender::Client, FrameError::UnknownOpcode),
            (&[0x8B, 0x80], Sender::Client, FrameError::UnknownOpcode),
            (&[0x81, 0x01], Sender::Client, FrameError::Unmasked),
            (&[0x81, 0x81], Sender::Server, FrameError::Masked),
            (&[0x09, 0x80], Sender::Client, FrameError::FragmentedControl),
            (&[0x89, 0xFE], Sender::Client, FrameError::LongControl),
            (&[0x88, 0x01], Sender::Server, FrameError::HalfCloseCode),
            (&[0x82, 127, 0x80, 0, 0, 0, 0, 0, 0, 0], Sender::Server, FrameError::NegativeLength),
        ];
        for (bytes, sender, error) in cases {
            assert_eq!(parse(bytes, sender), Err(error), "{bytes:x?}");
        }
    }

    #[test]
    fn fragments_must_be_in_order() {
        let frame =
            |opcode, is_final| Header { is_final, opcode, mask: None, payload_len: 0, len: 2 };
        let mut state = MessageState::default();
        let unexpected = Err(FrameError::UnexpectedContinuation);
        assert_eq!(state.advance(&frame(Opcode::Continuation, true)), unexpected);
        state.advance(&frame(Opcode::Text, false)).unwrap();
        state.advance(&frame(Opcode::Ping, true)).unwrap();
        let interrupted = Err(FrameError::InterruptedMessage);
        assert_eq!(state.advance(&frame(Opcode::Text, true)), interrupted);
        state.advance(&frame(Opcode::Continuation, true)).unwrap();
        assert!(!state.is_open());
    }

    #[test]
    fn written_frames_are_parsed_again() {
        for len in [0, 1, 125, 126, 300, 65_535] {
            for mask in [None, Some([1, 2, 3, 4])] {
                let payload: Vec<u8> = (0..len).map(|byte| byte as u8).collect();
                let mut frame = Vec::new();
                write_frame(&mut frame, Opcode::Text, &payload, mask);
                let sender = if mask.is_some() { Sender::Client } else { Sender::Server };
                let header = Header::parse(&frame, sender).unwrap().unwrap();
                assert_eq!(header.frame_len() as usize, frame.len());
                let mut read = frame[header.payload()].to_vec();
                apply_mask(&mut read, mask.unwrap_or_default());
                assert_eq!(read, payload);
            }
        }
    }

    #[test]
    fn close_codes_are_read() {
        let mut frame = Vec::new();
        write_close(&mut frame, 1012, "restart", None);
        assert_eq!(close_code(&frame[2..]), 1012);
        assert_eq!(close_code(&[]), NO_STATUS);
    }
}
