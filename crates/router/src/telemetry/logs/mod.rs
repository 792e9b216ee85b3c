//! Log lines: one per request, and what happens beside them.

mod json;

use std::{
    io::{self, Write},
    mem,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};
use tracing_subscriber::filter::LevelFilter;

use tracing::Level;
use tracing_subscriber::{filter::FilterFn, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use self::json::Json;
use crate::terminal;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    Json,
    Console,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogConfig {
    pub level: LevelFilter,
    pub format: LogFormat,
}

/// Lines are written together that come within this time.
const TOGETHER: Duration = Duration::from_millis(5);
/// What is kept (bytes) for a reader that is slow; what comes then is dropped.
const MOST: usize = 8 << 20;
/// How long the end of the program waits for such a reader.
const FAREWELL: Duration = Duration::from_secs(1);

/// Keeps the writer of log lines alive.
pub(crate) struct Logging {
    lines: Lines,
    writer: Option<JoinHandle<()>>,
}

/// Sends log lines to standard error by way of a thread of its own: a reader
/// that is slow costs lines, never time.
pub(crate) fn init(config: LogConfig) -> Logging {
    let lines = Lines::default();
    let writer = thread::Builder::new().name("log".into()).spawn({
        let lines = lines.clone();
        move || lines.write_all(io::stderr())
    });
    let logging = Logging { lines: lines.clone(), writer: writer.ok() };
    let layer = fmt::layer().with_writer(move || lines.clone()).with_target(false);
    // What goes wrong with the cluster is said by us, in our words.
    let ours = FilterFn::new(move |line| {
        config.level >= Level::DEBUG || !line.target().starts_with("kube")
    });
    let registry = tracing_subscriber::registry().with(config.level).with(ours);
    match config.format {
        LogFormat::Json => {
            registry.with(layer.event_format(Json)).init();
        }
        LogFormat::Console => {
            let colours = terminal::takes_colours(&io::stderr());
            registry.with(layer.with_ansi(colours)).init();
        }
    }
    logging
}

impl Logging {
    /// How many lines were dropped because nobody read them.
    pub(crate) fn dropped(&self) -> u64 {
        self.lines.0.dropped.load(Ordering::Relaxed)
    }
}

impl Drop for Logging {
    fn drop(&mut self) {
        let (mut waiting, mut left) = (self.lines.waiting(), FAREWELL);
        waiting.is_closed = true;
        self.lines.0.came.notify_one();
        drop(waiting);
        while self.writer.as_ref().is_some_and(|writer| !writer.is_finished()) && !left.is_zero() {
            thread::sleep(TOGETHER);
            left = left.saturating_sub(TOGETHER);
        }
    }
}

/// Lines on their way to the thread that writes them.
#[derive(Clone, Default)]
struct Lines(Arc<Shared>);

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    came: Condvar,
    dropped: AtomicU64,
}

#[derive(Default)]
struct Waiting {
    text: Vec<u8>,
    is_closed: bool,
}

impl Lines {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what comes until nothing more can.
    fn write_all(&self, mut to: impl Write) {
        let mut text = Vec::new();
        loop {
            let mut waiting = self.waiting();
            while waiting.text.is_empty() && !waiting.is_closed {
                waiting = self.0.came.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            }
            if waiting.text.is_empty() {
                return;
            }
            if !waiting.is_closed {
                drop(waiting);
                thread::sleep(TOGETHER);
                waiting = self.waiting();
            }
            mem::swap(&mut waiting.text, &mut text);
            drop(waiting);
            // There is no one left to tell.
            let _ = to.write_all(&text);
            text.clear();
        }
    }
}

/// Each write is a line.
impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut waiting = self.waiting();
        if waiting.text.len() + line.len() > MOST {
            self.0.dropped.fetch_add(1, Ordering::Relaxed);
        } else {
            waiting.text.extend_from_slice(line);
            if waiting.text.len() == line.len() {
                self.0.came.notify_one();
            }
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes nothing until it is told to.
    struct Slow(Arc<Mutex<Vec<u8>>>);

    impl Write for Slow {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(text);
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_slow_reader_costs_lines_and_no_time_and_the_rest_comes_in_order() {
        let mut lines = Lines::default();
        let read = Arc::new(Mutex::new(Vec::new()));
        let blocked = read.lock().unwrap();
        let writer = {
            let (lines, read) = (lines.clone(), read.clone());
            thread::spawn(move || lines.write_all(Slow(read)))
        };
        let line = |number: usize| format!("{number:0>1023}\n").into_bytes();
        let sent = 3 * (MOST >> 10);
        for number in 0..sent {
            assert_eq!(lines.write(&line(number)).unwrap(), 1024);
        }
        drop(blocked);
        lines.waiting().is_closed = true;
        lines.0.came.notify_one();
        writer.join().unwrap();
        let read = read.lock().unwrap();
        let dropped = lines.0.dropped.load(Ordering::Relaxed) as usize;
        assert!(dropped > 0);
        assert_eq!(read.len() >> 10, sent - dropped);
        assert!(read.chunks(1024).is_sorted());
    }
}
