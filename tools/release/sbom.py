"""The bill of materials of a release, as CycloneDX JSON: the works that are compiled into its files.

THIRD_PARTY_NOTICES.txt names those works and the files that each is in. Versions and licences are read from the host
that builds: Debian's package database, pip's metadata, headers and nvcc.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import uuid
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

# SPDX's expression for what copyright files and metadata write. Another text is an error: read it before you add it.
SPDX = {
    "Expat": "MIT",
    "MIT License": "MIT",
    "Expat with embedded exception": "MIT WITH fmt-exception",
    "BSD-2-clause": "BSD-2-Clause",
    "BSD-3-clause": "BSD-3-Clause",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "GCC Runtime Library Exception": "GPL-3.0-or-later WITH GCC-exception-3.1",
}


def read(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def debian(package: str) -> dict:
    """A Debian package: the licence of most of its files, or the exception of GCC's run-time libraries."""
    version = read("dpkg-query", "-W", "-f=${Version}", package)
    text = Path(f"/usr/share/doc/{package}/copyright").read_text()
    found = re.search(r"^Files: \*\n(?:.*\n)*?License: (.*)$", text, re.MULTILINE)
    found = found or re.search(r"(GCC Runtime Library Exception)", text)
    licence = found[1] if found else "no licence in its copyright file"
    purl = f"pkg:deb/{platform.freedesktop_os_release()['ID']}/{package}@{quote(version)}"
    return {"version": version, "licence": licence, "purl": purl}


def gcc() -> dict:
    return debian(f"libstdc++-{read('g++', '-dumpversion').split('.')[0]}-dev")


def nanobind() -> dict:
    version, metadata = importlib.metadata.version("nanobind"), importlib.metadata.metadata("nanobind")
    (licence,) = (line for line in metadata.get_all("Classifier", []) if line.startswith("License :: "))
    return {"version": version, "licence": licence, "purl": f"pkg:pypi/nanobind@{version}"}


def robin_map() -> dict:
    """nanobind carries the headers, which have a licence and no version."""
    header = Path(importlib.util.find_spec("nanobind").origin).parent / "ext/robin_map/include/tsl/robin_map.h"
    found = re.search(r"MIT License", header.read_text())
    return {"licence": found[0] if found else f"no licence in {header.name}"}


def cudart() -> dict:
    """Its version is that of the toolkit."""
    version = re.search(r"release (\S+),", read("nvcc", "--version"))[1]
    return {"version": version, "name": "NVIDIA Software License Agreement and CUDA Supplement"}


# How to find each work of THIRD_PARTY_NOTICES.txt, by its title there.
WORKS = {
    "nlohmann-json": lambda: debian("nlohmann-json3-dev"),
    "fmt": lambda: debian("libfmt-dev"),
    "xxHash": lambda: debian("libxxhash-dev"),
    "nanobind": nanobind,
    "robin-map (part of nanobind)": robin_map,
    "CLI11": lambda: debian("libcli11-dev"),
    "libstdc++ and libgcc (GCC)": gcc,
    "CUDA run time (cudart)": cudart,
}


def component(title: str, within: str, found: dict) -> dict:
    """A CycloneDX component. Its licence is an SPDX expression, or the name of one that SPDX does not have."""
    if "licence" in found and found["licence"] not in SPDX:
        raise ValueError(f"{title}: expected a licence of tools/release/sbom.py, got {found['licence']!r}")
    licence = {"license": {"name": found["name"]}} if "name" in found else {"expression": SPDX[found["licence"]]}
    kept = {key: found[key] for key in ("version", "purl") if key in found}
    return {
        "type": "library",
        "bom-ref": title,
        "name": title,
        **kept,
        "licenses": [licence],
        "properties": [{"name": "nvfp4-moe:in", "value": within}],
    }


def make_sbom(notices: str, version: str, commit: str, epoch: int, cuda: bool) -> dict:
    """Makes the bill from the text of THIRD_PARTY_NOTICES.txt."""
    listed = dict(re.findall(r"^={20,}\n(.+)\nIn: (.+)$", notices, re.MULTILINE))
    if listed.keys() != WORKS.keys():
        differ = ", ".join(sorted(listed.keys() ^ WORKS.keys()))
        raise ValueError(f"THIRD_PARTY_NOTICES.txt and tools/release/sbom.py differ in: {differ}")
    works = {title: within for title, within in listed.items() if cuda or "built with CUDA" not in within}
    product = {"type": "library", "bom-ref": "nvfp4-moe", "name": "nvfp4-moe", "version": version}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'nvfp4-moe {version} {commit} {cuda}')}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, UTC).isoformat(),
            "component": {**product, "licenses": [{"expression": "Apache-2.0"}]},
            "properties": [{"name": "nvfp4-moe:commit", "value": commit}],
        },
        "components": [component(title, within, WORKS[title]()) for title, within in works.items()],
        "dependencies": [{"ref": "nvfp4-moe", "dependsOn": list(works)}],
    }


def validate(bom: dict) -> None:
    """Raises if the bill does not follow CycloneDX's schema. The package is in the environment of ./dev release only."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bom))
    if error:
        raise ValueError(f"the bill of materials does not follow CycloneDX 1.6: {error.data.message}")
