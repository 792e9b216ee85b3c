//! The relay's view of the frames of both sides.

use std::{sync::Arc, time::Instant};

use crate::{
    direction::{Inspect, Verdict},
    frame::{Header, Opcode, apply_mask, close_code},
    opening::Opening,
    stats::{Meter, StreamHandle},
};

/// Looks at the frames of the provider.
pub(super) struct ProviderFrames {
    pub(super) opening: Opening,
    pub(super) handle: Arc<StreamHandle>,
    pub(super) meter: Meter,
    /// Code of its close frame.
    pub(super) closed: Option<u16>,
}

impl ProviderFrames {
    pub(super) fn new(handle: Arc<StreamHandle>) -> Self {
        Self { opening: Opening::default(), handle, meter: Meter::new(), closed: None }
    }
}

impl Inspect for ProviderFrames {
    fn inspect(&mut self, header: &Header, frame: &[u8], now: Instant) -> Verdict {
        match header.opcode {
            Opcode::Close => {
                let mut payload = frame[header.payload()].to_vec();
                apply_mask(&mut payload, header.mask.unwrap_or_default());
                self.closed = Some(close_code(&payload));
                Verdict::ForwardLast
            }
            Opcode::Ping | Opcode::Pong => Verdict::Forward,
            _ => {
                self.meter.count(&self.handle.provider, frame.len(), now);
                let was_complete = self.opening.is_complete();
                let is_stop = self.opening.inspect(header, frame);
                if !was_complete {
                    self.handle.set_dialect(self.opening.dialect());
                }
                if is_stop { Verdict::ForwardLast } else { Verdict::Forward }
            }
        }
    }

    fn count_large(&mut self, header: &Header, now: Instant) {
        self.meter.count(&self.handle.provider, header.frame_len() as usize, now);
        self.opening.skip_large();
        self.handle.set_dialect(self.opening.dialect());
    }
}

/// Looks at the frames of the agents, one after the other.
pub(super) struct AgentFrames {
    handle: Arc<StreamHandle>,
    /// Goes on with the next agent: the gap between two agents is one of the stream.
    pub(super) meter: Meter,
    pub(super) ping: [u8; 8],
    pub(super) closed: Option<u16>,
    /// The gateway closes the provider's side with a code of its own.
    pub(super) keeps_close: bool,
}

impl AgentFrames {
    pub(super) fn new(handle: Arc<StreamHandle>) -> Self {
        Self { handle, meter: Meter::new(), ping: [0; 8], closed: None, keeps_close: false }
    }

    /// Begins with the next agent.
    pub(super) fn begin(&mut self, ping: [u8; 8]) {
        (self.ping, self.closed, self.keeps_close) = (ping, None, false);
    }
}

impl Inspect for AgentFrames {
    fn inspect(&mut self, header: &Header, frame: &[u8], now: Instant) -> Verdict {
        match header.opcode {
            Opcode::Close => {
                self.closed = Some(close_code(&frame[header.payload()]));
                // The provider's stream outlives an agent that is lost.
                match self.closed.is_some_and(is_over) && !self.keeps_close {
                    true => Verdict::ForwardLast,
                    false => Verdict::DropLast,
                }
            }
            // The answer to a ping of our own.
            Opcode::Pong if frame[header.payload()] == self.ping => Verdict::Drop,
            Opcode::Ping | Opcode::Pong => Verdict::Forward,
            _ => {
                self.meter.count(&self.handle.agent, frame.len(), now);
                Verdict::Forward
            }
        }
    }

    fn count_large(&mut self, header: &Header, now: Instant) {
        self.meter.count(&self.handle.agent, header.frame_len() as usize, now);
    }
}

/// Whether an agent that closes with this code has ended the call. Any other code means that
/// the agent is lost: going away, abnormal end, internal error, restart, try again later.
pub(super) fn is_over(code: u16) -> bool {
    !matches!(code, 1001 | 1006 | 1011..=1015)
}
