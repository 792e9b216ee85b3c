//! Builder for the description of one operation.

use axum::http::StatusCode;
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::{
    ToSchema,
    openapi::{
        Ref, RefOr, Required, Schema,
        content::ContentBuilder,
        header::HeaderBuilder,
        path::{Operation, OperationBuilder, ParameterBuilder, ParameterIn},
        request_body::RequestBodyBuilder,
        response::{Response, ResponseBuilder},
        security::SecurityRequirement,
    },
};

use super::{REQUEST_ID, TOKEN, schemas};
use crate::{auth::Role, http::reply::ErrorBody};

pub(super) type NamedSchema = (String, RefOr<Schema>);

const JSON: &str = "application/json";

/// Tag of an operation in the document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Group {
    Calls,
    Pods,
    Settings,
    Router,
    Webhooks,
}

impl Group {
    pub(super) const ALL: [Self; 5] =
        [Self::Calls, Self::Pods, Self::Settings, Self::Router, Self::Webhooks];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Calls => "calls",
            Self::Pods => "pods",
            Self::Settings => "settings",
            Self::Router => "router",
            Self::Webhooks => "webhooks",
        }
    }

    pub(super) fn description(self) -> &'static str {
        match self {
            Self::Calls => "Calls and their events.",
            Self::Pods => "Pods and their state.",
            Self::Settings => "Tiers and merchants.",
            Self::Router => "Health, metrics and state of the router.",
            Self::Webhooks => "Webhooks of telephony providers, in their own formats.",
        }
    }
}

/// An operation and the schemas that it references.
#[derive(Clone)]
pub(crate) struct Endpoint {
    pub(crate) operation: Operation,
    pub(crate) schemas: Vec<NamedSchema>,
}

impl Endpoint {
    pub(crate) fn new(group: Group, summary: &str) -> Self {
        let operation = OperationBuilder::new().tag(group.name()).summary(Some(summary)).build();
        Self { operation, schemas: Vec::new() }
    }

    /// Appends to the description.
    pub(crate) fn description(mut self, text: &str) -> Self {
        let description = self.operation.description.get_or_insert_default();
        if !description.is_empty() {
            description.push(' ');
        }
        description.push_str(text);
        self
    }

    pub(crate) fn path_param(
        self,
        name: &str,
        schema: impl Into<RefOr<Schema>>,
        example: &str,
    ) -> Self {
        let parameter = ParameterBuilder::new()
            .name(name)
            .parameter_in(ParameterIn::Path)
            .required(Required::True)
            .schema(Some(schema))
            .example(Some(example.into()));
        self.parameter(parameter)
    }

    /// An optional query parameter.
    pub(crate) fn query_param(
        self,
        name: &str,
        schema: impl Into<RefOr<Schema>>,
        description: &str,
    ) -> Self {
        self.any_query_param(name, schema, description, Required::False)
    }

    pub(super) fn required_query_param(
        self,
        name: &str,
        schema: impl Into<RefOr<Schema>>,
        description: &str,
    ) -> Self {
        self.any_query_param(name, schema, description, Required::True)
    }

    fn any_query_param(
        self,
        name: &str,
        schema: impl Into<RefOr<Schema>>,
        description: &str,
        required: Required,
    ) -> Self {
        let parameter = ParameterBuilder::new()
            .name(name)
            .parameter_in(ParameterIn::Query)
            .required(required)
            .schema(Some(schema))
            .description(Some(description));
        self.parameter(parameter)
    }

    /// Parameters of a paginated list.
    pub(crate) fn paginated(self, default: usize, max: usize) -> Self {
        self.query_param("limit", schemas::limit(default, max), "Maximum number of items.")
            .query_param("cursor", schemas::text(), "`next` of the previous page; same filters.")
            .error(400, "A parameter is invalid or unknown.")
    }

    pub(crate) fn header_param(
        self,
        name: &str,
        schema: impl Into<RefOr<Schema>>,
        description: &str,
    ) -> Self {
        let parameter = ParameterBuilder::new()
            .name(name)
            .parameter_in(ParameterIn::Header)
            .required(Required::False)
            .schema(Some(schema))
            .description(Some(description));
        self.parameter(parameter)
    }

    fn parameter(mut self, parameter: ParameterBuilder) -> Self {
        self.operation.parameters.get_or_insert_default().push(parameter.build().into());
        self
    }

    /// A required JSON request body.
    pub(crate) fn json_body<T: ToSchema>(self, example: Value) -> Self {
        let schema = Ref::from_schema_name(T::name());
        let content = ContentBuilder::new().schema(Some(schema)).example(Some(example)).build();
        let body = RequestBodyBuilder::new().content(JSON, content).required(Some(Required::True));
        self.register_schema::<T>()
            .request_body(body)
            .error(400, "The body is invalid; `details` may name the field.")
            .error(408, "The body did not arrive in time.")
            .error(413, "The body is larger than 64 KiB.")
    }

