//! The address of Redis: an endpoint, or Sentinels that know the primary.

use std::{io, time::Duration};

use futures_util::{StreamExt, stream::FuturesUnordered};
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisError,
    TlsCertificates,
    aio::{MultiplexedConnection, PubSub},
};

/// Time to establish a connection, handshake included.
const REDIS_CONNECT_TIMEOUT: Duration = Duration::from_millis(300);
/// Time for one reply.
pub(super) const RESPONSE_TIMEOUT: Duration = Duration::from_millis(350);

/// A parsed Redis URL.
#[derive(Clone)]
pub(super) struct Address {
    /// Connection settings; with Sentinels the endpoint is a placeholder.
    info: ConnectionInfo,
    sentinels: Option<Sentinels>,
    /// A certificate authority to trust besides the system's (PEM).
    authority: Option<Vec<u8>>,
}

#[derive(Clone)]
struct Sentinels {
    nodes: Vec<(String, u16)>,
    service: String,
}

impl Address {
    /// Parses `redis://`, `rediss://` or
    /// `redis+sentinel://[user:password@]host:port,host:port/service[/database]`. With
    /// `rediss+sentinel://` both Sentinels and primary use TLS.
    pub(super) fn parse(url: &str, authority: Option<Vec<u8>>) -> Result<Self, String> {
        let Some((scheme, rest)) = url.split_once("+sentinel://") else {
            let info = url.into_connection_info().map_err(|error| error.to_string())?;
            return Ok(Self { info, sentinels: None, authority });
        };
        let (credentials, rest) = match rest.rsplit_once('@') {
            Some((credentials, rest)) => (format!("{credentials}@"), rest),
            None => (String::new(), rest),
        };
        let (hosts, path) = rest.split_once('/').ok_or("the name of the service is missing")?;
        let (service, database) = path.split_once('/').unwrap_or((path, "0"));
        if service.is_empty() {
            return Err("the name of the service is missing".into());
        }
        let node = |text: &str| {
            let (host, port) = text.rsplit_once(':').unwrap_or((text, "26379"));
            let port = port.parse().map_err(|_| format!("{text:?} is not host:port"))?;
            if host.is_empty() {
                Err(format!("{text:?} is not host:port"))
            } else {
                Ok((host.to_owned(), port))
            }
        };
        let nodes = hosts.split(',').map(node).collect::<Result<_, _>>()?;
        let info =
            format!("{scheme}://{credentials}primary:6379/{database}").into_connection_info();
        let info = info.map_err(|error| error.to_string())?;
        Ok(Self { info, sentinels: Some(Sentinels { nodes, service: service.into() }), authority })
    }

