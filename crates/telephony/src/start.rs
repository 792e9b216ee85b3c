//! The start message of a media stream: the call and its parameters, for streams that no webhook
//! has announced.

use serde_json::{Map, Value};

use crate::{CallParts, CallRequest, Parameters, Params, Provider};
use fleet::names::InvalidName;

/// The reason why a start message names no call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidStart {
    #[error("the start message is not a JSON object")]
    NotJson,
    #[error("the stream does not begin with the provider's start message")]
    NotStart,
    #[error("{0} in the start message is not a text")]
    NotText(&'static str),
    #[error(transparent)]
    Name(#[from] InvalidName),
}

type Object = Map<String, Value>;

/// Fields of a provider's start message.
struct Fields {
    /// Value of `event`, if the message has one.
    event: Option<&'static str>,
    /// The object with the call id, if it is not the message itself.
    body: Option<&'static str>,
    call: &'static str,
    /// The object in `body` with the operator's parameters. They may also be in `body` itself, if
    /// the provider has `flat_params`.
    params: &'static str,
    flat_params: bool,
}

fn fields(provider: Provider) -> Fields {
    let start = |call, params| Fields {
        event: Some("start"),
        body: Some("start"),
        call,
        params,
        flat_params: false,
    };
    match provider {
        Provider::Twilio | Provider::SignalWire => start("callSid", "customParameters"),
        Provider::Plivo => start("callId", "customParameters"),
        Provider::Exotel => start("call_sid", "custom_parameters"),
        Provider::Telnyx => start("call_control_id", "custom_parameters"),
        Provider::Vonage => Fields {
            event: Some("websocket:connected"),
            body: None,
            call: "call_sid",
            params: "headers",
            flat_params: true,
        },
        Provider::Jambonz => Fields {
            event: None,
            body: None,
            call: "callSid",
            params: "metadata",
            flat_params: true,
        },
    }
}

impl CallRequest {
    /// Reads the start message of a stream. Parameters in the query of the stream URL take
    /// precedence over those in the message. `new_id` generates the id of a call whose provider
    /// sends none.
    pub fn from_start(
        provider: Provider,
        query: &Params,
        message: &[u8],
        new_id: impl FnOnce() -> String,
    ) -> Result<Self, InvalidStart> {
        let message: Value = serde_json::from_slice(message).map_err(|_| InvalidStart::NotJson)?;
        let message = message.as_object().ok_or(InvalidStart::NotJson)?;
        let fields = fields(provider);
        if message.get("event").and_then(Value::as_str) != fields.event {
            return Err(InvalidStart::NotStart);
        }
        let body = match fields.body {
            None => message,
            Some(name) => {
                message.get(name).and_then(Value::as_object).ok_or(InvalidStart::NotStart)?
            }
        };
        let mut call = text(body.get(fields.call), fields.call)?;
        if call.is_none() && provider == Provider::Vonage {
            call = Some(new_id());
        }
        let params = |name| match query.get(name).filter(|value| !value.is_empty()) {
            Some(value) => Ok(Some(value.to_owned())),
            None => param(body, &fields, name),
        };
        let (merchant, flow, template) =
            (params("merchant_id")?, params("flow")?, params("template")?);
        let parts = CallParts {
            call: call.as_deref(),
            merchant: merchant.as_deref(),
            flow: flow.as_deref(),
            template: template.as_deref(),
        };
        let parameters = Parameters::from_query(query.iter())?;
        Ok(Self { parameters, ..Self::new(provider, parts)? })
    }
}

/// A parameter that the operator has configured.
fn param(
    body: &Object,
    fields: &Fields,
    name: &'static str,
) -> Result<Option<String>, InvalidStart> {
    let nested = match body.get(fields.params) {
        Some(Value::Object(params)) => params.get(name),
        // Telnyx's API takes parameters as a list of names and values.
        Some(Value::Array(params)) => params
            .iter()
            .find(|param| param.get("name").and_then(Value::as_str) == Some(name))
            .and_then(|param| param.get("value")),
        _ => None,
    };
    let flat = || body.get(name).filter(|_| fields.flat_params);
    text(nested.or_else(flat), name)
}

/// A text or a number; `None` if it is missing or empty.
fn text(value: Option<&Value>, name: &'static str) -> Result<Option<String>, InvalidStart> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone()).filter(|text| !text.is_empty())),
        Some(Value::Number(number)) => Ok(Some(number.to_string())),
        Some(_) => Err(InvalidStart::NotText(name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(provider: Provider, query: &str, message: &str) -> Result<CallRequest, InvalidStart> {
        let query = Params::from_form(query).unwrap();
        CallRequest::from_start(provider, &query, message.as_bytes(), || "generated".into())
    }

    /// Call, merchant, template and flow.
    fn parts(request: &CallRequest) -> [&str; 4] {
        let merchant = request.merchant.as_ref().map_or("", |merchant| merchant.as_str());
        [request.call.as_str(), merchant, request.template.as_str(), request.flow.as_str()]
    }

    #[test]
    fn start_messages_of_all_providers_name_the_call_and_its_parameters() {
        let custom = r#"{"merchant_id": "acme", "template": "hello", "flow": "v1"}"#;
        let listed = r#"[{"name": "flow", "value": "v1"}, {"name": "template", "value": "hello"},
            {"name": "merchant_id", "value": "acme"}]"#;
        let twilio = format!(
            r#"{{"event": "start", "start": {{"callSid": "c", "customParameters": {custom}}}}}"#
        );
        let snake = |call: &str, custom: &str| {
            format!(
                r#"{{"event": "start", "start": {{"{call}": "c", "custom_parameters": {custom}}}}}"#
            )
        };
        let metadata = format!(r#"{{"callSid": "c", "callId": "sip", "metadata": {custom}}}"#);
        let flat = r#""merchant_id": "acme", "template": "hello", "flow": "v1""#;
        let connected = r#""event": "websocket:connected", "content-type": "audio/l16;rate=16000""#;
        for (provider, message) in [
            (Provider::Twilio, twilio.clone()),
            (Provider::SignalWire, twilio),
            (Provider::Exotel, snake("call_sid", custom)),
            (Provider::Telnyx, snake("call_control_id", custom)),
            (Provider::Telnyx, snake("call_control_id", listed)),
            (Provider::Jambonz, metadata),
            (Provider::Jambonz, format!(r#"{{"callSid": "c", {flat}}}"#)),
            (Provider::Vonage, format!(r#"{{{connected}, "call_sid": "c", {flat}}}"#)),
        ] {
            let request = read(provider, "", &message).unwrap();
            assert_eq!(parts(&request), ["c", "acme", "hello", "v1"], "{message}");
            assert_eq!(request.provider, provider);
        }
        let plivo = r#"{"event": "start", "start": {"callId": "c", "streamId": "s"}}"#;
        let request = read(Provider::Plivo, "merchant_id=acme&flow=v1", plivo).unwrap();
        assert_eq!(parts(&request), ["c", "acme", "order-confirmation", "v1"]);
        let request = read(Provider::Vonage, "", &format!("{{{connected}}}")).unwrap();
        assert_eq!(parts(&request), ["generated", "", "order-confirmation", "v2"]);
    }

    #[test]
    fn the_query_takes_precedence_over_the_message() {
        let message = r#"{"event": "start", "start": {"callSid": "c",
            "customParameters": {"merchant_id": "other", "template": "hello", "call_sid": "d"}}}"#;
        let request =
            read(Provider::Twilio, "merchant_id=acme&template=&callSid=e", message).unwrap();
        assert_eq!(parts(&request), ["c", "acme", "hello", "v2"]);
    }

    #[test]
    fn invalid_start_messages_are_refused() {
        let start = |call: &str| format!(r#"{{"event": "start", "start": {{"callSid": {call}}}}}"#);
        let not_json = ["", "{", "[]", "7", "hello"];
        for message in not_json {
            assert_eq!(read(Provider::Twilio, "", message), Err(InvalidStart::NotJson));
        }
        for message in [
            r#"{"event": "connected"}"#,
            r#"{"event": "media", "start": {"callSid": "c"}}"#,
            r#"{"event": "start"}"#,
            r#"{"event": "start", "start": []}"#,
            r#"{"start": {"callSid": "c"}}"#,
        ] {
            let read = read(Provider::Twilio, "", message);
            assert_eq!(read, Err(InvalidStart::NotStart), "{message}");
        }
        for call in ["null", r#""""#, r#""a/b""#, r#""a b""#, r#""a\r\nb""#] {
            let read = read(Provider::Twilio, "", &start(call));
            assert!(matches!(read, Err(InvalidStart::Name(_))), "{call}: {read:?}");
        }
        for call in ["[]", "{}", "true"] {
            let read = read(Provider::Twilio, "", &start(call));
            assert_eq!(read, Err(InvalidStart::NotText("callSid")));
        }
        let other = start(r#""c""#);
        for provider in [Provider::Plivo, Provider::Exotel, Provider::Telnyx] {
            assert!(matches!(read(provider, "", &other), Err(InvalidStart::Name(_))));
        }
        for provider in [Provider::Vonage, Provider::Jambonz] {
            assert_eq!(read(provider, "", &other), Err(InvalidStart::NotStart));
        }
        assert!(matches!(read(Provider::Twilio, "flow=a/b", &other), Err(InvalidStart::Name(_))));
    }
}
