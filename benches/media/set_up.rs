//! New streams in a closed loop: handshake up to the response, then a close as by a provider.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use super::client::Endpoint;

/// Streams that are being opened at any time.
const CONCURRENCY: usize = 32;

/// Opens a stream per path and hangs up at once. Returns how many failed.
pub(crate) async fn open_and_close(endpoint: &Endpoint, paths: Vec<String>) -> usize {
    let (paths, next) = (Arc::new(paths), Arc::new(AtomicUsize::new(0)));
    let clients = (0..CONCURRENCY).map(|_| {
        let (endpoint, paths, next) = (endpoint.clone(), paths.clone(), next.clone());
        tokio::spawn(async move {
            let mut failed = 0;
            while let Some(path) = paths.get(next.fetch_add(1, Ordering::Relaxed)) {
                let stream = async { endpoint.open(path).await?.hang_up().await };
                failed += usize::from(stream.await.is_err());
            }
            failed
        })
    });
    let mut failed = 0;
    for client in clients.collect::<Vec<_>>() {
        failed += client.await.expect("the client does not panic");
    }
    failed
}
