//! One direction of a stream: splits the bytes of one socket into frames and forwards them to
//! the other. Buffers exist only while data is pending; reads go to one buffer per thread.

use std::{
    cell::RefCell,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Instant,
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::frame::{FrameError, Header, MessageState, Sender};

/// Frames up to this size are forwarded whole, so that a sender that dies leaves no half frame
/// behind; larger ones are forwarded as they come.
const MAX_WHOLE_FRAME: usize = 16 << 10;
/// Size of the read buffer of a thread; a frame that is forwarded whole fits into it.
const READ_BUFFER: usize = 64 << 10;

thread_local! {
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ_BUFFER].into_boxed_slice());
}

/// Decision about a complete frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Forward,
    Drop,
    /// Forward, and read nothing more: the direction has ended.
    ForwardLast,
    /// Drop, and read nothing more.
    DropLast,
}

/// Looks at the complete frames of a direction.
pub(crate) trait Inspect {
    /// `frame` is the whole frame as it came, header and payload, read at `now`.
    fn inspect(&mut self, header: &Header, frame: &[u8], now: Instant) -> Verdict;

    /// A frame that is too large to be inspected has begun.
    fn count_large(&mut self, header: &Header, now: Instant);
}

/// Why a direction ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The inspector has seen the last frame, and it has been written.
    LastFrame,
    /// The source closed its side; `is_inside_frame` if a frame was incomplete.
    Eof { is_inside_frame: bool },
    /// Reading from the source failed.
    Read,
    /// Writing to the destination failed.
    Write,
    /// The source violated the protocol.
    Violation(FrameError),
}

/// State of one direction.
pub(crate) struct Direction {
    sender: Sender,
    max_frame: u64,
    messages: MessageState,
    /// Bytes that are still to come of a frame that is forwarded in parts.
    streaming: u64,
    /// Start of an incomplete frame.
    partial: Vec<u8>,
    /// Bytes that the destination has not taken yet.
    pending: Vec<u8>,
    written: usize,
    is_last_seen: bool,
    /// The rest of the open message is dropped: the destination has not seen its beginning.
    is_skipping: bool,
    /// `partial` came with the handshake and has not been looked at.
    is_preloaded: bool,
    /// When the source last sent anything, or a destination took data again after a block.
    last_read: Instant,
    /// Since when the destination takes nothing.
    blocked_since: Option<Instant>,
}

impl Direction {
    pub(crate) fn new(sender: Sender, max_frame: u64) -> Self {
        Self {
            sender,
            max_frame,
            messages: MessageState::default(),
            streaming: 0,
            partial: Vec::new(),
            pending: Vec::new(),
            written: 0,
            is_last_seen: false,
            is_skipping: false,
            is_preloaded: false,
            last_read: Instant::now(),
            blocked_since: None,
        }
    }

    /// Begins with a source. `bytes` were read together with its handshake.
    pub(crate) fn preload(&mut self, bytes: &[u8]) {
        self.last_read = Instant::now();
        self.partial.extend_from_slice(bytes);
        self.is_preloaded = !self.partial.is_empty();
    }

    /// Whether a frame of our own may be put between those of the source.
    pub(crate) fn is_at_boundary(&self) -> bool {
        self.streaming == 0
    }

    /// When the source last sent anything, or a destination took data again after a block.
    pub(crate) fn last_read(&self) -> Instant {
        self.last_read
    }

    /// Since when the destination takes nothing of what is pending for it.
    pub(crate) fn blocked_since(&self) -> Option<Instant> {
        self.blocked_since
    }

    /// Queues a frame of our own for the destination.
    pub(crate) fn inject(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        debug_assert!(self.is_at_boundary());
        write(&mut self.pending);
    }

    /// Forgets the source, for the next one: its incomplete frame and open message.
    pub(crate) fn restart(&mut self) {
        (self.streaming, self.partial) = (0, Vec::new());
        (self.is_last_seen, self.is_preloaded) = (false, false);
        (self.messages, self.last_read) = (MessageState::default(), Instant::now());
    }

    /// Forgets what the destination has not taken, for the next one, which begins with the next
    /// message.
    pub(crate) fn restart_destination(&mut self) {
        (self.pending, self.written, self.blocked_since) = (Vec::new(), 0, None);
        self.is_skipping = self.messages.is_open() || self.streaming > 0;
    }

    /// Whether the source has begun a message in fragments and not finished it.
    pub(crate) fn has_open_message(&self) -> bool {
        self.messages.is_open()
    }

    /// Writes what is pending.
    pub(crate) fn poll_flush<W: AsyncWrite + Unpin>(
        &mut self,
        destination: &mut W,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while self.written < self.pending.len() {
            let rest = &self.pending[self.written..];
            match Pin::new(&mut *destination).poll_write(cx, rest)? {
                Poll::Ready(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(written) => {
                    self.written += written;
                    if self.blocked_since.take().is_some() {
                        // The source could not be read meanwhile.
                        self.last_read = Instant::now();
                    }
                }
                Poll::Pending => {
                    self.blocked_since.get_or_insert_with(Instant::now);
                    return Poll::Pending;
                }
            }
        }
        if self.written > 0 {
            (self.pending, self.written) = (Vec::new(), 0);
        }
        // A TLS session may hold bytes back until it is flushed.
        Pin::new(destination).poll_flush(cx)
    }

    /// Forwards until the source has nothing more to read, the destination takes nothing
    /// more, or the direction ends. A destination that is slow stops reading, so that TCP
    /// pushes back on the source.
    pub(crate) fn poll_forward<R, W>(
        &mut self,
        source: &mut R,
        destination: &mut W,
        inspector: &mut impl Inspect,
        cx: &mut Context<'_>,
    ) -> Poll<Ended>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        loop {
            if ready!(self.poll_flush(destination, cx)).is_err() {
                return Poll::Ready(Ended::Write);
            }
            if let Some(ended) = ready!(self.poll_once(source, destination, inspector, cx)) {
                return Poll::Ready(ended);
            }
        }
    }

