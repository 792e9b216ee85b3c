"""Validates the OpenAPI document of a running router and its examples. Usage: openapi.py URL"""

import json
import sys
import urllib.request

from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

with urllib.request.urlopen(sys.argv[1]) as response:
    assert response.headers["content-type"] == "application/json"
    document = json.load(response)

validate(document)
registry = Registry().with_resource("urn:document", Resource(document, DRAFT202012))
checked = 0


def check(schema, example, path):
    global checked
    checked += 1
    schema = json.loads(json.dumps(schema).replace('"#/', '"urn:document#/'))
    errors = list(Draft202012Validator(schema, registry=registry).iter_errors(example))
    if errors:
        raise SystemExit(f"{path}: {example!r} does not fit: {errors[0].message}")


def visit(part, path):
    if isinstance(part, list):
        for at, inner in enumerate(part):
            visit(inner, f"{path}/{at}")
    if not isinstance(part, dict):
        return
    if "schema" in part and "example" in part:
        check(part["schema"], part["example"], path)
    is_schema = "type" in part or "$ref" in part or "enum" in part
    if is_schema and isinstance(part.get("examples"), list):
        for example in part["examples"]:
            check(part, example, path)
    for name, inner in part.items():
        if name not in ("example", "examples"):
            visit(inner, f"{path}/{name}")


visit(document, "")

# Every request and response body has an example.
for path, item in document["paths"].items():
    for method, operation in item.items():
        bodies = [operation.get("requestBody", {})] + list(operation["responses"].values())
        for body in bodies:
            for kind, content in body.get("content", {}).items():
                assert "example" in content, f"{method} {path}: {kind} has no example"
print(f"{len(document['paths'])} paths, {checked} examples")
