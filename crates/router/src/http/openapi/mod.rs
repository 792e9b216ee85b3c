//! `GET /openapi.json`: what this address serves, described from the code that serves it.
//! A route can't be added without its description: [`Routes`] takes no other.

mod endpoint;
mod route;
pub(super) mod schemas;
#[cfg(test)]
mod tests;
pub(super) mod webhooks;

use axum::{
    body::Bytes,
    http::header,
    response::{IntoResponse, Response},
};
use serde_json::json;
use utoipa::openapi::{
    Components, Info, License, OpenApi, Tag,
    header::HeaderBuilder,
    path::Paths,
    security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
    tag::TagBuilder,
};

pub(super) use self::{
    endpoint::{Endpoint, Group},
    route::{Route, Routes, get, post, put},
};

const ABOUT: &str = "Gives every phone call a pod, exactly once. Errors are `{\"error\": …}`, \
    with `details` where they help. Times are unix seconds unless said otherwise. Webhooks answer \
    in the format of their provider.";

/// The name of the one security scheme.
const TOKEN: &str = "token";
/// The name of the header that every answer has.
const REQUEST_ID: &str = "RequestId";

/// The document as it is served.
fn document(paths: Paths, schemas: Vec<endpoint::NamedSchema>) -> Bytes {
    let mut info = Info::new("smart-router", env!("CARGO_PKG_VERSION"));
    info.description = Some(ABOUT.into());
    let mut license = License::new("MIT OR Apache-2.0");
    license.identifier = Some("MIT OR Apache-2.0".into());
    info.license = Some(license);
    let token = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
        "One of `API_TOKENS`. A viewer looks, an agent allocates, releases, renews and drains, an \
         admin does everything.",
    ));
    let request_id = HeaderBuilder::new()
        .schema(Some(schemas::text()))
        .description(Some("The caller's own id of the request, or a new one."));
    let mut components = Components::new();
    components.add_security_scheme(TOKEN, SecurityScheme::Http(token.build()));
    components.headers.insert(REQUEST_ID.into(), request_id.build().into());
    components.schemas.extend(schemas);
    let mut document = OpenApi::new(info, paths);
    document.components = Some(components);
    document.tags = Some(Group::ALL.map(tag).into());
    // By way of a value, whose keys have an order.
    let document = serde_json::to_value(&document).expect("the document is JSON");
    document.to_string().into()
}

fn tag(group: Group) -> Tag {
    TagBuilder::new().name(group.name()).description(Some(group.about())).build()
}

fn answer(document: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], document).into_response()
}

fn described() -> Endpoint {
    Endpoint::new(Group::Router, "This document")
        .about("Describes what is served at the address it comes from.")
        .gives_some(
            "application/json",
            schemas::object(),
            json!({"openapi": "3.1.0", "info": {"title": "smart-router", "version": "0.1.0"}, "paths": {}}),
        )
}
