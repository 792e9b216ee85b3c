use std::{collections::BTreeSet, sync::Arc};

use axum::{
    Router,
    body::Body,
    http::{Method, Request, Response, StatusCode, header},
};
use http_body_util::BodyExt;
use serde_json::Value;
use tower::ServiceExt;

use crate::http::{Context, admin_routes, metrics_routes, public_routes, routes};
use telephony::Provider;

async fn send(routes: &Router, method: &str, path: &str) -> Response<Body> {
    let method = Method::from_bytes(method.as_bytes()).unwrap();
    let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
    routes.clone().oneshot(request).await.unwrap()
}

async fn text(response: Response<Body>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().into()).unwrap()
}

async fn document(routes: &Router) -> Value {
    let response = send(routes, "GET", "/openapi.json").await;
    assert_eq!(response.status(), StatusCode::OK);
    serde_json::from_str(&text(response).await).unwrap()
}

/// Each path, with examples in place of its parameters, and its described methods.
fn described(document: &Value) -> Vec<(String, String, Vec<String>)> {
    let paths = document["paths"].as_object().unwrap();
    let described = paths.iter().map(|(path, item)| {
        let methods = item.as_object().unwrap();
        let parameters = methods.values().flat_map(|it| it["parameters"].as_array()).flatten();
        let real = parameters.filter(|it| it["in"] == "path").fold(path.clone(), |path, it| {
            let name = format!("{{{}}}", it["name"].as_str().unwrap());
            path.replace(&name, it["example"].as_str().unwrap())
        });
        (path.clone(), real, methods.keys().map(|method| method.to_uppercase()).collect())
    });
    described.collect()
}

fn paths(document: &Value) -> BTreeSet<String> {
    document["paths"].as_object().unwrap().keys().cloned().collect()
}

#[tokio::test]
async fn described_paths_serve_exactly_the_described_methods() {
    let context = Context::for_tests();
    let routes = routes(&context, None);
    let described = described(&document(&routes).await);
    assert!(described.len() > 50, "{}", described.len());
    for (path, real, methods) in described {
        for method in ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"] {
            let response = send(&routes, method, &real).await;
            let status = response.status();
            if methods.iter().any(|described| described == method) {
                assert_ne!(status, StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
                if status == StatusCode::NOT_FOUND {
                    let text = text(response).await;
                    assert!(!text.contains("no such path"), "{method} {path}: {text}");
                }
            } else {
                assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
                let allowed = response.headers()[header::ALLOW].to_str().unwrap();
                let allowed: BTreeSet<&str> =
                    allowed.split(',').filter(|allowed| *allowed != "HEAD").collect();
                assert_eq!(allowed, methods.iter().map(String::as_str).collect(), "{path}");
            }
        }
    }
}

#[tokio::test]
async fn webhooks_reject_head_requests() {
    let routes = routes(&Context::for_tests(), None);
    for endpoint in ["allocate", "after-stream", "call-status", "stream-status"] {
        let response = send(&routes, "HEAD", &format!("/api/v1/twilio/{endpoint}")).await;
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
        assert_eq!(response.headers()[header::ALLOW], "GET,POST");
    }
    assert_eq!(send(&routes, "HEAD", "/health").await.status(), StatusCode::OK);
}

/// Operations in the table of `docs/api.md`, such as `GET /api/v1/status`.
fn documented(providers: &[Provider]) -> BTreeSet<String> {
    let text = include_str!("../../../../../docs/api.md");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
    let mut documented = BTreeSet::new();
    for row in rows.filter(|row| row.contains(" /")) {
        let request = row.split(" |").next().unwrap().replace(['`', ','], "");
        let mut words: Vec<&str> = request.split(' ').collect();
        let path = words.pop().unwrap();
        for method in words {
            let paths: Vec<String> = match path.contains("{provider}") {
                true => {
                    providers.iter().map(|it| path.replace("{provider}", it.as_str())).collect()
                }
                false => vec![path.to_owned()],
            };
            documented.extend(paths.iter().map(|path| format!("{method} /api/v1{path}")));
        }
    }
    documented
}

#[tokio::test]
async fn the_document_and_the_api_docs_list_the_same_operations() {
    let routes = routes(&Context::for_tests(), None);
    let described: BTreeSet<String> = described(&document(&routes).await)
        .iter()
        .filter(|(path, ..)| path.starts_with("/api/v1/"))
        .flat_map(|(path, _, methods)| methods.iter().map(move |it| format!("{it} {path}")))
        .collect();
    assert_eq!(described, documented(&Provider::ALL));
}

#[tokio::test]
async fn each_address_describes_its_own_routes() {
    let mut context = Context::for_tests();
    Arc::get_mut(&mut context).unwrap().providers = vec![Provider::Plivo];
    let all = paths(&document(&routes(&context, None)).await);
    let public = paths(&document(&public_routes(&context, None)).await);
    let admin = paths(&document(&admin_routes(&context)).await);
    let metrics = paths(&document(&metrics_routes(&context)).await);
    assert!(public.contains("/api/v1/plivo/allocate") && !public.contains("/api/v1/allocate"));
    assert!(admin.contains("/api/v1/allocate") && !admin.contains("/api/v1/plivo/allocate"));
    assert_eq!(public.union(&admin).cloned().collect::<BTreeSet<_>>(), all);
    assert!(!all.iter().any(|path| path.contains("twilio")), "{all:?}");
    assert!(metrics.contains("/metrics") && metrics.is_subset(&admin));
}

#[tokio::test]
async fn the_document_is_deterministic_and_names_this_version() {
    let (one, other) = (routes(&Context::for_tests(), None), routes(&Context::for_tests(), None));
    let response = send(&one, "GET", "/openapi.json").await;
    assert_eq!(response.headers()[header::CONTENT_TYPE], "application/json");
    let (one, other) =
        (text(response).await, text(send(&other, "GET", "/openapi.json").await).await);
    assert_eq!(one, other);
    let document: Value = serde_json::from_str(&one).unwrap();
    assert_eq!(document["openapi"], "3.1.0");
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
}
