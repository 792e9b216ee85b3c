//! C libraries that replace system calls of one program (`LD_PRELOAD`).

use std::{fs, path::PathBuf, process::Command, sync::OnceLock};

use super::scratch;

/// A library that is compiled on first use.
pub(crate) struct Preload {
    code: &'static str,
    library: OnceLock<PathBuf>,
}

impl Preload {
    pub(crate) const fn new(code: &'static str) -> Self {
        Self { code, library: OnceLock::new() }
    }

    /// The environment variable that loads the library into a program.
    pub(crate) fn setting(&self) -> (&'static str, String) {
        let library = self.library.get_or_init(|| {
            let directory = scratch();
            let (source, library) = (directory.join("preload.c"), directory.join("preload.so"));
            fs::write(&source, self.code).unwrap();
            let mut compiler = Command::new("cc");
            compiler.args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source);
            assert!(compiler.status().unwrap().success());
            library
        });
        ("LD_PRELOAD", library.to_str().unwrap().to_owned())
    }
}
