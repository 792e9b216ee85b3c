//! A wall clock that is wrong, and can be set while a program runs.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use super::scratch;

/// The wall clock of one program. Its monotonic clock stays as it is.
pub struct WallClock {
    path: PathBuf,
    ahead: File,
}

impl WallClock {
    /// A clock that is `seconds` ahead of the real one, or behind if negative.
    pub fn ahead(seconds: i64) -> Self {
        let path = scratch().join("ahead");
        let ahead = File::options().create_new(true).write(true).open(&path).unwrap();
        let clock = Self { path, ahead };
        clock.set_ahead(seconds);
        clock
    }

    /// Steps the clock.
    pub fn set_ahead(&self, seconds: i64) {
        self.ahead.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    }

    /// The settings that give a program this clock.
    pub fn settings(&self) -> [(&'static str, String); 2] {
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        [("LD_PRELOAD", text(library())), ("CLOCK_AHEAD", text(&self.path))]
    }
}

/// Adds the seconds in the file `CLOCK_AHEAD` to the wall clock of a program.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let directory = scratch();
        let (source, library) = (directory.join("ahead.c"), directory.join("ahead.so"));
        let code = r#"
            #define _GNU_SOURCE
            #include <fcntl.h>
            #include <stdlib.h>
            #include <sys/mman.h>
            #include <sys/syscall.h>
            #include <sys/time.h>
            #include <time.h>
            #include <unistd.h>
            static volatile long long *seconds;
            static long long ahead(void) {
                if (!seconds) seconds = mmap(0, 8, PROT_READ, MAP_SHARED, open(getenv("CLOCK_AHEAD"), O_RDONLY), 0);
                return *seconds;
            }
            int clock_gettime(clockid_t id, struct timespec *ts) {
                int done = syscall(SYS_clock_gettime, id, ts);
                if (id == CLOCK_REALTIME) ts->tv_sec += ahead();
                return done;
            }
            int gettimeofday(struct timeval *tv, void *tz) {
                struct timespec ts; clock_gettime(CLOCK_REALTIME, &ts);
                tv->tv_sec = ts.tv_sec; tv->tv_usec = ts.tv_nsec / 1000; return 0;
            }
            time_t time(time_t *t) { struct timespec ts; clock_gettime(CLOCK_REALTIME, &ts); if (t) *t = ts.tv_sec; return ts.tv_sec; }"#;
        fs::write(&source, code).unwrap();
        let built = Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source).status();
        assert!(built.unwrap().success());
        library
    })
}
