//! Log lines: one per request, and what happens beside them.

use tracing::Level;
use tracing_appender::non_blocking::{ErrorCounter, WorkerGuard};
use tracing_subscriber::{filter::FilterFn, fmt, layer::SubscriberExt, util::SubscriberInitExt};

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
    let lines = fmt::layer().with_writer(writer).with_target(false);
    // What goes wrong with the cluster is said by us, in our words.
    let ours = FilterFn::new(move |line| {
        config.level >= Level::DEBUG || !line.target().starts_with("kube")
    });
    let registry = tracing_subscriber::registry().with(config.level).with(ours);
    match config.format {
        LogFormat::Json => {
            registry.with(lines.json().flatten_event(true).with_current_span(false)).init();
        }
        LogFormat::Console => {
            let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
            registry.with(lines.with_ansi(ansi)).init();
        }
    }
    Logging { dropped, _writer: guard }
}