    /// Host and port, unless Sentinels provide them.
    pub(super) fn endpoint(&self) -> Option<(&str, u16)> {
        match self.info.addr() {
            _ if self.sentinels.is_some() => None,
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                Some((host, *port))
            }
            _ => None,
        }
    }

    /// Connects to the primary. `moved` is the endpoint of a cluster's MOVED reply.
    pub(super) async fn connect(
        &self,
        moved: Option<(String, u16)>,
    ) -> Result<MultiplexedConnection, RedisError> {
        self.primary(moved).await.map(|(_, connection)| connection)
    }

    /// Opens a separate connection to the primary for messages.
    pub(super) async fn subscription(&self) -> Result<PubSub, RedisError> {
        let (client, _) = self.primary(None).await?;
        tokio::time::timeout(REDIS_CONNECT_TIMEOUT, client.get_async_pubsub())
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    async fn primary(
        &self,
        moved: Option<(String, u16)>,
    ) -> Result<(Client, MultiplexedConnection), RedisError> {
        match (moved, &self.sentinels) {
            (Some(endpoint), _) => self.connect_to(Some(endpoint)).await,
            (None, None) => self.connect_to(None).await,
            (None, Some(sentinels)) => {
                // Query all Sentinels concurrently: some may not reply, and some may still name a
                // former primary.
                let mut replies: FuturesUnordered<_> = sentinels
                    .nodes
                    .iter()
                    .map(|node| self.query_sentinel(sentinels, node))
                    .collect();
                let mut last = io::Error::other("the URL names no Sentinel").into();
                while let Some(reply) = replies.next().await {
                    let connected = match reply {
                        Ok(endpoint) => self.connect_to(Some(endpoint)).await,
                        Err(error) => Err(error),
                    };
                    match connected {
                        Ok(connection) => return Ok(connection),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }

    async fn connect_to(
        &self,
        endpoint: Option<(String, u16)>,
    ) -> Result<(Client, MultiplexedConnection), RedisError> {
        let info = match endpoint {
            Some(endpoint) => self.info.clone().set_addr(with_endpoint(self.info.addr(), endpoint)),
            None => self.info.clone(),
        };
        let client = self.client(info)?;
        let mut connection = open(&client).await?;
        if self.sentinels.is_some() {
            let role: Vec<redis::Value> = redis::cmd("ROLE").query_async(&mut connection).await?;
            let is_primary = role.first() == Some(&redis::Value::BulkString(b"master".to_vec()));
            if !is_primary {
                return Err(io::Error::other("the server is not the primary").into());
            }
        }
        Ok((client, connection))
    }

    /// Asks a Sentinel for the endpoint of the primary.
    async fn query_sentinel(
        &self,
        Sentinels { service, .. }: &Sentinels,
        node: &(String, u16),
    ) -> Result<(String, u16), RedisError> {
        let address = with_endpoint(self.info.addr(), node.clone());
        let mut sentinel = open(&self.client(address.into_connection_info()?)?).await?;
        let mut query = redis::cmd("SENTINEL");
        query.arg("GET-MASTER-ADDR-BY-NAME").arg(service);
        let endpoint: Option<(String, u16)> = query.query_async(&mut sentinel).await?;
        endpoint.ok_or_else(|| {
            io::Error::other(format!("Sentinel does not know the service {service:?}")).into()
        })
    }

    fn client(&self, info: ConnectionInfo) -> Result<Client, RedisError> {
        match (&self.authority, info.addr()) {
            (Some(authority), ConnectionAddr::TcpTls { .. }) => {
                let root_cert = Some(authority.clone());
                Client::build_with_tls(info, TlsCertificates { client_tls: None, root_cert })
            }
            _ => Client::open(info),
        }
    }
}

async fn open(client: &Client) -> Result<MultiplexedConnection, RedisError> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(REDIS_CONNECT_TIMEOUT))
        .set_response_timeout(Some(RESPONSE_TIMEOUT));
    client.get_multiplexed_async_connection_with_config(&config).await
}

/// An address of the same kind with another endpoint.
fn with_endpoint(like: &ConnectionAddr, (host, port): (String, u16)) -> ConnectionAddr {
    match like {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: *insecure,
            tls_params: tls_params.clone(),
        },
        _ => ConnectionAddr::Tcp(host, port),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentinel_urls_name_nodes_service_and_database() {
        let address = Address::parse("redis+sentinel://u:p@a:1,b/voice/3", None).unwrap();
        let sentinels = address.sentinels.unwrap();
        assert_eq!(sentinels.nodes, [("a".into(), 1), ("b".into(), 26379)]);
        assert_eq!(sentinels.service, "voice");
        assert_eq!(address.info.redis_settings().db(), 3);
        assert_eq!(address.info.redis_settings().username(), Some("u"));
        let address = Address::parse("rediss+sentinel://a:1/voice", None).unwrap();
        assert!(matches!(address.info.addr(), ConnectionAddr::TcpTls { insecure: false, .. }));
        for bad in [
            "http+sentinel://a:1/s",
            "redis+sentinel://a:1",
            "redis+sentinel://a:1/",
            "redis+sentinel://a:x/s",
            "redis+sentinel://:1/s",
            "redis://",
        ] {
            assert!(Address::parse(bad, None).is_err(), "{bad}");
        }
    }
}
