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
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("?");
    let cores = thread::available_parallelism().map_or(0, |cores| cores.get());
    let output = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).output().ok();
        output.map(|it| String::from_utf8_lossy(&it.stdout).trim().to_owned()).unwrap_or_default()
    };
    let redis = output("redis-server", &["--version"]);
    let redis = redis.split_whitespace().find_map(|word| word.strip_prefix("v=")).unwrap_or("?");
    // Changes of the documentation do not change the program.
    let program = ["--", ".", ":!docs", ":!*.md"];
    let commit = output("git", &[&["log", "-1", "--format=%h"], &program[..]].concat());
    let changed = !output("git", &[&["status", "--porcelain"], &program[..]].concat()).is_empty();
    let changed = if changed { " (with changes)" } else { "" };
    format!(
        "{cores} cores, {}, Redis {redis}, commit {commit}{changed}",
        model.trim_start_matches([' ', '\t', ':'])
    )
}
