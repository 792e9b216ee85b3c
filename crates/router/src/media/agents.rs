//! Connections to agents.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use hyper::header::HeaderValue;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, lookup_host},
    time::timeout,
};
use tokio_rustls::TlsConnector;

use super::sockets::{AgentSocket, Socket};
use crate::tls::Trust;
use fleet::{Attached, names::CallSid};
use media::handshake::{self, AgentRequest, MAX_RESPONSE_HEAD, Refused};
use telephony::Parameters;

/// Time from the first packet to the agent's 101.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for the last bytes to an agent.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes of the first read: a response head and the agent's first frames.
const READ_SIZE: usize = 1024;
/// The subprotocol that jambonz requires.
pub(super) const JAMBONZ: &str = "audio.jambonz.org";
/// Address of simulated pods in the store.
pub(crate) const SIMULATED: &str = "simulated";

/// TLS to agents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AgentTls {
    /// A certificate authority to trust besides the system's.
    pub(crate) authority: Option<PathBuf>,
}

/// An open WebSocket to an agent.
pub(super) struct AgentConnection {
    pub(super) socket: AgentSocket,
    /// Frames that came with the response.
    pub(super) early: Vec<u8>,
    /// The subprotocol that the agent chose.
    pub(super) protocol: Option<String>,
}

/// The subprotocols of a stream.
#[derive(Debug)]
pub(super) enum Protocols {
    /// The provider's offer; the agent chooses.
    Offered(Option<String>),
    /// The provider has the answer already: every further agent has to choose the same.
    Chosen(Option<String>),
}

impl Protocols {
    fn offer(&self) -> Option<&str> {
        let (Self::Offered(protocols) | Self::Chosen(protocols)) = self;
        protocols.as_deref()
    }

    /// Checks the agent's choice. Providers whose subprotocol is not known to be required accept an
    /// agent without one.
    fn check(&self, chosen: Option<&str>) -> Result<(), ConnectError> {
        let is_offered = |name: &str| handshake::has_token(self.offer().unwrap_or_default(), name);
        match self {
            _ if chosen.is_none() && is_offered(JAMBONZ) => Err(ConnectError::NoProtocol),
            Self::Chosen(protocol) if protocol.as_deref() != chosen => {
                Err(ConnectError::OtherProtocol)
            }
            Self::Offered(_) | Self::Chosen(_) => Ok(()),
        }
    }
}

/// The request that every agent of a stream gets.
#[derive(Debug)]
pub(super) struct AgentTarget {
    pub(super) call: CallSid,
    /// Path and query.
    pub(super) path: String,
    pub(super) protocols: Protocols,
    /// Custom values, for headers.
    pub(super) parameters: Parameters,
    /// Address of the provider, behind trusted proxies.
    pub(super) from: IpAddr,
    pub(super) traceparent: Option<HeaderValue>,
}

/// The reason why an agent could not be connected; the text is for its author.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("the pod has no address")]
    NoAddress,
    #[error("no connection to {address}: {error}")]
    Tcp { address: String, error: io::Error },
    #[error("no TLS with {address}: {error}")]
    Tls { address: String, error: io::Error },
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(
        "the agent chose no subprotocol, and jambonz requires one: answer the handshake with \
         Sec-WebSocket-Protocol: {JAMBONZ}"
    )]
    NoProtocol,
    #[error("the agent did not choose the subprotocol that the provider was answered")]
    OtherProtocol,
    #[error("the agent closed the connection before it answered the handshake")]
    Closed,
    #[error("cannot resolve {address}: {error}")]
    Name { address: String, error: io::Error },
    #[error("{}", .phase.timeout_words(.address))]
    Timeout { phase: Phase, address: String },
}

/// The steps of a connection, to tell where one that takes too long has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Name,
    Tcp,
    Tls,
    Handshake,
}

impl Phase {
    const ALL: [Self; 4] = [Self::Name, Self::Tcp, Self::Tls, Self::Handshake];

    fn timeout_words(self, address: &str) -> String {
        let limit = format!("within {} s", CONNECT_TIMEOUT.as_secs());
        match self {
            Self::Name => format!("{address} was not resolved {limit}: check the name server"),
            Self::Tcp => format!(
                "no TCP connection to {address} {limit}: wrong address, firewall or network policy"
            ),
            Self::Tls => {
                format!("no TLS with {address} {limit}: AGENT_TLS=on needs a port that serves TLS")
            }
            Self::Handshake => format!("the agent did not answer the handshake {limit}"),
        }
    }
}

/// The current [`Phase`] of a connection.
struct Progress(AtomicU8);

impl Progress {
    fn enter(&self, phase: Phase) {
        self.0.store(phase as u8, Ordering::Relaxed);
    }

    fn phase(&self) -> Phase {
        Phase::ALL[usize::from(self.0.load(Ordering::Relaxed))]
    }
}

pub(super) struct AgentConnector {
    tls: Option<Arc<ClientConfig>>,
    simulated: Option<SocketAddr>,
}

impl AgentConnector {
    pub(super) fn new(
        tls: Option<&AgentTls>,
        simulated: Option<SocketAddr>,
    ) -> Result<Self, String> {
        let config = |tls: &AgentTls| {
            let trust = Trust { authority: tls.authority.clone(), identity: None };
            trust.client_config().map_err(|error| format!("AGENT_CA_FILE: {error}"))
        };
        Ok(Self { tls: tls.map(config).transpose()?, simulated })
    }

