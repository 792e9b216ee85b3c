//! Log lines: one per request, and what happens beside them.

use tracing_appender::non_blocking::{ErrorCounter, WorkerGuard};
use tracing_subscriber::fmt;

use crate::config::{LogConfig, LogFormat};

/// Keeps the writer of log lines alive.
pub struct Logging {
    /// Counts the lines that were dropped because nobody read them.
    pub dropped: ErrorCounter,
    _writer: WorkerGuard,
}

/// Sends log lines to standard error by way of a thread of its own: a reader
/// that is slow costs lines, never time.
pub fn init(config: LogConfig) -> Logging {
    let (writer, guard) = tracing_appender::non_blocking(std::io::stderr());
    let dropped = writer.error_counter();
    let lines = fmt().with_max_level(config.level).with_writer(writer).with_target(false);
    match config.format {
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(false).init(),
        LogFormat::Console => {
            lines.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init()
        }
    }
    Logging { dropped, _writer: guard }
}
