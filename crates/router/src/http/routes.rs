//! All routes, with the role that each needs.

use std::sync::Arc;

use axum::{Router, extract::Request, middleware::from_fn_with_state};

use super::{
    Context, Shared,
    api::{
        allocate, calls, drain, events, live, merchants, metrics, pod, pods, probes, release,
        renew, status, tiers, whoami,
    },
    dashboard, middleware,
    openapi::{self, Route, Routes, get, post, put},
    reply,
    webhooks::{
        self,
        callbacks::{self, About},
    },
};
use crate::auth::Role;

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
        .route("/", get(dashboard::index, dashboard::index_described()).limited(context))
        .route("/page/{name}", get(dashboard::part, dashboard::part_described()).limited(context))
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
        .layer(from_fn_with_state(context.clone(), middleware::access_log::observe))
}
