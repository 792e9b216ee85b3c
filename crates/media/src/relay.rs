//! The relay of one stream: frames between the provider's socket and the agent's, until one
//! of them closes, is lost, or the stream is ended from outside.

mod frames;
mod handover;
mod liveness;

use std::{
    fmt,
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf},
    time::{sleep_until, timeout},
};

use crate::{
    direction::{Direction, Ended},
    frame::{FrameError, Sender, write_close},
    stats::{GAP_BUCKETS, Order, StreamHandle},
};

use self::{
    frames::{AgentFrames, ProviderFrames, is_over},
    liveness::Ticker,
};

/// How long a peer may take to answer a close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Either socket of a stream.
pub trait Socket: AsyncRead + AsyncWrite + Unpin {}
impl<S: AsyncRead + AsyncWrite + Unpin> Socket for S {}

/// Limits of a stream.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Largest payload of a frame.
    pub max_frame: u64,
    /// How often the agent is pinged.
    pub ping_interval: Duration,
    /// How long the agent may send nothing at all.
    pub agent_timeout: Duration,
    /// How long the provider may send nothing, or take nothing.
    pub provider_timeout: Duration,
    /// How long the agent may go on once the provider has ended the stream.
    pub wrap_up: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_frame: 1 << 20,
            ping_interval: Duration::from_secs(10),
            agent_timeout: Duration::from_secs(20),
            provider_timeout: Duration::from_secs(60),
            wrap_up: Duration::from_secs(5),
        }
    }
}

/// Why an agent counts as lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    #[error("connection closed without a close frame")]
    Eof,
    #[error("connection closed inside a frame")]
    InsideFrame,
    #[error("connection reset")]
    Reset,
    #[error("no byte in time")]
    Timeout,
    #[error("closed with {0}")]
    Code(u16),
    #[error("protocol violation: {0}")]
    Violation(FrameError),
}

/// How the stream to one agent ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamEnd {
    /// The agent closed with a code that ends the call.
    Agent(u16),
    /// The agent is lost; another may take over.
    AgentLost(Loss),
    /// The provider closed, sent `stop`, or its connection ended. `code` is that of its close.
    Provider { code: Option<u16> },
    /// The provider sent and took nothing for too long.
    ProviderTimeout,
    /// The provider violated the protocol.
    ProviderViolation(FrameError),
    /// The call was released.
    Released,
    /// The gateway stops.
    Stopping,
    /// The stream has to leave its pod, which serves an older one; another may take over.
    Displaced,
}

impl fmt::Display for StreamEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agent(code) => write!(f, "agent closed with {code}"),
            Self::AgentLost(loss) => write!(f, "agent lost: {loss}"),
            Self::Provider { code: Some(code) } => write!(f, "provider closed with {code}"),
            Self::Provider { code: None } => f.write_str("provider ended the stream"),
            Self::ProviderTimeout => f.write_str("provider timed out"),
            Self::ProviderViolation(error) => write!(f, "provider violated the protocol: {error}"),
            Self::Released => f.write_str("call released"),
            Self::Stopping => f.write_str("gateway stopping"),
            Self::Displaced => f.write_str("pod serves an older stream"),
        }
    }
}

impl StreamEnd {
    /// Close code for the provider, unless another agent takes over.
    pub fn close_code(self) -> u16 {
        match self {
            Self::Agent(_) | Self::Provider { .. } | Self::Released => 1000,
            Self::AgentLost(_) | Self::Displaced => 1011,
            // Going away: RFC 6455 has no code for a silent peer.
            Self::ProviderTimeout => 1001,
            Self::ProviderViolation(error) => error.close_code(),
            Self::Stopping => 1012,
        }
    }
}

/// Gaps between frames since the last report, by bucket of [`GAP_BUCKETS`].
pub type Gaps = [u32; GAP_BUCKETS.len() + 1];

/// Receives the gaps of the provider's and of the agent's frames.
pub trait GapSink: Send + Sync {
    fn record(&self, provider: &Gaps, agent: &Gaps);
}

