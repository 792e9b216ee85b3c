//! The wall clock of one program: offset from the real one, or frozen. The monotonic clock does
//! not change.

use std::{fs::File, os::unix::fs::FileExt, path::PathBuf};

use super::{preload::Preload, scratch};

/// A clock that a test can set while a program runs.
pub struct WallClock {
    path: PathBuf,
    file: File,
    /// The environment variable that names the file.
    mode: &'static str,
}

impl WallClock {
    /// A clock that is `seconds` ahead of the real one, or behind if negative.
    pub fn ahead(seconds: i64) -> Self {
        let clock = Self::create("CLOCK_AHEAD");
        clock.set_ahead(seconds);
        clock
    }

    /// A clock frozen at a time (ms since 1970).
    pub fn frozen(now: u64) -> Self {
        let clock = Self::create("CLOCK_FROZEN");
        clock.set_time(now);
        clock
    }

    fn create(mode: &'static str) -> Self {
        let path = scratch().join("clock");
        let file = File::options().create_new(true).write(true).open(&path).unwrap();
        Self { path, file, mode }
    }

    /// Steps a running clock.
    pub fn set_ahead(&self, seconds: i64) {
        assert_eq!(self.mode, "CLOCK_AHEAD");
        self.file.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    }

    /// Sets a frozen clock.
    pub fn set_time(&self, now: u64) {
        assert_eq!(self.mode, "CLOCK_FROZEN");
        self.file.write_all_at(&(now * 1_000).to_ne_bytes(), 0).unwrap();
    }

    /// The environment of a program with this clock.
    pub fn settings(&self) -> [(&'static str, String); 2] {
        [LIBRARY.setting(), (self.mode, self.path.to_str().unwrap().to_owned())]
    }
}

/// `CLOCK_AHEAD` names a file with the offset in seconds, `CLOCK_FROZEN` one with the time in
/// microseconds.
static LIBRARY: Preload = Preload::new(
    r#"
    #define _GNU_SOURCE
    #include <fcntl.h>
    #include <stdlib.h>
    #include <sys/mman.h>
    #include <sys/syscall.h>
    #include <sys/time.h>
    #include <time.h>
    #include <unistd.h>
    static volatile long long *ahead, *frozen;
    static volatile long long *map(const char *path) {
        return mmap(0, 8, PROT_READ, MAP_SHARED, open(path, O_RDONLY), 0);
    }
    int clock_gettime(clockid_t id, struct timespec *ts) {
        int done = syscall(SYS_clock_gettime, id, ts);
        if (id != CLOCK_REALTIME) return done;
        if (!frozen && !ahead) {
            const char *path = getenv("CLOCK_FROZEN");
            if (path) frozen = map(path); else ahead = map(getenv("CLOCK_AHEAD"));
        }
        if (ahead) { ts->tv_sec += *ahead; return done; }
        long long micros = *frozen;
        ts->tv_sec = micros / 1000000; ts->tv_nsec = micros % 1000000 * 1000; return 0;
    }
    int gettimeofday(struct timeval *tv, void *tz) {
        struct timespec ts; clock_gettime(CLOCK_REALTIME, &ts);
        tv->tv_sec = ts.tv_sec; tv->tv_usec = ts.tv_nsec / 1000; return 0;
    }
    time_t time(time_t *t) {
        struct timespec ts; clock_gettime(CLOCK_REALTIME, &ts);
        if (t) *t = ts.tv_sec; return ts.tv_sec;
    }"#,
);
