//! The processes of a measurement, and what they use.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// A process that ends with its owner.
pub struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    pub fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts"))
    }

    /// Time on a processor so far.
    pub fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        Duration::from_millis(ticks * 10)
    }

    /// Lets it stand still, or go on. (Whoever runs beside another keeps the processor
    /// awake for it.)
    pub fn set_running(&self, is_running: bool) {
        let signal = if is_running { "-CONT" } else { "-STOP" };
        let told = Command::new("kill").args([signal, &self.0.id().to_string()]).status();
        assert!(told.is_ok_and(|status| status.success()), "kill {signal}");
    }

    /// Waits until what its clients do at their start is done.
    pub fn wait_until_idle(&self) {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let before = self.cpu();
            thread::sleep(Duration::from_millis(250));
            if self.cpu() - before <= Duration::from_millis(10) {
                return;
            }
            assert!(Instant::now() < until, "still busy");
        }
    }

    /// Resident memory in megabytes.
    pub fn memory(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
    }
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub fn wait_for(port: u16) {
    let until = Instant::now() + Duration::from_secs(60);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < until, "nobody listens on {port}");
        thread::sleep(Duration::from_millis(10));
    }
}

pub fn redis_server() -> (Process, u16) {
    let port = free_port();
    let mut command = Command::new("redis-server");
    command.args(["--port", &port.to_string(), "--save", "", "--appendonly", "no"]);
    let server = Process::start(&mut command);
    wait_for(port);
    (server, port)
}

/// Passes everything on after `delay`, each way: a network in between. Threads, since
/// a runtime's timers are too coarse for it.
pub fn delayed(to: u16, delay: Duration) -> u16 {
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
                thread::spawn(move || carry(from, to, delay));
            }
        }
    });
    port
}

fn carry(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
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

/// What this is measured on.
pub fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("?");
    let cores = thread::available_parallelism().map_or(0, |cores| cores.get());
    let output = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).output().ok();
        output.map(|it| String::from_utf8_lossy(&it.stdout).trim().to_owned()).unwrap_or_default()
    };
    let redis = output("redis-server", &["--version"]);
    let redis = redis.split_whitespace().find_map(|word| word.strip_prefix("v=")).unwrap_or("?");
    // (what is written down about it does not change the program)
    let program = ["--", ".", ":!docs", ":!*.md"];
    let commit = output("git", &[&["log", "-1", "--format=%h"], &program[..]].concat());
    let changed = !output("git", &[&["status", "--porcelain"], &program[..]].concat()).is_empty();
    let changed = if changed { " (with changes)" } else { "" };
    format!(
        "{cores} cores, {}, Redis {redis}, commit {commit}{changed}",
        model.trim_start_matches([' ', '\t', ':'])
    )
}
