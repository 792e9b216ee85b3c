//! Files that are reloaded when they change.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Size limit of a watched file (bytes).
const MAX_FILE_SIZE: u64 = 16 << 20;

/// Parses the text of a file; the error names what was expected.
pub(crate) type Parse<T> = Arc<dyn Fn(&str) -> Result<T, String> + Send + Sync>;
/// Parses the texts of files that belong together, in their order.
pub(crate) type ParseAll<T> = Arc<dyn Fn(&[String]) -> Result<T, String> + Send + Sync>;

/// A file that is polled for changes, or several that belong together.
#[derive(Clone)]
pub(crate) struct WatchedFile<T> {
    /// The variable that names the file.
    variable: &'static str,
    paths: Vec<PathBuf>,
    parse: ParseAll<T>,
    /// The texts that were last accepted or rejected.
    settled: Vec<String>,
    /// The texts of the last read. A change takes effect when two reads agree, because the
    /// first may have read a half-written file.
    last_read: Result<Vec<String>, String>,
}

impl<T: 'static> WatchedFile<T> {
    /// Reads the file for the first time.
    pub(crate) fn open(
        variable: &'static str,
        path: PathBuf,
        parse: Parse<T>,
    ) -> Result<(T, Self), String> {
        Self::open_all(variable, vec![path], Arc::new(move |texts| parse(&texts[0])))
    }

    /// Reads files that belong together.
    pub(crate) fn open_all(
        variable: &'static str,
        paths: Vec<PathBuf>,
        parse: ParseAll<T>,
    ) -> Result<(T, Self), String> {
        let texts = texts_of(&paths)?;
        let first = parse(&texts)?;
        Ok((first, Self { variable, paths, parse, settled: texts.clone(), last_read: Ok(texts) }))
    }

    /// Reads the file; returns its value if it changed and is valid.
    pub(crate) fn reload_if_changed(&mut self) -> Option<T> {
        let before = std::mem::replace(&mut self.last_read, texts_of(&self.paths));
        let (variable, path) = (self.variable, self.paths[0].display());
        match &self.last_read {
            Ok(texts) if *texts == self.settled => None,
            Err(expected) => {
                if before.as_ref() != Err(expected) {
                    tracing::warn!(variable, %path, expected, "the file is unusable; keeping the previous value");
                }
                None
            }
            Ok(texts) if before.as_ref() != Ok(texts) => None,
            Ok(texts) => {
                self.settled.clone_from(texts);
                match (self.parse)(texts) {
                    Ok(changed) => {
                        tracing::info!(variable, %path, "the file changed; using the new value");
                        Some(changed)
                    }
                    Err(expected) => {
                        tracing::warn!(variable, %path, expected, "the file is unusable; keeping the previous value");
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

/// Accepts regular files only: a read of a pipe may block forever.
fn text_of(path: &Path) -> Result<String, String> {
    let unreadable = |error: std::io::Error| format!("a file that can be read; {error}");
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_file() || metadata.len() > MAX_FILE_SIZE {
        return Err(format!("a regular file of at most {MAX_FILE_SIZE} bytes"));
    }
    std::fs::read_to_string(path).map_err(unreadable)
}
