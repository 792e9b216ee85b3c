//! The journal of the embedded store: a text file of decided changes.
//!
//! Each line is a checksum, a space, JSON, a line feed. The first line names the
//! format and its version; every other one holds the changes of one commit. A
//! commit is written and synced before the next begins, so a crash can damage
//! only the last line. Damage anywhere else is not a crash, and is refused.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use fleet::Change;

const VERSION: u32 = 1;
/// A journal shorter than this is not worth compacting.
const COMPACT_FROM: u64 = 4 << 20;
/// Compacted when it has grown to so many times its compacted length.
const COMPACT_GROWTH: u64 = 4;

/// Why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("{path}: {error}")]
    Io { path: PathBuf, error: io::Error },
    #[error("{0} is in use by another process")]
    InUse(PathBuf),
    #[error("{0} is not a journal of smart-router")]
    NotAJournal(PathBuf),
    #[error(
        "{path} has format {found}, and this program reads up to {VERSION}: use a newer release"
    )]
    TooNew { path: PathBuf, found: u32 },
    #[error(
        "{path} is damaged at byte {at}, before its last record: this is not the trace of a crash. \
         Restore the file, or move it away to begin anew"
    )]
    Damaged { path: PathBuf, at: usize },
    #[error("{path} holds a record at byte {at} that this release does not know: {error}")]
    Unreadable { path: PathBuf, at: usize, error: serde_json::Error },
}

#[derive(Serialize, Deserialize)]
struct Header {
    smart_router_journal: u32,
}

/// What a journal held when it was opened.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
    pub changes: Vec<Change>,
    /// Bytes of an unfinished last record that were cut off.
    pub torn: usize,
}

/// A data directory that is ours: locked for as long as this lives.
pub(crate) struct Directory {
    journal: PathBuf,
    _lock: File,
}

impl Directory {
    /// Takes a directory, which is made if it is not there, and reads the
    /// journal in it, if there is one.
    pub(crate) fn take(path: &Path) -> Result<(Self, Option<Recovered>), JournalError> {
        let io_error = |error| JournalError::Io { path: path.to_owned(), error };
        fs::create_dir_all(path).map_err(io_error)?;
        // A file of its own: the journal itself is replaced when compacted.
        let lock = File::create(path.join("lock")).map_err(io_error)?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => JournalError::InUse(path.to_owned()),
            TryLockError::Error(error) => io_error(error),
        })?;
        let journal = path.join("journal");
        let recovered = match fs::read(&journal) {
            Ok(bytes) => Some(read(&bytes, &journal)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(JournalError::Io { path: journal, error }),
        };
        Ok((Self { journal, _lock: lock }, recovered))
    }

    /// Begins a journal that holds `facts`, in place of the one that was there.
    pub(crate) fn begin(self, facts: &[Change]) -> Result<Journal, JournalError> {
        match replace(&self.journal, facts) {
            Ok((file, length)) => Ok(Journal { directory: self, file, length, compacted: length }),
            Err(error) => Err(JournalError::Io { path: self.journal, error }),
        }
    }
}

/// An open journal.
pub(crate) struct Journal {
    directory: Directory,
    file: File,
    length: u64,
    compacted: u64,
}

impl Journal {
    /// Writes changes as one record and waits until they are on disk.
    pub(crate) fn commit(&mut self, changes: &[Change]) -> io::Result<()> {
        let record = line(&changes)?;
        self.file.write_all(&record)?;
        self.file.sync_data()?;
        // A file whose name was taken away is written and synced all the same, and lost.
        if matches!(self.directory.journal.try_exists(), Ok(false)) {
            return Err(io::Error::other("the file was removed or renamed"));
        }
        self.length += record.len() as u64;
        Ok(())
    }

    /// Replaces all records by the facts that they come to.
    pub(crate) fn compact(&mut self, facts: &[Change]) -> io::Result<()> {
        (self.file, self.length) = replace(&self.directory.journal, facts)?;
        self.compacted = self.length;
        Ok(())
    }

    /// The file, for messages.
    pub(crate) fn path(&self) -> &Path {
        &self.directory.journal
    }

    pub(crate) fn wants_compaction(&self) -> bool {
        self.length > COMPACT_FROM && self.length > COMPACT_GROWTH * self.compacted
    }
}

/// Writes a whole journal. The new file is complete and on disk before it takes
/// the name of the old one; if it cannot be, it leaves nothing behind on a disk that is full.
fn replace(path: &Path, facts: &[Change]) -> io::Result<(File, u64)> {
    let fresh = path.with_extension("new");
    write_whole(&fresh, path, facts).inspect_err(|_| drop(fs::remove_file(&fresh)))
}

fn write_whole(fresh: &Path, path: &Path, facts: &[Change]) -> io::Result<(File, u64)> {
    let mut bytes = line(&Header { smart_router_journal: VERSION })?;
    for some in facts.chunks(1024) {
        bytes.extend(line(&some)?);
    }
    let mut file = File::create(fresh)?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    fs::rename(fresh, path)?;
    File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()?;
    Ok((file, bytes.len() as u64))
}

