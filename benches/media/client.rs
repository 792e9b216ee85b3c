//! Clients: plaintext and TLS connections, the WebSocket handshake, and JSON requests.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use media::frame::{Opcode, write_frame};
use rustls::{
    ClientConfig, DigitallySignedStruct, SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::frames::MASK;

const MAX_HEAD: usize = 16 << 10;
/// Close code of a stream that ended normally.
const NORMAL_CLOSE: u16 = 1000;
/// How long the other side may take to end a closed stream.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Where streams are opened.
#[derive(Clone)]
pub(crate) struct Endpoint {
    pub address: SocketAddr,
    pub tls: Option<TlsConnector>,
}

pub(crate) enum Socket {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Verifies nothing. The clients share a core with the agents, and the work of clients is not
/// measured.
#[derive(Debug)]
struct AnyCertificate;

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ECDSA_NISTP256_SHA256]
    }
}

/// A TLS client for which every server does the same work: TLS 1.3 with one key exchange and
/// one cipher, and no resumption.
pub(crate) fn tls_connector() -> TlsConnector {
    let mut provider = aws_lc_rs::default_provider();
    provider.kx_groups = vec![aws_lc_rs::kx_group::X25519];
    provider.cipher_suites = vec![aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384];
    let mut config = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("the cipher belongs to TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate))
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    TlsConnector::from(Arc::new(config))
}

impl Endpoint {
    pub(crate) fn plain(port: u16) -> Self {
        Self { address: ([127, 0, 0, 1], port).into(), tls: None }
    }

    async fn connect(&self) -> io::Result<Socket> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let Some(tls) = &self.tls else {
            return Ok(Socket::Plain(stream));
        };
        let name = ServerName::try_from("localhost").expect("a valid name");
        Ok(Socket::Tls(Box::new(tls.connect(name, stream).await?)))
    }

    /// Opens a WebSocket, up to the response to the handshake.
    pub(crate) async fn open(&self, path: &str) -> io::Result<Socket> {
        let mut socket = self.connect().await?;
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n\
             Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        socket.write_all(request.as_bytes()).await?;
        let head = read_head(&mut socket).await?;
        if !head.starts_with("HTTP/1.1 101 ") {
            return Err(io::Error::other(format!("the handshake with {path} got {head}")));
        }
        Ok(socket)
    }

    /// A connection for JSON requests.
    pub(crate) async fn json_client(&self) -> io::Result<JsonClient> {
        Ok(JsonClient(self.connect().await?))
    }
}

/// Reads up to the end of a head. The peer must send nothing beyond it.
pub(crate) async fn read_head(from: &mut (impl AsyncRead + Unpin)) -> io::Result<String> {
    let mut bytes = Vec::with_capacity(512);
    while !bytes.ends_with(b"\r\n\r\n") {
        let is_long = bytes.len() > MAX_HEAD;
        if is_long || from.read_buf(&mut bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    String::from_utf8(bytes).map_err(io::Error::other)
}

/// A keep-alive connection.
pub(crate) struct JsonClient(Socket);

impl JsonClient {
    pub(crate) async fn post(&mut self, path: &str, body: &Value) -> io::Result<Value> {
        let body = body.to_string();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.0.write_all(request.as_bytes()).await?;
        let mut bytes = Vec::with_capacity(1024);
        loop {
            let text = String::from_utf8_lossy(&bytes);
            if let Some((head, body)) = text.split_once("\r\n\r\n")
                && body.len() >= content_length(head)
            {
                if !head.starts_with("HTTP/1.1 200 ") {
                    return Err(io::Error::other(format!("POST {path}: {text}")));
                }
                return serde_json::from_str(body).map_err(io::Error::other);
            }
            if self.0.read_buf(&mut bytes).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

fn content_length(head: &str) -> usize {
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    });
    length.unwrap_or(0)
}

impl Socket {
    /// Ends the stream as providers do: a close frame, then the end of the connection by the
    /// other side.
    pub(crate) async fn hang_up(mut self) -> io::Result<()> {
        let (mut frame, code) = (Vec::new(), NORMAL_CLOSE.to_be_bytes());
        write_frame(&mut frame, Opcode::Close, &code, Some(MASK));
        self.write_all(&frame).await?;
        let mut rest = Vec::new();
        let end = tokio::time::timeout(CLOSE_TIMEOUT, self.read_to_end(&mut rest)).await;
        // The other side need not end TLS; its close frame is what counts.
        drop(end.map_err(|_| io::ErrorKind::TimedOut)?);
        match rest.ends_with(&[0x88, 2, code[0], code[1]]) {
            true => Ok(()),
            false => Err(io::Error::other("the close was not answered")),
        }
    }

    /// Ends the connection, with TLS properly. The other side may have ended it first.
    pub(crate) async fn close(self) {
        if let Self::Tls(mut stream) = self {
            let _ = stream.shutdown().await;
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
