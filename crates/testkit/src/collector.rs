//! An OTLP trace collector with fault injection.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use serde_json::Value;

use super::{eventually, scratch};

/// The behaviour of a collector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CollectorMode {
    Accept,
    Respond(u16),
    Hang,
}

#[derive(Debug, Clone)]
pub struct ReceivedRequest {
    pub head: String,
    pub body: String,
}

#[derive(Clone)]
pub struct Collector {
    pub port: u16,
    mode: Arc<Mutex<CollectorMode>>,
    accepted: Arc<Mutex<Vec<ReceivedRequest>>>,
    refused: Arc<AtomicUsize>,
}

impl Collector {
    pub fn start(mode: CollectorMode) -> Self {
        Self::start_on(0, mode)
    }

    pub fn start_on(port: u16, mode: CollectorMode) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (mode, accepted) = (Arc::new(Mutex::new(mode)), Arc::default());
        let collector = Self { port, mode, accepted, refused: Arc::default() };
        let serving = collector.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let collector = serving.clone();
                thread::spawn(move || collector.serve(stream));
            }
        });
        collector
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn set_mode(&self, mode: CollectorMode) {
        *self.mode.lock().unwrap() = mode;
    }

    fn serve(&self, mut stream: TcpStream) {
        while let Some(received) = receive(&mut stream) {
            let mode = *self.mode.lock().unwrap();
            let status = match mode {
                CollectorMode::Accept => 200,
                CollectorMode::Respond(status) => status,
                // Blocks until the client closes the connection.
                CollectorMode::Hang => return drop(stream.read(&mut [0])),
            };
            if mode == CollectorMode::Accept {
                self.accepted.lock().unwrap().push(received);
            }
            let response = format!(
                "HTTP/1.1 {status} so\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}"
            );
            if stream.write_all(response.as_bytes()).is_err() {
                return;
            }
            self.refused.fetch_add(usize::from(mode != CollectorMode::Accept), Ordering::Relaxed);
        }
    }

    /// Number of refused requests.
    pub fn refused(&self) -> usize {
        self.refused.load(Ordering::Relaxed)
    }

    /// The accepted requests.
    pub fn accepted(&self) -> Vec<ReceivedRequest> {
        self.accepted.lock().unwrap().clone()
    }

    /// Number of accepted spans.
    pub fn count(&self) -> usize {
        self.accepted().iter().map(|received| received.body.matches("\"spanId\"").count()).sum()
    }

    /// Waits for at least `min` spans. Returns all parsed spans.
    pub fn spans(&self, min: usize) -> Vec<Value> {
        eventually(Duration::from_secs(10), "the collector has the spans", || self.count() >= min);
        self.parsed_spans()
    }

    /// The accepted spans, parsed and checked with OpenTelemetry's protobuf messages.
    pub fn parsed_spans(&self) -> Vec<Value> {
        let directory = scratch();
        let files = self.accepted().into_iter().enumerate().map(|(number, received)| {
            let path = directory.join(format!("{number}.json"));
            std::fs::write(&path, received.body).unwrap();
            path
        });
        let files: Vec<_> = files.collect();
        let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/checkers/venv/bin/python");
        let output = Command::new(python)
            .current_dir(crate::ROOT)
            .arg("tests/checkers/traces.py")
            .args(files)
            .output();
        let output = output.expect("./test.sh installs the external checkers");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let lines = String::from_utf8(output.stdout).unwrap();
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn receive(stream: &mut TcpStream) -> Option<ReceivedRequest> {
    let mut read = Vec::new();
    let mut some = [0; 16 << 10];
    loop {
        if let Some(end) = read.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8(read[..end].to_vec()).unwrap();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.map_or(0, |length| length.parse().unwrap());
            if read.len() >= end + 4 + length {
                let body = String::from_utf8(read[end + 4..].to_vec()).unwrap();
                return Some(ReceivedRequest { head, body });
            }
        }
        match stream.read(&mut some) {
            Ok(0) | Err(_) => return None,
            Ok(count) => read.extend(&some[..count]),
        }
    }
}
