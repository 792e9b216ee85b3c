//! All routes, with the role that each requires.

use std::sync::Arc;

use axum::{Router, extract::Request, middleware::from_fn_with_state};

use super::{
    Context, Shared,
    api::{
        allocate, calls, capacity, dial_limits, drain, events, live, merchants, metrics, pod, pods,
        prescale, probes, release, renew, reservations, status, tiers, whoami,
    },
    dashboard, middleware,
    openapi::{self, Route, Routes, delete, get, post, put},
    reply,
    webhooks::{
        self,
        callbacks::{self, CallbackKind},
    },
};
use crate::auth::Role;

/// The whole API. `agents` are the routes of simulated agents, if there are any.
pub(crate) fn routes(context: &Arc<Context>, agents: Option<Router>) -> Router {
    let routes = webhook_routes(context).merge(api_routes(context)).merge(probe_routes());
    finish(routes, context, agents)
}

/// Webhooks and health checks: the public routes if the admin API has its own address.
pub(crate) fn public_routes(context: &Arc<Context>, agents: Option<Router>) -> Router {
    finish(webhook_routes(context).merge(health_routes()), context, agents)
}

/// The API without webhooks, for its own address.
pub(crate) fn admin_routes(context: &Arc<Context>) -> Router {
    finish(api_routes(context).merge(probe_routes()), context, None)
}

/// Metrics and health checks, for the metrics port.
pub(crate) fn metrics_routes(context: &Arc<Context>) -> Router {
    finish(probe_routes(), context, None)
}

/// Health checks, for the address of a media process: it is public, so metrics are elsewhere.
pub(crate) fn health_only_routes(context: &Arc<Context>) -> Router {
    finish(health_routes(), context, None)
}

/// A path of the API. (Prefixes are joined once here; a nested router joins them per request.)
fn api(path: &str) -> String {
    format!("/api/v1{path}")
}

