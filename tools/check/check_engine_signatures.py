#!/usr/bin/env python3
"""Checks which releases of the engines the adapters support, by comparing wheels' source with the adapters' tables.

Writes the record of the releases and the page made from it. Each wheel (10 to 550 MB) is downloaded by pip, parsed
without importing or running it, and deleted, one at a time. Releases that the record has for the same table are not
read again. Exits with 1, and names what moved, if a release does not fit or fits contrary to the adapter's RELEASES.

usage: check_engine_signatures.py [vllm] [sglang] [transformers] [--all] [--since VERSION] [--folder DIR]
                                  [--table ENGINE=FILE]
  --all: reads every release again. --folder: unpacked wheels, DIR/NAME-VERSION/, instead of downloads. --table: an
  adapter's requirements from another tree.
"""

import argparse
import hashlib
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python/nvfp4_moe"
RECORD = ROOT / "docs/engines-compatibility.json"
PAGE = ROOT / "docs/reference/engines-compatibility.md"
# The file with REQUIRED and RELEASES, and the first release to check: the one before the first that fits, or of
# transformers, whose older releases fit without having been run, the first that was run.
ENGINES = {
    "vllm": ("vllm/internals.py", "0.24.0"),
    "sglang": ("sglang/required.py", "0.5.18"),
    "transformers": ("transformers/requirements.py", "5.16.0"),
}
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers"}


def load(path):
    """Loads a file of the package as a separate module, without the package and its compiled part."""
    spec = importlib.util.spec_from_file_location(f"_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def table(engine):
    """Returns the adapter's module of requirements, or None in a tree without such an adapter."""
    path = PACKAGE / ENGINES[engine][0]
    return load(path) if path.exists() else None


def digest(required):
    """Returns a hash that changes whenever a requirement does."""
    return hashlib.sha256(repr({group: list(entries) for group, entries in required.items()}).encode()).hexdigest()[:16]


def key(version):
    """Sorts versions; a post-release comes after its release."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def is_release(version):
    return re.fullmatch(r"[0-9.]+(\.post[0-9]+)?", version) is not None


def versions(engine):
    command = [sys.executable, "-m", "pip", "index", "versions", engine]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for name in re.search(r"Available versions: (.*)", out)[1].split(", ") if is_release(name)]


def read_wheel(engine, version, required, signatures):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder]
        subprocess.run([*command, f"{engine}=={version}"], check=True, stderr=subprocess.DEVNULL)
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            return signatures.misfits_in(signatures.wheel_reader(opened), required)


def supported(version, releases):
    """Returns whether a list of releases contains a version or the minor release that it belongs to."""
    return any(version == release or version.startswith(release + ".") for release in releases)


def needed(version, found, adapter):
    """Returns the misfits of a release without those of groups that the adapter does not expect there."""
    lacking = getattr(adapter, "LACKING", {})
    return {group: whys for group, whys in found.items() if version not in lacking.get(group, ())}


def objections(engine, version, found, releases, is_recorded):
    """Returns one line for each reason why a maintainer has to act on a release."""
    name, file = f"{engine} {version}", f"python/nvfp4_moe/{ENGINES[engine][0]}"
    if not found:
        return [] if supported(version, releases) else [f"{name}: fits, but {file} does not list it in RELEASES"]
    if is_recorded and not supported(version, releases):
        return []
    return [f"{name}: does not fit {file}: {group}: {why}" for group, whys in found.items() for why in whys]


def render(record):
    """Makes the page from a record."""
    lines = [
        "# Which engine releases fit",
        "",
        "Written by `tools/check/check_engine_signatures.py`, which reads each release's wheel and compares",
        "it with what the adapter calls, overrides and reads: the adapter's own table, which it checks again",
        "when an engine loads it. A release that fits has every member with the parameters that are relied",
        "on; what ran is in the adapter's page. Of a group that does not fit the engine keeps the layers, of",
        "`core` all, of `router` the selection of experts; transformers' adapter is then an ImportError. A",
        "newer release than those below is judged by the same table when it is loaded.",
    ]
    for engine, found in record.items():
        lines += ["", f"## {TITLES[engine]}", "", "| release | |", "|---|---|"]
        for version, groups in found["releases"].items():
            cell = "fits"
            if groups:
                cell = "; ".join(f"{group}: " + ", ".join(f"`{why}`" for why in whys) for group, whys in groups.items())
            lines.append(f"| {version} | {cell} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", help=f"{', '.join(ENGINES)}; all by default")
    parser.add_argument("--all", action="store_true", help="read releases again that the record has")
    parser.add_argument("--since", help="the first release to read")
    parser.add_argument("--folder", type=pathlib.Path, help="unpacked wheels, NAME-VERSION each")
    parser.add_argument("--table", action="append", default=[], help="ENGINE=FILE: requirements from another file")
    args = parser.parse_args()
    unknown = [name for name in args.engines if name not in ENGINES]
    if unknown:
        parser.error(f"expected {', '.join(ENGINES)}, got {unknown[0]}")
    tables = {name: load(pathlib.Path(file)) for name, _, file in (given.partition("=") for given in args.table)}
    signatures = load(PACKAGE / "_signatures.py")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    failed = []
    for engine in args.engines or ENGINES:
        adapter = tables.get(engine) or table(engine)
        if adapter is None:
            print(f"{engine}: this tree has no {ENGINES[engine][0]}: skipped")
            continue
        before = record.get(engine, {"table": "", "releases": {}})
        recorded = before["releases"]
        read_all = args.all or args.folder or before["table"] != digest(adapter.REQUIRED)
        kept = {} if read_all else recorded
        since = key(args.since or ENGINES[engine][1])
        if args.folder:
            names = [folder.name.removeprefix(engine + "-") for folder in args.folder.glob(engine + "-*")]
        else:
            names = versions(engine)
        releases = {}
        for version in sorted((name for name in names if key(name) >= since), key=key):
            if version in kept:
                found = kept[version]
            elif args.folder:
                read = signatures.folder_reader(args.folder / f"{engine}-{version}")
                found = signatures.misfits_in(read, adapter.REQUIRED)
            else:
                found = read_wheel(engine, version, adapter.REQUIRED, signatures)
            releases[version] = found
            print(f"{engine} {version}: {'fits' if not found else found}", flush=True)
            moved = needed(version, found, adapter)
            failed += objections(engine, version, moved, adapter.RELEASES, version in recorded)
        record[engine] = {"table": digest(adapter.REQUIRED), "releases": releases}
    print("\n".join(failed), end="\n" if failed else "")
    record = {engine: record[engine] for engine in ENGINES if engine in record}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(render(record))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
