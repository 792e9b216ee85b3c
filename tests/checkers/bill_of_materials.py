"""Checks a bill of materials against the strict schema of CycloneDX 1.5: bill_of_materials.py FILE."""

import sys

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

with open(sys.argv[1], encoding="utf-8") as file:
    error = JsonStrictValidator(SchemaVersion.V1_5).validate_str(file.read())
if error:
    sys.exit(str(error)[:2000])
