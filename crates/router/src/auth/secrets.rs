//! Secrets: never shown, several at a time so that they can be changed one after
//! the other, and read again when their file changes.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use telephony::Secret;

use crate::watched_file::{FollowedFile, Read, ReadAll};

/// Where secrets come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    Text(Secret),
    File(PathBuf),
}

/// Secrets that may change while they are in use.
pub struct Followed<T> {
    current: RwLock<Arc<T>>,
    file: Option<Mutex<FollowedFile<T>>>,
}

impl<T: 'static> Followed<T> {
    /// Reads the secrets for the first time. What `read` says of bad ones must
    /// show nothing of them.
    pub fn new(what: &'static str, source: &Source, read: Read<T>) -> Result<Self, String> {
        let (first, file) = match source {
            Source::Text(text) => (read(text.expose())?, None),
            Source::File(path) => {
                let (first, file) = FollowedFile::open(what, path.clone(), read)?;
                (first, Some(Mutex::new(file)))
            }
        };
        Ok(Self { current: RwLock::new(Arc::new(first)), file })
    }

    /// The same with files that belong together.
    pub fn files(
        what: &'static str,
        paths: Vec<PathBuf>,
        read: ReadAll<T>,
    ) -> Result<Self, String> {
        let (first, file) = FollowedFile::open_all(what, paths, read)?;
        Ok(Self { current: RwLock::new(Arc::new(first)), file: Some(Mutex::new(file)) })
    }

    pub fn current(&self) -> Arc<T> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Looks at the file, if there is one. What can't be used changes nothing.
    pub fn look(&self) {
        let Some(file) = &self.file else { return };
        if let Some(changed) = file.lock().unwrap_or_else(PoisonError::into_inner).look() {
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
        assert!(secret.is("hunter2") && !secret.is("hunter") && !secret.is(""));
    }

    #[test]
    fn lists_are_split_at_commas_and_lines() {
        let secrets = list(" a, b\nc\r\n,").unwrap();
        assert_eq!(secrets.iter().map(Secret::expose).collect::<Vec<_>>(), ["a", "b", "c"]);
        assert!(list(" ,\n").is_err());
    }

    #[test]
    fn a_file_that_changes_is_read_again_and_a_bad_one_is_not_taken() {
        let path = std::env::temp_dir().join(format!("secrets-{}", std::process::id()));
        std::fs::write(&path, "one").unwrap();
        let followed = Followed::new("TEST", &Source::File(path.clone()), Arc::new(list)).unwrap();
        let now = || followed.current().iter().map(|it| it.expose().to_owned()).collect::<Vec<_>>();
        std::fs::write(&path, "one,two").unwrap();
        followed.look();
        assert_eq!(now(), ["one"], "the file may be half written");
        followed.look();
        assert_eq!(now(), ["one", "two"]);
        for bad in [Some(""), Some(","), None] {
            match bad {
                Some(text) => std::fs::write(&path, text).unwrap(),
                None => std::fs::remove_file(&path).unwrap(),
            }
            followed.look();
            followed.look();
            assert_eq!(now(), ["one", "two"]);
        }
    }
}