    /// Reads once and forwards what is complete; the end of the direction, if that has come.
    pub(crate) fn poll_once<R, W>(
        &mut self,
        source: &mut R,
        destination: &mut W,
        inspector: &mut impl Inspect,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Ended>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        if self.is_last_seen {
            return Poll::Ready(Some(Ended::LastFrame));
        }
        let step = BUFFER
            .with_borrow_mut(|buffer| self.poll_step(source, destination, inspector, buffer, cx));
        step.map(Result::err)
    }

    /// Reads once and forwards what is complete.
    fn poll_step<R, W>(
        &mut self,
        source: &mut R,
        destination: &mut W,
        inspector: &mut impl Inspect,
        buffer: &mut [u8],
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Ended>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let kept = self.partial.len();
        let mut fresh = 0;
        if !std::mem::take(&mut self.is_preloaded) {
            let mut read = ReadBuf::new(&mut buffer[kept..]);
            match ready!(Pin::new(source).poll_read(cx, &mut read)) {
                Ok(()) => fresh = read.filled().len(),
                Err(_) => return Poll::Ready(Err(Ended::Read)),
            }
            if fresh == 0 {
                let is_inside_frame = kept > 0 || self.streaming > 0;
                return Poll::Ready(Err(Ended::Eof { is_inside_frame }));
            }
            self.last_read = Instant::now();
        }
        buffer[..kept].copy_from_slice(&self.partial);
        let bytes = &buffer[..kept + fresh];
        let split = self
            .split(bytes, inspector, |owner, range| owner.forward(&bytes[range], destination, cx));
        match split {
            Ok(consumed) => {
                self.partial = bytes[consumed..].to_vec();
                Poll::Ready(Ok(()))
            }
            Err(ended) => Poll::Ready(Err(ended)),
        }
    }

    /// Writes bytes as far as the destination takes them now, and keeps the rest.
    fn forward<W: AsyncWrite + Unpin>(
        &mut self,
        mut bytes: &[u8],
        destination: &mut W,
        cx: &mut Context<'_>,
    ) -> io::Result<()> {
        while self.pending.is_empty() && !bytes.is_empty() {
            match Pin::new(&mut *destination).poll_write(cx, bytes)? {
                Poll::Ready(0) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(written) => bytes = &bytes[written..],
                Poll::Pending => break,
            }
        }
        self.pending.extend_from_slice(bytes);
        Ok(())
    }

    /// Passes runs of frames to `forward`; returns how many bytes are dealt with.
    fn split(
        &mut self,
        bytes: &[u8],
        inspector: &mut impl Inspect,
        mut forward: impl FnMut(&mut Self, std::ops::Range<usize>) -> io::Result<()>,
    ) -> Result<usize, Ended> {
        // Frames that follow each other are forwarded in one write.
        let (mut begin, mut at) = (0, 0);
        let mut result = Ok(());
        while at < bytes.len() && !self.is_last_seen {
            if self.streaming > 0 {
                let part = self.streaming.min((bytes.len() - at) as u64);
                self.streaming -= part;
                at += part as usize;
                if self.is_skipping {
                    begin = at;
                    self.is_skipping = self.streaming > 0 || self.messages.is_open();
                }
                continue;
            }
            let header = match self.header(&bytes[at..]) {
                Ok(Some(header)) => header,
                Ok(None) => break,
                Err(error) => {
                    result = Err(Ended::Violation(error));
                    break;
                }
            };
            let is_whole = header.frame_len() <= MAX_WHOLE_FRAME as u64;
            if is_whole && ((bytes.len() - at) as u64) < header.frame_len() {
                break;
            }
            if let Err(error) = self.messages.advance(&header) {
                result = Err(Ended::Violation(error));
                break;
            }
            let is_skipped = self.is_skipping && !header.opcode.is_control();
            if !is_whole {
                inspector.count_large(&header, self.last_read);
                self.streaming = header.payload_len;
                if is_skipped {
                    forward(self, begin..at).map_err(|_| Ended::Write)?;
                    begin = at + header.len;
                }
                at += header.len;
                continue;
            }
            let end = at + header.frame_len() as usize;
            let verdict = match inspector.inspect(&header, &bytes[at..end], self.last_read) {
                Verdict::Forward if is_skipped => Verdict::Drop,
                verdict => verdict,
            };
            if is_skipped {
                self.is_skipping = self.messages.is_open();
            }
            match verdict {
                Verdict::Forward => {}
                Verdict::ForwardLast => self.is_last_seen = true,
                verdict @ (Verdict::Drop | Verdict::DropLast) => {
                    self.is_last_seen = verdict == Verdict::DropLast;
                    forward(self, begin..at).map_err(|_| Ended::Write)?;
                    begin = end;
                }
            }
            at = end;
        }
        forward(self, begin..at).map_err(|_| Ended::Write)?;
        result.map(|()| at)
    }

    fn header(&self, bytes: &[u8]) -> Result<Option<Header>, FrameError> {
        let header = Header::parse(bytes, self.sender)?;
        if header.is_some_and(|header| header.payload_len > self.max_frame) {
            return Err(FrameError::TooLarge);
        }
        Ok(header)
    }
}
