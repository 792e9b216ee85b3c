//! Sends spans to a collector by OTLP over HTTP. The queue is bounded; spans that the collector
//! does not accept are dropped and counted.

use std::{fmt, sync::Arc, time::Duration};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{
    Request, StatusCode, Uri,
    client::conn::http1::{self, SendRequest},
    header::{self, HeaderMap, HeaderName, HeaderValue},
};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use serde_json::Value;
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{TraceConfig, otlp};
use crate::client::{Wire, connect};
use spans::{BATCH, Span, SpanQueue};

/// Interval at which an incomplete batch is sent.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Tries per batch.
const MAX_TRIES: u32 = 3;
/// Backoff between tries.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(8);
/// How long shutdown waits for the last spans.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// Size limit of a response (bytes).
const MAX_RESPONSE_SIZE: usize = 64 << 10;

/// The collector that receives the spans.
#[derive(Debug, Clone)]
pub(crate) struct Collector {
    pub(crate) url: Uri,
    /// TLS settings for https://.
    pub(crate) tls: Option<Arc<ClientConfig>>,
    /// Request headers, marked as sensitive so that they are not printed.
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    /// How long a request may take.
    pub(crate) timeout: Duration,
}

impl fmt::Display for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.url.fmt(f)
    }
}

/// The task that sends spans until [`Exporter::finish`].
pub(crate) struct Exporter {
    stopping: CancellationToken,
    task: JoinHandle<()>,
    queue: Arc<SpanQueue>,
}

impl Exporter {
    pub(crate) fn start(config: TraceConfig, queue: Arc<SpanQueue>) -> Self {
        let stopping = CancellationToken::new();
        tracing::info!(collector = %config.collector, "exporting traces");
        let sender = Sender {
            collector: config.collector,
            resource: config.resource.into(),
            queue: queue.clone(),
            stopping: stopping.clone(),
            connection: None,
            is_failing: false,
            backoff: MIN_BACKOFF,
        };
        Self { stopping, task: tokio::spawn(sender.run()), queue }
    }

    pub(crate) async fn finish(mut self) {
        self.stopping.cancel();
        if timeout(SHUTDOWN_TIMEOUT, &mut self.task).await.is_err() {
            self.task.abort();
            tracing::warn!(spans = self.queue.count(), "the last spans were not sent in time");
        }
    }
}

struct Sender {
    collector: Collector,
    resource: Arc<[(String, String)]>,
    queue: Arc<SpanQueue>,
    stopping: CancellationToken,
    connection: Option<SendRequest<Full<Bytes>>>,
    /// The last batch was dropped.
    is_failing: bool,
    backoff: Duration,
}

/// Why the collector did not accept a batch.
enum SendError {
    /// Permanent.
    Refused(String),
    /// Transient: the batch may be sent again.
    Retryable { cause: String, after: Option<Duration> },
}

impl SendError {
    /// Includes all causes: hyper describes only its own part.
    fn retryable(error: impl Into<anyhow::Error>) -> Self {
        Self::Retryable { cause: format!("{:#}", error.into()), after: None }
    }
}

impl Sender {
    async fn run(mut self) {
        loop {
            if self.queue.count() < BATCH {
                tokio::select! {
                    () = self.queue.batch_ready.notified() => {}
                    () = sleep(BATCH_INTERVAL) => {}
                    () = self.stopping.cancelled() => {}
                }
            }
            let spans = self.queue.take();
            match spans.is_empty() {
                true if self.stopping.is_cancelled() => return,
                true => {}
                false => self.deliver(spans).await,
            }
        }
    }

    async fn deliver(&mut self, spans: Vec<Span>) {
        let (count, resource) = (spans.len() as u64, self.resource.clone());
        // Encoding must not block the threads that serve requests.
        let encoded = tokio::task::spawn_blocking(move || otlp::encode(&resource, &spans));
        let Ok(body) = encoded.await.map(Bytes::from) else { return };
        // While the collector is down, one try per batch shows whether it is back.
        let tries = if self.is_failing { 1 } else { MAX_TRIES };
        for left in (0..tries).rev() {
            let sent = timeout(self.collector.timeout, self.send(body.clone())).await;
            let (cause, after) = match sent
                .unwrap_or_else(|_| Err(SendError::retryable(anyhow::anyhow!("no answer in time"))))
            {
                Ok(rejected) => return self.delivered(count, rejected.min(count)),
                Err(SendError::Refused(cause)) => return self.drop_spans(count, "refused", &cause),
                Err(SendError::Retryable { cause, after }) => (cause, after),
            };
            // A late response must not be taken for that of the next try.
            self.connection = None;
            if left == 0 {
                self.drop_spans(count, "unreachable", &cause);
            }
            let pause = after.unwrap_or(self.backoff).min(MAX_BACKOFF);
            self.backoff = (self.backoff * 2).min(MAX_BACKOFF);
            tokio::select! {
                () = sleep(pause) => {}
                () = self.stopping.cancelled() => {}
            }
        }
    }

