//! What the document says of one operation, in the words of the API.

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

/// Under which heading an operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    Calls,
    Pods,
    Settings,
    Router,
    Webhooks,
}

impl Group {
    pub const ALL: [Self; 5] =
        [Self::Calls, Self::Pods, Self::Settings, Self::Router, Self::Webhooks];

    pub fn name(self) -> &'static str {
        match self {
            Self::Calls => "calls",
            Self::Pods => "pods",
            Self::Settings => "settings",
            Self::Router => "router",
            Self::Webhooks => "webhooks",
        }
    }

    pub fn about(self) -> &'static str {
        match self {
            Self::Calls => "Calls and what happened to them.",
            Self::Pods => "Pods and what they do.",
            Self::Settings => "Tiers and merchants.",
            Self::Router => "The router itself.",
            Self::Webhooks => "What telephony providers ask, in their own formats.",
        }
    }
}

/// An operation, and the schemas that it refers to.
#[derive(Clone)]
pub struct Endpoint {
    pub(crate) operation: Operation,
    pub(crate) schemas: Vec<NamedSchema>,
}

impl Endpoint {
    pub fn new(group: Group, summary: &str) -> Self {
        let operation = OperationBuilder::new().tag(group.name()).summary(Some(summary)).build();
        Self { operation, schemas: Vec::new() }
    }

    /// Adds to what is said at length.
    pub fn about(mut self, text: &str) -> Self {
        let description = self.operation.description.get_or_insert_default();
        if !description.is_empty() {
            description.push(' ');
        }
        description.push_str(text);
        self
    }

    /// A name in the path.
    pub fn path(self, name: &str, schema: impl Into<RefOr<Schema>>, example: &str) -> Self {
        let parameter = ParameterBuilder::new()
            .name(name)
            .parameter_in(ParameterIn::Path)
            .required(Required::True)
            .schema(Some(schema))
            .example(Some(example.into()));
        self.parameter(parameter)
    }

    /// A parameter of the query that may be left out.
    pub fn query(self, name: &str, schema: impl Into<RefOr<Schema>>, about: &str) -> Self {
        self.query_or_not(name, schema, about, Required::False)
    }

    pub fn needed_query(self, name: &str, schema: impl Into<RefOr<Schema>>, about: &str) -> Self {
        self.query_or_not(name, schema, about, Required::True)
    }

    fn query_or_not(
        self,
        name: &str,
        schema: impl Into<RefOr<Schema>>,
        about: &str,
        required: Required,
    ) -> Self {
        let parameter = ParameterBuilder::new()
            .name(name)
            .parameter_in(ParameterIn::Query)
            .required(required)
            .schema(Some(schema))
            .description(Some(about));
        self.parameter(parameter)
    }

    /// A list in pages.
    pub fn pages(self, usual: usize, most: usize) -> Self {
        self.query("limit", schemas::limit(usual, most), "How many at most.")
            .query("cursor", schemas::text(), "What `next` said, with the same filters.")
            .fails(400, "A parameter makes no sense, or is not known.")
    }

    pub fn header(self, name: &str, schema: impl Into<RefOr<Schema>>, about: &str) -> Self {
        let parameter = ParameterBuilder::new()
            .name(name)
            .parameter_in(ParameterIn::Header)
            .required(Required::False)
            .schema(Some(schema))
            .description(Some(about));
        self.parameter(parameter)
    }

    fn parameter(mut self, parameter: ParameterBuilder) -> Self {
        self.operation.parameters.get_or_insert_default().push(parameter.build().into());
        self
    }

    /// A JSON body.
    pub fn takes<T: ToSchema>(self, example: Value) -> Self {
        let schema = Ref::from_schema_name(T::name());
        let content = ContentBuilder::new().schema(Some(schema)).example(Some(example)).build();
        let body = RequestBodyBuilder::new().content(JSON, content).required(Some(Required::True));
        self.knows::<T>()
            .takes_body(body)
            .fails(400, "The body makes no sense; `details` may name the field.")
            .fails(408, "The body did not arrive in time.")
            .fails(413, "The body is larger than 64 KiB.")
    }

