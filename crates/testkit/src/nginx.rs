//! A real nginx with the shipped configuration, and its DNS server.

use std::{
    net::{Ipv4Addr, UdpSocket},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use super::{
    certificates::Certificate,
    eventually, free_port,
    process::{children, pinned},
    scratch,
};

pub struct Nginx {
    child: Child,
    pub port: u16,
    directory: PathBuf,
}

impl Nginx {
    /// `pods` are the DNS records of pods.
    pub fn start(router: u16, agent_port: u16, pods: Vec<(String, Ipv4Addr)>) -> Self {
        let port = free_port();
        let template = include_str!("../../../deploy/nginx/smart-router.conf.template");
        let settings = [
            ("LISTEN", format!("127.0.0.1:{port}")),
            ("RESOLVER", format!("127.0.0.1:{}", dns(pods))),
            ("ROUTER", format!("127.0.0.1:{router}")),
            ("POD_PREFIX", "voice-agent".into()),
            ("POD_DOMAIN", "agents.test".into()),
            ("AGENT_PORT", agent_port.to_string()),
        ];
        let server = settings.iter().fold(template.to_owned(), |text, (name, value)| {
            text.replace(&format!("${{{name}}}"), value)
        });
        Self::serving(port, &server)
    }

    /// A TLS proxy for a plaintext server; it requires client certificates of `authority`.
    pub fn with_tls(certificate: &Certificate, authority: &str, behind: u16) -> Self {
        let port = free_port();
        let Certificate { file, key } = certificate;
        Self::serving(
            port,
            &format!(
                "server {{ listen 127.0.0.1:{port} ssl; ssl_certificate {file}; \
                 ssl_certificate_key {key}; ssl_client_certificate {authority}; \
                 ssl_verify_client on; location / {{ proxy_pass http://127.0.0.1:{behind}; }} }}"
            ),
        )
    }

    /// One worker on one core that relays WebSockets to the agents.
    pub fn relay(core: usize, certificate: Option<&Certificate>, agents: &[u16]) -> Self {
        let port = free_port();
        let (ssl, certificate) = match certificate {
            None => ("", String::new()),
            Some(Certificate { file, key }) => (
                " ssl",
                format!(
                    "ssl_certificate {file}; ssl_certificate_key {key}; \
                     ssl_protocols TLSv1.2 TLSv1.3;"
                ),
            ),
        };
        let agents: String =
            agents.iter().map(|agent| format!("server 127.0.0.1:{agent} max_fails=0; ")).collect();
        let server = format!(
            "upstream agents {{ {agents} }}\n\
             server {{ listen 127.0.0.1:{port}{ssl} backlog=4096; {certificate}\n\
             location / {{ proxy_pass http://agents; proxy_http_version 1.1; \
             proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection upgrade; \
             proxy_read_timeout 1h; proxy_send_timeout 1h; }} }}"
        );
        let main = "worker_processes 1; events { worker_connections 8192; }";
        // SIGTERM, because a killed master leaves its worker.
        let mut command = pinned(core, "TERM", Path::new("nginx"));
        Self::start_with(&mut command, port, main, &server)
    }

    /// Process id of the only worker.
    pub fn worker(&self) -> u32 {
        let mut workers = Vec::new();
        eventually(Duration::from_secs(1), "nginx has a worker", || {
            workers = children(self.child.id());
            !workers.is_empty()
        });
        workers[0]
    }

    fn serving(port: u16, server: &str) -> Self {
        Self::start_with(&mut Command::new("nginx"), port, "events {}", server)
    }

    fn start_with(command: &mut Command, port: u16, main: &str, server: &str) -> Self {
        let directory = scratch();
        let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .iter()
            .map(|name| format!("{name}_temp_path {}/{name};", directory.display()))
            .collect();
        let directory_text = directory.display();
        let all = format!(
            "daemon off; pid {directory_text}/pid; error_log {directory_text}/error.log; {main}\n\
             http {{ access_log off; {paths}\n{server} }}"
        );
        std::fs::write(directory.join("nginx.conf"), all).unwrap();
        let child = command
            .arg("-p")
            .arg(&directory)
            .arg("-c")
            .arg(directory.join("nginx.conf"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("nginx is installed");
        let nginx = Self { child, port, directory };
        eventually(Duration::from_secs(5), "nginx listens", || {
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        nginx
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.join("error.log")).unwrap_or_default()
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // SIGTERM stops the master and its workers; SIGKILL would leave the workers.
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
    }
}

/// A DNS server for `{pod}.agents.test`; other names do not exist.
fn dns(pods: Vec<(String, Ipv4Addr)>) -> u16 {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    thread::spawn(move || {
        let mut packet = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut packet) {
            let (mut at, mut labels) = (12, Vec::new());
            while at < length && packet[at] != 0 {
                let end = at + 1 + packet[at] as usize;
                labels.push(String::from_utf8_lossy(&packet[at + 1..end]).into_owned());
                at = end;
            }
            let name = labels.join(".");
            let found = pods.iter().find(|(pod, _)| name == format!("{pod}.agents.test"));
            let mut answer = packet[..at + 5].to_vec();
            answer[2..12].copy_from_slice(&[
                0x81,
                if found.is_some() { 0x80 } else { 0x83 },
                0,
                1,
                0,
                0,
                0,
                0,
                0,
                0,
            ]);
            if let Some((_, address)) = found {
                answer[7] = 1;
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
                answer.extend(address.octets());
            }
            let _ = socket.send_to(&answer, from);
        }
    });
    port
}
