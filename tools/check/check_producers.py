#!/usr/bin/env python3
"""Checks that ModelOpt's and llm-compressor's exports of transformers' MoE classes load here.

Writes a record and the table of docs/reference/checkpoints.md. Every layer of an export must hold the original weights,
within the rounding of NVFP4, and compute the same as the class's own experts (check_moe_classes.py). Each export runs
in a process of its own.

usage: PYTHONPATH=build/cpu/python check_producers.py PRODUCER [--python INTERPRETER] [MODEL_TYPE ...]
  --python: the interpreter of an environment with the producer (producer_exports.py); this one by default
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from typing import Any

import check_moe_classes as classes
import moe_classes
import nvfp4_moe as nv
import own_experts
import torch
import transformers

RECORD = classes.ROOT / "docs/producers.json"
BEGIN, END = "<!-- producers: begin -->", "<!-- producers: end -->"
SCRIPT = classes.ROOT / "tools/check/producer_exports.py"
# Longest excerpt of the producer's last line, cut to its first sentence.
LONGEST = 160


def exports(python: str, producer: str, names: list[str], scratch: pathlib.Path) -> Iterator[dict[str, str] | str]:
    """Runs the producer. Gives its versions for each class, or why it exported nothing."""
    pairs = [part for name in names for part in (name, str(scratch / name))]
    with subprocess.Popen([python, str(SCRIPT), producer, *pairs], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # A producer may print lines of its own.
        for line in process.stdout:
            if not line.startswith('{"'):
                continue
            made = json.loads(line)
            yield f"not exported: {made['error']}"[:LONGEST] if "error" in made else made


def judge(model_class: moe_classes.ModelClass, out: pathlib.Path) -> str:
    """Returns "yes", or why the export does not load.

    Raises Judged if it loads as something other than the original.
    """
    model = model_class.model.from_pretrained(out / "original", dtype=torch.float32).eval()
    found = [one for one in moe_classes.experts_of(model) if "talker" not in one.path]
    try:
        inspected = nv.inspect(out / "export", layers=[])
        errors = [finding["text"] for finding in inspected["findings"] if finding["severity"] == "error"]
        if errors:
            return errors[0].split(" (and ")[0]
        for _ in classes.layers_of(out / "export", found, own_experts.batches(model, found), "export"):
            pass
    except nv.Error as error:
        return classes.reason(error, out / "export")
    return "yes" if inspected["format"] != "float" else "experts left in floats"


def judged(python: str, producer: str, model_class: moe_classes.ModelClass) -> tuple[dict[str, str], str]:
    """Returns the producer's versions, empty if it exported nothing, and the verdict of one class."""
    with tempfile.TemporaryDirectory() as scratch:
        made = next(exports(python, producer, [model_class.model_type], pathlib.Path(scratch)))
        out = pathlib.Path(scratch) / model_class.model_type
        return ({}, made) if isinstance(made, str) else (made, judge(model_class, out))


def render(record: dict[str, Any]) -> str:
    lines = [BEGIN, ""]
    for producer, found in record.items():
        names = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        yes = [name for name, verdict in found["classes"].items() if verdict == "yes"]
        text = f"**{producer}** ({names}), {len(yes)} classes load: {', '.join(yes)}."
        lines += [textwrap.fill(text, 100, break_on_hyphens=False), ""]
        others = {name: verdict for name, verdict in found["classes"].items() if verdict != "yes"}
        if others:
            lines += ["| `model_type` | its export |", "|---|---|"]
            lines += [f"| {name} | {classes.cell(verdict)} |" for name, verdict in others.items()]
            lines.append("")
    return "\n".join([*lines, END])


def page(text: str, record: dict[str, Any]) -> str:
    return classes.between(text, BEGIN, END, render(record))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("producer", choices=["modelopt", "llm-compressor"])
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_intermixed_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found = record.get(args.producer, {"versions": {}, "classes": {}})
    loads = {name for name, row in json.loads(classes.RECORD.read_text())["classes"].items() if row["loads"] == "yes"}
    failed = False
    wanted = [one for one in moe_classes.model_classes() if one.model_type in (args.model_types or loads)]
    with tempfile.TemporaryDirectory() as scratch:
        outs = [pathlib.Path(scratch) / one.model_type for one in wanted]
        made_of = exports(args.python, args.producer, [one.model_type for one in wanted], pathlib.Path(scratch))
        for model_class, out, made in zip(wanted, outs, made_of, strict=True):
            name = model_class.model_type
            try:
                verdict = made if isinstance(made, str) else judge(model_class, out)
            except own_experts.Judged as error:
                failed, made, verdict = True, "", f"FAILED: {error}"
            shutil.rmtree(out, ignore_errors=True)
            print(f"{name}: {verdict}", flush=True)
            if not verdict.startswith("FAILED"):
                found["classes"][name] = verdict
            found["versions"] = found["versions"] if isinstance(made, str) else made
            found["classes"] = dict(sorted(found["classes"].items()))
            record = dict(sorted({**record, args.producer: found}.items()))
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
    classes.PAGE.write_text(page(classes.PAGE.read_text(), record))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(classes.ROOT / "tests/python"))
    sys.exit(main())
