//! Echo agents: WebSocket servers that send every data frame back.

use media::{
    frame::{Header, Opcode, Sender, apply_mask, write_frame},
    handshake::accept_key,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::client::read_head;

/// Agents with a port each: connections to one port would exhaust the local ports during the
/// set-up measurement.
const COUNT: usize = 8;

/// Starts the agents on the current runtime. Returns their ports.
pub(crate) async fn start() -> Vec<u16> {
    let mut ports = Vec::new();
    for _ in 0..COUNT {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        ports.push(listener.local_addr().unwrap().port());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream));
            }
        });
    }
    ports
}

/// Serves one stream. A system under test may close it at any time, so that errors only end it.
async fn serve(mut stream: TcpStream) -> Option<()> {
    stream.set_nodelay(true).ok()?;
    let head = read_head(&mut stream).await.ok()?;
    let key = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("sec-websocket-key").then(|| value.trim())
    })?;
    let answer = format!(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Accept: {}\r\n\r\n",
        accept_key(key)
    );
    stream.write_all(answer.as_bytes()).await.ok()?;
    let (mut received, mut replies) = (Vec::with_capacity(2048), Vec::with_capacity(2048));
    loop {
        if stream.read_buf(&mut received).await.ok()? == 0 {
            return None;
        }
        let echoed = echo(&mut received, &mut replies)?;
        received.drain(..echoed.len);
        stream.write_all(&replies).await.ok()?;
        if echoed.is_closed {
            return stream.shutdown().await.ok();
        }
        replies.clear();
    }
}

struct Echoed {
    /// Length of the frames that have a reply.
    len: usize,
    /// One of them was a close frame.
    is_closed: bool,
}

/// Writes the replies to the complete frames of `received`. `None` ends the connection after a
/// frame that violates the protocol.
fn echo(received: &mut [u8], replies: &mut Vec<u8>) -> Option<Echoed> {
    let (mut read, mut is_closed) = (0, false);
    while let Some(header) = Header::parse(&received[read..], Sender::Client).ok()? {
        let end = read + header.frame_len() as usize;
        let Some(frame) = received.get_mut(read..end) else {
            break;
        };
        let payload = &mut frame[header.payload()];
        apply_mask(payload, header.mask.unwrap_or_default());
        match header.opcode {
            Opcode::Ping => write_frame(replies, Opcode::Pong, payload, None),
            Opcode::Pong => {}
            Opcode::Close => {
                write_frame(replies, Opcode::Close, payload, None);
                is_closed = true;
            }
            opcode => write_frame(replies, opcode, payload, None),
        }
        read = end;
    }
    Some(Echoed { len: read, is_closed })
}
