//! Connections: accepted, bounded in time, and finished gracefully.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, body::Body, http::StatusCode};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    time::{Instant, Sleep, sleep, sleep_until},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

/// How long clients may take.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// To send the head of a request once it has begun.
    pub read: Duration,
    /// To begin the next request.
    pub idle: Duration,
    /// To let requests in flight finish at the end.
    pub shutdown: Duration,
}

/// Serves until `stopping`, then finishes what is in flight, within bounds.
pub async fn serve(
    listener: TcpListener,
    routes: Router,
    patience: Patience,
    stopping: CancellationToken,
) {
    let connections = TaskTracker::new();
    let cut = CancellationToken::new();
    while let Some((stream, peer)) = accept(&listener, &stopping).await {
        let connection = converse(stream, peer, routes.clone(), patience, stopping.clone());
        let cut = cut.clone();
        connections.spawn(async move {
            tokio::select! {
                () = connection => {}
                () = cut.cancelled() => {}
            }
        });
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(patience.shutdown, connections.wait()).await.is_err() {
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
    stopping: &CancellationToken,
) -> Option<(TcpStream, SocketAddr)> {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stopping.cancelled() => return None,
        };
        match accepted {
            Ok(accepted) => return Some(accepted),
            // Out of file descriptors, most likely: others must finish first.
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn converse(
    stream: TcpStream,
    peer: SocketAddr,
    routes: Router,
    patience: Patience,
    stopping: CancellationToken,
) {
    // Answers are small and complete: nothing is gained by waiting for more.
    let _ = stream.set_nodelay(true);
    let turns = Arc::new(Turns::default());
    let io = Punctual { stream, limit: patience.read, turns: turns.clone(), head: None };
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        turns.change();
        request.extensions_mut().insert(peer);
        let (routes, turns) = (routes.clone(), turns.clone());
        async move {
            let response = routes.oneshot(request.map(Body::new)).await?;
            // An upgraded connection has no more heads to wait for.
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                turns.change();
            }
            Ok::<_, Infallible>(response)
        }
    });
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(patience.idle);
    let mut connection =
        std::pin::pin!(server.serve_connection(TokioIo::new(io), service).with_upgrades());
    let finished = tokio::select! {
        finished = &mut connection => finished,
        () = stopping.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = finished {
        tracing::debug!(%peer, %error, "connection ended");
    }
}

/// Whose turn it is: the client's, which may send the head of a request, or
/// ours, which answer it. Even counts are the client's.
#[derive(Default)]
struct Turns(AtomicUsize);

impl Turns {
    fn change(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// A stream whose peer must finish the head of a request soon after beginning
/// it. (Hyper's own limit also counts the time between requests.)
struct Punctual {
    stream: TcpStream,
    limit: Duration,
    turns: Arc<Turns>,
    head: Option<Head>,
}

/// A head that has begun.
struct Head {
    turn: usize,
    deadline: Instant,
    alarm: Option<Pin<Box<Sleep>>>,
}

impl AsyncRead for Punctual {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let turn = this.turns.count();
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
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

impl AsyncWrite for Punctual {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
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
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
