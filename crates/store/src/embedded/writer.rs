//! The thread that writes the journal, and the exits of the process after a failure.

use std::{io, path::Path};

use tokio::sync::watch;

use super::Shared;
use crate::journal::Journal;
use fleet::Change;

/// The writer thread: writes and syncs pending changes, then publishes their commit.
pub(super) fn run_writer(shared: &Shared, mut journal: Journal, publish: &watch::Sender<u64>) {
    loop {
        let mut state = shared.lock();
        while state.pending.is_empty() && !state.is_closing {
            state = shared.work.wait(state).unwrap_or_else(|_| exit_poisoned());
        }
        if state.pending.is_empty() {
            return;
        }
        let mut changes = std::mem::take(&mut state.pending);
        changes.push(Change::Time { at: state.clock.now() });
        let commit = state.commit;
        let snapshot = journal.needs_compaction().then(|| state.snapshot());
        drop(state);
        let written = match snapshot {
            Some(snapshot) => journal.compact(&snapshot),
            None => journal.commit(&changes),
        };
        match written {
            Ok(()) => drop(publish.send(commit)),
            Err(error) => exit_journal_failed(journal.path(), &error),
        }
    }
}

/// Exits after a failed write or sync: the content of the disk is unknown, and a retried sync can
/// report success falsely. The next start reads the journal.
fn exit_journal_failed(path: &Path, error: &io::Error) -> ! {
    let directory = path.parent().unwrap_or(path).display();
    eprintln!(
        "smart-router: DATA_DIR={directory}: the journal cannot be written: {error}; exiting, because \
         a restart could undo further replies"
    );
    std::process::exit(74);
}

/// Exits after a panic in the fleet, which may have left it inconsistent.
pub(super) fn exit_poisoned() -> ! {
    eprintln!("smart-router: a step of the fleet panicked; exiting");
    std::process::exit(70);
}
