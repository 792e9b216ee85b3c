//! The HTTP API: every route stands in [`routes`], every endpoint in a file of
//! its name.

mod allocate;
mod auth;
mod body;
mod callbacks;
mod calls;
mod drain;
mod events;
pub mod live;
mod merchants;
mod metrics;
mod observe;
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
mod spans;
mod status;
mod tiers;
mod webhooks;
mod whoami;

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    middleware,
    response::Response,
    routing::{MethodRouter, get, post, put},
};
use tokio::sync::Notify;

use self::{callbacks::About, live::Live, rate::Rates};
pub use self::{
    events::Stories,
    reply::{ApiError, Noted},
};
use crate::{
    access::{Access, Role},
    config::{BusyAction, HoldConfig, Ttls},
    domain::fleet::{After, Allocation},
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
    pub read_timeout: Duration,
    /// Tells the pods' loop that the tiers have changed.
    pub nudge: Arc<Notify>,
    pub lifecycle: Arc<Lifecycle>,
    /// What the page shows.
    pub live: Arc<Live>,
    pub stories: Stories,
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

    /// Where a call that waits asks again. `since` is when it began to (unix seconds).
    fn waiting_url(&self, request: &CallRequest, since: u64) -> String {
        self.return_url(request, "allocate", &format!("waiting_since={since}"))
    }

    /// Where a call comes back to whose answer has to wait until the store is there.
    fn url_back(&self, request: &CallRequest, since: u64, after: Option<&After>) -> String {
        match after {
            None => self.waiting_url(request, since),
            Some(After { pod, attempt, .. }) => {
                let what = format!("pod_name={pod}&attempt={attempt}&waiting_since={since}");
                self.return_url(request, "after-stream", &what)
            }
        }
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
fn webhook_routes(context: &Context) -> Router<Arc<Context>> {
    context.providers.iter().copied().fold(Router::new(), |routes, provider| {
        let allocate =
            move |context: Shared, request: Request| webhooks::allocate(context, provider, request);
        let after_stream = move |context: Shared, request: Request| {
            webhooks::after_stream(context, provider, request)
        };
        let callback = |about: About| {
            let handler = move |context: Shared, request: Request| {
                callbacks::callback(context, provider, about, request)
            };
            get(handler).post(handler).head(reply::method_not_allowed)
        };
        routes
            // A HEAD would be taken for a GET, and must not take a pod.
            .route(
                &api(&format!("/{provider}/allocate")),
                get(allocate).post(allocate).head(reply::method_not_allowed),
            )
            .route(
                &api(&format!("/{provider}/after-stream")),
                get(after_stream).post(after_stream).head(reply::method_not_allowed),
            )
            .route(&api(&format!("/{provider}/call-status")), callback(About::Call))
            .route(&api(&format!("/{provider}/stream-status")), callback(About::Stream))
    })
}

/// Everything else, with the role that each route needs where there are tokens.
fn api_routes(context: &Arc<Context>) -> Router<Arc<Context>> {
    let needs = |role: Role, route: MethodRouter<Arc<Context>>| {
        route.route_layer(middleware::from_fn_with_state((context.clone(), role), auth::check))
    };
    let open = |route: MethodRouter<Arc<Context>>| {
        route.route_layer(middleware::from_fn_with_state(context.clone(), rate::limit))
    };
    let viewer = |route| needs(Role::Viewer, route);
    let agent = |route| needs(Role::Agent, route);
    let admin = |route| needs(Role::Admin, route);
    Router::new()
        .route(&api("/allocate"), agent(post(allocate::allocate)))
        .route(&api("/release"), agent(post(release::release)))
        .route(&api("/renew"), agent(post(renew::renew)))
        .route(&api("/drain"), agent(post(drain::drain)))
        .route(&api("/undrain"), admin(post(drain::undrain)))
        .route(&api("/status"), viewer(get(status::status)))
        .route(&api("/pod/{name}"), viewer(get(pod::pod)))
        .route(&api("/pods"), viewer(get(pods::list)))
        .route(&api("/calls"), viewer(get(calls::list)))
        .route(&api("/calls/{sid}"), viewer(get(calls::call)))
        .route(&api("/events"), viewer(get(events::events)))
        .route(&api("/live"), viewer(get(live::live)))
        .route(&api("/whoami"), open(get(whoami::whoami)))
        .route("/", open(get(page::index)))
        .route("/page/{name}", open(get(page::part)))
        .route(&api("/merchants"), viewer(get(merchants::list)))
        .route(&api("/tiers"), viewer(get(tiers::get)).merge(admin(put(tiers::put))))
        .route(
            &api("/merchants/{id}"),
            viewer(get(merchants::get)).merge(admin(put(merchants::put).delete(merchants::delete))),
        )
}

fn health_routes() -> Router<Arc<Context>> {
    let routes = |routes: Router<Arc<Context>>, path: &dyn Fn(&str) -> String| {
        routes
            .route(&path("/health"), get(probes::health))
            .route(&path("/ready"), get(probes::ready))
    };
    routes(routes(Router::new(), &str::to_owned), &api)
}

fn probe_routes() -> Router<Arc<Context>> {
    health_routes()
        .route("/metrics", get(metrics::metrics))
        .route(&api("/metrics"), get(metrics::metrics))
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
        let store: Arc<dyn Store> = Arc::new(Embedded::in_memory(tiers, 0, metrics.store.clone()));
        let lifecycle = Arc::new(Lifecycle::default());
        let about = live::About {
            name: String::new(),
            store: "embedded",
            has_cluster: false,
            has_events: true,
            draining_ttl: 1_000,
        };
        Arc::new(Self {
            live: Live::new(store.clone(), metrics.clone(), lifecycle.clone(), about),
            stories: Stories::default(),
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
            read_timeout: Duration::from_secs(1),
            nudge: Arc::default(),
            lifecycle,
        })
    }
}