    fn delivered(&mut self, count: u64, rejected: u64) {
        self.queue.metrics.sent.inc_by(count - rejected);
        if rejected > 0 {
            self.queue.metrics.dropped("refused", rejected);
        }
        self.backoff = MIN_BACKOFF;
        if std::mem::take(&mut self.is_failing) {
            tracing::info!("the collector accepts spans again");
        }
    }

    fn drop_spans(&mut self, count: u64, reason: &'static str, cause: &str) {
        self.queue.metrics.dropped(reason, count);
        if !std::mem::replace(&mut self.is_failing, true) {
            let collector = &self.collector;
            tracing::warn!(%collector, cause, "the collector does not accept spans; dropping them");
        }
    }

    /// Sends a batch; returns how many spans the collector rejected.
    async fn send(&mut self, body: Bytes) -> Result<u64, SendError> {
        let (mut sender, new) = match self.connection.take().filter(|it| !it.is_closed()) {
            Some(sender) => (sender, None),
            None => {
                let (sender, connection) = self.connect().await.map_err(SendError::retryable)?;
                (sender, Some(connection))
            }
        };
        let url = &self.collector.url;
        let mut request = Request::post(url.path())
            .header(header::HOST, url.authority().map_or("", |it| it.as_str()))
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(headers) = request.headers_mut() {
            headers.extend(self.collector.headers.iter().cloned());
        }
        let request = request.body(Full::new(body)).map_err(SendError::retryable)?;
        let response = sender.send_request(request);
        // The connection runs after its first request is queued, so that its error becomes the
        // request's error.
        new.map(tokio::spawn);
        let response = response.await.map_err(SendError::retryable)?;
        let (head, body) = response.into_parts();
        let answer = Limited::new(body, MAX_RESPONSE_SIZE).collect().await;
        match head.status {
            status if status.is_success() => {
                let answer = answer.map(|answer| answer.to_bytes()).unwrap_or_default();
                self.connection = Some(sender);
                Ok(rejected(&answer))
            }
            status if is_retryable(status) => Err(SendError::Retryable {
                cause: status.to_string(),
                after: retry_after(&head.headers),
            }),
            status => Err(SendError::Refused(status.to_string())),
        }
    }

    async fn connect(
        &self,
    ) -> anyhow::Result<(
        SendRequest<Full<Bytes>>,
        http1::Connection<TokioIo<Box<dyn Wire>>, Full<Bytes>>,
    )> {
        let stream = connect(&self.collector.url, self.collector.tls.as_ref()).await?;
        Ok(http1::handshake(TokioIo::new(stream)).await?)
    }
}

/// The statuses after which OTLP specifies a retry.
fn is_retryable(status: StatusCode) -> bool {
    matches!(status.as_u16(), 429 | 502 | 503 | 504)
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// Returns the number of rejected spans in a response; OTLP/JSON may encode numbers as text.
fn rejected(answer: &[u8]) -> u64 {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    let number = &answer["partialSuccess"]["rejectedSpans"];
    let text = number.as_str().and_then(|text| text.parse().ok());
    number.as_u64().or(text).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partial_success_has_the_number_of_rejected_spans() {
        for (answer, count) in [
            ("{}", 0),
            ("", 0),
            (r#"{"partialSuccess": {}}"#, 0),
            (r#"{"partialSuccess": {"rejectedSpans": "3", "errorMessage": "no"}}"#, 3),
            (r#"{"partialSuccess": {"rejectedSpans": 2}}"#, 2),
        ] {
            assert_eq!(rejected(answer.as_bytes()), count, "{answer}");
        }
    }

    #[test]
    fn only_the_statuses_of_otlp_are_retried() {
        let retryable =
            (100..600).filter(|code| is_retryable(StatusCode::from_u16(*code).unwrap()));
        assert_eq!(retryable.collect::<Vec<_>>(), [429, 502, 503, 504]);
    }
}
