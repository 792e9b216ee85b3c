"""Checks that the schema of the chart's values is a valid draft-07 schema that accepts the
defaults: values_schema.py SCHEMA VALUES."""

import json
import sys

import yaml
from jsonschema import Draft7Validator

schema = json.load(open(sys.argv[1], encoding="utf-8"))
assert schema["$schema"] == "http://json-schema.org/draft-07/schema#", schema["$schema"]
Draft7Validator.check_schema(schema)
values = yaml.safe_load(open(sys.argv[2], encoding="utf-8"))
errors = [f"{error.json_path}: {error.message}" for error in Draft7Validator(schema).iter_errors(values)]
if errors:
    sys.exit("\n".join(errors))


def closed(path, schema):
    """Every object with named values refuses others."""
    if "properties" in schema and "global" not in path:
        if path and schema.get("additionalProperties") is not False:
            sys.exit(f"{path} accepts unknown values")
        for name, value in schema["properties"].items():
            closed(f"{path}.{name}", value)


closed("", schema)
if schema["additionalProperties"] is not False:
    sys.exit("the values accept unknown names")
