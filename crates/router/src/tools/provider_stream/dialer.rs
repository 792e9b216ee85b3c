//! Connections for many streams.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use hyper::Uri;
use rustls::ClientConfig;
use tokio::{
    net::{TcpStream, lookup_host},
    time::timeout,
};

use super::session::StreamError;
use crate::client::{Wire, add_tls};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Connects to the hosts of WebSocket URLs. Each host is resolved once, because a look-up takes
/// a thread for its time.
#[derive(Debug, Default)]
pub struct Dialer {
    /// For `wss` and `https`.
    tls: Option<Arc<ClientConfig>>,
    /// Refuse hosts other than this machine.
    loopback_only: bool,
    addresses: Mutex<HashMap<String, Vec<SocketAddr>>>,
}

impl Dialer {
    pub fn new(tls: Option<Arc<ClientConfig>>, loopback_only: bool) -> Self {
        Self { tls, loopback_only, addresses: Mutex::default() }
    }

    pub async fn connect(&self, url: &str) -> Result<Box<dyn Wire>, StreamError> {
        let connect = async {
            let uri = parse(url)?;
            let addresses = self.resolve(&uri).await?;
            if self.loopback_only && !are_loopback(&addresses) {
                return Err(other("the URL is not on this machine"));
            }
            let stream = TcpStream::connect(&addresses[..]).await.map_err(no_connection)?;
            stream.set_nodelay(true).map_err(no_connection)?;
            let secured = add_tls(stream, &uri, self.tls.as_ref()).await;
            secured.map_err(|error| other(&format!("{error:#}")))
        };
        timeout(CONNECT_TIMEOUT, connect).await.map_err(|_| StreamError::Timeout)?
    }

    /// Whether the host of a URL is this machine.
    pub(crate) async fn is_loopback(&self, url: &str) -> Result<bool, StreamError> {
        Ok(are_loopback(&self.resolve(&parse(url)?).await?))
    }

    async fn resolve(&self, uri: &Uri) -> Result<Vec<SocketAddr>, StreamError> {
        let host = uri.host().ok_or_else(|| other("the URL has no host"))?;
        let is_tls = matches!(uri.scheme_str(), Some("wss" | "https"));
        let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
        let name = format!("{host}:{port}");
        let known = self.addresses().get(&name).cloned();
        if let Some(addresses) = known {
            return Ok(addresses);
        }
        let found: Vec<_> = lookup_host(&name).await.map_err(no_connection)?.collect();
        self.addresses().insert(name, found.clone());
        Ok(found)
    }

    fn addresses(&self) -> MutexGuard<'_, HashMap<String, Vec<SocketAddr>>> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn parse(url: &str) -> Result<Uri, StreamError> {
    url.parse().map_err(|_| other("the URL is not valid"))
}

fn are_loopback(addresses: &[SocketAddr]) -> bool {
    addresses.iter().all(|address| address.ip().is_loopback())
}

fn other(text: &str) -> StreamError {
    StreamError::Other(text.into())
}

fn no_connection(error: std::io::Error) -> StreamError {
    StreamError::NoConnection(error.kind())
}
