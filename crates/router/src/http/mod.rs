//! The HTTP API. [`routes`] lists every route; each endpoint has a file of its name.

pub(crate) mod api;
mod dashboard;
pub(crate) mod middleware;
mod openapi;
mod reply;
mod routes;
pub(crate) mod server;
mod webhooks;

use std::{sync::Arc, time::Duration};

use axum::{extract::State, response::Response};
use tokio::sync::Notify;

pub(crate) use self::{
    api::{dial_queues::DialQueues, events::CallTimelines, reservations::OutboundConfig},
    reply::{ApiError, RequestLog},
    routes::{admin_routes, health_only_routes, metrics_routes, public_routes, routes},
};
use self::{
    api::{live::Live, snapshots::Snapshots},
    middleware::stream_limit::StreamLimiter,
};
use crate::{
    auth::Access,
    capacity::Capacity,
    client_limits::RateLimiter,
    hold_config::{BusyAction, HoldConfig},
    lifecycle::Lifecycle,
    media::Gateway,
    telemetry::metrics::Metrics,
};
use fleet::{Allocation, Millis, PreviousPod};
use spans::Tracer;
use store::{Store, Ttls};
use telephony::{CallRequest, Provider, WsPath, WsUrls};

/// State shared by all handlers.
pub(crate) struct Context {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) urls: StreamUrls,
    pub(crate) access: Arc<Access>,
    /// Scheme of this router's own URLs: `http` or `https`.
    pub(crate) scheme: &'static str,
    /// Base URL under which providers reach the router; empty if not configured.
    pub(crate) public_url: String,
    /// Providers whose webhooks are served.
    pub(crate) providers: Vec<Provider>,
    /// Whether call documents request stream status callbacks.
    pub(crate) stream_status: bool,
    pub(crate) busy_action: BusyAction,
    /// Hold configuration; `None` if calls never wait for a pod.
    pub(crate) hold: Option<HoldConfig>,
    /// Reconnects of a call whose stream disconnected.
    pub(crate) max_retries: u32,
    /// Tiers and merchants that an object of the cluster manages can't be changed by the API.
    pub(crate) honours_owners: bool,
    pub(crate) ttls: Ttls,
    pub(crate) outbound: OutboundConfig,
    /// Waiting diallers.
    pub(crate) dial_queues: Arc<DialQueues>,
    /// Time for which fingerprints of signed requests are kept, for replay protection.
    pub(crate) replay_window: Millis,
    pub(crate) read_timeout: Duration,
    /// Triggers a reconciliation of the pods after the tiers changed.
    pub(crate) reconcile_now: Arc<Notify>,
    pub(crate) lifecycle: Arc<Lifecycle>,
    /// Cached reads of the whole fleet, shared by all requests.
    pub(crate) snapshots: Arc<Snapshots>,
    /// Data of the dashboard.
    pub(crate) live: Arc<Live>,
    /// The decisions of the capacity policy.
    pub(crate) capacity: Arc<Capacity>,
    pub(crate) timelines: CallTimelines,
    pub(crate) stream_limiter: Arc<StreamLimiter>,
    /// Limits unauthenticated requests.
    pub(crate) rate_limiter: Arc<RateLimiter>,
    /// `None` if tracing is off.
    pub(crate) tracer: Option<Arc<Tracer>>,
}

/// Builds the stream URLs of calls.
pub(crate) enum StreamUrls {
    Gateway {
        gateway: Arc<Gateway>,
        path: WsPath,
    },
    /// URLs that lead to the pods through a proxy.
    Direct(WsUrls),
}

impl StreamUrls {
    pub(crate) fn gateway(&self) -> Option<&Arc<Gateway>> {
        match self {
            Self::Gateway { gateway, .. } => Some(gateway),
            Self::Direct(_) => None,
        }
    }

    /// The stream URL of an allocated call; `None` before the key of its token is known.
    fn url(&self, request: &CallRequest, given: &Allocation) -> Option<String> {
        match self {
            Self::Gateway { gateway, path } => {
                let path = path.fill(request);
                gateway.url(&request.call, given.pod_attempt, &path, &request.parameters)
            }
            Self::Direct(urls) => Some(urls.url(&given.pod, request)),
        }
    }
}

