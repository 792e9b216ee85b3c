//! Sends spans to a collector by OTLP over HTTP. Whatever the collector does, what waits
//! for it is bounded, and what it does not take is dropped and counted.

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

/// Spans are sent after so long, or when there are enough.
const INTERVAL: Duration = Duration::from_secs(1);
/// How often a batch is tried.
const TRIES: u32 = 3;
/// How long we wait between tries: at first, and at most.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);
/// How long the end of the program waits for the last spans.
const FAREWELL: Duration = Duration::from_secs(2);
/// What is read of an answer.
const LONGEST_ANSWER: usize = 64 << 10;

/// Where spans go, and what is said with them.
#[derive(Debug, Clone)]
pub struct Collector {
    pub url: Uri,
    /// Whom we trust there, and who we are, with https://.
    pub tls: Option<Arc<ClientConfig>>,
    /// Secrets: marked as such, so that nothing shows them.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// How long it may take to answer.
    pub patience: Duration,
}

impl fmt::Display for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.url.fmt(f)
    }
}

/// The task that sends, until it is told to finish.
pub(crate) struct Exporter {
    stopping: CancellationToken,
    task: JoinHandle<()>,
    queue: Arc<SpanQueue>,
}

impl Exporter {
    pub(crate) fn start(config: TraceConfig, queue: Arc<SpanQueue>) -> Self {
        let stopping = CancellationToken::new();
        tracing::info!(collector = %config.collector, "traces are on");
        let sender = Sender {
            collector: config.collector,
            resource: config.resource.into(),
            queue: queue.clone(),
            stopping: stopping.clone(),
            line: None,
            is_failing: false,
            pause: PAUSE,
        };
        Self { stopping, task: tokio::spawn(sender.run()), queue }
    }

    pub(crate) async fn finish(mut self) {
        self.stopping.cancel();
        if timeout(FAREWELL, &mut self.task).await.is_err() {
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
    line: Option<SendRequest<Full<Bytes>>>,
    /// The last batch was lost.
    is_failing: bool,
    pause: Duration,
}

/// Why a batch was not taken.
enum Fault {
    /// It never will be.
    Refused(String),
    /// It may be later.
    Later { why: String, after: Option<Duration> },
}

impl Fault {
    /// With all causes: hyper names only its own part.
    fn later(error: impl Into<anyhow::Error>) -> Self {
        Self::Later { why: format!("{:#}", error.into()), after: None }
    }
}

impl Sender {
    async fn run(mut self) {
        loop {
            if self.queue.count() < BATCH {
                tokio::select! {
                    () = self.queue.batch_ready.notified() => {}
                    () = sleep(INTERVAL) => {}
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
        // Off the threads that answer requests.
        let encoded = tokio::task::spawn_blocking(move || otlp::encode(&resource, &spans));
        let Ok(body) = encoded.await.map(Bytes::from) else { return };
        // While it is known to be out, one try is enough to see whether it is back.
        let tries = if self.is_failing { 1 } else { TRIES };
        for left in (0..tries).rev() {
            let sent = timeout(self.collector.patience, self.send(body.clone())).await;
            let (why, after) = match sent
                .unwrap_or_else(|_| Err(Fault::later(anyhow::anyhow!("no answer in time"))))
            {
                Ok(rejected) => return self.delivered(count, rejected.min(count)),
                Err(Fault::Refused(why)) => return self.lose(count, "refused", &why),
                Err(Fault::Later { why, after }) => (why, after),
            };
            // What is on its way there would come twice, or between.
            self.line = None;
            if left == 0 {
                self.lose(count, "unreachable", &why);
            }
            let pause = after.unwrap_or(self.pause).min(LONGEST_PAUSE);
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
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
        self.pause = PAUSE;
        if std::mem::take(&mut self.is_failing) {
            tracing::info!("the collector takes spans again");
        }
    }

    fn lose(&mut self, count: u64, reason: &'static str, why: &str) {
        self.queue.metrics.dropped(reason, count);
        if !std::mem::replace(&mut self.is_failing, true) {
            let collector = &self.collector;
            tracing::warn!(%collector, why, "the collector does not take spans; dropping them");
        }
    }

    /// Sends a batch; how many of it were rejected.
    async fn send(&mut self, body: Bytes) -> Result<u64, Fault> {
        let (mut line, fresh) = match self.line.take().filter(|line| !line.is_closed()) {
            Some(line) => (line, None),
            None => {
                let (line, connection) = self.connect().await.map_err(Fault::later)?;
                (line, Some(connection))
            }
        };
        let url = &self.collector.url;
        let mut request = Request::post(url.path())
            .header(header::HOST, url.authority().map_or("", |it| it.as_str()))
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(headers) = request.headers_mut() {
            headers.extend(self.collector.headers.iter().cloned());
        }
        let request = request.body(Full::new(body)).map_err(Fault::later)?;
        let response = line.send_request(request);
        // A connection runs once its first request is queued: what ends it is the request's
        // error then.
        fresh.map(tokio::spawn);
        let response = response.await.map_err(Fault::later)?;
        let (head, body) = response.into_parts();
        let answer = Limited::new(body, LONGEST_ANSWER).collect().await;
        match head.status {
            status if status.is_success() => {
                let answer = answer.map(|answer| answer.to_bytes()).unwrap_or_default();
                self.line = Some(line);
                Ok(rejected(&answer))
            }
            status if is_retryable(status) => {
                Err(Fault::Later { why: status.to_string(), after: retry_after(&head.headers) })
            }
            status => Err(Fault::Refused(status.to_string())),
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

/// The answers after which OTLP wants a batch to be sent again; no others.
fn is_retryable(status: StatusCode) -> bool {
    matches!(status.as_u16(), 429 | 502 | 503 | 504)
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// How many spans an answer says were not taken; a number may be text.
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
    fn a_partial_success_says_how_many_were_not_taken() {
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
    fn only_what_otlp_names_is_sent_again() {
        let again = (100..600).filter(|code| is_retryable(StatusCode::from_u16(*code).unwrap()));
        assert_eq!(again.collect::<Vec<_>>(), [429, 502, 503, 504]);
    }
}
