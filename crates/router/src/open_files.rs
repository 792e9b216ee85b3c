//! The limit of open files, shared by connections and media streams, and the table of open files.

use std::{fs::File, io};

/// Open files that the router needs besides connections and streams.
const RESERVED: usize = 128;
/// Smallest number of connections, however few files may be open.
const MIN_CONNECTIONS: usize = 64;
/// A stream has two sockets: the provider's and the agent's.
const FILES_PER_STREAM: usize = 2;
/// At least one in this many files is for streams.
const STREAM_SHARE: usize = 4;

/// Room in the table of open files from the start: 8 bytes of kernel memory each.
const TABLE_SIZE: usize = 65_536;

/// Limits that fit into the limit of open files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) connections: usize,
    pub(crate) streams: usize,
}

/// Raises the soft limit of open files to the hard one. Common defaults (1,024) would limit a
/// router to a few hundred streams.
pub(crate) fn raise_limit() {
    if let Err(error) = rlimit::increase_nofile_limit(u64::MAX) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    if let Err(error) = grow_table(soft_limit().min(TABLE_SIZE)) {
        tracing::warn!(%error, "cannot grow the table of open files; new connections may stall calls");
    }
}

/// Grows the kernel's table of open files. The kernel doubles a full table, and suspends the thread
/// that opens the file for up to 20 ms meanwhile, with all calls that it serves.
fn grow_table(size: usize) -> io::Result<()> {
    let last = i32::try_from(size.saturating_sub(1)).unwrap_or(i32::MAX);
    rustix::io::fcntl_dupfd_cloexec(File::open("/dev/null")?, last)?;
    Ok(())
}

fn soft_limit() -> usize {
    rlimit::getrlimit(rlimit::Resource::NOFILE)
        .map_or(usize::MAX, |(soft, _)| usize::try_from(soft).unwrap_or(usize::MAX))
}

/// The limits for wanted numbers of connections and streams; `None` wants as many streams as
/// possible.
pub(crate) fn limits(connections: usize, streams: Option<usize>) -> Limits {
    let files = soft_limit();
    let limits = share(files, connections, streams);
    if limits.connections < connections || streams.is_some_and(|it| limits.streams < it) {
        tracing::warn!(
            files,
            connections = limits.connections,
            streams = limits.streams,
            "limits of connections and streams lowered to the limit of open files"
        );
    }
    limits
}

fn share(files: usize, connections: usize, streams: Option<usize>) -> Limits {
    let files = files.saturating_sub(RESERVED);
    let least = files / STREAM_SHARE;
    let most = files.saturating_sub(connections).max(least) / FILES_PER_STREAM;
    let streams = streams.map_or(most, |wanted| {
        wanted.min(files.saturating_sub(MIN_CONNECTIONS) / FILES_PER_STREAM)
    });
    let left = files.saturating_sub(streams.saturating_mul(FILES_PER_STREAM));
    Limits { connections: connections.min(left.max(MIN_CONNECTIONS)), streams: streams.max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_fit_into_the_limit_of_open_files() {
        let check = |files, connections, streams, expected: (usize, usize)| {
            let limits = share(files, connections, streams);
            assert_eq!((limits.connections, limits.streams), expected, "{files} {streams:?}");
        };
        check(1_048_576, 10_000, None, (10_000, 519_224));
        check(1_024, 10_000, None, (672, 112));
        check(1_024, 100, None, (100, 398));
        check(1_024, 100, Some(50), (100, 50));
        check(1_024, 10_000, Some(10_000), (64, 416));
        check(65_536, 10_000, Some(20_000), (10_000, 20_000));
        check(100, 10_000, None, (64, 1));
    }
}
