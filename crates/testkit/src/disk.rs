//! Disk fault injection for one program.

use std::{fs, path::PathBuf};

use super::{preload::Preload, scratch};

/// `errno` of a full, a read-only and a failing disk.
pub const ENOSPC: i32 = 28;
pub const EROFS: i32 = 30;
pub const EIO: i32 = 5;

/// Fails or stalls system calls on journals while the fault file names them.
pub struct Disk {
    fault: PathBuf,
}

impl Disk {
    pub fn create() -> Self {
        Self { fault: scratch().join("fault") }
    }

    /// The environment of a program on this disk.
    pub fn settings(&self) -> [(&'static str, String); 2] {
        [LIBRARY.setting(), ("DISK_FAULT", self.fault.to_str().unwrap().to_owned())]
    }

    /// Makes a call (`create`, `write`, `sync`) fail until [`heal`](Self::heal).
    pub fn fail(&self, call: &str, errno: i32) {
        fs::write(&self.fault, format!("{call} {errno}")).unwrap();
    }

    /// Makes a call block until [`heal`](Self::heal).
    pub fn stall(&self, call: &str) {
        self.fail(call, 0);
    }

    pub fn heal(&self) {
        fs::remove_file(&self.fault).unwrap();
    }
}

static LIBRARY: Preload = Preload::new(
    r#"
    #define _GNU_SOURCE
    #include <errno.h>
    #include <fcntl.h>
    #include <stdarg.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <unistd.h>
    #include <sys/syscall.h>
    static int failure(const char *call) {
        char text[64] = "", name[32] = ""; int number = 0;
        int fd = syscall(SYS_openat, AT_FDCWD, getenv("DISK_FAULT"), O_RDONLY);
        if (fd < 0) return -1;
        syscall(SYS_read, fd, text, sizeof text - 1);
        syscall(SYS_close, fd);
        if (sscanf(text, "%31s %d", name, &number) != 2 || strcmp(name, call)) return -1;
        return number;
    }
    static int fails(const char *call) {
        int number;
        while ((number = failure(call)) == 0) usleep(5000);
        if (number > 0) errno = number;
        return number > 0;
    }
    static int is_journal(int fd) {
        char link[64], path[512] = "";
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        return readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/journal");
    }
    int open64(const char *path, int flags, ...) {
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest);
        if ((flags & O_CREAT) && (strstr(path, "/journal") || strstr(path, "/lock")) && fails("create")) return -1;
        return syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    }
    ssize_t write(int fd, const void *bytes, size_t size) {
        if (is_journal(fd) && fails("write")) return -1;
        return syscall(SYS_write, fd, bytes, size);
    }
    int fdatasync(int fd) { return fails("sync") ? -1 : syscall(SYS_fdatasync, fd); }"#,
);
