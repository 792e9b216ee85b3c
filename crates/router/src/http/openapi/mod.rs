//! `GET /openapi.json`: a description of the routes at this address, generated from the code.
//! [`Routes`] accepts no route without a description.

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
    route::{Route, Routes, delete, get, post, put},
};

const DESCRIPTION: &str = "Allocates a pod to every phone call, exactly once. Errors are \
    `{\"error\": …}`, some with `details`. Times are unix seconds unless stated otherwise. \
    Webhooks respond in the format of their provider.";

/// Name of the security scheme.
const TOKEN: &str = "token";
/// Name of the header component that every response has.
const REQUEST_ID: &str = "RequestId";

/// The serialized document.
fn document(paths: Paths, schemas: Vec<endpoint::NamedSchema>) -> Bytes {
    let mut info = Info::new("smart-router", env!("CARGO_PKG_VERSION"));
    info.description = Some(DESCRIPTION.into());
    let mut license = License::new("MIT OR Apache-2.0");
    license.identifier = Some("MIT OR Apache-2.0".into());
    info.license = Some(license);
    let token = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
        "One of `API_TOKENS`. A viewer reads; an agent also allocates, releases, renews and \
         drains; an admin may call every operation.",
    ));
    let request_id = HeaderBuilder::new()
        .schema(Some(schemas::text()))
        .description(Some("The request id from the request, or a generated one."));
    let mut components = Components::new();
    components.add_security_scheme(TOKEN, SecurityScheme::Http(token.build()));
    components.headers.insert(REQUEST_ID.into(), request_id.build().into());
    components.schemas.extend(schemas);
    let mut document = OpenApi::new(info, paths);
    document.components = Some(components);
    document.tags = Some(Group::ALL.map(tag).into());
    // A `Value` sorts its keys: the same routes give the same text.
    let document = serde_json::to_value(&document).expect("the document is JSON");
    document.to_string().into()
}

fn tag(group: Group) -> Tag {
    TagBuilder::new().name(group.name()).description(Some(group.description())).build()
}

fn response(document: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], document).into_response()
}

fn document_endpoint() -> Endpoint {
    Endpoint::new(Group::Router, "OpenAPI document")
        .description("Describes the operations at the address that serves it.")
        .responds_untyped(
            "application/json",
            schemas::object(),
            json!({"openapi": "3.1.0", "info": {"title": "smart-router", "version": "0.1.0"}, "paths": {}}),
        )
}
