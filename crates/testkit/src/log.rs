//! The log file of a router.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::Stdio,
    time::Duration,
};

use super::{eventually, scratch};

pub struct Log(PathBuf);

impl Log {
    pub fn create() -> Self {
        Self(scratch().join("log"))
    }

    /// A handle that appends to the file, for the stderr of a program.
    pub fn sink(&self) -> Stdio {
        File::options().create(true).append(true).open(&self.0).unwrap().into()
    }

    pub fn text(&self) -> String {
        fs::read_to_string(&self.0).unwrap()
    }

    /// Waits until the log contains `text` more than `before` times.
    pub fn wait_for(&self, text: &str, before: usize) {
        eventually(Duration::from_secs(15), text, || self.count(text) > before);
    }

    pub fn count(&self, text: &str) -> usize {
        self.text().matches(text).count()
    }
}
