//! Liveness of both sides: pings to the agent, and the end of a stream with a silent side. A stream
//! has one timer, which frames do not touch: when it fires, it is set to the next ping or to the
//! time at which a side would count as silent, whichever is sooner.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use tokio::time::Sleep;

use super::{Limits, Loss, MASK, Relay, Socket, StreamEnd};
use crate::{
    direction::Direction,
    frame::{Opcode, write_frame},
};

/// The timer of a stream.
pub(super) struct Ticker<'a> {
    pub(super) sleep: Pin<&'a mut Sleep>,
    pub(super) next_ping: Instant,
}

impl Ticker<'_> {
    /// Waits until `deadline`.
    pub(super) fn poll_until(&mut self, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
        if self.sleep.deadline() != deadline.into() {
            self.sleep.as_mut().reset(deadline.into());
        }
        self.sleep.as_mut().poll(cx)
    }
}

/// When a side counts as silent: it sends nothing, or takes nothing of what is pending for it.
fn silent_at(from: &Direction, to: &Direction, limit: Duration) -> Option<Instant> {
    let blocked = to.blocked_since().and_then(|since| since.checked_add(limit));
    // While the other side takes nothing, this one is not read.
    let is_read = from.blocked_since().is_none();
    let idle = from.last_read().checked_add(limit).filter(|_| is_read);
    [blocked, idle].into_iter().flatten().min()
}

impl<P: Socket> Relay<P> {
    fn agent_silent_at(&self) -> Option<Instant> {
        silent_at(&self.down, &self.up, self.limits.agent_timeout)
    }

    fn provider_silent_at(&self) -> Option<Instant> {
        silent_at(&self.up, &self.down, self.limits.provider_timeout)
    }

    /// The time of the next check. Until then no side can become silent that is not now: each has
    /// sent or taken something since, or its limit has not passed.
    pub(super) fn next_check(&self, next_ping: Instant) -> Instant {
        let now = Instant::now();
        let Limits { agent_timeout, provider_timeout, .. } = self.limits;
        let agent = self.agent_silent_at().or(now.checked_add(agent_timeout));
        let provider = self.provider_silent_at().or(now.checked_add(provider_timeout));
        [agent, provider].into_iter().flatten().fold(next_ping, Instant::min)
    }

    /// Waits for the next check. Pings the agent if that is due, and ends a stream with a silent
    /// side.
    pub(super) fn poll_liveness(
        &mut self,
        ticker: &mut Ticker<'_>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<StreamEnd>> {
        ready!(ticker.sleep.as_mut().poll(cx));
        let now = Instant::now();
        let is_over = |silent_at: Option<Instant>| silent_at.is_some_and(|at| at <= now);
        if is_over(self.agent_silent_at()) {
            return Poll::Ready(Some(StreamEnd::AgentLost(Loss::Timeout)));
        }
        if is_over(self.provider_silent_at()) {
            return Poll::Ready(Some(StreamEnd::ProviderTimeout));
        }
        if ticker.next_ping <= now {
            ticker.next_ping = now + self.limits.ping_interval;
            self.ping_agent();
            self.report_gaps();
        }
        ticker.sleep.as_mut().reset(self.next_check(ticker.next_ping).into());
        Poll::Ready(None)
    }

    fn ping_agent(&mut self) {
        if self.up.is_at_boundary() && self.up.blocked_since().is_none() {
            let ping = self.agent_frames.ping;
            self.up.inject(|out| write_frame(out, Opcode::Ping, &ping, Some(MASK)));
        }
    }
}
