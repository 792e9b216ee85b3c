//! Targets of the media gateway: frames, the agent's handshake response, opening messages, start
//! messages and stream tokens.

use media::{
    frame::{
        Header, MAX_CONTROL_PAYLOAD, MAX_HEADER, MessageState, NO_STATUS, Opcode, Sender,
        apply_mask, close_code, write_close, write_frame,
    },
    handshake::{accept_key, read_response},
    opening::{MAX_OPENING, Message, Opening, classify},
    token::{Claims, TokenError, TokenKeys, Verified},
};
use telephony::{CallRequest, DEFAULT_WS_PATH, Params, Provider, WsPath};

use crate::text;

/// The bytes of a connection, read as frames of either side.
pub fn frame(data: &[u8]) {
    for sender in [Sender::Client, Sender::Server] {
        let (mut rest, mut messages) = (data, MessageState::default());
        while let Ok(Some(header)) = check_prefixes(rest, sender) {
            if messages.advance(&header).is_err() || header.frame_len() > rest.len() as u64 {
                break;
            }
            check_frame(&header, &rest[..header.frame_len() as usize], sender);
            rest = &rest[header.frame_len() as usize..];
        }
    }
}

type Parsed = Result<Option<Header>, media::frame::FrameError>;

/// Parses a header. A result must not depend on how many bytes have arrived.
fn check_prefixes(bytes: &[u8], sender: Sender) -> Parsed {
    let parsed = Header::parse(bytes, sender);
    for len in 0..bytes.len().min(MAX_HEADER) {
        let early = Header::parse(&bytes[..len], sender);
        assert!(early == Ok(None) || early == parsed, "{early:?} {parsed:?}");
    }
    if let Ok(Some(header)) = parsed {
        assert!(header.len <= MAX_HEADER.min(bytes.len()));
        assert_eq!(header.mask.is_some(), sender == Sender::Client);
        let is_short = header.payload_len <= MAX_CONTROL_PAYLOAD as u64;
        assert!(!header.opcode.is_control() || header.is_final && is_short);
    }
    parsed
}

/// Decodes the payload, writes it as a frame of our own, and reads it again.
fn check_frame(header: &Header, frame: &[u8], sender: Sender) {
    let mut payload = frame[header.payload()].to_vec();
    apply_mask(&mut payload, header.mask.unwrap_or_default());
    if header.opcode == Opcode::Close {
        assert_eq!(
            close_code(&payload) == NO_STATUS,
            payload.len() < 2 || payload[..2] == [3, 237]
        );
    }
    if !header.is_final || payload.len() > usize::from(u16::MAX) {
        return;
    }
    let mut written = Vec::new();
    write_frame(&mut written, header.opcode, &payload, header.mask);
    let again = Header::parse(&written, sender).unwrap().unwrap();
    assert_eq!((again.opcode, again.frame_len()), (header.opcode, written.len() as u64));
    apply_mask(&mut written[again.len..], again.mask.unwrap_or_default());
    assert_eq!(written[again.len..], payload);
    let mut close = Vec::new();
    write_close(&mut close, 1011, &String::from_utf8_lossy(&payload), header.mask);
    assert!(close.len() <= MAX_HEADER + MAX_CONTROL_PAYLOAD);
    assert!(Header::parse(&close, sender).unwrap().is_some());
}

const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const OFFERED: &str = "audio.jambonz.org, other";

/// The response of an agent: arbitrary bytes, and arbitrary headers after the required ones.
pub fn response(data: &[u8]) {
    let mut valid = format!(
        "HTTP/1.1 101 OK\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Accept: {}\r\n",
        accept_key(KEY)
    )
    .into_bytes();
    valid.extend_from_slice(data);
    valid.extend_from_slice(b"\r\n\r\n");
    for bytes in [data, &valid] {
        for offered in [None, Some(OFFERED)] {
            let Ok(Some(accepted)) = read_response(bytes, KEY, offered) else { continue };
            assert!(accepted.len <= bytes.len());
            assert_eq!(
                read_response(&bytes[..accepted.len], KEY, offered),
                Ok(Some(accepted.clone()))
            );
            if let Some(protocol) = accepted.protocol {
                assert!(
                    offered.is_some_and(|offered| offered.split(", ").any(|it| it == protocol))
                );
            }
        }
    }
}

