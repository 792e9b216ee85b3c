//! Timeouts of reads and writes on a client connection.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep, sleep_until},
};

use super::connection_limit::{Phase, Slot};

/// A stream with a timeout for the head of a request, from its first byte to its end, and for
/// writes without progress. (Hyper's timeout of a head includes the time between requests.)
pub(crate) struct TimeoutIo<S> {
    stream: S,
    timeout: Duration,
    slot: Arc<Slot>,
    head: Timer,
    write: Timer,
}

/// Set only while its operation is pending.
type Timer = Option<Pin<Box<Sleep>>>;

fn timed_out<T>() -> Poll<io::Result<T>> {
    Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
}

impl<S> TimeoutIo<S> {
    pub(crate) fn new(stream: S, timeout: Duration, slot: Arc<Slot>) -> Self {
        Self { stream, timeout, slot, head: None, write: None }
    }

    /// The stream without timeouts, after an upgrade.
    pub(crate) fn into_inner(self) -> S {
        self.stream
    }

    fn poll_written<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.slot.mark_active();
            self.write = None;
            return written;
        }
        let deadline = || Box::pin(sleep(self.timeout));
        ready!(self.write.get_or_insert_with(deadline).as_mut().poll(cx));
        timed_out()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimeoutIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
        if read.is_ready() {
            this.slot.mark_active();
        }
        match (this.slot.phase(), &read) {
            (Phase::Idle, Poll::Ready(_)) => {
                this.head = None;
                this.slot.enter(Phase::Head(std::time::Instant::now()));
            }
            (Phase::Head(begun), Poll::Pending) => {
                let deadline = || Box::pin(sleep_until(Instant::from_std(begun + this.timeout)));
                ready!(this.head.get_or_insert_with(deadline).as_mut().poll(cx));
                return timed_out();
            }
            _ => {}
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimeoutIo<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.poll_written(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