/// Webhooks, authenticated by the provider's signature.
fn webhook_routes(context: &Context) -> Routes {
    context.providers.iter().copied().fold(Routes::default(), |routes, provider| {
        let allocate =
            move |context: Shared, request: Request| webhooks::allocate(context, provider, request);
        let after_stream = move |context: Shared, request: Request| {
            webhooks::after_stream(context, provider, request)
        };
        let callback = |kind: CallbackKind| {
            let handler = move |context: Shared, request: Request| {
                callbacks::callback(context, provider, kind, request)
            };
            let [by_get, by_post] = openapi::webhooks::callback(provider, kind);
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
            .route(&path("call-status"), callback(CallbackKind::Call))
            .route(&path("stream-status"), callback(CallbackKind::Stream))
    })
}

/// The JSON API and the dashboard. Roles apply if tokens are configured.
fn api_routes(context: &Arc<Context>) -> Routes {
    let viewer = |route: Route| route.requires(context, Role::Viewer);
    let agent = |route: Route| route.requires(context, Role::Agent);
    let admin = |route: Route| route.requires(context, Role::Admin);
    Routes::default()
        .route(&api("/allocate"), agent(post(allocate::allocate, allocate::endpoint())))
        .route(&api("/release"), agent(post(release::release, release::endpoint())))
        .route(&api("/renew"), agent(post(renew::renew, renew::endpoint())))
        .route(&api("/drain"), agent(post(drain::drain, drain::drain_endpoint())))
        .route(&api("/undrain"), admin(post(drain::undrain, drain::undrain_endpoint())))
        .route(&api("/status"), viewer(get(status::status, status::endpoint())))
        .route(&api("/pod/{name}"), viewer(get(pod::pod, pod::endpoint())))
        .route(&api("/pods"), viewer(get(pods::list, pods::list_endpoint())))
        .route(&api("/calls"), viewer(get(calls::list, calls::list_endpoint())))
        .route(&api("/calls/{sid}"), viewer(get(calls::call, calls::call_endpoint())))
        .route(&api("/capacity"), viewer(get(capacity::capacity, capacity::endpoint())))
        .route(
            &api("/prescale"),
            viewer(get(prescale::list, prescale::list_endpoint()))
                .merge(admin(post(prescale::post, prescale::post_endpoint()))),
        )
        .route(&api("/prescale/{id}"), admin(delete(prescale::delete, prescale::delete_endpoint())))
        .route(&api("/events"), viewer(get(events::events, events::endpoint())))
        .route(&api("/live"), viewer(get(live::live, live::endpoint())))
        .route(
            &api("/whoami"),
            get(whoami::whoami, whoami::endpoint()).document_token(context, None),
        )
        .route("/", get(dashboard::index, dashboard::index_endpoint()).rate_limited(context))
        .route(
            "/page/{name}",
            get(dashboard::file, dashboard::file_endpoint()).rate_limited(context),
        )
        .merge(outbound_routes(context))
        .route(&api("/merchants"), viewer(get(merchants::list, merchants::list_endpoint())))
        .route(
            &api("/tiers"),
            viewer(get(tiers::get, tiers::get_endpoint()))
                .merge(admin(put(tiers::put, tiers::put_endpoint()))),
        )
        .route(
            &api("/merchants/{id}"),
            viewer(get(merchants::get, merchants::get_endpoint())).merge(admin(
                put(merchants::put, merchants::put_endpoint())
                    .delete(merchants::delete, merchants::delete_endpoint()),
            )),
        )
}

/// Reservations of diallers, and the limits of numbers and accounts.
fn outbound_routes(context: &Arc<Context>) -> Routes {
    let viewer = |route: Route| route.requires(context, Role::Viewer);
    let agent = |route: Route| route.requires(context, Role::Agent);
    let admin = |route: Route| route.requires(context, Role::Admin);
    Routes::default()
        .route(
            &api("/reservations"),
            viewer(get(reservations::list, reservations::list_endpoint()))
                .merge(agent(post(reservations::post, reservations::post_endpoint()))),
        )
        .route(
            &api("/reservations/{id}"),
            viewer(get(reservations::get, reservations::get_endpoint()))
                .merge(agent(delete(reservations::delete, reservations::delete_endpoint()))),
        )
        .route(
            &api("/reservations/{id}/dialed"),
            agent(post(reservations::dialed, reservations::dialed_endpoint())),
        )
        .route(&api("/numbers"), viewer(get(dial_limits::numbers, dial_limits::numbers_endpoint())))
        .route(
            &api("/numbers/{number}"),
            viewer(get(dial_limits::get_number, dial_limits::get_number_endpoint())).merge(admin(
                put(dial_limits::put_number, dial_limits::put_number_endpoint())
                    .delete(dial_limits::delete_number, dial_limits::delete_number_endpoint()),
            )),
        )
        .route(
            &api("/accounts"),
            viewer(get(dial_limits::accounts, dial_limits::accounts_endpoint())),
        )
        .route(
            &api("/accounts/{account}"),
            viewer(get(dial_limits::get_account, dial_limits::get_account_endpoint())).merge(
                admin(
                    put(dial_limits::put_account, dial_limits::put_account_endpoint()).delete(
                        dial_limits::delete_account,
                        dial_limits::delete_account_endpoint(),
                    ),
                ),
            ),
        )
}

fn health_routes() -> Routes {
    ["", "/api/v1"].into_iter().fold(Routes::default(), |routes, prefix| {
        routes
            .route(&format!("{prefix}/health"), get(probes::health, probes::health_endpoint()))
            .route(&format!("{prefix}/ready"), get(probes::ready, probes::ready_endpoint()))
    })
}

fn probe_routes() -> Routes {
    ["", "/api/v1"].into_iter().fold(health_routes(), |routes, prefix| {
        routes.route(&format!("{prefix}/metrics"), get(metrics::metrics, metrics::endpoint()))
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
