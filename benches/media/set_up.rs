//! New streams in a closed loop: handshake up to the response, then the end of the connection.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use super::client::Endpoint;

/// Streams that are being opened at any time.
const CONCURRENCY: usize = 32;

/// Opens a stream per path and closes it at once. Returns how many were refused.
pub(crate) async fn open_and_close(endpoint: &Endpoint, paths: Vec<String>) -> usize {
    let (paths, next) = (Arc::new(paths), Arc::new(AtomicUsize::new(0)));
    let clients = (0..CONCURRENCY).map(|_| {
        let (endpoint, paths, next) = (endpoint.clone(), paths.clone(), next.clone());
        tokio::spawn(async move {
            let mut refused = 0;
            while let Some(path) = paths.get(next.fetch_add(1, Ordering::Relaxed)) {
                match endpoint.open(path).await {
                    Ok(socket) => socket.close().await,
                    Err(_) => refused += 1,
                }
            }
            refused
        })
    });
    let mut refused = 0;
    for client in clients.collect::<Vec<_>>() {
        refused += client.await.expect("the client does not panic");
    }
    refused
}