impl Context {
    /// Callback URL for the status of the stream to a pod.
    fn stream_status_url(&self, provider: Provider, given: &Allocation) -> Option<String> {
        let base = Some(&self.public_url).filter(|_| self.stream_status)?;
        let url = format!("{base}/api/v1/{provider}/stream-status?pod_name={}", given.pod);
        Some(match given.pod_attempt {
            0 => url,
            number => format!("{url}&attempt={number}"),
        })
    }

    /// Webhook URL that the provider requests when the stream ends.
    fn after_stream_url(&self, request: &CallRequest, given: &Allocation) -> Option<String> {
        let Allocation { pod, pod_attempt, .. } = given;
        (*pod_attempt > 0).then(|| {
            self.webhook_url(
                request,
                "after-stream",
                &format!("pod_name={pod}&attempt={pod_attempt}"),
            )
        })
    }

    /// Poll URL of a waiting call. `since` is the start of the wait in unix seconds, `poll` the
    /// number of the next poll.
    fn poll_url(&self, request: &CallRequest, since: u64, poll: u32) -> String {
        self.webhook_url(request, "allocate", &format!("waiting_since={since}&poll={poll}"))
    }

    /// URL that repeats an after-stream webhook while the store is unavailable.
    fn after_stream_retry_url(
        &self,
        request: &CallRequest,
        since: u64,
        previous: &PreviousPod,
    ) -> String {
        let PreviousPod { pod, pod_attempt, .. } = previous;
        let query = format!("pod_name={pod}&attempt={pod_attempt}&waiting_since={since}");
        self.webhook_url(request, "after-stream", &query)
    }

    fn webhook_url(&self, request: &CallRequest, endpoint: &str, query: &str) -> String {
        let CallRequest { merchant, provider, flow, template, parameters, .. } = request;
        let merchant = merchant.as_ref().map(|id| format!("&merchant_id={id}")).unwrap_or_default();
        let (base, parameters) = (&self.public_url, parameters.to_query());
        format!(
            "{base}/api/v1/{provider}/{endpoint}?{query}{merchant}&flow={flow}&template={template}{parameters}"
        )
    }
}

pub(crate) type Shared = State<Arc<Context>>;

/// Adds `Connection: close` to a response.
fn close_connection(mut response: Response) -> Response {
    let close = axum::http::HeaderValue::from_static("close");
    response.headers_mut().insert(axum::http::header::CONNECTION, close);
    response
}

#[cfg(test)]
impl Context {
    fn for_tests() -> Arc<Self> {
        use fleet::tiers::{DocumentSource, Tiers};
        use store::Embedded;
        use telephony::DEFAULT_WS_PATH;
        let metrics = Arc::new(Metrics::default());
        let tiers = Tiers::parse(r#"{"gold": 1}"#, DocumentSource::Settings).unwrap().0;
        let store: Arc<dyn Store> = Arc::new(Embedded::in_memory(tiers, 0, metrics.store.clone()));
        let lifecycle = Arc::new(Lifecycle::default());
        let info = api::live::RouterInfo {
            name: String::new(),
            store: "embedded",
            has_cluster: false,
            has_events: true,
            draining_ttl: 1_000,
        };
        let snapshots = Snapshots::new(store.clone());
        let (live_store, shared) = (store.clone(), snapshots.clone());
        Arc::new(Self {
            live: Live::new(live_store, shared, metrics.clone(), lifecycle.clone(), info),
            snapshots,
            capacity: Arc::new(Capacity::new(metrics.capacity.clone(), true)),
            timelines: CallTimelines::default(),
            stream_limiter: StreamLimiter::new(metrics.clone()),
            rate_limiter: Arc::new(RateLimiter::new(0, Default::default())),
            tracer: None,
            store,
            metrics,
            urls: StreamUrls::Direct(WsUrls {
                base: "ws://localhost".into(),
                path: DEFAULT_WS_PATH.parse().unwrap(),
            }),
            access: Arc::default(),
            public_url: String::new(),
            scheme: "http",
            stream_status: false,
            busy_action: BusyAction::Say,
            hold: None,
            max_retries: 0,
            providers: Provider::ALL.into(),
            honours_owners: true,
            ttls: Ttls {
                lease: 1_000,
                draining: 1_000,
                call_info: 1_000,
                connect: None,
                poll_timeout: None,
            },
            outbound: OutboundConfig { reservation_ttl: 75_000, miss_target: 10_000 },
            dial_queues: Arc::default(),
            replay_window: 1_000,
            read_timeout: Duration::from_secs(1),
            reconcile_now: Arc::default(),
            lifecycle,
        })
    }
}
