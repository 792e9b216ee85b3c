//! Routes that carry their OpenAPI description.

use std::{convert::Infallible, future::ready, sync::Arc};

use axum::{
    Router,
    extract::Request,
    handler::Handler,
    http::{HeaderValue, Method, Uri, header},
    middleware,
    response::Response,
    routing::MethodRouter,
};
use utoipa::openapi::{HttpMethod, path::Paths};

use super::{Endpoint, document, document_endpoint, endpoint::NamedSchema, response};
use crate::{
    auth::Role,
    http::{
        Context, Shared,
        middleware::{auth, rate_limit},
        reply,
    },
};

/// Handlers of one path, with the description of each method.
pub(crate) struct Route {
    methods: MethodRouter<Arc<Context>, Infallible>,
    endpoints: Vec<(HttpMethod, Endpoint)>,
}

macro_rules! methods {
    ($($method:ident $name:ident)*) => {$(
        pub(crate) fn $method<H: Handler<T, Arc<Context>>, T: 'static>(handler: H, endpoint: Endpoint) -> Route {
            Route {
                methods: axum::routing::$method(handler),
                endpoints: vec![(HttpMethod::$name, endpoint)],
            }
        }

        impl Route {
            #[allow(dead_code, reason = "not every method follows another on some path")]
            pub(crate) fn $method<H: Handler<T, Arc<Context>>, T: 'static>(self, handler: H, endpoint: Endpoint) -> Self {
                self.merge($method(handler, endpoint))
            }
        }
    )*};
}

methods! { get Get post Post put Put delete Delete }

impl Route {
    pub(crate) fn merge(mut self, other: Self) -> Self {
        self.methods = self.methods.merge(other.methods);
        self.endpoints.extend(other.endpoints);
        self
    }

    /// Requires a token with the role, if tokens are configured.
    pub(crate) fn requires(mut self, context: &Arc<Context>, role: Role) -> Self {
        let check = middleware::from_fn_with_state((context.clone(), role), auth::check);
        self.methods = self.methods.route_layer(check);
        self.document_token(context, Some(role))
    }

    /// Requires no token; limits the rate of requests.
    pub(crate) fn rate_limited(mut self, context: &Arc<Context>) -> Self {
        let limit = middleware::from_fn_with_state(context.clone(), rate_limit::limit);
        self.methods = self.methods.route_layer(limit);
        let with_error = |(method, endpoint): (HttpMethod, Endpoint)| {
            (method, endpoint.error(429, "Rate limit of unauthenticated requests exceeded."))
        };
        self.endpoints = self.endpoints.into_iter().map(with_error).collect();
        self
    }

    /// Documents the required token; the handler checks it.
    pub(crate) fn document_token(mut self, context: &Context, role: Option<Role>) -> Self {
        let has_tokens = context.access.tokens().is_some();
        let with_token = |(method, endpoint): (HttpMethod, Endpoint)| {
            (method, endpoint.requires_token(role, has_tokens))
        };
        self.endpoints = self.endpoints.into_iter().map(with_token).collect();
        self
    }

    /// Rejects HEAD, which axum would pass to the GET handler and its side effects.
    pub(crate) fn without_head(mut self) -> Self {
        let refuse = |context: Shared, method: Method, uri: Uri, request: Request| async {
            let mut response: Response =
                reply::method_not_allowed(context, method, uri, request).await;
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET,POST"));
            response
        };
        self.methods = self.methods.head(refuse).fallback(refuse);
        self
    }
}

/// Routes with the paths and schemas of their document.
#[derive(Default)]
pub(crate) struct Routes {
    router: Router<Arc<Context>>,
    paths: Paths,
    schemas: Vec<NamedSchema>,
}

impl Routes {
    pub(crate) fn route(mut self, path: &str, route: Route) -> Self {
        self.router = self.router.route(path, route.methods);
        for (method, Endpoint { mut operation, schemas }) in route.endpoints {
            operation.operation_id = Some(operation_id(&method, path));
            self.paths.add_path_operation(path, vec![method], operation);
            self.schemas.extend(schemas);
        }
        self
    }

    pub(crate) fn merge(mut self, other: Self) -> Self {
        self.router = self.router.merge(other.router);
        self.paths.merge(other.paths);
        self.schemas.extend(other.schemas);
        self
    }

    /// Adds the document that describes all routes, serialized once.
    pub(crate) fn with_document(self, context: &Arc<Context>) -> Router<Arc<Context>> {
        const PATH: &str = "/openapi.json";
        let Self { paths, schemas, .. } = Self::default()
            .route(PATH, get(|| ready(()), document_endpoint()).rate_limited(context));
        let mut all = self.paths;
        all.merge(paths);
        let document = document(all, self.schemas.into_iter().chain(schemas).collect());
        let handler = move || ready(response(document.clone()));
        let limit = middleware::from_fn_with_state(context.clone(), rate_limit::limit);
        self.router.route(PATH, axum::routing::get(handler).route_layer(limit))
    }
}

/// `get_calls_sid`; paths outside `/api/v1` begin with `root`.
fn operation_id(method: &HttpMethod, path: &str) -> String {
    let (prefix, path) = match path.strip_prefix("/api/v1") {
        Some(rest) => ("", rest),
        None => ("root/", path),
    };
    let method = match method {
        HttpMethod::Get => "get",
        HttpMethod::Post => "post",
        HttpMethod::Put => "put",
        HttpMethod::Delete => "delete",
        _ => "other",
    };
    let words = format!("{method}/{prefix}{path}");
    let words = words.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("_")
}
