//! The sockets of a stream without their HTTP layer.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{client, server};

use crate::client_limits::TimeoutIo;

/// A socket, with TLS or without. The TLS state is boxed: most streams have one plain socket at
/// least, and their memory counts.
pub(super) enum Socket<T> {
    Plain(TcpStream),
    Tls(Box<T>),
}

/// The socket of the provider.
pub(super) type ProviderSocket = Socket<server::TlsStream<TcpStream>>;
/// The socket of the agent.
pub(super) type AgentSocket = Socket<client::TlsStream<TcpStream>>;

/// Waits for the end of the handshake. Returns the socket itself, free of buffers and timers of
/// the HTTP server, and the bytes that the server has read beyond the request.
pub(super) async fn upgraded(upgrade: OnUpgrade) -> Option<(ProviderSocket, Vec<u8>)> {
    let upgraded = upgrade.await.ok()?;
    let upgraded = match take::<TcpStream>(upgraded) {
        Ok((stream, read)) => return Some((Socket::Plain(stream), read)),
        Err(upgraded) => upgraded,
    };
    let (stream, read) = take::<server::TlsStream<TcpStream>>(upgraded).ok()?;
    Some((Socket::Tls(Box::new(stream)), read))
}

fn take<S>(upgraded: Upgraded) -> Result<(S, Vec<u8>), Upgraded>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let parts = upgraded.downcast::<TokioIo<TimeoutIo<S>>>()?;
    Ok((parts.io.into_inner().into_inner(), parts.read_buf.to_vec()))
}

impl<T: AsyncRead + Unpin> AsyncRead for Socket<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, buffer),
        }
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Socket<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}
