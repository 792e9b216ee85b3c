//! The complete router with the embedded store: `cargo bench --bench http`

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const PODS: usize = 10_000;
const CONNECTIONS: usize = 64;
const WARM_UP_TIME: Duration = Duration::from_secs(1);
const MEASURE_TIME: Duration = Duration::from_secs(5);

struct Router(Child);

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn start(port: u16, data_dir: Option<&str>) -> Router {
    let mut command = Command::new(env!("CARGO_BIN_EXE_smart-router"));
    command
        .env("HTTP_PORT", port.to_string())
        .env("METRICS_PORT", port.to_string())
        .env("TIER_CONFIG", format!(r#"{{"gold": {PODS}}}"#))
        .env("LOG_FORMAT", "json")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    if let Some(directory) = data_dir {
        command.env("DATA_DIR", directory);
    }
    Router(command.spawn().unwrap())
}

/// Resident memory of a process in megabytes.
fn memory_mb(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
}

struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    async fn open(port: u16) -> Option<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        stream.set_nodelay(true).unwrap();
        Some(Self { stream, buffer: Vec::new() })
    }

    /// Posts a body and reads the response. Returns its status.
    async fn post(&mut self, path: &str, body: &str) -> u16 {
        let request = format!(
            "POST /api/v1/{path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.stream.write_all(request.as_bytes()).await.unwrap();
        self.buffer.clear();
        loop {
            assert!(self.stream.read_buf(&mut self.buffer).await.unwrap() > 0, "connection closed");
            let Some(head) = self.buffer.windows(4).position(|four| four == b"\r\n\r\n") else {
                continue;
            };
            let text = str::from_utf8(&self.buffer[..head]).unwrap();
            let length =
                text.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
            if self.buffer.len() >= head + 4 + length.parse::<usize>().unwrap() {
                return text[9..12].parse().unwrap();
            }
        }
    }
}

async fn load(port: u16, connection: usize, until: Instant, measured_from: Instant) -> Vec<u32> {
    let mut client = Connection::open(port).await.unwrap();
    let mut latencies = Vec::new();
    for number in 0.. {
        if Instant::now() >= until {
            break;
        }
        let body = format!(r#"{{"call_sid": "CA{connection:08x}{number:08x}"}}"#);
        for path in ["allocate", "release"] {
            let started = Instant::now();
            assert_eq!(client.post(path, &body).await, 200);
            if started >= measured_from {
                latencies.push(started.elapsed().as_micros() as u32);
            }
        }
    }
    latencies
}

async fn measure(name: &str, data_dir: Option<&str>) {
    let port = free_port();
    let started = Instant::now();
    let router = start(port, data_dir);
    let mut client = loop {
        match Connection::open(port).await {
            Some(client) => break client,
            None => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    };
    client.post("release", r#"{"call_sid": "none"}"#).await;
    let first_response = started.elapsed();
    let resident = memory_mb(router.0.id());
    let measured_from = Instant::now() + WARM_UP_TIME;
    let until = measured_from + MEASURE_TIME;
    let clients: Vec<_> = (0..CONNECTIONS)
        .map(|connection| tokio::spawn(load(port, connection, until, measured_from)))
        .collect();
    let mut latencies = Vec::new();
    for client in clients {
        latencies.extend(client.await.unwrap());
    }
    latencies.sort_unstable();
    let quantile = |q: f64| f64::from(latencies[(latencies.len() as f64 * q) as usize]) / 1_000.0;
    println!(
        "{name:<10} {:>7.0} requests/s   p50 {:.2} ms   p99 {:.2} ms   first response {} ms   {resident:.1} MB at start, {:.1} MB under load",
        latencies.len() as f64 / MEASURE_TIME.as_secs_f64(),
        quantile(0.5),
        quantile(0.99),
        first_response.as_millis(),
        memory_mb(router.0.id()),
    );
}

fn first_line(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output();
    output
        .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        .unwrap_or_default()
}

#[tokio::main]
async fn main() {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu
        .lines()
        .find(|line| line.starts_with("model name"))
        .and_then(|line| line.split(": ").nth(1));
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    println!(
        "{cores} cores, {}, commit {}",
        cpu.unwrap_or("unknown"),
        first_line("git", &["rev-parse", "--short", "HEAD"])
    );
    println!(
        "{PODS} pods, {CONNECTIONS} connections, allocate + release, load generator on the same cores"
    );
    measure("in memory", None).await;
    let directory = std::env::temp_dir().join(format!("smart-router-bench-{}", std::process::id()));
    measure("journal", directory.to_str()).await;
    let _ = std::fs::remove_dir_all(&directory);
}
