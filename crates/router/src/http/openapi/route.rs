//! Routes that can't be without their description.

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

use super::{Endpoint, answer, described, document, endpoint::NamedSchema};
use crate::{
    auth::Role,
    http::{
        Context, Shared,
        middleware::{auth, rate_limit},
        reply,
    },
};

/// What a path answers to, and what the document says of it.
pub(crate) struct Route {
    methods: MethodRouter<Arc<Context>, Infallible>,
    described: Vec<(HttpMethod, Endpoint)>,
}

macro_rules! methods {
    ($($method:ident $name:ident)*) => {$(
        pub(crate) fn $method<H: Handler<T, Arc<Context>>, T: 'static>(handler: H, described: Endpoint) -> Route {
            Route {
                methods: axum::routing::$method(handler),
                described: vec![(HttpMethod::$name, described)],
            }
        }

        impl Route {
            #[allow(dead_code, reason = "not every method comes second somewhere")]
            pub(crate) fn $method<H: Handler<T, Arc<Context>>, T: 'static>(self, handler: H, described: Endpoint) -> Self {
                self.merge($method(handler, described))
            }
        }
    )*};
}

methods! { get Get post Post put Put delete Delete }

impl Route {
    pub(crate) fn merge(mut self, other: Self) -> Self {
        self.methods = self.methods.merge(other.methods);
        self.described.extend(other.described);
        self
    }

    /// Lets those in whose token is of the role, where there are tokens.
    pub(crate) fn needs(mut self, context: &Arc<Context>, role: Role) -> Self {
        let check = middleware::from_fn_with_state((context.clone(), role), auth::check);
        self.methods = self.methods.route_layer(check);
        self.told_needs(context, Some(role))
    }

    /// Lets anyone in, but not as often as they like.
    pub(crate) fn limited(mut self, context: &Arc<Context>) -> Self {
        let limit = middleware::from_fn_with_state(context.clone(), rate_limit::limit);
        self.methods = self.methods.route_layer(limit);
        let fails = |(method, endpoint): (HttpMethod, Endpoint)| {
            (method, endpoint.fails(429, "Too many requests without a token or signature."))
        };
        self.described = self.described.into_iter().map(fails).collect();
        self
    }

    /// Says so; the handler asks for the token itself.
    pub(crate) fn told_needs(mut self, context: &Context, role: Option<Role>) -> Self {
        let has_tokens = context.access.tokens().is_some();
        let needs = |(method, endpoint): (HttpMethod, Endpoint)| {
            (method, endpoint.needs_token(role, has_tokens))
        };
        self.described = self.described.into_iter().map(needs).collect();
        self
    }

    /// A HEAD would be taken for a GET, and must not do what that does.
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

/// Routes, and what the document says of them.
#[derive(Default)]
pub(crate) struct Routes {
    router: Router<Arc<Context>>,
    paths: Paths,
    schemas: Vec<NamedSchema>,
}

impl Routes {
    pub(crate) fn route(mut self, path: &str, route: Route) -> Self {
        self.router = self.router.route(path, route.methods);
        for (method, Endpoint { mut operation, schemas }) in route.described {
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

    /// The routes, with the document that describes all of them. It is made once.
    pub(crate) fn with_document(self, context: &Arc<Context>) -> Router<Arc<Context>> {
        const PATH: &str = "/openapi.json";
        let Self { paths, schemas, .. } =
            Self::default().route(PATH, get(|| ready(()), described()).limited(context));
        let mut all = self.paths;
        all.merge(paths);
        let document = document(all, self.schemas.into_iter().chain(schemas).collect());
        let handler = move || ready(answer(document.clone()));
        let limit = middleware::from_fn_with_state(context.clone(), rate_limit::limit);
        self.router.route(PATH, axum::routing::get(handler).route_layer(limit))
    }
}

/// `get_calls_sid`; what is not under `/api/v1` begins with `root`.
fn operation_id(method: &HttpMethod, path: &str) -> String {
    let (place, path) = match path.strip_prefix("/api/v1") {
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
    let words = format!("{method}/{place}{path}");
    let words = words.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("_")
}
