#!/usr/bin/env python3
"""Assembles the image of the last stage of the Dockerfile as an OCI archive, without a daemon and
without privileges. Equal inputs give equal bytes.

    oci_image.py --program FILE --certificates FILE --version TEXT --architecture amd64|arm64 \\
        --epoch SECONDS --output FILE.tar
"""

import argparse
import gzip
import hashlib
import io
import json
import struct
import sys
import tarfile
import time

PROGRAM = "smart-router"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"


def entry(name, epoch, mode, size=None):
    info = tarfile.TarInfo(name)
    info.mtime, info.mode = epoch, mode
    if size is None:
        info.type = tarfile.DIRTYPE
    else:
        info.size = size
    return info


def archive(files, epoch):
    """A tar file of (name, mode, content); a content of None is a directory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, mode, content in files:
            if content is None:
                tar.addfile(entry(name, epoch, mode))
            else:
                tar.addfile(entry(name, epoch, mode, len(content)), io.BytesIO(content))
    return buffer.getvalue()


def loader(program):
    """The dynamic loader that an ELF program needs; None if it is static. The image has none."""
    if program[:4] != b"\x7fELF" or program[4] != 2:
        sys.exit("the program is not an ELF file of 64 bits")
    order = "<" if program[5] == 1 else ">"
    (start,) = struct.unpack_from(order + "Q", program, 32)
    size, count = struct.unpack_from(order + "HH", program, 54)
    for at in range(start, start + size * count, size):
        (kind,) = struct.unpack_from(order + "I", program, at)
        if kind == 3:  # PT_INTERP
            offset, _, _, length = struct.unpack_from(order + "QQQQ", program, at + 8)
            return program[offset : offset + length].rstrip(b"\0").decode()
    return None


def digest(content):
    return "sha256:" + hashlib.sha256(content).hexdigest()


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ["program", "certificates", "version", "output"]:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--architecture", required=True, choices=["amd64", "arm64"])
    parser.add_argument("--epoch", required=True, type=int)
    return parser.parse_args()


def main():
    given = parse()
    with open(given.program, "rb") as file:
        program = file.read()
    if path := loader(program):
        sys.exit(
            f"{given.program} needs the loader {path}, which the image does not have: "
            "build it with deploy/image/static.sh"
        )
    with open(given.certificates, "rb") as file:
        certificates = file.read()
    layer = archive(
        [
            ("etc", 0o755, None),
            ("etc/ssl", 0o755, None),
            ("etc/ssl/certs", 0o755, None),
            (CERTIFICATES, 0o644, certificates),
            (PROGRAM, 0o755, program),
        ],
        given.epoch,
    )
    packed = gzip.compress(layer, compresslevel=6, mtime=0)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(given.epoch))
    labels = {
        "org.opencontainers.image.title": "smart-router",
        "org.opencontainers.image.version": given.version,
        "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
    }
    config = {
        "created": created,
        "architecture": given.architecture,
        "os": "linux",
        "config": {
            "User": "65532:65532",
            "ExposedPorts": {"8080/tcp": {}, "9090/tcp": {}},
            "Entrypoint": [f"/{PROGRAM}"],
            "Labels": labels,
        },
        "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
        "history": [{"created": created, "created_by": "deploy/image/oci_image.py"}],
    }
    blobs = {}

    def blob(content, media_type, **more):
        blobs[digest(content)] = content
        return {"mediaType": media_type, "digest": digest(content), "size": len(content), **more}

    def document(value):
        return json.dumps(value, sort_keys=True).encode()

    oci = "application/vnd.oci.image."
    manifest = {
        "schemaVersion": 2,
        "mediaType": oci + "manifest.v1+json",
        "config": blob(document(config), oci + "config.v1+json"),
        "layers": [blob(packed, oci + "layer.v1.tar+gzip")],
        "annotations": labels,
    }
    index = {
        "schemaVersion": 2,
        "manifests": [
            blob(
                document(manifest),
                oci + "manifest.v1+json",
                platform={"architecture": given.architecture, "os": "linux"},
                annotations={"org.opencontainers.image.ref.name": given.version},
            )
        ],
    }
    layout = [("blobs", 0o755, None), ("blobs/sha256", 0o755, None)]
    for name, content in sorted(blobs.items()):
        layout.append((f"blobs/{name.replace(':', '/')}", 0o644, content))
    layout.append(("index.json", 0o644, document(index)))
    layout.append(("oci-layout", 0o644, document({"imageLayoutVersion": "1.0.0"})))
    with open(given.output, "wb") as file:
        file.write(archive(layout, given.epoch))


main()