    pub fn takes_body(mut self, body: RequestBodyBuilder) -> Self {
        self.operation.request_body = Some(RefOr::T(body.build()));
        self
    }

    /// What it answers with 200, as in the example.
    pub fn gives<T: Serialize + ToSchema>(self, example: T) -> Self {
        self.gives_with(200, "Done.", example)
    }

    pub fn gives_with<T: Serialize + ToSchema>(self, status: u16, when: &str, example: T) -> Self {
        let example = serde_json::to_value(example).expect("answers are JSON");
        let schema = Ref::from_schema_name(T::name());
        let content = ContentBuilder::new().schema(Some(schema)).example(Some(example)).build();
        self.knows::<T>()
            .answers(status, ResponseBuilder::new().description(when).content(JSON, content))
    }

    /// The same, of what has no type of its own.
    pub fn gives_some(
        self,
        content_type: &str,
        schema: impl Into<RefOr<Schema>>,
        example: Value,
    ) -> Self {
        let content = ContentBuilder::new().schema(Some(schema)).example(Some(example)).build();
        self.answers(
            200,
            ResponseBuilder::new().description("Done.").content(content_type, content),
        )
    }

    /// Another content type of what it answers with 200.
    pub fn or_gives(
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

    /// An error in the common format.
    pub fn fails(self, status: u16, when: &str) -> Self {
        let example = StatusCode::from_u16(status).ok().and_then(|it| it.canonical_reason());
        let example = json!({"error": example.unwrap_or("error").to_lowercase()});
        self.fails_with(status, when, example)
    }

    pub fn fails_with(self, status: u16, when: &str, example: Value) -> Self {
        let schema = Ref::from_schema_name(ErrorBody::name());
        let content = ContentBuilder::new().schema(Some(schema)).example(Some(example)).build();
        let mut response = ResponseBuilder::new().description(when).content(JSON, content);
        let header = |about: &str| {
            HeaderBuilder::new().schema(Some(schemas::text())).description(Some(about)).build()
        };
        match status {
            401 => {
                response = response.header("WWW-Authenticate", header("Always `Bearer`."));
            }
            429 | 503 => {
                response = response.header("Retry-After", header("After how many seconds."));
            }
            _ => {}
        }
        self.knows::<ErrorBody<'_>>().answers(status, response)
    }

    /// It needs the store.
    pub fn asks_store(self) -> Self {
        self.fails(500, "The store is there and refused, or the router has a fault.")
            .fails(503, "The store can't be reached now; ask again.")
    }

    /// Only for those with a token of some role, where there are tokens.
    pub fn needs_token(mut self, role: Option<Role>, has_tokens: bool) -> Self {
        let (role, scopes) = match role {
            Some(role) => (format!("a token of the role {}", role.as_str()), vec![role.as_str()]),
            None => ("any token".into(), Vec::new()),
        };
        if has_tokens {
            self.operation.security = Some(vec![SecurityRequirement::new(TOKEN, scopes)]);
        }
        self.about(&format!("Needs {role}, where there are tokens."))
            .fails(401, "There is no token, or nobody knows it.")
            .fails(403, "The token is of another role.")
            .fails(429, "Too many requests.")
    }

    pub fn answers(mut self, status: u16, response: ResponseBuilder) -> Self {
        let mut response: Response = response.build();
        let id = Ref::new(format!("#/components/headers/{REQUEST_ID}"));
        response.headers.insert("X-Request-Id".into(), RefOr::Ref(id));
        self.operation.responses.responses.insert(status.to_string(), response.into());
        self
    }

    /// Makes the schema of a type, and those it refers to, part of the document.
    pub fn knows<T: ToSchema>(mut self) -> Self {
        self.schemas.push((T::name().into_owned(), T::schema()));
        T::schemas(&mut self.schemas);
        self
    }
}
