//! The HTTP API: every route stands in [`routes`], every endpoint in a file of
//! its name.

mod allocate;
mod auth;
mod body;
mod callbacks;
mod calls;
pub mod crowd;
mod drain;
mod events;
pub mod live;
mod merchants;
mod metrics;
mod observe;
mod openapi;
mod page;
mod pod;
mod pods;
mod probes;
mod query;
pub mod rate;
mod release;
mod renew;
mod reply;
pub mod server;
pub mod snapshots;
mod spans;
mod status;
pub mod streams;
mod tiers;
mod version;
mod webhooks;
mod whoami;

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    middleware,
    response::Response,
};
use tokio::sync::Notify;

use self::{
    callbacks::About,
    live::Live,
    openapi::{Route, Routes, get, post, put},
    rate::Rates,
    snapshots::Snapshots,
    streams::Streams,
};
pub use self::{
    events::Stories,
    reply::{ApiError, Noted},
};
use crate::{
    access::{Access, Role},
    config::{BusyAction, HoldConfig, Ttls},
    domain::{
        Millis,
        fleet::{After, Allocation},
    },
    lifecycle::Lifecycle,
    metrics::Metrics,
    store::Store,
    telephony::{CallRequest, Provider, WsUrls},
    traces::Tracer,
};

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

/// The whole API. `agents` are the routes of simulated agents, if there are any.
pub fn routes(context: &Arc<Context>, agents: Option<Router>) -> Router {
    let routes = webhook_routes(context).merge(api_routes(context)).merge(probe_routes());
    finish(routes, context, agents)
}

/// What the world may reach where the rest has an address of its own.
pub fn public_routes(context: &Arc<Context>, agents: Option<Router>) -> Router {
    finish(webhook_routes(context).merge(health_routes()), context, agents)
}

/// The rest.
pub fn admin_routes(context: &Arc<Context>) -> Router {
    finish(api_routes(context).merge(probe_routes()), context, None)
}

/// What stands on the port of the metrics.
pub fn metrics_routes(context: &Arc<Context>) -> Router {
    finish(probe_routes(), context, None)
}

/// A path of the API. (A nested router would do the same again for every request.)
fn api(path: &str) -> String {
    format!("/api/v1{path}")
}

/// What providers ask, each guarded by the provider's signature.
fn webhook_routes(context: &Context) -> Routes {
    context.providers.iter().copied().fold(Routes::default(), |routes, provider| {
        let allocate =
            move |context: Shared, request: Request| webhooks::allocate(context, provider, request);
        let after_stream = move |context: Shared, request: Request| {
            webhooks::after_stream(context, provider, request)
        };
        let callback = |about: About| {
            let handler = move |context: Shared, request: Request| {
                callbacks::callback(context, provider, about, request)
            };
            let [by_get, by_post] = openapi::webhooks::callback(provider, about);
            get(handler, by_get).post(handler, by_post).without_head()
        };
        let path = |endpoint: &str| api(&format!("/{provider}/{endpoint}"));
        let [by_get, by_post] = openapi::webhooks::allocate(provider);
        let [after_by_get, after_by_post] = openapi::webhooks::after_stream(provider);
        routes
            .route(&path("allocate"), get(allocate, by_get).post(allocate, by_post).without_head())
            .route(
                &path("after-stream"),
                get(after_stream, after_by_get).post(after_stream, after_by_post).without_head(),
            )
            .route(&path("call-status"), callback(About::Call))
            .route(&path("stream-status"), callback(About::Stream))
    })
}

/// Everything else, with the role that each route needs where there are tokens.
fn api_routes(context: &Arc<Context>) -> Routes {
    let viewer = |route: Route| route.needs(context, Role::Viewer);
    let agent = |route: Route| route.needs(context, Role::Agent);
    let admin = |route: Route| route.needs(context, Role::Admin);
    Routes::default()
        .route(&api("/allocate"), agent(post(allocate::allocate, allocate::described())))
        .route(&api("/release"), agent(post(release::release, release::described())))
        .route(&api("/renew"), agent(post(renew::renew, renew::described())))
        .route(&api("/drain"), agent(post(drain::drain, drain::drain_described())))
        .route(&api("/undrain"), admin(post(drain::undrain, drain::undrain_described())))
        .route(&api("/status"), viewer(get(status::status, status::described())))
        .route(&api("/pod/{name}"), viewer(get(pod::pod, pod::described())))
        .route(&api("/pods"), viewer(get(pods::list, pods::list_described())))
        .route(&api("/calls"), viewer(get(calls::list, calls::list_described())))
        .route(&api("/calls/{sid}"), viewer(get(calls::call, calls::call_described())))
        .route(&api("/events"), viewer(get(events::events, events::described())))
        .route(&api("/live"), viewer(get(live::live, live::described())))
        .route(&api("/whoami"), get(whoami::whoami, whoami::described()).told_needs(context, None))
        .route("/", get(page::index, page::index_described()).limited(context))
        .route("/page/{name}", get(page::part, page::part_described()).limited(context))
        .route(&api("/merchants"), viewer(get(merchants::list, merchants::list_described())))
        .route(
            &api("/tiers"),
            viewer(get(tiers::get, tiers::get_described()))
                .merge(admin(put(tiers::put, tiers::put_described()))),
        )
        .route(
            &api("/merchants/{id}"),
            viewer(get(merchants::get, merchants::get_described())).merge(admin(
                put(merchants::put, merchants::put_described())
                    .delete(merchants::delete, merchants::delete_described()),
            )),
        )
}

fn health_routes() -> Routes {
    ["", "/api/v1"].into_iter().fold(Routes::default(), |routes, place| {
        routes
            .route(&format!("{place}/health"), get(probes::health, probes::health_described()))
            .route(&format!("{place}/ready"), get(probes::ready, probes::ready_described()))
    })
}

fn probe_routes() -> Routes {
    ["", "/api/v1"].into_iter().fold(health_routes(), |routes, place| {
        routes.route(&format!("{place}/metrics"), get(metrics::metrics, metrics::described()))
    })
}

fn finish(routes: Routes, context: &Arc<Context>, agents: Option<Router>) -> Router {
    routes
        .with_document(context)
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
        let store: Arc<dyn Store> = Arc::new(Embedded::in_memory(tiers, 0, metrics.store.clone()));
        let lifecycle = Arc::new(Lifecycle::default());
        let about = live::About {
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
