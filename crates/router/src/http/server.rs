//! HTTP/1.1 server: accepts connections, enforces timeouts, shuts down gracefully.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, body::Body, http::StatusCode, response::Response};
use futures_util::FutureExt;
use hyper::{
    body::{Body as HttpBody, Frame, Incoming, SizeHint},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

use crate::{
    client_limits::{ConnectionLimiter, Phase, Slot, TimeoutIo},
    media::{self, Gateway},
    tls::ListenerTls,
};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Timeouts {
    /// From the first byte of a request to the end of its head, and for writes without progress.
    pub(crate) read: Duration,
    /// Until the next request begins.
    pub(crate) idle: Duration,
    /// For requests in flight at shutdown.
    pub(crate) shutdown: Duration,
}

/// What a listener serves.
#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) routes: Router,
    /// The media gateway, below its own path.
    pub(crate) media: Option<Arc<Gateway>>,
}

impl Service {
    /// Serves routes without the media gateway.
    pub(crate) fn of(routes: Router) -> Self {
        Self { routes, media: None }
    }

    async fn respond(
        self,
        mut request: hyper::Request<Incoming>,
        peer: SocketAddr,
        slot: Arc<Slot>,
    ) -> Response<Body> {
        if let Some(gateway) = &self.media {
            let path = request.uri().path();
            if path.starts_with(media::PATH_PREFIX) {
                return gateway.serve(request, peer).await;
            }
            if path.starts_with(media::CONNECT_PREFIX) {
                return gateway.serve_connect(request, peer).await;
            }
        }
        request.extensions_mut().insert(peer);
        let request = request.map(|body| Body::new(request_body(body, slot)));
        let Ok(response) = self.routes.oneshot(request).await;
        response
    }
}

/// Serves until `closing`, then finishes requests in flight within the shutdown timeout.
pub(crate) async fn serve(
    listener: TcpListener,
    tls: ListenerTls,
    service: Service,
    timeouts: Timeouts,
    limiter: Arc<ConnectionLimiter>,
    closing: CancellationToken,
) {
    let connections = TaskTracker::new();
    let abort = CancellationToken::new();
    let open = |(stream, peer)| {
        let Some(guard) = limiter.acquire() else { return };
        let (slot, evicted) = (guard.slot.clone(), guard.slot.evicted.clone());
        let (service, closing) = (service.clone(), closing.clone());
        let connection = Connection { peer, service, timeouts, slot, closing };
        let (tls, abort) = (tls.clone(), abort.clone());
        connections.spawn(async move {
            tokio::select! {
                () = connection.accept(tls, stream) => {}
                () = evicted.cancelled() => {}
                () = abort.cancelled() => {}
            }
            drop(guard);
        });
    };
    while let Some(accepted) = accept(&listener, &closing).await {
        open(accepted);
    }
    // Connections in the listen queue are established: their clients expect a response.
    while let Some(Ok(accepted)) = listener.accept().now_or_never() {
        open(accepted);
    }
    drop(listener);
    connections.close();
    if timeout(timeouts.shutdown, connections.wait()).await.is_err() {
        tracing::warn!(
            connections = connections.len(),
            "shutdown timeout reached; closing connections with requests in flight"
        );
        abort.cancel();
        connections.wait().await;
    }
}

async fn accept(
    listener: &TcpListener,
    closing: &CancellationToken,
) -> Option<(TcpStream, SocketAddr)> {
    let mut is_full = false;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = closing.cancelled() => return None,
        };
        match accepted {
            Ok(accepted) => return Some(accepted),
            // Most likely out of file descriptors, until other connections close.
            Err(error) => {
                if !is_full {
                    tracing::warn!(%error, "cannot accept connections; retrying");
                }
                is_full = true;
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// First byte of a TLS handshake.
const TLS_HANDSHAKE: u8 = 22;
/// Response to a client that speaks plain HTTP on an address with TLS.
const TLS_REQUIRED: &[u8] = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n\
    Content-Length: 51\r\nConnection: close\r\n\r\n\
    {\"error\":\"this address requires TLS; use https://\"}";

struct Connection {
    peer: SocketAddr,
    service: Service,
    timeouts: Timeouts,
    slot: Arc<Slot>,
    closing: CancellationToken,
}

impl Connection {
    async fn accept(self, tls: ListenerTls, mut stream: TcpStream) {
        let peer = self.peer;
        // Responses are written whole: Nagle's algorithm would only delay them.
        let _ = stream.set_nodelay(true);
        let Some(config) = tls.server_config() else {
            return self.serve(stream).await;
        };
        let handshake = async {
            let mut first = [0];
            if stream.peek(&mut first).await? == 1 && first != [TLS_HANDSHAKE] {
                stream.write_all(TLS_REQUIRED).await?;
                stream.shutdown().await?;
                // Closing with unread input resets the connection and loses the response.
                while stream.read(&mut [0; 1024]).await? > 0 {}
                return Err(io::Error::other("plain HTTP on a TLS address"));
            }
            TlsAcceptor::from(config).accept(stream).await
        };
        match timeout(self.timeouts.read, handshake).await {
            Ok(Ok(stream)) => self.serve(stream).await,
            Ok(Err(error)) => tracing::debug!(%peer, %error, "TLS handshake failed"),
            Err(_) => tracing::debug!(%peer, "TLS handshake timed out"),
        }
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let Self { peer, service, timeouts, slot, closing } = self;
        // The timeout of the first head includes the time until it begins.
        slot.enter(Phase::Head(std::time::Instant::now()));
        let io = TimeoutIo::new(stream, timeouts.read, slot.clone());
        let service = service_fn(move |request: hyper::Request<Incoming>| {
            slot.enter(Phase::Response);
            let (service, slot) = (service.clone(), slot.clone());
            async move {
                let response = service.respond(request, peer, slot.clone()).await;
                let is_upgrade = response.status() == StatusCode::SWITCHING_PROTOCOLS;
                let response = response.map(|body| response_body(body, slot, is_upgrade));
                Ok::<_, Infallible>(response)
            }
        });
        let mut server = http1::Builder::new();
        server.timer(TokioTimer::new()).header_read_timeout(timeouts.idle);
        let connection = server.serve_connection(TokioIo::new(io), service).with_upgrades();
        let mut connection = std::pin::pin!(connection);
        let finished = tokio::select! {
            finished = &mut connection => finished,
            () = closing.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = finished {
            tracing::debug!(%peer, %error, "connection ended");
        }
    }
}

/// A body that updates the slot of its connection when it is polled and dropped.
struct TrackedBody<B> {
    body: B,
    slot: Arc<Slot>,
    on_poll: fn(&Slot, bool),
    on_drop: fn(&Slot),
}

/// A handler that polls the body waits for the client.
fn request_body(body: Incoming, slot: Arc<Slot>) -> TrackedBody<Incoming> {
    TrackedBody { body, slot, on_poll: Slot::await_body, on_drop: |slot| slot.await_body(false) }
}

/// Hyper drops the body after it has written the response. No request follows an upgrade.
fn response_body(body: Body, slot: Arc<Slot>, is_upgrade: bool) -> TrackedBody<Body> {
    let on_drop = if is_upgrade { |_: &Slot| {} } else { Slot::end_response };
    TrackedBody { body, slot, on_poll: |_, _| {}, on_drop }
}

impl<B: HttpBody + Unpin> HttpBody for TrackedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        (self.on_poll)(&self.slot, polled.is_pending());
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B> Drop for TrackedBody<B> {
    fn drop(&mut self) {
        (self.on_drop)(&self.slot);
    }
}
