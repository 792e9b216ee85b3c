//! The time between two agents: the provider's side of the stream stays open while the next agent
//! is found, and the next agent begins like the first.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::{Context, Poll},
    time::Instant,
};

use super::{Order, ProviderFrames, Relay, Socket, StreamEnd};
use crate::{
    direction::{Ended, Inspect, Verdict},
    frame::{Header, Opcode, apply_mask, write_frame},
};

/// Looks at the frames of a provider that has no agent: its pings are answered, its media is
/// dropped.
struct HeldFrames<'a> {
    frames: &'a mut ProviderFrames,
    /// The answer to the latest ping.
    pong: &'a mut Vec<u8>,
}

impl Inspect for HeldFrames<'_> {
    fn inspect(&mut self, header: &Header, frame: &[u8], now: Instant) -> Verdict {
        if header.opcode == Opcode::Ping {
            let mut payload = frame[header.payload()].to_vec();
            apply_mask(&mut payload, header.mask.unwrap_or_default());
            self.pong.clear();
            write_frame(self.pong, Opcode::Pong, &payload, None);
            return Verdict::Drop;
        }
        match self.frames.inspect(header, frame, now) {
            Verdict::Forward | Verdict::Drop => Verdict::Drop,
            Verdict::ForwardLast | Verdict::DropLast => Verdict::DropLast,
        }
    }

    fn count_large(&mut self, header: &Header, now: Instant) {
        self.frames.count_large(header, now);
    }
}

impl<P: Socket> Relay<P> {
    /// Whether another agent may follow one that is lost: the provider has whole frames only.
    pub fn may_continue(&self) -> bool {
        self.down.is_at_boundary() && !self.is_provider_closed
    }

    /// Whether the opening of the provider is complete: its `start`, or its first message.
    fn has_opened(&self) -> bool {
        self.frames.opening.is_complete()
    }

    /// The provider's last opening message: its `start`.
    pub fn start_message(&self) -> Option<Vec<u8>> {
        self.frames.opening.last_message()
    }

    /// Leaves an agent that is lost: finishes the message that it has begun, and makes the provider
    /// drop the audio that it has not played yet.
    pub fn leave_agent(&mut self) {
        debug_assert!(self.may_continue());
        if self.down.has_open_message() {
            self.down.inject(|out| write_frame(out, Opcode::Continuation, &[], None));
        }
        if let Some(clear) = self.frames.opening.clear_message() {
            self.down.inject(|out| write_frame(out, Opcode::Text, clear.as_bytes(), None));
        }
        self.down.restart();
        self.up.restart_destination();
        self.frames.handle.complete_move();
    }

    /// Keeps the provider's side open while `work` finds the next agent. Its media is dropped.
    /// Returns the end of the stream if that comes first.
    pub async fn hold<T>(&mut self, work: impl Future<Output = T>) -> Result<T, StreamEnd> {
        let mut work = pin!(work);
        poll_fn(|cx| {
            if let Poll::Ready(end) = self.poll_held(|_| false, cx) {
                return Poll::Ready(Err(end));
            }
            work.as_mut().poll(cx).map(Ok)
        })
        .await
    }

    /// Reads the provider's opening, before any agent is connected. Returns the end of the stream
    /// if that comes first.
    pub async fn read_opening(&mut self) -> Result<(), StreamEnd> {
        poll_fn(|cx| {
            if let Poll::Ready(end) = self.poll_held(Relay::has_opened, cx) {
                return Poll::Ready(Err(end));
            }
            if self.has_opened() { Poll::Ready(Ok(())) } else { Poll::Pending }
        })
        .await
    }

    /// Begins with the next agent: it gets the opening as the first one did, then the next message.
    pub fn replay_opening(&mut self) {
        self.send_pong();
        self.up.restart_destination();
        let opening = self.frames.opening.frames();
        self.up.inject(|out| out.extend_from_slice(opening));
    }

    /// Queues the answer to the latest ping of a provider without an agent.
    fn send_pong(&mut self) {
        let pong = std::mem::take(&mut self.pong);
        self.down.inject(|out| out.extend_from_slice(&pong));
    }

    /// Serves a provider without an agent until the stream ends or `is_enough`.
    fn poll_held(
        &mut self,
        is_enough: impl Fn(&Self) -> bool,
        cx: &mut Context<'_>,
    ) -> Poll<StreamEnd> {
        loop {
            let flushed = self.down.poll_flush(&mut self.provider, cx);
            if let Poll::Ready(Err(_)) = flushed {
                (self.is_provider_closed, self.is_provider_gone) = (true, true);
                return Poll::Ready(StreamEnd::Provider { code: None });
            }
            if flushed.is_ready() && !self.pong.is_empty() {
                self.send_pong();
                continue;
            }
            let mut nowhere = tokio::io::sink();
            let mut held = HeldFrames { frames: &mut self.frames, pong: &mut self.pong };
            match self.up.poll_once(&mut self.provider, &mut nowhere, &mut held, cx) {
                Poll::Ready(Some(ended)) => return Poll::Ready(self.provider_end(&ended)),
                Poll::Ready(None) if is_enough(self) => return Poll::Pending,
                Poll::Ready(None) => continue,
                Poll::Pending => {}
            }
            return match self.frames.handle.poll_order(cx) {
                Some(Order::End) => Poll::Ready(StreamEnd::Released),
                Some(Order::Stop) => Poll::Ready(StreamEnd::Stopping),
                Some(Order::Move) | None => Poll::Pending,
            };
        }
    }

    /// How the stream ends when the direction from the provider does.
    pub(super) fn provider_end(&mut self, ended: &Ended) -> StreamEnd {
        match ended {
            Ended::LastFrame => StreamEnd::Provider { code: self.frames.closed },
            Ended::Eof { .. } | Ended::Read => {
                (self.is_provider_closed, self.is_provider_gone) = (true, true);
                StreamEnd::Provider { code: None }
            }
            Ended::Violation(error) => {
                self.is_provider_unreadable = true;
                StreamEnd::ProviderViolation(*error)
            }
            Ended::Write => StreamEnd::AgentLost(super::Loss::Reset),
        }
    }
}
