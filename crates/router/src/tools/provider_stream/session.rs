//! One stream from the WebSocket handshake to its close, at the pace of a real call.

use std::{fmt, io, time::Duration};

use futures_util::{SinkExt, StreamExt};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout};
use tokio_tungstenite::{
    WebSocketStream, client_async_with_config,
    tungstenite::{
        Error, Message,
        client::IntoClientRequest,
        error::ProtocolError,
        handshake::client::Request,
        http::{HeaderValue, header::SEC_WEBSOCKET_PROTOCOL},
        protocol::WebSocketConfig,
    },
};

use super::{
    clip::{Clip, Heard},
    echoes::Echoes,
    format::MediaFormat,
    messages::{AgentMessage, ProviderMessages},
};
use crate::client::Wire;

/// How long a handshake may take. The router tries pods for 5 s, and the last one for a second more,
/// before it answers with an error.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(8);
/// How long the sending of a message, or the last echo may take.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the peer may take to close after a hang-up.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(15);
/// An agent that sends nothing for this long after the caller's last audio has no more to say.
const QUIET: Duration = Duration::from_secs(2);
/// How long the rest of an echo may take after the caller's last audio.
const TAIL: Duration = Duration::from_secs(10);
/// The library's default of 128 KiB per stream is for bulk data.
const BUFFER_SIZE: usize = 4 << 10;

