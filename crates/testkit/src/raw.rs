//! HTTP spelt out, so that tests can spell it wrong.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use serde_json::Value;

use super::SLACK;

/// What came back.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(other, _)| other.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("an answer is text")
    }

    pub fn json(&self) -> (u16, Value) {
        let value = serde_json::from_slice(&self.body).unwrap_or_else(|_| {
            panic!("not JSON: {} {:?}", self.status, String::from_utf8_lossy(&self.body))
        });
        (self.status, value)
    }
}

/// One connection, kept alive as long as the server likes.
pub struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
    /// The last request was a HEAD: no body follows.
    is_head: bool,
    /// What every request says of who sends it.
    pub token: Option<String>,
}

impl Connection {
    pub fn try_open(address: SocketAddr) -> Option<Self> {
        let stream = TcpStream::connect(address).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.set_nodelay(true).unwrap();
        Some(Self { stream, read: Vec::new(), is_head: false, token: None })
    }

    pub fn open(address: SocketAddr) -> Self {
        Self::try_open(address).expect("the router accepts connections")
    }

    pub fn get(&mut self, path: &str) -> Answer {
        self.send("GET", path, &[], b"")
    }

    pub fn post(&mut self, path: &str, body: &Value) -> Answer {
        self.send(
            "POST",
            path,
            &[("content-type", "application/json")],
            body.to_string().as_bytes(),
        )
    }

    pub fn form(&mut self, path: &str, body: &str) -> Answer {
        self.send(
            "POST",
            path,
            &[("content-type", "application/x-www-form-urlencoded")],
            body.as_bytes(),
        )
    }

    /// What a server says that may still be starting.
    pub fn try_get(&mut self, path: &str) -> Option<Answer> {
        if self.try_write(&head("GET", path, &[], 0)) { self.answer() } else { None }
    }

    /// The same, but the server may go away.
    pub fn try_post(&mut self, path: &str, body: &Value) -> Option<Answer> {
        self.try_json("POST", path, body)
    }

    pub fn try_put(&mut self, path: &str, body: &Value) -> Option<Answer> {
        self.try_json("PUT", path, body)
    }

    fn try_json(&mut self, method: &str, path: &str, body: &Value) -> Option<Answer> {
        let body = body.to_string();
        let json = [("content-type", "application/json")];
        let request = [&head(method, path, &json, body.len()), body.as_bytes()].concat();
        if self.try_write(&request) { self.answer() } else { None }
    }

    pub fn try_form(&mut self, path: &str, body: &str) -> Option<Answer> {
        let form = [("content-type", "application/x-www-form-urlencoded")];
        let request = [&head("POST", path, &form, body.len()), body.as_bytes()].concat();
        if self.try_write(&request) { self.answer() } else { None }
    }

    pub fn send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Answer {
        self.is_head = method == "HEAD";
        let bearer = self.token.as_ref().map(|token| format!("Bearer {token}"));
        let mut headers = headers.to_vec();
        headers.extend(bearer.as_deref().map(|bearer| ("authorization", bearer)));
        self.write(&head(method, path, &headers, body.len()));
        // A server that has heard enough may stop listening.
        let _ = self.stream.write_all(body);
        self.answer().expect("an answer")
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn try_write(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    /// Writes unless the server takes nothing for so long.
    pub fn try_write_for(&mut self, bytes: &[u8], patience: Duration) -> bool {
        self.stream.set_write_timeout(Some(patience)).unwrap();
        self.stream.write_all(bytes).is_ok()
    }

    /// The next answer, or `None` if the server closes the connection instead.
    pub fn answer(&mut self) -> Option<Answer> {
        loop {
            if let Some(end) = self.read.windows(4).position(|four| four == b"\r\n\r\n") {
                let head = String::from_utf8(self.read[..end].to_vec()).unwrap();
                let mut lines = head.lines();
                let status = lines.next().unwrap()[9..12].parse().unwrap();
                let headers: Vec<(String, String)> = lines
                    .filter_map(|line| line.split_once(": "))
                    .map(|(a, b)| (a.into(), b.into()))
                    .collect();
                let mut answer = Answer { status, headers, body: Vec::new() };
                let length: usize =
                    answer.header("content-length").map_or(0, |length| length.parse().unwrap());
                let length = if self.is_head { 0 } else { length };
                while self.read.len() < end + 4 + length {
                    self.more()?;
                }
                answer.body = self.read[end + 4..end + 4 + length].to_vec();
                self.read.drain(..end + 4 + length);
                return Some(answer);
            }
            self.more()?;
        }
    }

    /// Asks for a stream of events; what comes is read with [`Self::read_until`].
    pub fn open_stream(&mut self, path: &str) {
        self.write(&head("GET", path, &[("accept", "text/event-stream")], 0));
    }

    /// What comes up to a text; `usual` as for [`super::eventually`].
    pub fn read_until(&mut self, text: &str, usual: Duration) -> String {
        let until = Instant::now() + usual * SLACK;
        loop {
            let found = self.read.windows(text.len()).position(|some| some == text.as_bytes());
            if let Some(at) = found {
                let rest = self.read.split_off(at + text.len());
                let read = std::mem::replace(&mut self.read, rest);
                return String::from_utf8_lossy(&read).into_owned();
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "{text:?} did not come, but {}",
                String::from_utf8_lossy(&self.read)
            );
            self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1)))).unwrap();
            let mut some = [0; 16 << 10];
            match self.stream.read(&mut some) {
                Ok(0) => panic!("{text:?} did not come, but the end"),
                Ok(count) => self.read.extend(&some[..count]),
                Err(_) => {}
            }
        }
    }

    /// Reads until the server closes the connection; `usual` as for [`super::eventually`].
    pub fn read_to_end(&mut self, usual: Duration) {
        self.stream.set_read_timeout(Some(usual * SLACK)).unwrap();
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest).expect("the end");
    }

    fn more(&mut self) -> Option<()> {
        let mut some = [0; 16 << 10];
        match self.stream.read(&mut some) {
            Ok(0) => None,
            Ok(count) => {
                self.read.extend(&some[..count]);
                Some(())
            }
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("neither an answer nor an end: {error}"),
        }
    }
}

pub fn head(method: &str, path: &str, headers: &[(&str, &str)], length: usize) -> Vec<u8> {
    let mut head =
        format!("{method} {path} HTTP/1.1\r\nhost: router\r\ncontent-length: {length}\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    head.into_bytes()
}
