"""Parses exported spans with OpenTelemetry's protobuf messages, rejects unknown fields, and checks
the spans. Usage: traces.py FILE..., each an OTLP request in JSON. Prints one JSON object per span."""

import base64
import json
import sys

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

IDS = ("traceId", "spanId", "parentSpanId")


def with_ids_in_base64(value):
    """Converts ids: OTLP encodes them in hexadecimal, Protobuf's JSON format in Base64."""
    if isinstance(value, list):
        return [with_ids_in_base64(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64encode(bytes.fromhex(item)).decode() if key in IDS else with_ids_in_base64(item)
        for key, item in value.items()
    }


def read(path):
    with open(path) as file:
        text = file.read()
    return json_format.ParseDict(
        with_ids_in_base64(json.loads(text)), ExportTraceServiceRequest(), ignore_unknown_fields=False
    )


def check(holds, what, span):
    if not holds:
        raise SystemExit(f"{what}: {span}")


def value(any_value):
    return getattr(any_value, any_value.WhichOneof("value"))


spans, seen = [], set()
for path in sys.argv[1:]:
    for resource_spans in read(path).resource_spans:
        resource = {pair.key: value(pair.value) for pair in resource_spans.resource.attributes}
        for scope_spans in resource_spans.scope_spans:
            spans += [(resource, scope_spans.scope.name, span) for span in scope_spans.spans]

by_id = {(span.trace_id, span.span_id): span for _, _, span in spans}
for resource, scope, span in spans:
    check(len(span.trace_id) == 16 and any(span.trace_id), "a trace has an id of 16 bytes", span)
    check(len(span.span_id) == 8 and any(span.span_id), "a span has an id of 8 bytes", span)
    check((span.trace_id, span.span_id) not in seen, "a span is sent once", span)
    seen.add((span.trace_id, span.span_id))
    check(span.start_time_unix_nano <= span.end_time_unix_nano, "a span ends after it begins", span)
    check(span.name and resource["service.name"] and scope, "everything has a name", span)
    keys = [pair.key for pair in span.attributes]
    check(len(keys) == len(set(keys)), "attributes are unique", span)
    parent = by_id.get((span.trace_id, span.parent_span_id))
    if span.kind == Span.SPAN_KIND_CLIENT:
        check(parent is not None and parent.kind == Span.SPAN_KIND_SERVER, "a client span has a server span as parent", span)
        check(
            parent.start_time_unix_nano <= span.start_time_unix_nano
            and span.end_time_unix_nano <= parent.end_time_unix_nano,
            "a client span lies within its parent",
            span,
        )
    else:
        check(span.kind == Span.SPAN_KIND_SERVER, "a span is a server or a client span", span)
    print(
        json.dumps(
            {
                "trace": span.trace_id.hex(),
                "span": span.span_id.hex(),
                "parent": span.parent_span_id.hex(),
                "state": span.trace_state,
                "name": span.name,
                "kind": Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                "failed": span.status.code == Status.STATUS_CODE_ERROR,
                "resource": resource,
                **{pair.key: value(pair.value) for pair in span.attributes},
            }
        )
    )