/// The messages of a provider: one per line, the first byte selects the opcode.
pub fn opening(data: &[u8]) {
    let mut opening = Opening::default();
    for line in data.split(|byte| *byte == b'\n') {
        let Some((kind, payload)) = line.split_first() else { continue };
        let opcode = match kind {
            b'b' => Opcode::Binary,
            b'c' => Opcode::Continuation,
            b'p' => Opcode::Ping,
            _ => Opcode::Text,
        };
        let limit = if opcode.is_control() { MAX_CONTROL_PAYLOAD } else { usize::from(u16::MAX) };
        let payload = &payload[..payload.len().min(limit)];
        let mut frame = Vec::new();
        write_frame(&mut frame, opcode, payload, Some([7, 0, 129, 255]));
        let header = Header::parse(&frame, Sender::Client).unwrap().unwrap();
        let before = (opening.is_complete(), opening.frames().to_vec());
        let is_stop = opening.inspect(&header, &frame);
        assert!(!is_stop || opcode == Opcode::Text && classify(payload) == Message::Stop);
        assert!(opening.frames().len() <= MAX_OPENING);
        // A complete opening never changes; an incomplete one only grows, by this frame.
        match before {
            (true, frames) => assert!(opening.is_complete() && opening.frames() == frames),
            (false, mut frames) if opening.frames() != frames => {
                frames.extend_from_slice(&frame);
                assert!(opening.frames() == frames);
            }
            _ => {}
        }
    }
}

/// The start message of a stream after a line with its query, read as that of every provider. The
/// path for the agent is a plain path, whatever the message contains.
pub fn start(data: &[u8]) {
    const GENERATED: &str = "generated";
    let split = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (query, message) = (&data[..split], data.get(split + 1..).unwrap_or_default());
    let Ok(query) = Params::from_form(text(query)) else { return };
    let path: WsPath = DEFAULT_WS_PATH.parse().unwrap();
    for provider in Provider::ALL {
        let mut is_generated = false;
        let new_id = || {
            is_generated = true;
            GENERATED.to_owned()
        };
        let Ok(request) = CallRequest::from_start(provider, &query, message, new_id) else {
            continue;
        };
        assert!(!is_generated || provider == Provider::Vonage);
        let path = path.fill(&request);
        assert!(path.starts_with("/agent/"));
        assert!(path.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte)));
        assert!(path.split('/').all(|part| part != ".."));
    }
}

/// Lines: call, path, token. No input contains a token of a secret key, and a token of another call
/// or path, or with another character, is refused.
pub fn token(data: &[u8]) {
    let mut lines = text(data).split('\n');
    let [call, path, token] = [(); 3].map(|()| lines.next().unwrap_or_default());
    let keys_of = |secret: &str| TokenKeys::new([secret.as_bytes()]).unwrap();
    // This key signs nothing: the fuzzer would learn the token from the comparisons below.
    let unused = keys_of("a key that is not in any corpus: 0b6f7d1d");
    assert!(unused.verify(token, call, path, 0).is_err());
    let keys = keys_of("another key");
    let claims = Claims { call, attempt: data.len() as u32, expiry: 1_000, path, parameters: "" };
    let signed = keys.sign(&claims);
    let verified = Verified { attempt: claims.attempt, parameters: "" };
    assert_eq!(keys.verify(&signed, call, path, 1_000), Ok(verified));
    assert_eq!(keys.verify(&signed, call, path, 1_001), Err(TokenError::Expired));
    assert_eq!(keys.verify(&signed, call, &format!("{path}/"), 0), Err(TokenError::Wrong));
    if token != call {
        assert_eq!(keys.verify(&signed, token, path, 0), Err(TokenError::Wrong));
    }
    for (at, other) in token.char_indices().filter(|(at, _)| signed.get(*at..=*at).is_some()) {
        let altered = format!("{}{other}{}", &signed[..at], &signed[at + 1..]);
        assert!(altered == signed || keys.verify(&altered, call, path, 0).is_err(), "{altered}");
    }
}
