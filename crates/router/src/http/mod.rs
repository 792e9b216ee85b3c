//! The HTTP API: every route stands in [`routes`], every endpoint in a file of
//! its name.

pub mod api;
mod dashboard;
mod hold;
pub mod middleware;
mod openapi;
mod reply;
mod routes;
pub mod server;
mod webhooks;

use std::{sync::Arc, time::Duration};

use axum::{extract::State, response::Response};
use tokio::sync::Notify;

pub use self::{
    api::events::Stories,
    hold::{BusyAction, HoldConfig},
    reply::{ApiError, Noted},
    routes::{admin_routes, metrics_routes, public_routes, routes},
};
use self::{
    api::{live::Live, snapshots::Snapshots},
    middleware::{rate_limit::Rates, stream_limit::Streams},
};
use crate::{auth::Access, lifecycle::Lifecycle, telemetry::metrics::Metrics};
use fleet::{After, Allocation, Millis};
use spans::Tracer;
use store::{Store, Ttls};
use telephony::{CallRequest, Provider, WsUrls};

/// What every endpoint may use.
pub struct Context {
    pub store: Arc<dyn Store>,
    pub metrics: Arc<Metrics>,
    pub urls: WsUrls,
    pub access: Arc<Access>,
    /// What URLs of ours begin with: `http`, or `https`.
    pub scheme: &'static str,
    /// The URL under which providers reach us; empty if nobody said.
    pub public_url: String,
    /// Whose webhooks are there.
    pub providers: Vec<Provider>,
    /// Whether documents ask providers to tell us about streams.
    pub stream_status: bool,
    pub busy_action: BusyAction,
    /// How calls wait for a pod, if they may.
    pub hold: Option<HoldConfig>,
    /// How often a call whose stream is gone is given another pod.
    pub retries: u32,
    pub ttls: Ttls,
    /// How long a signed request is remembered.
    pub replay_window: Millis,
    pub read_timeout: Duration,
    /// Tells the pods' loop that the tiers have changed.
    pub nudge: Arc<Notify>,
    pub lifecycle: Arc<Lifecycle>,
    /// Readings of the whole fleet, shared by all requests.
    pub snapshots: Arc<Snapshots>,
    /// What the page shows.
    pub live: Arc<Live>,
    pub stories: Stories,
    /// Open event streams.
    pub streams: Arc<Streams>,
    /// How often who is not authenticated may ask.
    pub rates: Rates,
    /// Where the spans of requests begin, if anything is traced.
    pub traces: Option<Arc<Tracer>>,
}

impl Context {
    /// Where a provider shall tell what becomes of the stream to a pod.
    fn stream_status_url(&self, provider: Provider, given: &Allocation) -> Option<String> {
        let base = Some(&self.public_url).filter(|_| self.stream_status)?;
        let url = format!("{base}/api/v1/{provider}/stream-status?pod_name={}", given.pod);
        Some(match given.attempt {
            0 => url,
            attempt => format!("{url}&attempt={attempt}"),
        })
    }

    /// Where a call goes when its stream is gone.
    fn after_stream_url(&self, request: &CallRequest, given: &Allocation) -> Option<String> {
        let Allocation { pod, attempt, .. } = given;
        (*attempt > 0).then(|| {
            self.return_url(request, "after-stream", &format!("pod_name={pod}&attempt={attempt}"))
        })
    }

    /// Where a call that waits asks again. `since` is when it began to (unix seconds), `poll`
    /// how often it will have asked.
    fn waiting_url(&self, request: &CallRequest, since: u64, poll: u32) -> String {
        self.return_url(request, "allocate", &format!("waiting_since={since}&poll={poll}"))
    }

    /// Where a call comes back to whose stream is gone, and whose answer has to wait until the
    /// store is there.
    fn after_stream_again_url(&self, request: &CallRequest, since: u64, after: &After) -> String {
        let After { pod, attempt, .. } = after;
        let what = format!("pod_name={pod}&attempt={attempt}&waiting_since={since}");
        self.return_url(request, "after-stream", &what)
    }

    fn return_url(&self, request: &CallRequest, endpoint: &str, what: &str) -> String {
        let CallRequest { merchant, provider, flow, template, .. } = request;
        let merchant = merchant.as_ref().map(|id| format!("&merchant_id={id}")).unwrap_or_default();
        let base = &self.public_url;
        format!(
            "{base}/api/v1/{provider}/{endpoint}?{what}{merchant}&flow={flow}&template={template}"
        )
    }
}

pub type Shared = State<Arc<Context>>;

/// Tells every client that the connection ends here.
fn close(mut response: Response) -> Response {
    let close = axum::http::HeaderValue::from_static("close");
    response.headers_mut().insert(axum::http::header::CONNECTION, close);
    response
}

#[cfg(test)]
impl Context {
    fn for_tests() -> Arc<Self> {
        use fleet::tiers::{Origin, Tiers};
        use store::Embedded;
        use telephony::DEFAULT_WS_PATH;
        let metrics = Arc::new(Metrics::default());
        let tiers = Tiers::parse(r#"{"gold": 1}"#, Origin::Settings).unwrap().0;
        let store: Arc<dyn Store> = Arc::new(Embedded::in_memory(tiers, 0, metrics.store.clone()));
        let lifecycle = Arc::new(Lifecycle::default());
        let about = api::live::About {
            name: String::new(),
            store: "embedded",
            has_cluster: false,
            has_events: true,
            draining_ttl: 1_000,
        };
        let snapshots = Snapshots::new(store.clone());
        let (live_store, shared) = (store.clone(), snapshots.clone());
        Arc::new(Self {
            live: Live::new(live_store, shared, metrics.clone(), lifecycle.clone(), about),
            snapshots,
            stories: Stories::default(),
            streams: Streams::new(metrics.clone()),
            rates: Rates::new(0, Default::default()),
            traces: None,
            store,
            metrics,
            urls: WsUrls { base: "ws://localhost".into(), path: DEFAULT_WS_PATH.parse().unwrap() },
            access: Arc::default(),
            public_url: String::new(),
            scheme: "http",
            stream_status: false,
            busy_action: BusyAction::Say,
            hold: None,
            retries: 0,
            providers: Provider::ALL.into(),
            ttls: Ttls {
                lease: 1_000,
                draining: 1_000,
                call_info: 1_000,
                connect: None,
                patience: None,
            },
            replay_window: 1_000,
            read_timeout: Duration::from_secs(1),
            nudge: Arc::default(),
            lifecycle,
        })
    }
}