/// Why a stream failed.
#[derive(Debug)]
pub enum StreamError {
    /// The handshake was answered with this status.
    Refused(u16),
    NoConnection(io::ErrorKind),
    /// No response in time.
    Timeout,
    /// The peer closed the stream in mid-call, with this code if it sent one.
    Closed(Option<u16>),
    Other(String),
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(status) => write!(f, "status {status}"),
            Self::NoConnection(kind) => write!(f, "no connection ({kind})"),
            Self::Timeout => f.write_str("no response"),
            Self::Closed(Some(code)) => write!(f, "closed with {code}"),
            Self::Closed(None) => f.write_str("closed without a code"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for StreamError {}

impl From<Error> for StreamError {
    fn from(error: Error) -> Self {
        match error {
            Error::Http(response) => Self::Refused(response.status().as_u16()),
            Error::Io(error) => Self::NoConnection(error.kind()),
            Error::ConnectionClosed | Error::AlreadyClosed => Self::Closed(None),
            Error::Protocol(
                ProtocolError::ResetWithoutClosingHandshake | ProtocolError::SendAfterClosing,
            ) => Self::Closed(None),
            other => Self::Other(other.to_string()),
        }
    }
}

/// An echoed frame.
#[derive(Debug, Clone, Copy)]
pub struct Echo {
    pub round_trip: Duration,
    /// Time since the echo before; `None` for the first.
    pub gap: Option<Duration>,
}

/// The provider's side of one open stream.
pub struct ProviderStream {
    socket: WebSocketStream<Box<dyn Wire>>,
    format: MediaFormat,
    messages: ProviderMessages,
    echoes: Echoes,
    opened_at: Instant,
    last_echo: Option<Instant>,
}

impl ProviderStream {
    /// Opens the stream of a call over a connection to the host of `url`.
    pub async fn open(
        connection: Box<dyn Wire>,
        url: &str,
        format: MediaFormat,
        call: &str,
    ) -> Result<Self, StreamError> {
        let limits = WebSocketConfig::default().read_buffer_size(BUFFER_SIZE);
        let handshake = client_async_with_config(request(url, format)?, connection, Some(limits));
        let (socket, _) = timeout(HANDSHAKE_TIMEOUT, handshake).await.map_err(no_response)??;
        let messages = ProviderMessages::new(format, call);
        let echoes = Echoes::new(messages.call_tag());
        let opened_at = Instant::now();
        let mut stream = Self { socket, format, messages, echoes, opened_at, last_echo: None };
        for message in stream.messages.opening() {
            stream.send(message).await?;
        }
        Ok(stream)
    }

    /// Sends audio for this long, beginning after `offset`, and then waits for the last echoes.
    /// Calls `observe` with each echo.
    pub async fn talk(
        &mut self,
        audio: Duration,
        offset: Duration,
        mut observe: impl FnMut(Echo),
    ) -> Result<(), StreamError> {
        let mut left = self.format.frames_in(audio);
        let mut pace = interval_at(Instant::now() + offset, self.format.frame_duration());
        // A late frame is followed by the frames that are due, as from a provider.
        pace.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut deadline = Instant::now();
        while left > 0 || self.echoes.lost() > 0 {
            tokio::select! {
                _ = pace.tick(), if left > 0 => {
                    left -= 1;
                    let media = self.messages.media(self.opened_at.elapsed());
                    self.echoes.sent += 1;
                    self.send(media).await?;
                    deadline = Instant::now() + RESPONSE_TIMEOUT;
                }
                message = self.socket.next() => self.receive(message, &mut observe)?,
                () = sleep_until(deadline), if left == 0 => break,
            }
        }
        Ok(())
    }

    /// Sends a clip and then silence, in all for `talk`, beginning after `offset`. Then goes on
    /// with silence, as a provider does, until as much audio has come back or no more comes.
    /// Returns the agent's audio, also of a stream that failed.
    pub(crate) async fn play(
        &mut self,
        clip: &Clip,
        talk: Duration,
        offset: Duration,
    ) -> (Heard, Result<(), StreamError>) {
        let mut heard = Heard { format: self.format, encoded: Vec::new() };
        let played = self.play_into(clip, talk, offset, &mut heard).await;
        (heard, played)
    }

    async fn play_into(
        &mut self,
        clip: &Clip,
        talk: Duration,
        offset: Duration,
        heard: &mut Heard,
    ) -> Result<(), StreamError> {
        let frames = self.format.frames_in(talk);
        let expected = frames as usize * self.format.silence().len();
        let mut pace = interval_at(Instant::now() + offset, self.format.frame_duration());
        pace.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let (mut sent, mut last_sent, mut last_activity) = (0, Instant::now(), Instant::now());
        loop {
            let is_tail = sent >= frames;
            if is_tail && heard.encoded.len() >= expected {
                return Ok(());
            }
            let end = (last_activity + QUIET).min(last_sent + TAIL);
            tokio::select! {
                _ = pace.tick() => {
                    let media = self.messages.media_with(&clip.frame(sent));
                    sent += 1;
                    self.send(media).await?;
                    if !is_tail {
                        (last_sent, last_activity) = (Instant::now(), Instant::now());
                    }
                }
                message = self.socket.next() => {
                    let message = open_message(message)?;
                    if let Some(audio) = self.messages.audio(&message) {
                        heard.encoded.extend(audio);
                        last_activity = Instant::now();
                    }
                }
                () = sleep_until(end), if is_tail => return Ok(()),
            }
        }
    }

    /// Ends the call as the provider does, and waits until the peer has closed the stream.
    pub async fn hang_up(&mut self) -> Result<(), StreamError> {
        let close = async {
            if let Some(stop) = self.messages.stop() {
                self.socket.send(stop).await?;
            }
            self.socket.close(None).await?;
            while let Some(message) = self.socket.next().await {
                message?;
            }
            Ok::<(), Error>(())
        };
        match timeout(CLOSE_TIMEOUT, close).await.map_err(no_response)?.map_err(StreamError::from) {
            // The peer may have closed first.
            Ok(()) | Err(StreamError::Closed(_) | StreamError::NoConnection(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    pub fn echoes(&self) -> &Echoes {
        &self.echoes
    }

    async fn send(&mut self, message: Message) -> Result<(), StreamError> {
        let sent = timeout(RESPONSE_TIMEOUT, self.socket.send(message)).await;
        Ok(sent.map_err(no_response)??)
    }

    fn receive(
        &mut self,
        message: Option<Result<Message, Error>>,
        observe: &mut impl FnMut(Echo),
    ) -> Result<(), StreamError> {
        let message = open_message(message)?;
        match self.messages.read(&message) {
            AgentMessage::Echo(marker) => {
                if self.echoes.record(marker) {
                    let now = Instant::now();
                    let gap = self.last_echo.replace(now).map(|last| now - last);
                    let round_trip = (now - self.opened_at).saturating_sub(marker.sent);
                    observe(Echo { round_trip, gap });
                }
            }
            AgentMessage::Audio => self.echoes.unmarked += 1,
            AgentMessage::Other => {}
        }
        Ok(())
    }
}

/// Returns the message of a stream that is still open.
fn open_message(message: Option<Result<Message, Error>>) -> Result<Message, StreamError> {
    match message.ok_or(StreamError::Closed(None))?? {
        Message::Close(frame) => Err(StreamError::Closed(frame.map(|frame| frame.code.into()))),
        message => Ok(message),
    }
}

fn no_response(_: tokio::time::error::Elapsed) -> StreamError {
    StreamError::Timeout
}

fn request(url: &str, format: MediaFormat) -> Result<Request, Error> {
    let mut request = url.into_client_request()?;
    if let Some(name) = format.subprotocol() {
        request.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(name));
    }
    Ok(request)
}