/// A stream with its provider; agents may follow each other.
pub struct Relay<P> {
    provider: P,
    /// Provider to agent.
    up: Direction,
    /// Agent to provider.
    down: Direction,
    frames: ProviderFrames,
    agent_frames: AgentFrames,
    limits: Limits,
    gaps: Arc<dyn GapSink>,
    /// The answer to the latest ping of a provider that has no agent, until the provider takes what
    /// is pending. Further pings replace it, so that a provider that reads nothing takes no memory.
    pong: Vec<u8>,
    /// A close frame was queued for the provider, or its connection has ended.
    is_provider_closed: bool,
    /// The connection of the provider has ended.
    is_provider_gone: bool,
    /// The provider violated the protocol: its further bytes are not frames.
    is_provider_unreadable: bool,
}

/// Mask of the frames that the gateway itself sends to agents. Masking protects proxies from
/// content that a page chooses; the content here is ours, so that any mask will do.
const MASK: [u8; 4] = [0x5a, 0xc3, 0x1e, 0x87];

enum Phase {
    Open,
    /// The provider or the gateway has ended the stream; the agent may finish until then.
    WrapUp(StreamEnd, Instant),
}

impl<P: Socket> Relay<P> {
    /// `early` are bytes that came with the provider's handshake.
    pub fn new(
        provider: P,
        early: &[u8],
        limits: Limits,
        handle: Arc<StreamHandle>,
        gaps: Arc<dyn GapSink>,
    ) -> Self {
        let mut up = Direction::new(Sender::Client, limits.max_frame);
        up.preload(early);
        let agent_frames = AgentFrames::new(handle.clone());
        let frames = ProviderFrames::new(handle);
        let down = Direction::new(Sender::Server, limits.max_frame);
        Self {
            provider,
            up,
            down,
            frames,
            agent_frames,
            limits,
            gaps,
            pong: Vec::new(),
            is_provider_closed: false,
            is_provider_gone: false,
            is_provider_unreadable: false,
        }
    }

