//! Descriptions of the webhooks. Example responses come from the code that renders responses.

use serde_json::{Map, Value, json};
use utoipa::openapi::{
    RefOr, Required, Schema, content::ContentBuilder, request_body::RequestBodyBuilder,
    response::ResponseBuilder,
};

use super::{Endpoint, Group, schemas};
use crate::http::webhooks::callbacks::CallbackKind;
use telephony::{Document, Parameters, Provider, Stream};

const FORM: &str = "application/x-www-form-urlencoded";
const JSON: &str = "application/json";
const MULTIPART: &str = "multipart/form-data";

/// A field of a webhook.
#[derive(Clone, Copy)]
struct Field {
    name: &'static str,
    description: &'static str,
    /// Accepted values; used only for providers that receive errors.
    pattern: &'static str,
    example: &'static str,
}

/// The fields and the response of a webhook.
struct Webhook<'a> {
    provider: Provider,
    summary: &'static str,
    /// Fields that the provider sends.
    sent: &'a [Field],
    /// Required fields in the query of a URL that the router generated.
    generated: &'a [Field],
    /// Optional fields in the query, configured by the operator.
    configured: &'a [Field],
    response: Document,
}

const POD: Field = Field {
    name: "pod_name",
    description: "The pod of the stream.",
    pattern: schemas::POD_NAME,
    example: "voice-agent-0",
};
const ATTEMPT: Field = Field {
    name: "attempt",
    description: "Ordinal of the pod that the call had been given.",
    pattern: "^([1-9][0-9]?|100)$",
    example: "1",
};

const fn configured(name: &'static str, description: &'static str, example: &'static str) -> Field {
    Field { name, description, pattern: schemas::NAME, example }
}

const CONFIGURED: [Field; 4] = [
    configured("merchant_id", "The merchant of the call.", "acme"),
    configured("flow", "The agent's flow; default `v2`.", "v2"),
    configured("template", "The agent's template.", "hello"),
    Field {
        name: "reservation",
        description: "The reservation of a dial that was answered.",
        // Any text: a call with an unknown reservation is a call without one.
        pattern: "",
        example: "R5f3a09c2b1d4e687",
    },
];

/// Returns the descriptions of GET and POST.
pub(crate) fn allocate(provider: Provider) -> [Endpoint; 2] {
    let stream = Stream {
        url: "wss://voice.example.com/ws/pod/voice-agent-0/agent/voice/hello",
        call: &"CA1".parse().expect("a name"),
        status_url: None,
        after_stream_url: None,
        traceparent: None,
        parameters: &Parameters::NONE,
    };
    let response = provider.dialect().connect(&stream);
    let summary = "Allocate a pod to a call";
    Webhook { provider, summary, sent: &[], generated: &[], configured: &CONFIGURED, response }
        .endpoints()
}

pub(crate) fn after_stream(provider: Provider) -> [Endpoint; 2] {
    let summary = "Reconnect a call whose stream ended";
    let (response, generated) = (provider.dialect().silent_hang_up(), &[POD, ATTEMPT]);
    Webhook { provider, summary, sent: &[], generated, configured: &CONFIGURED, response }
        .endpoints()
}

pub(crate) fn callback(provider: Provider, kind: CallbackKind) -> [Endpoint; 2] {
    use CallbackKind::{Call, Stream};
    let (summary, name, example) = match (kind, provider) {
        (Call, Provider::Exotel) => (CALL, "Status", "completed"),
        (Stream, Provider::Exotel) => (STREAM, "EventType", "stream-stop"),
        (Call, Provider::Vonage) => (CALL, "status", "completed"),
        (Stream, Provider::Vonage) => (STREAM, "status", "disconnected"),
        (Call, Provider::Jambonz) => (CALL, "call_status", "completed"),
        (Stream, Provider::Jambonz) => (STREAM, "call_status", "completed"),
        (Stream, Provider::Plivo) => (STREAM, "Event", "StopStream"),
        (Call, _) => (CALL, "CallStatus", "completed"),
        (Stream, _) => (STREAM, "StreamEvent", "stream-stopped"),
    };
    let status = Field { name, description: "The new status.", pattern: "", example };
    let response = provider.dialect().acknowledgement();
    Webhook { provider, summary, sent: &[status], generated: &[], configured: &[POD], response }
        .endpoints()
}

const ANYTHING: [&str; 6] = ["object", "array", "string", "number", "boolean", "null"];
const CALL: &str = "Status of a call";
const STREAM: &str = "Status of a stream";

