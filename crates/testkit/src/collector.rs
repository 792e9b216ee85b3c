//! A collector of traces that notes what it gets, and fails as a test wants it to.

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

/// What a collector does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    Take,
    Answer(u16),
    Hang,
}

/// A request as it came.
#[derive(Debug, Clone)]
pub struct Received {
    pub head: String,
    pub body: String,
}

#[derive(Clone)]
pub struct Collector {
    pub port: u16,
    does: Arc<Mutex<Does>>,
    taken: Arc<Mutex<Vec<Received>>>,
    refused: Arc<AtomicUsize>,
}

impl Collector {
    pub fn start(does: Does) -> Self {
        Self::start_on(0, does)
    }

    pub fn start_on(port: u16, does: Does) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (does, taken) = (Arc::new(Mutex::new(does)), Arc::default());
        let collector = Self { port, does, taken, refused: Arc::default() };
        let serving = collector.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let collector = serving.clone();
                thread::spawn(move || collector.converse(stream));
            }
        });
        collector
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn now_does(&self, does: Does) {
        *self.does.lock().unwrap() = does;
    }

    fn converse(&self, mut stream: TcpStream) {
        while let Some(received) = receive(&mut stream) {
            let does = *self.does.lock().unwrap();
            let status = match does {
                Does::Take => 200,
                Does::Answer(status) => status,
                // Until whoever asked has gone.
                Does::Hang => return drop(stream.read(&mut [0])),
            };
            if does == Does::Take {
                self.taken.lock().unwrap().push(received);
            }
            let answer = format!(
                "HTTP/1.1 {status} so\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}"
            );
            if stream.write_all(answer.as_bytes()).is_err() {
                return;
            }
            self.refused.fetch_add(usize::from(does != Does::Take), Ordering::Relaxed);
        }
    }

    /// How many requests it has refused.
    pub fn refused(&self) -> usize {
        self.refused.load(Ordering::Relaxed)
    }

    /// The requests it took.
    pub fn taken(&self) -> Vec<Received> {
        self.taken.lock().unwrap().clone()
    }

    /// How many spans it took.
    pub fn count(&self) -> usize {
        self.taken().iter().map(|received| received.body.matches("\"spanId\"").count()).sum()
    }

    /// Waits until it has so many spans, and answers what the judge read in them.
    pub fn spans(&self, least: usize) -> Vec<Value> {
        eventually(Duration::from_secs(10), "the collector has the spans", || {
            self.count() >= least
        });
        self.judged()
    }

    /// What OpenTelemetry's own messages read in what was taken.
    pub fn judged(&self) -> Vec<Value> {
        let directory = scratch();
        let files = self.taken().into_iter().enumerate().map(|(number, received)| {
            let path = directory.join(format!("{number}.json"));
            std::fs::write(&path, received.body).unwrap();
            path
        });
        let files: Vec<_> = files.collect();
        let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/judges/venv/bin/python");
        let judged = Command::new(python)
            .current_dir(crate::ROOT)
            .arg("tests/judges/traces.py")
            .args(files)
            .output();
        let judged = judged.expect("./test.sh installs the judges");
        let said = String::from_utf8_lossy(&judged.stderr);
        assert!(judged.status.success(), "{said}");
        let lines = String::from_utf8(judged.stdout).unwrap();
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn receive(stream: &mut TcpStream) -> Option<Received> {
    let mut read = Vec::new();
    let mut some = [0; 16 << 10];
    loop {
        if let Some(end) = read.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8(read[..end].to_vec()).unwrap();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.map_or(0, |length| length.parse().unwrap());
            if read.len() >= end + 4 + length {
                let body = String::from_utf8(read[end + 4..].to_vec()).unwrap();
                return Some(Received { head, body });
            }
        }
        match stream.read(&mut some) {
            Ok(0) | Err(_) => return None,
            Ok(count) => read.extend(&some[..count]),
        }
    }
}
