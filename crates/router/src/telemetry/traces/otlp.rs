//! Encodes spans as OTLP/JSON: ids in hexadecimal, names in lowerCamelCase, 64-bit numbers as
//! text.

use std::fmt;

use serde::{Serialize, Serializer};

use spans::{Span, Value};

/// `ExportTraceServiceRequest`
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Request<'a> {
    resource_spans: [ResourceSpans<'a>; 1],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ResourceSpans<'a> {
    resource: Resource<'a>,
    scope_spans: [ScopeSpans<'a>; 1],
}

#[derive(Serialize)]
struct Resource<'a> {
    #[serde(serialize_with = "texts")]
    attributes: &'a [(String, String)],
}

#[derive(Serialize)]
struct ScopeSpans<'a> {
    scope: Scope,
    #[serde(serialize_with = "each")]
    spans: &'a [Span],
}

#[derive(Serialize)]
struct Scope {
    name: &'static str,
    version: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OtlpSpan<'a> {
    #[serde(serialize_with = "text")]
    trace_id: Hex<32, u128>,
    #[serde(serialize_with = "text")]
    span_id: Hex<16, u64>,
    #[serde(serialize_with = "text", skip_serializing_if = "Hex::is_zero")]
    parent_span_id: Hex<16, u64>,
    #[serde(skip_serializing_if = "str::is_empty")]
    trace_state: &'a str,
    flags: u32,
    name: &'a str,
    kind: u32,
    #[serde(serialize_with = "text")]
    start_time_unix_nano: u64,
    #[serde(serialize_with = "text")]
    end_time_unix_nano: u64,
    #[serde(serialize_with = "values")]
    attributes: &'a [(&'static str, Value)],
    status: Status,
}

#[derive(Serialize)]
struct Status {
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<u32>,
}

#[derive(Serialize)]
struct Attribute<'a, V> {
    key: &'a str,
    value: V,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Text<'a> {
    string_value: &'a str,
}

/// `STATUS_CODE_ERROR`
const ERROR: u32 = 2;
/// Sampled (W3C trace flag), and bit 8: whether the parent is remote is known.
const FLAGS: u32 = 0x101;
/// Bit 9: the parent is remote.
const REMOTE_PARENT: u32 = 0x200;

impl<'a> From<&'a Span> for OtlpSpan<'a> {
    fn from(span: &'a Span) -> Self {
        Self {
            trace_id: Hex(span.context.trace.get()),
            span_id: Hex(span.context.span.get()),
            parent_span_id: Hex(span.parent.map_or(0, |parent| parent.get())),
            trace_state: &span.tracestate,
            flags: if span.has_remote_parent { FLAGS | REMOTE_PARENT } else { FLAGS },
            name: &span.name,
            kind: span.kind as u32,
            start_time_unix_nano: span.start,
            end_time_unix_nano: span.end,
            attributes: &span.attributes,
            status: Status { code: span.has_failed.then_some(ERROR) },
        }
    }
}

struct Hex<const DIGITS: usize, N>(N);

impl<const DIGITS: usize, N: Default + PartialEq> Hex<DIGITS, N> {
    fn is_zero(&self) -> bool {
        self.0 == N::default()
    }
}

impl<const DIGITS: usize, N: fmt::LowerHex> fmt::Display for Hex<DIGITS, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0DIGITS$x}", self.0)
    }
}

fn text<S: Serializer>(shown: &impl fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(shown)
}

fn each<S: Serializer>(spans: &[Span], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(spans.iter().map(OtlpSpan::from))
}

fn values<S: Serializer>(
    attributes: &[(&'static str, Value)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(attributes.iter().map(|(key, value)| Attribute { key, value }))
}

fn texts<S: Serializer>(attributes: &[(String, String)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(
        attributes
            .iter()
            .map(|(key, value)| Attribute { key, value: Text { string_value: value } }),
    )
}

/// Encodes the body of an export request.
pub(super) fn encode(resource: &[(String, String)], spans: &[Span]) -> Vec<u8> {
    let scope = Scope { name: "smart-router", version: env!("CARGO_PKG_VERSION") };
    let request = Request {
        resource_spans: [ResourceSpans {
            resource: Resource { attributes: resource },
            scope_spans: [ScopeSpans { scope, spans }],
        }],
    };
    serde_json::to_vec(&request).expect("text and numbers are JSON")
}
