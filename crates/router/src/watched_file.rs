//! Files that are read again when they change.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// No list of ours is larger.
const LARGEST: u64 = 16 << 20;

/// Reads what a file holds; an error says what was expected.
pub(crate) type Read<T> = Arc<dyn Fn(&str) -> Result<T, String> + Send + Sync>;
/// Reads what files hold that belong together, in their order.
pub(crate) type ReadAll<T> = Arc<dyn Fn(&[String]) -> Result<T, String> + Send + Sync>;

/// A file that is looked at again and again, or some that belong together.
#[derive(Clone)]
pub(crate) struct FollowedFile<T> {
    /// The variable that names it.
    what: &'static str,
    paths: Vec<PathBuf>,
    read: ReadAll<T>,
    /// The texts that were last decided upon, for good or ill.
    settled: Vec<String>,
    /// What the last look saw: a change counts when two looks agree, because the
    /// first may have come upon a file that was half written.
    seen: Result<Vec<String>, String>,
}

impl<T: 'static> FollowedFile<T> {
    /// Reads the file for the first time.
    pub(crate) fn open(
        what: &'static str,
        path: PathBuf,
        read: Read<T>,
    ) -> Result<(T, Self), String> {
        Self::open_all(what, vec![path], Arc::new(move |texts| read(&texts[0])))
    }

    /// Reads files that belong together.
    pub(crate) fn open_all(
        what: &'static str,
        paths: Vec<PathBuf>,
        read: ReadAll<T>,
    ) -> Result<(T, Self), String> {
        let texts = texts_of(&paths)?;
        let first = read(&texts)?;
        Ok((first, Self { what, paths, read, settled: texts.clone(), seen: Ok(texts) }))
    }

    /// Looks at the file; what it holds, if that has changed and can be used.
    pub(crate) fn look(&mut self) -> Option<T> {
        let before = std::mem::replace(&mut self.seen, texts_of(&self.paths));
        let (what, path) = (self.what, self.paths[0].display());
        match &self.seen {
            Ok(texts) if *texts == self.settled => None,
            Err(expected) => {
                if before.as_ref() != Err(expected) {
                    tracing::warn!(what, %path, expected, "keeping what there is: the file can't be used");
                }
                None
            }
            Ok(texts) if before.as_ref() != Ok(texts) => None,
            Ok(texts) => {
                self.settled.clone_from(texts);
                match (self.read)(texts) {
                    Ok(changed) => {
                        tracing::info!(what, %path, "the file has changed");
                        Some(changed)
                    }
                    Err(expected) => {
                        tracing::warn!(what, %path, expected, "keeping what there is: the file can't be used");
                        None
                    }
                }
            }
        }
    }
}

fn texts_of(paths: &[PathBuf]) -> Result<Vec<String>, String> {
    paths.iter().map(|path| text_of(path)).collect()
}

/// Only a file is read, and not a pipe, which may have nothing to say for ever.
fn text_of(path: &Path) -> Result<String, String> {
    let unreadable = |error: std::io::Error| format!("a file that can be read; {error}");
    let about = std::fs::metadata(path).map_err(unreadable)?;
    if !about.is_file() || about.len() > LARGEST {
        return Err(format!("a regular file of at most {LARGEST} bytes"));
    }
    std::fs::read_to_string(path).map_err(unreadable)
}
