//! Connections: accepted, bounded in time, and finished gracefully.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, body::Body, http::StatusCode};
use futures_util::FutureExt;
use hyper::{
    body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{TcpListener, TcpStream},
    time::{Instant, Sleep, sleep, sleep_until, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

use super::middleware::connection_limit::{Crowd, Seat};
use crate::tls::Door;

/// How long clients may take.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// To send the head of a request once it has begun, and to take some of an
    /// answer.
    pub read: Duration,
    /// To begin the next request.
    pub idle: Duration,
    /// To let requests in flight finish at the end.
    pub shutdown: Duration,
}

/// Serves until `closing`, then finishes what is in flight, within bounds.
pub async fn serve(
    listener: TcpListener,
    door: Door,
    routes: Router,
    patience: Patience,
    crowd: Arc<Crowd>,
    closing: CancellationToken,
) {
    let connections = TaskTracker::new();
    let cut = CancellationToken::new();
    let open = |(stream, peer)| {
        let Some(seated) = crowd.enter() else { return };
        let visit = Visit {
            peer,
            routes: routes.clone(),
            patience,
            seat: seated.0.clone(),
            closing: closing.clone(),
        };
        let connection = open_to(door.settings(), stream, visit);
        let cut = cut.clone();
        connections.spawn(async move {
            tokio::select! {
                () = connection => {}
                () = seated.0.leave.cancelled() => {}
                () = cut.cancelled() => {}
            }
        });
    };
    while let Some(accepted) = accept(&listener, &closing).await {
        open(accepted);
    }
    // Who already waits at the door is still let in.
    while let Some(Ok(accepted)) = listener.accept().now_or_never() {
        open(accepted);
    }
    drop(listener);
    connections.close();
    if timeout(patience.shutdown, connections.wait()).await.is_err() {
        tracing::warn!(
            connections = connections.len(),
            "cut connections that did not finish in time"
        );
        cut.cancel();
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
            // Out of file descriptors, most likely: others must finish first.
            Err(error) => {
                if !is_full {
                    tracing::warn!(%error, "cannot accept connections; waiting for room");
                }
                is_full = true;
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Somebody who has come, and what there is for them.
struct Visit {
    peer: SocketAddr,
    routes: Router,
    patience: Patience,
    seat: Arc<Seat>,
    closing: CancellationToken,
}

/// Lets a client in, by TLS if there are settings for that.
async fn open_to(settings: Option<Arc<ServerConfig>>, mut stream: TcpStream, visit: Visit) {
    let peer = visit.peer;
    // Answers are small and complete: nothing is gained by waiting for more.
    let _ = stream.set_nodelay(true);
    let Some(settings) = settings else {
        return converse(stream, visit).await;
    };
    let greet = async {
        let mut first = [0];
        if stream.peek(&mut first).await? == 1 && first != [HANDSHAKE] {
            stream.write_all(MISTAKEN).await?;
            stream.shutdown().await?;
            // Who still sends would not hear it.
            while stream.read(&mut [0; 1024]).await? > 0 {}
            return Err(io::Error::other("no TLS"));
        }
        TlsAcceptor::from(settings).accept(stream).await
    };
    match timeout(visit.patience.read, greet).await {
        Ok(Ok(stream)) => converse(stream, visit).await,
        Ok(Err(error)) => tracing::debug!(%peer, %error, "no TLS connection"),
        Err(_) => tracing::debug!(%peer, "a TLS handshake took too long"),
    }
}

/// What a client begins with that speaks TLS.
const HANDSHAKE: u8 = 22;
/// What one hears that does not.
const MISTAKEN: &[u8] = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n\
    Content-Length: 56\r\nConnection: close\r\n\r\n\
    {\"error\":\"this address speaks TLS: begin with https://\"}";

async fn converse(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, visit: Visit) {
    let Visit { peer, routes, patience, seat, closing } = visit;
    // Who connects has something to ask.
    let head = Head { turn: 0, deadline: Instant::now() + patience.read, alarm: None };
    let (limit, head) = (patience.read, Some(head));
    let io = Punctual { stream, limit, seat: seat.clone(), head, stuck: None };
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        seat.change_turn();
        request.extensions_mut().insert(peer);
        let (routes, seat) = (routes.clone(), seat.clone());
        async move {
            let request = request.map(|body| Body::new(Asked { body, seat: seat.clone() }));
            let response = routes.oneshot(request).await?;
            // An upgraded connection has no more heads to wait for.
            let is_upgrade = response.status() == StatusCode::SWITCHING_PROTOCOLS;
            let turn = (!is_upgrade).then(|| Turn(seat));
            Ok::<_, Infallible>(response.map(|body| Told { body, _turn: turn }))
        }
    });
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(patience.idle);
    let mut connection =
        std::pin::pin!(server.serve_connection(TokioIo::new(io), service).with_upgrades());
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

/// What a client sends, for which it can keep us waiting.
struct Asked {
    body: Incoming,
    seat: Arc<Seat>,
}

impl HttpBody for Asked {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        self.seat.await_body(polled.is_pending());
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.seat.await_body(false);
    }
}

/// What a client is told; when that is done it is its turn again.
struct Told {
    body: Body,
    _turn: Option<Turn>,
}

struct Turn(Arc<Seat>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.change_turn();
    }
}

impl HttpBody for Told {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream whose peer must finish the head of a request soon after beginning
/// it. (Hyper's own limit also counts the time between requests.)
struct Punctual<S> {
    stream: S,
    limit: Duration,
    seat: Arc<Seat>,
    head: Option<Head>,
    /// Rings when the peer has not taken anything of an answer for too long.
    stuck: Option<Pin<Box<Sleep>>>,
}

impl<S> Punctual<S> {
    /// Lets a write that can't go on wait, but not for ever.
    fn bound<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.seat.hear();
            self.stuck = None;
            return written;
        }
        let limit = self.limit;
        let alarm = self.stuck.get_or_insert_with(|| Box::pin(sleep(limit)));
        match alarm.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// A head that has begun.
struct Head {
    turn: usize,
    deadline: Instant,
    alarm: Option<Pin<Box<Sleep>>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Punctual<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let turn = this.seat.turn();
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
        if read.is_ready() {
            this.seat.hear();
        }
        if !turn.is_multiple_of(2) {
            return read;
        }
        let begun = this.head.take_if(|head| head.turn == turn);
        match (read, begun) {
            (Poll::Pending, None) => Poll::Pending,
            (Poll::Pending, Some(mut head)) => {
                let alarm = head.alarm.get_or_insert_with(|| Box::pin(sleep_until(head.deadline)));
                let rung = alarm.as_mut().poll(cx).is_ready();
                this.head = Some(head);
                if rung { Poll::Ready(Err(io::ErrorKind::TimedOut.into())) } else { Poll::Pending }
            }
            (ready, begun) => {
                let deadline = Instant::now() + this.limit;
                this.head = Some(begun.unwrap_or(Head { turn, deadline, alarm: None }));
                ready
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Punctual<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.bound(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.bound(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
