//! Fixtures for benchmarks.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use super::{Process, eventually, free_port};

pub fn wait_for_port(port: u16) {
    eventually(Duration::from_secs(6), "the port is open", || {
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
}

pub fn redis_server() -> (Process, u16) {
    let port = free_port();
    let mut command = Command::new("redis-server");
    command.args(["--port", &port.to_string(), "--save", "", "--appendonly", "no"]);
    let server = Process::start(&mut command);
    wait_for_port(port);
    (server, port)
}

/// Starts a proxy that delays each direction by `delay`. It uses threads, because the timers of
/// an async runtime are too coarse. Returns its port.
pub fn latency_proxy(to: u16, delay: Duration) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], to))) else {
                continue;
            };
            for (from, to) in [(&near, &far), (&far, &near)] {
                from.set_nodelay(true).unwrap();
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                thread::spawn(move || forward(from, to, delay));
            }
        }
    });
    port
}

fn forward(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
    let (queue, due) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        for (at, bytes) in due {
            thread::sleep(at.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                return;
            }
        }
    });
    let mut some = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut some) {
        if queue.send((Instant::now() + delay, some[..count].to_vec())).is_err() {
            return;
        }
    }
}

/// Describes the machine, the Redis version and the commit of a measurement.
pub fn describe_machine() -> String {
    let redis = output(Command::new("redis-server").arg("--version")).0;
    let redis = redis.split_whitespace().find_map(|word| word.strip_prefix("v=")).unwrap_or("?");
    describe_machine_with(&format!("Redis {redis}"))
}

/// Describes the machine, the nginx version and the commit of a measurement.
pub fn describe_machine_with_nginx() -> String {
    // It prints its version to standard error.
    let nginx = output(Command::new("nginx").arg("-v")).1;
    describe_machine_with(&format!("nginx {}", nginx.rsplit('/').next().unwrap_or("?")))
}

/// What a program prints to standard output and standard error; nothing if it does not run.
fn output(command: &mut Command) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let output = command.output().ok();
    output.map(|it| (text(&it.stdout), text(&it.stderr))).unwrap_or_default()
}

fn describe_machine_with(software: &str) -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("?");
    let cores = thread::available_parallelism().map_or(0, |cores| cores.get());
    // Changes of the documentation do not change the program.
    let program = ["--", ".", ":!docs", ":!*.md"];
    let git = |args: &[&str]| output(Command::new("git").args(args).args(program)).0;
    let commit = git(&["log", "-1", "--format=%h"]);
    let changed = !git(&["status", "--porcelain"]).is_empty();
    let changed = if changed { " (with changes)" } else { "" };
    format!(
        "{cores} cores, {}, {software}, commit {commit}{changed}",
        model.trim_start_matches([' ', '\t', ':'])
    )
}
