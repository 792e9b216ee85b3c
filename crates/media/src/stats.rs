//! Figures of one stream, shared between its task and those that show them.

use std::{
    fmt,
    str::FromStr,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
    task::{Context, Waker},
    time::{Duration, Instant},
};

use crate::opening::Dialect;

/// Upper bounds (ms) of the histogram of gaps between frames; the last bucket is open.
pub const GAP_BUCKETS: [u64; 7] = [30, 50, 100, 250, 500, 1_000, 5_000];

/// Figures of one side of a stream.
#[derive(Debug, Default)]
pub struct SideStats {
    frames: AtomicU64,
    bytes: AtomicU64,
    longest_gap_ms: AtomicU64,
}

/// A reading of [`SideStats`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SideFigures {
    pub frames: u64,
    pub bytes: u64,
    pub longest_gap: Duration,
}

impl SideStats {
    pub fn read(&self) -> SideFigures {
        SideFigures {
            frames: self.frames.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            longest_gap: Duration::from_millis(self.longest_gap_ms.load(Ordering::Relaxed)),
        }
    }
}

/// Figures of a stream.
#[derive(Debug, Clone, Copy)]
pub struct StreamFigures {
    /// The provider as its opening message shows it.
    pub provider: &'static str,
    pub from_provider: SideFigures,
    pub from_agent: SideFigures,
}

/// One line, for the store.
impl fmt::Display for StreamFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.provider)?;
        for side in [self.from_provider, self.from_agent] {
            write!(f, " {} {} {}", side.frames, side.bytes, side.longest_gap.as_millis())?;
        }
        Ok(())
    }
}

impl FromStr for StreamFigures {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split(' ');
        let provider = Dialect::from_name(parts.next().unwrap_or_default()).as_str();
        let mut number = || parts.next().and_then(|part| part.parse::<u64>().ok()).ok_or(());
        let mut side = || {
            Ok::<_, ()>(SideFigures {
                frames: number()?,
                bytes: number()?,
                longest_gap: Duration::from_millis(number()?),
            })
        };
        Ok(Self { provider, from_provider: side()?, from_agent: side()? })
    }
}

/// Counts the frames of one side. The task of the stream is the only writer, so that plain
/// loads and stores are enough.
#[derive(Debug)]
pub(crate) struct Meter {
    last_frame: Option<Instant>,
    gaps: [u32; GAP_BUCKETS.len() + 1],
}

impl Meter {
    pub(crate) fn new() -> Self {
        Self { last_frame: None, gaps: [0; GAP_BUCKETS.len() + 1] }
    }

    pub(crate) fn count(&mut self, stats: &SideStats, bytes: usize, now: Instant) {
        let add = |counter: &AtomicU64, more: u64| {
            counter.store(counter.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        };
        add(&stats.frames, 1);
        add(&stats.bytes, bytes as u64);
        if let Some(last) = self.last_frame.replace(now) {
            let gap = now.saturating_duration_since(last).as_millis() as u64;
            self.gaps[GAP_BUCKETS.iter().take_while(|bound| gap > **bound).count()] += 1;
            if gap > stats.longest_gap_ms.load(Ordering::Relaxed) {
                stats.longest_gap_ms.store(gap, Ordering::Relaxed);
            }
        }
    }

    /// Takes the counts of gaps since the last time.
    pub(crate) fn take_gaps(&mut self) -> [u32; GAP_BUCKETS.len() + 1] {
        std::mem::take(&mut self.gaps)
    }
}

/// Orders to a stream from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The call was released: close both sides normally.
    End,
    /// The gateway stops: close both sides with 1012.
    Stop,
    /// The pod serves an older stream: move to another one.
    Move,
}

/// A stream as others see it: its figures, and the way to end it.
#[derive(Debug, Default)]
pub struct StreamHandle {
    pub provider: SideStats,
    pub agent: SideStats,
    dialect: AtomicU8,
    order: AtomicU8,
    has_provider_ended: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl StreamHandle {
    /// The provider as its opening shows it.
    pub fn dialect(&self) -> Dialect {
        Dialect::from_number(self.dialect.load(Ordering::Relaxed))
    }

    pub(crate) fn set_dialect(&self, dialect: Dialect) {
        self.dialect.store(dialect as u8, Ordering::Relaxed);
    }

    /// Whether the provider has ended the stream; the agent may finish.
    pub fn has_provider_ended(&self) -> bool {
        self.has_provider_ended.load(Ordering::Relaxed)
    }

    pub(crate) fn set_provider_ended(&self) {
        self.has_provider_ended.store(true, Ordering::Relaxed);
    }

    /// Gives an order. The first one to end the stream holds.
    pub fn order(&self, order: Order) {
        let code = match order {
            Order::Move => 1,
            Order::End => 2,
            Order::Stop => 3,
        };
        let replace = |known: u8| (known <= 1).then_some(code.max(known));
        let _ = self.order.fetch_update(Ordering::Release, Ordering::Relaxed, replace);
        if let Some(waker) = self.waker.lock().unwrap_or_else(|it| it.into_inner()).take() {
            waker.wake();
        }
    }

    /// Forgets an order to move, which has been carried out.
    pub(crate) fn complete_move(&self) {
        let _ = self.order.compare_exchange(1, 0, Ordering::Release, Ordering::Relaxed);
    }

    /// The order, if one was given. Wakes the task at the next one, unless this one ends the stream.
    pub(crate) fn poll_order(&self, cx: &Context<'_>) -> Option<Order> {
        let read = || match self.order.load(Ordering::Acquire) {
            0 => None,
            1 => Some(Order::Move),
            2 => Some(Order::End),
            _ => Some(Order::Stop),
        };
        if let Some(order @ (Order::End | Order::Stop)) = read() {
            return Some(order);
        }
        // Uncontended; locked only by the task itself and by few orders.
        let mut waker = self.waker.lock().unwrap_or_else(|it| it.into_inner());
        if !waker.as_ref().is_some_and(|known| known.will_wake(cx.waker())) {
            *waker = Some(cx.waker().clone());
        }
        drop(waker);
        read()
    }
}