impl Webhook<'_> {
    /// Whether invalid requests receive an error. Other providers receive a hang-up document with
    /// 200: with an error status, they would leave the caller on a dead line.
    fn is_strict(&self) -> bool {
        self.provider.dialect().hang_up("").is_none()
    }

    fn endpoints(&self) -> [Endpoint; 2] {
        let call = Field {
            name: self.provider.dialect().call_id_field(),
            description: "The id of the call.",
            pattern: schemas::CALL_SID,
            example: "CA1",
        };
        let sent: Vec<Field> = [call].iter().chain(self.sent).copied().collect();
        let by_get = sent.iter().fold(self.endpoint(), |it, field| self.query_param(it, field));
        let by_post = self.endpoint().request_body(self.body(&sent));
        [by_get, by_post].map(|it| self.with_responses(it))
    }

    fn endpoint(&self) -> Endpoint {
        let summary = format!("{} ({})", self.summary, self.provider);
        let endpoint = Endpoint::new(Group::Webhooks, &summary)
            .description("Authenticated by the provider's signature if its secret is configured.");
        let endpoint =
            self.generated.iter().fold(endpoint, |it, field| self.query_param(it, field));
        self.configured.iter().fold(endpoint, |it, field| {
            let schema = match self.is_strict() && !field.pattern.is_empty() {
                true => schemas::matching_or_empty(field.pattern),
                false => schemas::text(),
            };
            it.query_param(field.name, schema, field.description)
        })
    }

    fn query_param(&self, endpoint: Endpoint, field: &Field) -> Endpoint {
        let schema: RefOr<Schema> = schemas::schema(self.field(field));
        match self.is_strict() {
            true => endpoint.required_query_param(field.name, schema, field.description),
            false => endpoint.query_param(field.name, schema, field.description),
        }
    }

    /// Schema of a text field.
    fn field(&self, field: &Field) -> Value {
        let mut schema = json!({
            "type": "string",
            "description": field.description,
            "examples": [field.example],
        });
        if self.is_strict() && !field.pattern.is_empty() {
            schema["pattern"] = field.pattern.into();
        }
        schema
    }

    fn body(&self, sent: &[Field]) -> RequestBodyBuilder {
        let example: Map<String, Value> =
            sent.iter().map(|field| (field.name.into(), field.example.into())).collect();
        let content = |schema: Value| {
            ContentBuilder::new()
                .schema(Some(schemas::schema(schema)))
                .example(Some(Value::Object(example.clone())))
                .build()
        };
        let (as_form, as_json) = (self.form(sent), self.json(sent));
        let required = if self.is_strict() { Required::True } else { Required::False };
        RequestBodyBuilder::new()
            .content(FORM, content(as_form.clone()))
            .content(JSON, content(as_json))
            .content(MULTIPART, content(as_form))
            .required(Some(required))
    }

    fn form(&self, sent: &[Field]) -> Value {
        let fields: Map<String, Value> =
            sent.iter().map(|field| (field.name.into(), self.field(field))).collect();
        let mut schema = json!({"type": "object", "properties": fields});
        if self.is_strict() {
            schema["required"] = sent.iter().map(|field| field.name).collect();
        } else {
            // Any other body also receives a hang-up document.
            schema["type"] = ANYTHING.into();
        }
        schema
    }

    /// Numbers and booleans are accepted as text.
    fn json(&self, sent: &[Field]) -> Value {
        let mut schema = self.form(sent);
        for field in sent {
            let kinds: &[&str] = match field.pattern {
                _ if !self.is_strict() => &ANYTHING,
                "" => &ANYTHING[..5],
                _ => &["string", "number", "boolean"],
            };
            schema["properties"][field.name]["type"] = kinds.into();
        }
        schema
    }

    fn with_responses(&self, endpoint: Endpoint) -> Endpoint {
        let Document { content_type, body } = &self.response;
        let (schema, example) = match serde_json::from_str(body) {
            Ok(example) => (json!({"type": ["object", "array"]}), example),
            Err(_) => (json!({"type": "string"}), body.clone().into()),
        };
        let forged = ResponseBuilder::new().description("The signature is missing or invalid.");
        let endpoint = endpoint
            .responds_untyped(content_type, schemas::schema(schema), example)
            .response(403, forged)
            .error(429, "Rate limit of unauthenticated requests exceeded.");
        if !self.is_strict() {
            return endpoint;
        }
        endpoint
            .error(400, "The request is invalid or lacks the id of the call.")
            .error(408, "The body did not arrive in time.")
            .error(413, "The body is larger than 64 KiB.")
            .error(415, "The content type is not supported.")
            .uses_store()
    }
}
