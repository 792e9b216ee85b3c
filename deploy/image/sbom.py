#!/usr/bin/env python3
"""Writes a software bill of materials (CycloneDX 1.5, JSON) of the program: every crate that is
compiled into it or runs in its build, with version, licence and checksum.

    sbom.py --target TRIPLE --epoch SECONDS --program FILE --output FILE.json
"""

import argparse
import hashlib
import json
import subprocess
import time
import tomllib
import uuid

ROOT = "smart-router"
REGISTRY = "registry+https://github.com/rust-lang/crates.io-index"


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ["target", "program", "output"]:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--epoch", required=True, type=int)
    return parser.parse_args()


def metadata(target):
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", target]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def reachable(nodes, root):
    """Packages that `root` needs, with the packages that each needs. Dependencies of tests are left
    out."""
    found, open_ids = {}, [root]
    while open_ids:
        package = open_ids.pop()
        if package in found:
            continue
        needed = [
            dependency["pkg"]
            for dependency in nodes[package]["deps"]
            if any(kind["kind"] != "dev" for kind in dependency["dep_kinds"])
        ]
        found[package] = sorted(set(needed))
        open_ids.extend(needed)
    return found


def component(package, checksums):
    name, version = package["name"], package["version"]
    described = {
        "type": "application" if name == ROOT else "library",
        "bom-ref": f"{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:cargo/{name}@{version}",
    }
    if package["license"]:
        # Crates of before 2018 write a slash instead of OR.
        described["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    if checksum := checksums.get((name, version)):
        described["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package["repository"]:
        described["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return described


def main():
    given = parse()
    document = metadata(given.target)
    packages = {package["id"]: package for package in document["packages"]}
    nodes = {node["id"]: node for node in document["resolve"]["nodes"]}
    root = next(package["id"] for package in document["packages"] if package["name"] == ROOT)
    with open("Cargo.lock", "rb") as file:
        locked = tomllib.load(file)["package"]
    checksums = {(it["name"], it["version"]): it.get("checksum") for it in locked}
    for package in packages.values():
        source = package["source"]
        if source is not None and source != REGISTRY:
            raise SystemExit(f"{package['name']} has an unknown source: {source}")
    needed = reachable(nodes, root)
    components = {package: component(packages[package], checksums) for package in needed}
    program = components.pop(root)
    with open(given.program, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    program["hashes"] = [{"alg": "SHA-256", "content": digest}]
    references = {**{it: components[it]["bom-ref"] for it in components}, root: program["bom-ref"]}
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(given.epoch)),
            "component": program,
            "properties": [{"name": "target", "value": given.target}],
        },
        "components": sorted(components.values(), key=lambda it: it["bom-ref"]),
        "dependencies": sorted(
            (
                {"ref": references[it], "dependsOn": sorted(references[on] for on in needed[it])}
                for it in needed
            ),
            key=lambda it: it["ref"],
        ),
    }
    with open(given.output, "w", encoding="utf-8") as file:
        json.dump(bill, file, indent=2, sort_keys=True)
        file.write("\n")


main()