    /// Opens the WebSocket of a stream to its pod.
    pub(super) async fn connect(
        &self,
        target: &AgentTarget,
        attached: &Attached,
    ) -> Result<AgentConnection, ConnectError> {
        let progress = Progress(AtomicU8::new(Phase::Name as u8));
        let connect = async {
            let mut socket = self.open(&attached.address, &progress).await?;
            progress.enter(Phase::Handshake);
            let key = random_key();
            let request = request(target, attached, &key);
            let tcp = |error| ConnectError::Tcp { address: attached.address.clone(), error };
            socket.write_all(&request).await.map_err(tcp)?;
            socket.flush().await.map_err(tcp)?;
            let (early, protocol) =
                read_response(&mut socket, &key, target.protocols.offer()).await?;
            target.protocols.check(protocol.as_deref())?;
            Ok(AgentConnection { socket, early, protocol })
        };
        timeout(CONNECT_TIMEOUT, connect).await.unwrap_or_else(|_| {
            let (phase, address) = (progress.phase(), attached.address.clone());
            Err(ConnectError::Timeout { phase, address })
        })
    }

    async fn open(&self, address: &str, progress: &Progress) -> Result<AgentSocket, ConnectError> {
        let tcp = |error| ConnectError::Tcp { address: address.to_owned(), error };
        if address == SIMULATED {
            let address = self.simulated.ok_or(ConnectError::NoAddress)?;
            progress.enter(Phase::Tcp);
            let stream = TcpStream::connect(address).await.map_err(tcp)?;
            let _ = stream.set_nodelay(true);
            return Ok(Socket::Plain(stream));
        }
        if address.is_empty() {
            return Err(ConnectError::NoAddress);
        }
        let found = resolve(address).await;
        let found =
            found.map_err(|error| ConnectError::Name { address: address.to_owned(), error })?;
        progress.enter(Phase::Tcp);
        let stream = TcpStream::connect(&found[..]).await.map_err(tcp)?;
        // Frames are sent as they come: Nagle's algorithm would delay audio.
        let _ = stream.set_nodelay(true);
        let Some(config) = &self.tls else { return Ok(Socket::Plain(stream)) };
        progress.enter(Phase::Tls);
        let tls = |error| ConnectError::Tls { address: address.to_owned(), error };
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host).map_err(|error| tls(io::Error::other(error)))?;
        let stream = TlsConnector::from(config.clone()).connect(name, stream).await.map_err(tls)?;
        Ok(Socket::Tls(Box::new(stream)))
    }
}

/// The addresses of a pod. An IP address takes no thread for the look-up.
async fn resolve(address: &str) -> io::Result<Vec<SocketAddr>> {
    match address.parse() {
        Ok(address) => Ok(vec![address]),
        Err(_) => Ok(lookup_host(address).await?.collect()),
    }
}

fn request(target: &AgentTarget, attached: &Attached, key: &str) -> Vec<u8> {
    let (attempt, from) = (attached.ordinal.to_string(), target.from.to_string());
    let merchant = attached.merchant.as_ref().map(|id| ("X-Merchant-Id", id.as_str()));
    let traceparent = target.traceparent.as_ref().and_then(|it| it.to_str().ok());
    let traceparent = traceparent.map(|it| ("traceparent", it));
    let own = [
        ("X-Call-Sid", target.call.as_str()),
        ("X-Pod-Attempt", attempt.as_str()),
        ("X-Forwarded-For", from.as_str()),
    ];
    let parameters: Vec<(String, String)> =
        target.parameters.iter().map(parameter_header).collect();
    let parameters = parameters.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let headers: Vec<(&str, &str)> =
        own.into_iter().chain(merchant).chain(traceparent).chain(parameters).collect();
    let host = if attached.address == SIMULATED { "localhost" } else { &attached.address };
    AgentRequest {
        target: &target.path,
        host,
        key,
        protocols: target.protocols.offer(),
        headers: &headers,
    }
    .to_bytes()
}

/// The header of a parameter. Characters that a header cannot carry are percent-encoded.
fn parameter_header((name, value): (&str, &str)) -> (String, String) {
    // Everything but visible ASCII, which excludes space.
    const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'%');
    (format!("X-Param-{name}"), utf8_percent_encode(value, ESCAPED).to_string())
}

/// Reads the response to the handshake. Returns the bytes after it, and the subprotocol.
async fn read_response(
    socket: &mut AgentSocket,
    key: &str,
    offered: Option<&str>,
) -> Result<(Vec<u8>, Option<String>), ConnectError> {
    let mut head = Vec::with_capacity(READ_SIZE);
    loop {
        let count = socket.read_buf(&mut head).await.map_err(|_| ConnectError::Closed)?;
        if count == 0 {
            return Err(ConnectError::Closed);
        }
        if let Some(accepted) = handshake::read_response(&head, key, offered)? {
            return Ok((head.split_off(accepted.len), accepted.protocol));
        }
        head.reserve(READ_SIZE.min(MAX_RESPONSE_HEAD));
    }
}

/// The key only proves that the agent has read the request, so that it need not be secret.
fn random_key() -> String {
    let numbers = [(); 4].map(|()| crate::random_u32().to_ne_bytes());
    data_encoding::BASE64.encode(numbers.as_flattened())
}

/// Ends the connection to an agent, which has been told before. A plain one ends when it is
/// dropped; TLS sends its own end.
pub(super) async fn close(mut socket: AgentSocket) {
    if let Socket::Tls(_) = socket {
        let _ = timeout(CLOSE_TIMEOUT, socket.shutdown()).await;
    }
}