    /// Relays until the stream to this agent ends. `early` are bytes that came with the agent's
    /// handshake; `ping` is the payload of our pings. The provider's socket stays open.
    pub async fn run<A: Socket>(
        &mut self,
        agent: &mut A,
        early: Vec<u8>,
        ping: [u8; 8],
    ) -> StreamEnd {
        self.down.preload(&early);
        drop(early);
        self.agent_frames.begin(ping);
        let mut phase = Phase::Open;
        let next_ping = Instant::now() + self.limits.ping_interval;
        let sleep = pin!(sleep_until(self.next_check(next_ping).into()));
        let mut ticker = Ticker { sleep, next_ping };
        let end = poll_fn(|cx| {
            loop {
                match self.poll_phase(agent, &mut phase, &mut ticker, cx) {
                    Poll::Ready(Some(end)) => return Poll::Ready(end),
                    // The phase has changed.
                    Poll::Ready(None) => {}
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await;
        self.report_gaps();
        end
    }

    fn report_gaps(&mut self) {
        let agent = &mut self.agent_frames.meter;
        self.gaps.record(&self.frames.meter.take_gaps(), &agent.take_gaps());
    }

    fn poll_phase<A: Socket>(
        &mut self,
        agent: &mut A,
        phase: &mut Phase,
        ticker: &mut Ticker<'_>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<StreamEnd>> {
        // The agent's side first: an error of a write to it must not overtake its close.
        let frames = &mut self.agent_frames;
        if let Poll::Ready(ended) = self.down.poll_forward(agent, &mut self.provider, frames, cx) {
            let end = self.agent_side_end(&ended);
            return Poll::Ready(match (end, &*phase) {
                // The provider is gone; the agent may finish.
                (StreamEnd::Provider { .. }, Phase::Open) => {
                    self.begin_wrap_up(end, phase);
                    None
                }
                (_, Phase::WrapUp(end, _)) => Some(*end),
                (end, Phase::Open) => Some(end),
            });
        }
        if let Phase::WrapUp(end, deadline) = *phase {
            let _ = self.up.poll_flush(agent, cx);
            return match Instant::now() >= deadline {
                true => Poll::Ready(Some(end)),
                false => ticker.poll_until(deadline, cx).map(|()| None),
            };
        }
        if let Some(end) = self.poll_provider_side(agent, cx) {
            if let StreamEnd::AgentLost(_) | StreamEnd::Displaced = end {
                return Poll::Ready(Some(end));
            }
            self.begin_wrap_up(end, phase);
            return Poll::Ready(None);
        }
        if let Some(end) = ready!(self.poll_liveness(ticker, cx)) {
            if let StreamEnd::AgentLost(_) = end {
                return Poll::Ready(Some(end));
            }
            self.begin_wrap_up(end, phase);
        }
        Poll::Ready(None)
    }

    /// How the stream ends when the direction from the agent does.
    fn agent_side_end(&mut self, ended: &Ended) -> StreamEnd {
        if let Some(code) = self.agent_frames.closed {
            if is_over(code) {
                self.is_provider_closed |= !self.agent_frames.keeps_close;
                return StreamEnd::Agent(code);
            }
            return StreamEnd::AgentLost(Loss::Code(code));
        }
        match ended {
            Ended::LastFrame => unreachable!("the last frame of an agent is its close"),
            Ended::Eof { is_inside_frame: true } => StreamEnd::AgentLost(Loss::InsideFrame),
            Ended::Eof { is_inside_frame: false } => StreamEnd::AgentLost(Loss::Eof),
            Ended::Read => StreamEnd::AgentLost(Loss::Reset),
            Ended::Violation(error) => StreamEnd::AgentLost(Loss::Violation(*error)),
            Ended::Write => {
                (self.is_provider_closed, self.is_provider_gone) = (true, true);
                StreamEnd::Provider { code: None }
            }
        }
    }

    /// Forwards from the provider and looks for orders; the end of the stream, if it comes.
    fn poll_provider_side<A: Socket>(
        &mut self,
        agent: &mut A,
        cx: &mut Context<'_>,
    ) -> Option<StreamEnd> {
        let forwarded = self.up.poll_forward(&mut self.provider, agent, &mut self.frames, cx);
        if let Poll::Ready(ended) = forwarded {
            return Some(self.provider_end(&ended));
        }
        match self.frames.handle.poll_order(cx) {
            Some(Order::End) => Some(StreamEnd::Released),
            Some(Order::Stop) => Some(StreamEnd::Stopping),
            Some(Order::Move) => Some(StreamEnd::Displaced),
            None => None,
        }
    }

    /// Tells the agent that the stream is over, and lets it finish.
    fn begin_wrap_up(&mut self, end: StreamEnd, phase: &mut Phase) {
        *phase = Phase::WrapUp(end, Instant::now() + self.limits.wrap_up);
        if !matches!(end, StreamEnd::Released | StreamEnd::Stopping) {
            self.frames.handle.set_provider_ended();
        }
        // The agent answers our close with its code, which is not the reason for the provider.
        self.agent_frames.keeps_close = self.frames.closed.is_none();
        // A close frame of the provider was forwarded as it came.
        if self.frames.closed.is_none() && self.up.is_at_boundary() {
            let code = if end == StreamEnd::Stopping { 1012 } else { 1000 };
            self.up.inject(|out| write_close(out, code, "", Some(MASK)));
        }
    }

    /// Closes the provider's side with `code`, unless a close of the agent has gone there, and
    /// waits a moment for it to close, too.
    pub async fn close(mut self, code: u16, reason: &str) {
        if self.is_provider_gone {
            return;
        }
        let part = async {
            if !self.is_provider_closed && self.down.is_at_boundary() {
                self.down.inject(|out| write_close(out, code, reason, None));
            }
            poll_fn(|cx| self.down.poll_flush(&mut self.provider, cx)).await?;
            if self.frames.closed.is_none() && !self.is_provider_unreadable {
                self.wait_for_close().await;
            }
            self.provider.shutdown().await?;
            self.discard().await
        };
        let _: Result<io::Result<()>, _> = timeout(CLOSE_TIMEOUT, part).await;
    }

    /// Reads and discards until the provider closes.
    async fn wait_for_close(&mut self) {
        let mut nowhere = tokio::io::sink();
        self.up.restart_destination();
        let frames = &mut self.frames;
        poll_fn(|cx| self.up.poll_forward(&mut self.provider, &mut nowhere, frames, cx)).await;
    }

    /// Reads until the provider's connection ends. Unread bytes would reset the connection, and
    /// the close frame would be lost.
    async fn discard(&mut self) -> io::Result<()> {
        poll_fn(|cx| {
            let mut buffer = [0; 4096];
            loop {
                let mut read = ReadBuf::new(&mut buffer);
                ready!(Pin::new(&mut self.provider).poll_read(cx, &mut read))?;
                if read.filled().is_empty() {
                    return Poll::Ready(Ok(()));
                }
            }
        })
        .await
    }
}
