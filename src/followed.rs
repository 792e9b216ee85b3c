//! Files that are read again when they change.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// No list of ours is larger.
const LARGEST: u64 = 16 << 20;

/// Reads what a file holds; an error says what was expected.
pub type Read<T> = Arc<dyn Fn(&str) -> Result<T, String> + Send + Sync>;

/// A file that is looked at again and again.
#[derive(Clone)]
pub struct FollowedFile<T> {
    /// The variable that names it.
    what: &'static str,
    path: PathBuf,
    read: Read<T>,
    /// The text that was last decided upon, for good or ill.
    settled: String,
    /// What the last look saw: a change counts when two looks agree, because the
    /// first may have come upon a file that was half written.
    seen: Result<String, String>,
}

impl<T> FollowedFile<T> {
    /// Reads the file for the first time.
    pub fn open(what: &'static str, path: PathBuf, read: Read<T>) -> Result<(T, Self), String> {
        let text = text_of(&path)?;
        let first = read(&text)?;
        Ok((first, Self { what, path, read, settled: text.clone(), seen: Ok(text) }))
    }

    /// Looks at the file; what it holds, if that has changed and can be used.
    pub fn look(&mut self) -> Option<T> {
        let before = std::mem::replace(&mut self.seen, text_of(&self.path));
        let (what, path) = (self.what, self.path.display());
        match &self.seen {
            Ok(text) if *text == self.settled => None,
            Err(expected) => {
                if before.as_ref() != Err(expected) {
                    tracing::warn!(what, %path, expected, "keeping what there is: the file can't be used");
                }
                None
            }
            Ok(text) if before.as_ref() != Ok(text) => None,
            Ok(text) => {
                self.settled.clone_from(text);
                match (self.read)(text) {
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

/// Only a file is read, and not a pipe, which may have nothing to say for ever.
fn text_of(path: &Path) -> Result<String, String> {
    let unreadable = |error: std::io::Error| format!("a file that can be read; {error}");
    let about = std::fs::metadata(path).map_err(unreadable)?;
    if !about.is_file() || about.len() > LARGEST {
        return Err(format!("a regular file of at most {LARGEST} bytes"));
    }
    std::fs::read_to_string(path).map_err(unreadable)
}
