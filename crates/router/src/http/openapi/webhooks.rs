//! What the document says of webhooks. Their examples are made by what makes the answers.

use serde_json::{Map, Value, json};
use utoipa::openapi::{
    RefOr, Required, Schema, content::ContentBuilder, request_body::RequestBodyBuilder,
    response::ResponseBuilder,
};

use super::{Endpoint, Group, schemas};
use crate::http::webhooks::callbacks::About;
use telephony::{Document, Provider, Stream};

const FORM: &str = "application/x-www-form-urlencoded";
const JSON: &str = "application/json";
const MULTIPART: &str = "multipart/form-data";

/// Something that a webhook says.
#[derive(Clone, Copy)]
struct Field {
    name: &'static str,
    about: &'static str,
    /// What is taken, by those who are told of errors.
    pattern: &'static str,
    example: &'static str,
}

/// What a provider asks, and what it is told.
struct Webhook<'a> {
    provider: Provider,
    summary: &'static str,
    /// What the provider sends.
    sent: &'a [Field],
    /// What stands in the query of the URL that we gave, and has to.
    ours: &'a [Field],
    /// What the operator may have put there.
    wishes: &'a [Field],
    answer: Document,
}

const POD: Field = Field {
    name: "pod_name",
    about: "The pod of the stream.",
    pattern: schemas::POD_NAME,
    example: "voice-agent-0",
};
const ATTEMPT: Field = Field {
    name: "attempt",
    about: "Which of the call's streams it was.",
    pattern: "^([1-9][0-9]?|100)$",
    example: "1",
};

const fn wish(name: &'static str, about: &'static str, example: &'static str) -> Field {
    Field { name, about, pattern: schemas::NAME, example }
}

const WISHES: [Field; 3] = [
    wish("merchant_id", "Whose call it is.", "acme"),
    wish("flow", "The flow of the agent; `v2` unless given.", "v2"),
    wish("template", "What the agent shall speak.", "hello"),
];

/// By GET and by POST.
pub(crate) fn allocate(provider: Provider) -> [Endpoint; 2] {
    let stream = Stream {
        url: "wss://voice.example.com/ws/pod/voice-agent-0/agent/voice/hello",
        call: &"CA1".parse().expect("a name"),
        status_url: None,
        after_url: None,
        traceparent: None,
    };
    let answer = provider.dialect().connect(&stream);
    let summary = "A pod for a call";
    Webhook { provider, summary, sent: &[], ours: &[], wishes: &WISHES, answer }.described()
}

pub(crate) fn after_stream(provider: Provider) -> [Endpoint; 2] {
    let (summary, answer) = ("The stream of a call is gone", provider.dialect().goodbye());
    Webhook { provider, summary, sent: &[], ours: &[POD, ATTEMPT], wishes: &WISHES, answer }
        .described()
}

pub(crate) fn callback(provider: Provider, about: About) -> [Endpoint; 2] {
    let (summary, name, example) = match (about, provider) {
        (About::Call, Provider::Exotel) => (CALL, "Status", "completed"),
        (About::Stream, Provider::Exotel) => (STREAM, "EventType", "stream-stop"),
        (About::Call, Provider::Vonage) => (CALL, "status", "completed"),
        (About::Stream, Provider::Vonage) => (STREAM, "status", "disconnected"),
        (About::Call, Provider::Jambonz) => (CALL, "call_status", "completed"),
        (About::Stream, Provider::Jambonz) => (STREAM, "call_status", "completed"),
        (About::Stream, Provider::Plivo) => (STREAM, "Event", "StopStream"),
        (About::Call, _) => (CALL, "CallStatus", "completed"),
        (About::Stream, _) => (STREAM, "StreamEvent", "stream-stopped"),
    };
    let said = Field { name, about: "What has become of it.", pattern: "", example };
    let answer = provider.dialect().noted();
    Webhook { provider, summary, sent: &[said], ours: &[], wishes: &[POD], answer }.described()
}

const ANYTHING: [&str; 6] = ["object", "array", "string", "number", "boolean", "null"];
const CALL: &str = "What has become of a call";
const STREAM: &str = "What has become of a stream";

impl Webhook<'_> {
    /// Whether what makes no sense is refused. Others are told to hang up, with 200, because
    /// anything else would be a dead line.
    fn is_strict(&self) -> bool {
        self.provider.dialect().hang_up("").is_none()
    }

    fn described(&self) -> [Endpoint; 2] {
        let call = Field {
            name: self.provider.dialect().call_field(),
            about: "The id of the call.",
            pattern: schemas::CALL_SID,
            example: "CA1",
        };
        let sent: Vec<Field> = [call].iter().chain(self.sent).copied().collect();
        let by_get = sent.iter().fold(self.endpoint(), |it, field| self.query(it, field));
        let by_post = self.endpoint().takes_body(self.body(&sent));
        [by_get, by_post].map(|it| self.answered(it))
    }

    fn endpoint(&self) -> Endpoint {
        let summary = format!("{} ({})", self.summary, self.provider);
        let endpoint = Endpoint::new(Group::Webhooks, &summary)
            .about("Verified by the provider's signature, where its secret is known.");
        let endpoint = self.ours.iter().fold(endpoint, |it, field| self.query(it, field));
        self.wishes.iter().fold(endpoint, |it, field| {
            let schema = match self.is_strict() {
                true => schemas::matching_or_empty(field.pattern),
                false => schemas::text(),
            };
            it.query(field.name, schema, field.about)
        })
    }

    fn query(&self, endpoint: Endpoint, field: &Field) -> Endpoint {
        let schema: RefOr<Schema> = schemas::schema(self.field(field));
        match self.is_strict() {
            true => endpoint.needed_query(field.name, schema, field.about),
            false => endpoint.query(field.name, schema, field.about),
        }
    }

    /// A field as text.
    fn field(&self, field: &Field) -> Value {
        let mut schema = json!({
            "type": "string",
            "description": field.about,
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
            // Who sends something else is told to hang up, too.
            schema["type"] = ANYTHING.into();
        }
        schema
    }

    /// Numbers and the like are read as the text they are.
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

    fn answered(&self, endpoint: Endpoint) -> Endpoint {
        let Document { content_type, body } = &self.answer;
        let (schema, example) = match serde_json::from_str(body) {
            Ok(example) => (json!({"type": ["object", "array"]}), example),
            Err(_) => (json!({"type": "string"}), body.clone().into()),
        };
        let forged = ResponseBuilder::new().description("It is not genuine.");
        let endpoint = endpoint
            .gives_some(content_type, schemas::schema(schema), example)
            .answers(403, forged)
            .fails(429, "Too many requests that are not genuine.");
        if !self.is_strict() {
            return endpoint;
        }
        endpoint
            .fails(400, "It makes no sense, or does not say of which call it is.")
            .fails(408, "The body did not arrive in time.")
            .fails(413, "The body is larger than 64 KiB.")
            .fails(415, "The body is of another kind.")
            .asks_store()
    }
}
