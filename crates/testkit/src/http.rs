//! A minimal HTTP/1.1 client that can also send malformed requests.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use serde_json::Value;

use super::TIMEOUT_FACTOR;

#[derive(Debug, Clone)]
pub struct HttpResponse {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl HttpResponse {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(other, _)| other.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("the body is UTF-8")
    }

    pub fn json(&self) -> (u16, Value) {
        let value = serde_json::from_slice(&self.body).unwrap_or_else(|_| {
            panic!("not JSON: {} {:?}", self.status, String::from_utf8_lossy(&self.body))
        });
        (self.status, value)
    }
}

/// A keep-alive connection.
pub struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
    /// The last request was a HEAD: no body follows.
    is_head: bool,
    /// Bearer token of every request.
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

    pub fn get(&mut self, path: &str) -> HttpResponse {
        self.send("GET", path, &[], b"")
    }

    pub fn post(&mut self, path: &str, body: &Value) -> HttpResponse {
        self.send(
            "POST",
            path,
            &[("content-type", "application/json")],
            body.to_string().as_bytes(),
        )
    }

    pub fn form(&mut self, path: &str, body: &str) -> HttpResponse {
        self.send(
            "POST",
            path,
            &[("content-type", "application/x-www-form-urlencoded")],
            body.as_bytes(),
        )
    }

    /// Returns `None` if the server closes the connection, for example while it starts.
    pub fn try_get(&mut self, path: &str) -> Option<HttpResponse> {
        if self.try_write(&request_head("GET", path, &[], 0)) { self.read_response() } else { None }
    }

    /// Returns `None` if the server closes the connection.
    pub fn try_post(&mut self, path: &str, body: &Value) -> Option<HttpResponse> {
        self.try_json("POST", path, body)
    }

    pub fn try_put(&mut self, path: &str, body: &Value) -> Option<HttpResponse> {
        self.try_json("PUT", path, body)
    }

    fn try_json(&mut self, method: &str, path: &str, body: &Value) -> Option<HttpResponse> {
        let body = body.to_string();
        let json = [("content-type", "application/json")];
        let request = [&request_head(method, path, &json, body.len()), body.as_bytes()].concat();
        if self.try_write(&request) { self.read_response() } else { None }
    }

    pub fn try_form(&mut self, path: &str, body: &str) -> Option<HttpResponse> {
        let form = [("content-type", "application/x-www-form-urlencoded")];
        let request = [&request_head("POST", path, &form, body.len()), body.as_bytes()].concat();
        if self.try_write(&request) { self.read_response() } else { None }
    }

    pub fn send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> HttpResponse {
        self.is_head = method == "HEAD";
        let bearer = self.token.as_ref().map(|token| format!("Bearer {token}"));
        let mut headers = headers.to_vec();
        headers.extend(bearer.as_deref().map(|bearer| ("authorization", bearer)));
        self.write(&request_head(method, path, &headers, body.len()));
        // The server may respond and close before it has read the whole body.
        let _ = self.stream.write_all(body);
        self.read_response().expect("a response")
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn try_write(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    /// Writes; returns false if the server reads nothing for `timeout`.
    pub fn try_write_for(&mut self, bytes: &[u8], timeout: Duration) -> bool {
        self.stream.set_write_timeout(Some(timeout)).unwrap();
        self.stream.write_all(bytes).is_ok()
    }

    /// The next response, or `None` if the server closes the connection.
    pub fn read_response(&mut self) -> Option<HttpResponse> {
        loop {
            if let Some(end) = self.read.windows(4).position(|four| four == b"\r\n\r\n") {
                let head = String::from_utf8(self.read[..end].to_vec()).unwrap();
                let mut lines = head.lines();
                let status = lines.next().unwrap()[9..12].parse().unwrap();
                let headers: Vec<(String, String)> = lines
                    .filter_map(|line| line.split_once(": "))
                    .map(|(a, b)| (a.into(), b.into()))
                    .collect();
                let mut response = HttpResponse { status, headers, body: Vec::new() };
                let length: usize =
                    response.header("content-length").map_or(0, |length| length.parse().unwrap());
                let length = if self.is_head { 0 } else { length };
                while self.read.len() < end + 4 + length {
                    self.fill_buffer()?;
                }
                response.body = self.read[end + 4..end + 4 + length].to_vec();
                self.read.drain(..end + 4 + length);
                return Some(response);
            }
            self.fill_buffer()?;
        }
    }

    /// Requests a stream of events, to be read with [`Self::read_until`].
    pub fn open_stream(&mut self, path: &str) {
        self.write(&request_head("GET", path, &[("accept", "text/event-stream")], 0));
    }

    /// Reads up to a text; `usual` as for [`super::eventually`].
    pub fn read_until(&mut self, text: &str, usual: Duration) -> String {
        let until = Instant::now() + usual * TIMEOUT_FACTOR;
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
                "expected {text:?}, received {}",
                String::from_utf8_lossy(&self.read)
            );
            self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1)))).unwrap();
            let mut some = [0; 16 << 10];
            match self.stream.read(&mut some) {
                Ok(0) => panic!("expected {text:?}, but the connection was closed"),
                Ok(count) => self.read.extend(&some[..count]),
                Err(_) => {}
            }
        }
    }

    /// Reads until the server closes the connection; `usual` as for [`super::eventually`].
    pub fn read_to_end(&mut self, usual: Duration) {
        self.stream.set_read_timeout(Some(usual * TIMEOUT_FACTOR)).unwrap();
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest).expect("the server closes the connection");
    }

    fn fill_buffer(&mut self) -> Option<()> {
        let mut some = [0; 16 << 10];
        match self.stream.read(&mut some) {
            Ok(0) => None,
            Ok(count) => {
                self.read.extend(&some[..count]);
                Some(())
            }
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("neither a response nor a closed connection: {error}"),
        }
    }
}

pub fn request_head(method: &str, path: &str, headers: &[(&str, &str)], length: usize) -> Vec<u8> {
    let mut head =
        format!("{method} {path} HTTP/1.1\r\nhost: router\r\ncontent-length: {length}\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    head.into_bytes()
}
