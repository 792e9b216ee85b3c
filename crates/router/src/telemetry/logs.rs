//! Log output: format, level and the writer thread.

use std::{
    io::{self, BufWriter, Write},
    thread,
    time::Duration,
};

use serde::ser::{SerializeMap, Serializer};
use tracing::{Event, Level, Subscriber};
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_serde::{AsSerde, SerdeMapVisitor};
use tracing_subscriber::{
    filter::{FilterFn, LevelFilter},
    fmt::{
        self, FmtContext, FormatEvent, FormatFields,
        format::Writer,
        time::{FormatTime, SystemTime},
    },
    layer::SubscriberExt,
    registry::LookupSpan,
    util::SubscriberInitExt,
};

use crate::terminal;

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    Json,
    Console,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogConfig {
    pub(crate) level: LevelFilter,
    pub(crate) format: LogFormat,
}

/// Lines buffered for a slow reader of standard error; further lines are dropped.
const BUFFERED_LINES: usize = 1 << 14;
/// Pause of the writer thread between two batches.
const BATCH_INTERVAL: Duration = Duration::from_millis(5);

/// Owns the writer thread; when dropped, waits up to a second for buffered lines.
pub(crate) struct Logging {
    dropped: ErrorCounter,
    _flush: WorkerGuard,
}

/// Sends log lines to standard error through a separate thread: a slow reader loses lines and
/// never delays a request.
pub(crate) fn init(config: LogConfig) -> Logging {
    let (writer, guard) = non_blocking(io::stderr());
    let logging = Logging { dropped: writer.error_counter(), _flush: guard };
    let layer = fmt::layer().with_writer(writer).with_target(false);
    // The cluster module logs the errors of kube itself.
    let own_lines = FilterFn::new(move |line| {
        config.level >= Level::DEBUG || !line.target().starts_with("kube")
    });
    let registry = tracing_subscriber::registry().with(config.level).with(own_lines);
    match config.format {
        LogFormat::Json => registry.with(layer.event_format(Json)).init(),
        LogFormat::Console => {
            let colours = terminal::takes_colours(&io::stderr());
            registry.with(layer.with_ansi(colours)).init();
        }
    }
    logging
}

/// Formats an event as one flat JSON object. The JSON format of tracing-subscriber writes a line in
/// small pieces and checks each for UTF-8, which takes 2.4 times as many instructions.
struct Json;

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let mut timestamp = String::with_capacity(32);
        SystemTime.format_time(&mut Writer::new(&mut timestamp))?;
        let line = json_line(&timestamp, event).map_err(|_| std::fmt::Error)?;
        writer.write_str(str::from_utf8(&line).map_err(|_| std::fmt::Error)?)
    }
}

fn json_line(timestamp: &str, event: &Event<'_>) -> serde_json::Result<Vec<u8>> {
    let mut line = Vec::with_capacity(512);
    let mut serializer = serde_json::Serializer::new(&mut line);
    let mut object = serializer.serialize_map(None)?;
    object.serialize_entry("timestamp", timestamp)?;
    object.serialize_entry("level", &event.metadata().level().as_serde())?;
    let mut fields = SerdeMapVisitor::new(object);
    event.record(&mut fields);
    fields.finish()?;
    line.push(b'\n');
    Ok(line)
}

fn non_blocking(to: impl Write + Send + 'static) -> (NonBlocking, WorkerGuard) {
    NonBlockingBuilder::default()
        .buffered_lines_limit(BUFFERED_LINES)
        .thread_name("log")
        .finish(Batched(BufWriter::with_capacity(64 << 10, to)))
}

impl Logging {
    /// Number of lines dropped because standard error was read too slowly.
    pub(crate) fn dropped(&self) -> usize {
        self.dropped.dropped_lines()
    }
}

/// Pauses after each flush, that is, whenever the buffer of lines is empty. Otherwise every
/// line of a busy router wakes the writer thread, which costs more than the line itself.
struct Batched<W: Write>(BufWriter<W>);

impl<W: Write> Write for Batched<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.0.flush();
        thread::sleep(BATCH_INTERVAL);
        flushed
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Mutex},
        time::Instant,
    };

    use super::*;

    /// Blocks every write while the lock is held.
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
    fn a_slow_reader_loses_lines_and_the_rest_stay_in_order() {
        let read = Arc::new(Mutex::new(Vec::new()));
        let blocked = read.lock().unwrap();
        let (mut lines, _guard) = non_blocking(Slow(read.clone()));
        let line = |number: usize| format!("{number:0>1023}\n").into_bytes();
        let sent = 3 * BUFFERED_LINES;
        for number in 0..sent {
            assert_eq!(lines.write(&line(number)).unwrap(), 1024);
        }
        drop(blocked);
        let dropped = lines.error_counter().dropped_lines();
        assert!(dropped > 0);
        let started = Instant::now();
        while read.lock().unwrap().len() >> 10 < sent - dropped {
            assert!(started.elapsed() < Duration::from_secs(30), "lines are missing");
            thread::sleep(BATCH_INTERVAL);
        }
        let read = read.lock().unwrap();
        assert_eq!(read.len() >> 10, sent - dropped);
        assert!(read.chunks(1024).is_sorted());
    }
}
