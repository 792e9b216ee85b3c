//! A wall clock that is wrong by a constant.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use crate::support::scratch;

/// A library that gives a program a wall clock that is `CLOCK_SHIFT` seconds off.
pub fn shifted_clock() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let directory = scratch();
        let (source, library) = (directory.join("shift.c"), directory.join("shift.so"));
        let code = r#"
            #define _GNU_SOURCE
            #include <stdlib.h>
            #include <sys/syscall.h>
            #include <sys/time.h>
            #include <time.h>
            #include <unistd.h>
            static long shift(void) { const char *text = getenv("CLOCK_SHIFT"); return text ? atol(text) : 0; }
            int clock_gettime(clockid_t id, struct timespec *ts) {
                int done = syscall(SYS_clock_gettime, id, ts);
                if (id == CLOCK_REALTIME) ts->tv_sec += shift();
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
