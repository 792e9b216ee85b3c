//! Secrets: never printed, several valid at a time so that they can be rotated, and reloaded
//! when their file changes.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use telephony::Secret;

use crate::watched_file::{Parse, ParseAll, WatchedFile};

/// Source of secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    Text(Secret),
    File(PathBuf),
}

/// A value that is reloaded when its file changes.
pub(crate) struct Watched<T> {
    current: RwLock<Arc<T>>,
    file: Option<Mutex<WatchedFile<T>>>,
}

impl<T: 'static> Watched<T> {
    /// Parses the secrets. Errors of `parse` must not contain any part of them.
    pub(super) fn new(
        variable: &'static str,
        source: &Source,
        parse: Parse<T>,
    ) -> Result<Self, String> {
        let (first, file) = match source {
            Source::Text(text) => (parse(text.expose())?, None),
            Source::File(path) => {
                let (first, file) = WatchedFile::open(variable, path.clone(), parse)?;
                (first, Some(Mutex::new(file)))
            }
        };
        Ok(Self { current: RwLock::new(Arc::new(first)), file })
    }

    /// Parses files that belong together.
    pub(crate) fn files(
        variable: &'static str,
        paths: Vec<PathBuf>,
        parse: ParseAll<T>,
    ) -> Result<Self, String> {
        let (first, file) = WatchedFile::open_all(variable, paths, parse)?;
        Ok(Self { current: RwLock::new(Arc::new(first)), file: Some(Mutex::new(file)) })
    }

    pub(crate) fn current(&self) -> Arc<T> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reloads the value if its file changed. An unusable file changes nothing.
    pub(crate) fn reload_if_changed(&self) {
        let Some(file) = &self.file else { return };
        if let Some(changed) =
            file.lock().unwrap_or_else(PoisonError::into_inner).reload_if_changed()
        {
            *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(changed);
        }
    }
}

#[cfg(test)]
mod tests {
    use telephony::secrets::list;

    use super::*;

    #[test]
    fn secrets_are_not_shown() {
        let secret = Secret::from("hunter2");
        assert_eq!(format!("{secret:?} {:?}", Source::Text(secret.clone())), "*** Text(***)");
        assert!(secret.matches("hunter2") && !secret.matches("hunter") && !secret.matches(""));
    }

    #[test]
    fn lists_are_split_at_commas_and_lines() {
        let secrets = list(" a, b\nc\r\n,").unwrap();
        assert_eq!(secrets.iter().map(Secret::expose).collect::<Vec<_>>(), ["a", "b", "c"]);
        assert!(list(" ,\n").is_err());
    }

    #[test]
    fn a_changed_file_is_reloaded_and_a_malformed_one_is_ignored() {
        let path = std::env::temp_dir().join(format!("secrets-{}", std::process::id()));
        std::fs::write(&path, "one").unwrap();
        let watched = Watched::new("TEST", &Source::File(path.clone()), Arc::new(list)).unwrap();
        let now = || watched.current().iter().map(|it| it.expose().to_owned()).collect::<Vec<_>>();
        std::fs::write(&path, "one,two").unwrap();
        watched.reload_if_changed();
        assert_eq!(now(), ["one"], "the file may be half written");
        watched.reload_if_changed();
        assert_eq!(now(), ["one", "two"]);
        for bad in [Some(""), Some(","), None] {
            match bad {
                Some(text) => std::fs::write(&path, text).unwrap(),
                None => std::fs::remove_file(&path).unwrap(),
            }
            watched.reload_if_changed();
            watched.reload_if_changed();
            assert_eq!(now(), ["one", "two"]);
        }
    }
}
