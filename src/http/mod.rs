//! The HTTP API: every route stands in [`routes`], every endpoint in a file of
//! its name.

mod allocate;
mod body;
mod calls;
mod drain;
mod merchants;
mod metrics;
mod observe;
mod pod;
mod probes;
mod release;
mod renew;
mod reply;
pub mod server;
mod status;
mod tiers;
mod webhooks;

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    middleware,
    response::Response,
    routing::{get, post},
};
use tokio::sync::Notify;

pub use self::reply::{ApiError, Noted};
use crate::{
    config::Ttls,
    lifecycle::Lifecycle,
    metrics::Metrics,
    store::Store,
    telephony::{Provider, WsUrls},
};

/// What every endpoint may use.
pub struct Context {
    pub store: Arc<dyn Store>,
    pub metrics: Arc<Metrics>,
    pub urls: WsUrls,
    pub ttls: Ttls,
    pub read_timeout: Duration,
    /// Tells the pods' loop that the tiers have changed.
    pub nudge: Arc<Notify>,
    pub lifecycle: Arc<Lifecycle>,
}

pub type Shared = State<Arc<Context>>;

/// The whole API. `agents` are the routes of simulated agents, if there are any.
pub fn routes(context: &Arc<Context>, agents: Option<Router>) -> Router {
    let webhook = |provider: Provider| {
        let handler =
            move |context: Shared, request: Request| webhooks::allocate(context, provider, request);
        // A HEAD would be taken for a GET, and must not take a pod.
        get(handler).post(handler).head(reply::method_not_allowed)
    };
    let api = probe_routes()
        .route("/allocate", post(allocate::allocate))
        .route("/twilio/allocate", webhook(Provider::Twilio))
        .route("/plivo/allocate", webhook(Provider::Plivo))
        .route("/exotel/allocate", webhook(Provider::Exotel))
        .route("/release", post(release::release))
        .route("/renew", post(renew::renew))
        .route("/drain", post(drain::drain))
        .route("/undrain", post(drain::undrain))
        .route("/status", get(status::status))
        .route("/pod/{name}", get(pod::pod))
        .route("/calls/{sid}", get(calls::call))
        .route("/tiers", get(tiers::get).put(tiers::put))
        .route(
            "/merchants/{id}",
            get(merchants::get).put(merchants::put).delete(merchants::delete),
        );
    let routes = Router::new().nest("/api/v1", api).merge(probe_routes());
    finish(routes, context, agents)
}

/// What stands on the port of the metrics.
pub fn metrics_routes(context: &Arc<Context>) -> Router {
    finish(probe_routes(), context, None)
}

fn probe_routes() -> Router<Arc<Context>> {
    Router::new()
        .route("/health", get(probes::health))
        .route("/ready", get(probes::ready))
        .route("/metrics", get(metrics::metrics))
}

fn finish(routes: Router<Arc<Context>>, context: &Arc<Context>, agents: Option<Router>) -> Router {
    routes
        .fallback(reply::not_found)
        .method_not_allowed_fallback(reply::method_not_allowed)
        .with_state(context.clone())
        .merge(agents.unwrap_or_default())
        .layer(middleware::from_fn_with_state(context.clone(), observe::observe))
}

/// Tells every client that the connection ends here.
fn close(mut response: Response) -> Response {
    let close = axum::http::HeaderValue::from_static("close");
    response.headers_mut().insert(axum::http::header::CONNECTION, close);
    response
}

#[cfg(test)]
impl Context {
    fn for_tests() -> Arc<Self> {
        use crate::{
            domain::tiers::{Origin, Tiers},
            store::Embedded,
            telephony::DEFAULT_WS_PATH,
        };
        let metrics = Arc::new(Metrics::default());
        let tiers = Tiers::parse(r#"{"gold": 1}"#, Origin::Settings).unwrap().0;
        Arc::new(Self {
            store: Arc::new(Embedded::in_memory(tiers, 0, metrics.store.clone())),
            metrics,
            urls: WsUrls { base: "ws://localhost".into(), path: DEFAULT_WS_PATH.parse().unwrap() },
            ttls: Ttls { lease: 1_000, draining: 1_000, call_info: 1_000 },
            read_timeout: Duration::from_secs(1),
            nudge: Arc::default(),
            lifecycle: Arc::default(),
        })
    }
}