fn line<T: Serialize>(payload: &T) -> io::Result<Vec<u8>> {
    let mut line = b"00000000 ".to_vec();
    serde_json::to_writer(&mut line, payload)?;
    let checksum = format!("{:08x}", crc32fast::hash(&line[9..]));
    line[..8].copy_from_slice(checksum.as_bytes());
    line.push(b'\n');
    Ok(line)
}

/// The payload of an intact line.
fn payload(line: &[u8]) -> Option<&[u8]> {
    let line = line.strip_suffix(b"\n")?;
    let (checksum, payload) = (line.get(..8)?, line.get(9..)?);
    let checksum = u32::from_str_radix(str::from_utf8(checksum).ok()?, 16).ok()?;
    (checksum == crc32fast::hash(payload)).then_some(payload)
}

fn read(bytes: &[u8], path: &Path) -> Result<Recovered, JournalError> {
    let mut lines = bytes.split_inclusive(|byte| *byte == b'\n');
    let first = lines.next().unwrap_or_default();
    let header: Header = payload(first)
        .and_then(|payload| serde_json::from_slice(payload).ok())
        .ok_or_else(|| JournalError::NotAJournal(path.to_owned()))?;
    if header.smart_router_journal > VERSION {
        let found = header.smart_router_journal;
        return Err(JournalError::TooNew { path: path.to_owned(), found });
    }
    let mut recovered = Recovered::default();
    let mut at = first.len();
    for line in lines.by_ref() {
        let Some(payload) = payload(line) else {
            recovered.torn = bytes.len() - at;
            break;
        };
        let changes: Vec<Change> = serde_json::from_slice(payload)
            .map_err(|error| JournalError::Unreadable { path: path.to_owned(), at, error })?;
        recovered.changes.extend(changes);
        at += line.len();
    }
    if lines.next().is_some() {
        return Err(JournalError::Damaged { path: path.to_owned(), at });
    }
    Ok(recovered)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(call: &str) -> Change {
        Change::Ended { call: call.parse().unwrap(), at: 1, cause: Default::default() }
    }

    fn directory(name: &str) -> PathBuf {
        let directory =
            std::env::temp_dir().join(format!("smart-router-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        directory
    }

    fn written(directory: &Path) -> Vec<u8> {
        let (directory, recovered) = Directory::take(directory).unwrap();
        assert!(recovered.is_none());
        let mut journal = directory.begin(&[ended("a")]).unwrap();
        journal.commit(&[ended("b"), ended("c")]).unwrap();
        journal.commit(&[ended("d")]).unwrap();
        fs::read(&journal.directory.journal).unwrap()
    }

    #[test]
    fn what_was_committed_is_read_back() {
        let directory = directory("read-back");
        written(&directory);
        let (_, recovered) = Directory::take(&directory).unwrap();
        let recovered = recovered.unwrap();
        assert_eq!(recovered.changes, ["a", "b", "c", "d"].map(ended));
        assert_eq!(recovered.torn, 0);
    }

    #[test]
    fn a_record_cut_anywhere_is_dropped_whole_and_those_before_it_stay() {
        let directory = directory("torn");
        let bytes = written(&directory);
        let last = bytes[..bytes.len() - 1].iter().rposition(|byte| *byte == b'\n').unwrap() + 1;
        for cut in last..bytes.len() {
            let recovered = read(&bytes[..cut], &directory).unwrap();
            assert_eq!(recovered.changes, ["a", "b", "c"].map(ended), "cut at {cut}");
            assert_eq!(recovered.torn, cut - last);
        }
    }

    #[test]
    fn damage_before_the_last_record_is_refused() {
        let directory = directory("damaged");
        let mut bytes = written(&directory);
        let header = bytes.iter().position(|byte| *byte == b'\n').unwrap();
        bytes[header + 20] ^= 1;
        let last = bytes.len() - 5;
        bytes[last] ^= 1;
        assert!(
            matches!(read(&bytes, &directory), Err(JournalError::Damaged { at, .. }) if at == header + 1)
        );
    }

    #[test]
    fn other_files_and_newer_formats_are_refused() {
        let path = Path::new("journal");
        for other in ["", "hello\nworld\n"] {
            assert!(matches!(read(other.as_bytes(), path), Err(JournalError::NotAJournal(_))));
        }
        let newer = line(&Header { smart_router_journal: VERSION + 1 }).unwrap();
        assert!(matches!(read(&newer, path), Err(JournalError::TooNew { found: 2, .. })));
    }

    #[test]
    fn a_second_opener_is_refused_while_the_first_lives() {
        let directory = directory("locked");
        let (journal, _) = Directory::take(&directory).unwrap();
        assert!(matches!(Directory::take(&directory), Err(JournalError::InUse(_))));
        drop(journal);
        assert!(Directory::take(&directory).is_ok());
    }
}
