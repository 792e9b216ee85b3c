"""Checks objects against the OpenAPI schemas of Kubernetes, strictly: unknown fields are refused.
Reads a JSON list of objects: kubernetes_schemas.py VERSION < OBJECTS."""

import json
import sys

import kubernetes_validate

version = sys.argv[1]
found = []
for at, thing in enumerate(json.load(sys.stdin)):
    name = f"{thing['kind']} {thing['metadata']['name']}"
    try:
        kubernetes_validate.validate(thing, version, strict=True)
    except Exception as error:
        path = ".".join(str(part) for part in getattr(error, "path", []))
        found.append(f"{at}: {name}: {path}: {str(error).splitlines()[0]}")
if found:
    sys.exit("\n".join(found))