    pub(super) fn request_body(mut self, body: RequestBodyBuilder) -> Self {
        self.operation.request_body = Some(RefOr::T(body.build()));
        self
    }

    /// A JSON response with status 200, such as the example.
    pub(crate) fn responds<T: Serialize + ToSchema>(self, example: T) -> Self {
        self.responds_with(200, "Success.", example)
    }

    pub(crate) fn responds_with<T: Serialize + ToSchema>(
        self,
        status: u16,
        description: &str,
        example: T,
    ) -> Self {
        let example = serde_json::to_value(example).expect("an example is JSON");
        let schema = Ref::from_schema_name(T::name());
        let content = ContentBuilder::new().schema(Some(schema)).example(Some(example)).build();
        self.register_schema::<T>().response(
            status,
            ResponseBuilder::new().description(description).content(JSON, content),
        )
    }

    /// A response with status 200 whose body has no Rust type.
    pub(crate) fn responds_untyped(
        self,
        content_type: &str,
        schema: impl Into<RefOr<Schema>>,
        example: Value,
    ) -> Self {
        let content = ContentBuilder::new().schema(Some(schema)).example(Some(example)).build();
        self.response(
            200,
            ResponseBuilder::new().description("Success.").content(content_type, content),
        )
    }

    /// Another content type of the response with status 200.
    pub(crate) fn or_content(
        mut self,
        content_type: &str,
        schema: impl Into<RefOr<Schema>>,
        example: Value,
    ) -> Self {
        let content = ContentBuilder::new().schema(Some(schema)).example(Some(example)).build();
        if let Some(RefOr::T(response)) = self.operation.responses.responses.get_mut("200") {
            response.content.insert(content_type.into(), content.into());
        }
        self
    }

    /// An error response in the common format.
    pub(crate) fn error(self, status: u16, description: &str) -> Self {
        let example = StatusCode::from_u16(status).ok().and_then(|it| it.canonical_reason());
        let example = json!({"error": example.unwrap_or("error").to_lowercase()});
        self.error_with(status, description, example)
    }

    pub(crate) fn error_with(self, status: u16, description: &str, example: Value) -> Self {
        let schema = Ref::from_schema_name(ErrorBody::name());
        let content = ContentBuilder::new().schema(Some(schema)).example(Some(example)).build();
        let mut response = ResponseBuilder::new().description(description).content(JSON, content);
        let header = |description: &str| {
            HeaderBuilder::new()
                .schema(Some(schemas::text()))
                .description(Some(description))
                .build()
        };
        match status {
            401 => {
                response = response.header("WWW-Authenticate", header("Always `Bearer`."));
            }
            429 | 503 => {
                response = response.header("Retry-After", header("Seconds until the next try."));
            }
            _ => {}
        }
        self.register_schema::<ErrorBody<'_>>().response(status, response)
    }

    /// Errors of an operation that uses the store.
    pub(crate) fn uses_store(self) -> Self {
        self.error(500, "The store rejected the operation, or the router failed.")
            .error(503, "The store is unavailable; retry.")
    }

    /// Requires a token of a role, or of any role, if tokens are configured.
    pub(super) fn requires_token(mut self, role: Option<Role>, has_tokens: bool) -> Self {
        let (role, scopes) = match role {
            Some(role) => (format!("a token with role {}", role.as_str()), vec![role.as_str()]),
            None => ("any token".into(), Vec::new()),
        };
        if has_tokens {
            self.operation.security = Some(vec![SecurityRequirement::new(TOKEN, scopes)]);
        }
        self.description(&format!("Requires {role} if tokens are configured."))
            .error(401, "The token is missing or unknown.")
            .error(403, "The token's role does not permit this operation.")
            .error(429, "Rate limit exceeded.")
    }

    pub(super) fn response(mut self, status: u16, response: ResponseBuilder) -> Self {
        let mut response: Response = response.build();
        let id = Ref::new(format!("#/components/headers/{REQUEST_ID}"));
        response.headers.insert("X-Request-Id".into(), RefOr::Ref(id));
        self.operation.responses.responses.insert(status.to_string(), response.into());
        self
    }

    /// Adds the schema of a type, and the schemas it references, to the document.
    pub(crate) fn register_schema<T: ToSchema>(mut self) -> Self {
        self.schemas.push((T::name().into_owned(), T::schema()));
        T::schemas(&mut self.schemas);
        self
    }
}
