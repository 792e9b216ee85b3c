//! The journal of the embedded store: a text file of changes.
//!
//! Each line is a checksum, a space, JSON, a line feed. The first line names the format and its
//! version; every other line is a record with the changes of one commit. A commit is written and
//! synced before the next begins, so a crash can damage only the last record. Damage anywhere else
//! has another cause and is refused.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use fleet::Change;

const VERSION: u32 = 1;
/// A shorter journal is not compacted.
const MIN_COMPACTION_BYTES: u64 = 4 << 20;
/// A journal is compacted when it exceeds this multiple of its compacted length.
const COMPACTION_GROWTH: u64 = 4;

/// Why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("{path}: {error}")]
    Io { path: PathBuf, error: io::Error },
    #[error("{0} is in use by another process")]
    InUse(PathBuf),
    #[error("{0} is not a smart-router journal")]
    NotAJournal(PathBuf),
    #[error(
        "{path} has format {found}, and this program reads up to {VERSION}: use a newer release"
    )]
    TooNew { path: PathBuf, found: u32 },
    #[error(
        "{path} is damaged at byte {at}, before its last record: a crash does not cause this. \
         Restore the file, or move it away to start with an empty store"
    )]
    Damaged { path: PathBuf, at: usize },
    #[error("{path} contains a record at byte {at} that this release cannot read: {error}")]
    Unreadable { path: PathBuf, at: usize, error: serde_json::Error },
}

#[derive(Serialize, Deserialize)]
struct Header {
    smart_router_journal: u32,
}

/// The content of a journal when it was opened.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
    pub changes: Vec<Change>,
    /// Bytes of an incomplete last record, which were removed.
    pub incomplete: usize,
}

/// A data directory, locked while this exists.
pub(crate) struct Directory {
    journal: PathBuf,
    _lock: File,
}

impl Directory {
    /// Creates the directory if necessary, locks it, and reads its journal, if any.
    pub(crate) fn open(path: &Path) -> Result<(Self, Option<Recovered>), JournalError> {
        let io_error = |error| JournalError::Io { path: path.to_owned(), error };
        fs::create_dir_all(path).map_err(io_error)?;
        // A separate lock file: compaction replaces the journal.
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

    /// Replaces the journal by a new one with this snapshot.
    pub(crate) fn begin(self, snapshot: &[Change]) -> Result<Journal, JournalError> {
        match replace(&self.journal, snapshot) {
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
        let record = encode(&changes)?;
        self.file.write_all(&record)?;
        self.file.sync_data()?;
        // Writes to an unlinked file succeed, and are lost.
        if matches!(self.directory.journal.try_exists(), Ok(false)) {
            return Err(io::Error::other("the file was removed or renamed"));
        }
        self.length += record.len() as u64;
        Ok(())
    }

    /// Compaction: replaces all records by a snapshot.
    pub(crate) fn compact(&mut self, snapshot: &[Change]) -> io::Result<()> {
        (self.file, self.length) = replace(&self.directory.journal, snapshot)?;
        self.compacted = self.length;
        Ok(())
    }

    /// The file, for messages.
    pub(crate) fn path(&self) -> &Path {
        &self.directory.journal
    }

    pub(crate) fn needs_compaction(&self) -> bool {
        self.length > MIN_COMPACTION_BYTES && self.length > COMPACTION_GROWTH * self.compacted
    }
}

/// Replaces a journal atomically: the new file is synced before it is renamed. If that fails, the
/// temporary file is removed, so that it does not fill the disk.
fn replace(path: &Path, snapshot: &[Change]) -> io::Result<(File, u64)> {
    let temporary = path.with_extension("new");
    write_all_records(&temporary, path, snapshot).inspect_err(|_| drop(fs::remove_file(&temporary)))
}

fn write_all_records(
    temporary: &Path,
    path: &Path,
    snapshot: &[Change],
) -> io::Result<(File, u64)> {
    let mut bytes = encode(&Header { smart_router_journal: VERSION })?;
    for batch in snapshot.chunks(1024) {
        bytes.extend(encode(&batch)?);
    }
    let mut file = File::create(temporary)?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    fs::rename(temporary, path)?;
    File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()?;
    Ok((file, bytes.len() as u64))
}

fn encode<T: Serialize>(payload: &T) -> io::Result<Vec<u8>> {
    let mut record = b"00000000 ".to_vec();
    serde_json::to_writer(&mut record, payload)?;
    let checksum = format!("{:08x}", crc32fast::hash(&record[9..]));
    record[..8].copy_from_slice(checksum.as_bytes());
    record.push(b'\n');
    Ok(record)
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
            recovered.incomplete = bytes.len() - at;
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
        let (directory, recovered) = Directory::open(directory).unwrap();
        assert!(recovered.is_none());
        let mut journal = directory.begin(&[ended("a")]).unwrap();
        journal.commit(&[ended("b"), ended("c")]).unwrap();
        journal.commit(&[ended("d")]).unwrap();
        fs::read(&journal.directory.journal).unwrap()
    }

    #[test]
    fn committed_changes_are_read_back() {
        let directory = directory("read-back");
        written(&directory);
        let (_, recovered) = Directory::open(&directory).unwrap();
        let recovered = recovered.unwrap();
        assert_eq!(recovered.changes, ["a", "b", "c", "d"].map(ended));
        assert_eq!(recovered.incomplete, 0);
    }

    #[test]
    fn an_incomplete_last_record_is_dropped_and_earlier_ones_stay() {
        let directory = directory("torn");
        let bytes = written(&directory);
        let last = bytes[..bytes.len() - 1].iter().rposition(|byte| *byte == b'\n').unwrap() + 1;
        for cut in last..bytes.len() {
            let recovered = read(&bytes[..cut], &directory).unwrap();
            assert_eq!(recovered.changes, ["a", "b", "c"].map(ended), "cut at {cut}");
            assert_eq!(recovered.incomplete, cut - last);
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
        let newer = encode(&Header { smart_router_journal: VERSION + 1 }).unwrap();
        assert!(matches!(read(&newer, path), Err(JournalError::TooNew { found: 2, .. })));
    }

    #[test]
    fn a_locked_directory_cannot_be_opened_again() {
        let directory = directory("locked");
        let (journal, _) = Directory::open(&directory).unwrap();
        assert!(matches!(Directory::open(&directory), Err(JournalError::InUse(_))));
        drop(journal);
        assert!(Directory::open(&directory).is_ok());
    }
}
