#!/usr/bin/env python3
"""Checks which of transformers' mixture-of-experts classes load here. Writes a record and the table of
docs/reference/checkpoints.md.

Each class that moe_classes.py finds is built at a tiny size and saved by transformers. This library quantizes the
checkpoint in both formats. Every layer then runs on the inputs that the model's own router sent to its experts. Each
element of the output must be within a bound (own_experts.py) of the model's own experts in float64 with the dequantized
weights. The transformers adapter must pass the same check: enable() on the model in memory, and from_pretrained() of
the quantized files.

usage: PYTHONPATH=build/cpu/python check_moe_classes.py [--engines DIRECTORY] [MODEL_TYPE ...]
  names: checks only these and keeps the record of the others
  --engines: checks no class, and records which of them vLLM's and SGLang's registries have. DIRECTORY is what
    `./dev engines` makes.
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import moe_classes
import nvfp4_moe as nv
import torch
import transformers
from moe_classes import Experts, ModelClass
from own_experts import Batch, Judged, batches, check_output, check_weights, decoded, routed, twin_of
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs/moe-classes.json"
PAGE = ROOT / "docs/reference/checkpoints.md"
BEGIN, END = "<!-- classes: begin -->", "<!-- classes: end -->"
FORMATS = ("modelopt", "compressed-tensors")
# W4A16 with rows in fp32: only the rounding of h to bf16 and the fp32 sums differ from float64.
OPTIONS: dict[str, Any] = {"activation_format": "bf16", "row_format": "fp32"}


# ---- one class


def reason(error: Exception, directory: pathlib.Path) -> str:
    text = str(error).replace(str(directory), "").strip(": ")
    return re.sub(r"; known are .*", "", re.sub(r"^config\.json model_type [^:]*: ", "", text))


def shared_of(model: nn.Module, layer: int) -> nn.Module | None:
    pattern = re.compile(rf"(?:^|\.)layers\.{layer}\..*?(?:shared_experts?|shared_mlp|share_expert)$")
    return next((m for path, m in model.named_modules() if pattern.search(path) and "talker" not in path), None)


def check_shared(model: nn.Module, checkpoint: Any, layer: int) -> str:
    """Returns "none", "loaded" (part of the layer, with the model's weights), or "kept" (by the model)."""
    module = shared_of(model, layer)
    if module is None:
        return "none"
    try:
        loaded = checkpoint.shared_expert(layer)
    except nv.Error:
        return "kept"
    named = {name.removesuffix(".weight").removesuffix("_proj"): p.data for name, p in module.named_parameters()}
    for fused in ("gate_up", "input_linear"):
        if fused in named:
            named["gate"], named["up"] = named[fused].chunk(2)
    for name, others in (("gate", ("w1",)), ("up", ("w3",)), ("down", ("w2", "output_linear"))):
        if not loaded.get(name):  # without a gate
            continue
        original = next(named[one] for one in (name, *others) if one in named)
        check_weights(original, decoded(loaded[name]), f"layer {layer} shared expert {name}")
    return "loaded"


def layers_of(
    directory: pathlib.Path, found: list[Experts], seen: dict[str, Batch], what: str
) -> Iterator[tuple[Experts, nn.Module, Any]]:
    """Checks each layer of a checkpoint; yields its experts, their twin and the open layer."""
    checkpoint = nv.Checkpoint(str(directory))
    numbers = list(dict.fromkeys(one.layer for one in found))  # two modules may share a layer's weights
    if checkpoint.inspect([])["layers"] != numbers:
        raise Judged(f"{what}: layers {checkpoint.inspect([])['layers']}, and the model has experts in {numbers}")
    for one in found:
        place = f"{what} layer {one.layer}"
        twin = twin_of(one.module, lambda e, layer=one.layer: checkpoint.expert(layer, e), place)
        layer = nv.MoeLayer.from_checkpoint(checkpoint, one.layer, max_tokens=64, shared_intermediate_size=0, **OPTIONS)
        batch = routed(seen[one.path], layer.config.num_experts)
        check_output(
            layer.run(batch.hidden, batch.ids.int().contiguous(), batch.weights.contiguous()), twin, batch, place
        )
        yield one, twin, layer


def judge_adapter(module: nn.Module, twin: nn.Module, batch: Batch, what: str) -> None:
    with torch.no_grad():
        got = module(batch.hidden, batch.ids, batch.weights).reshape(batch.hidden.shape)
    check_output(got, twin, batch, what)


def adapter_rows(
    model_class: ModelClass, quantized: pathlib.Path, model: nn.Module, twins: dict[str, Any], seen: dict[str, Batch]
) -> dict[str, str]:
    """Checks enable() and from_pretrained(): "yes", or why not.

    twins: {"enable", "from_pretrained"} to {path: twin}.
    """
    import nvfp4_moe.transformers as adapter

    row = {}
    options = {"row_format": "fp32"}

    def enabled() -> nn.Module:
        adapter.enable(model, max_tokens=64, **options)
        return model

    def loaded() -> nn.Module:
        config = adapter.Nvfp4MoeConfig(max_tokens=64, activation_format="bf16", **options)
        made = model_class.model.from_pretrained(quantized, dtype=torch.float32, quantization_config=config)
        return made

    for name, make in (("from_pretrained", loaded), ("enable", enabled)):
        try:
            made = make()
        except (nv.Error, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            row[name] = re.sub(r"^.*?: (?=expected)|, while the files.*", "", reason(error, quantized))
            continue
        modules = made.named_modules(remove_duplicate=False)  # an encoder and a decoder may share one
        packed = {path: m for path, m in modules if isinstance(m, adapter.Nvfp4Experts)}
        if not set(packed) >= set(twins[name]):  # enable() also takes the experts of speech
            raise Judged(f"{name}: packed {sorted(packed)}, expected {sorted(twins[name])}")
        for path, twin in twins[name].items():
            judge_adapter(packed[path], twin, seen[path], f"{name} {path}")
        row[name] = "yes"
    return row


def judge(model_class: ModelClass, scratch: pathlib.Path) -> dict[str, Any]:
    """Makes the row of a class. Raises Judged if something loads that differs from the model."""
    directory = scratch / "floats"
    model = moe_classes.tiny_model(model_class).to(torch.bfloat16)
    model.save_pretrained(directory)
    model = model.float()
    found = moe_classes.experts_of(model)
    row: dict[str, Any] = {
        "class": model_class.model.__name__,
        "experts": type(found[0].module).__name__ if found else "",
    }
    try:
        inspected = nv.inspect(directory, layers=[])
    except nv.Error as error:
        return {**row, "loads": reason(error, directory)}
    found = [one for one in found if not re.search("talker|vision", one.path)]
    seen = batches(model, found)
    names = nv.Checkpoint(str(directory)).expert(found[0].layer, 0)["names"]
    first = names.get("gate", names["up"])
    row["names"] = re.sub(rf"^.*?\.{found[0].layer}\.", "", first.replace("experts.0.", "experts.E."))
    row["family"] = inspected["family"]
    row["shared"] = check_shared(model, nv.Checkpoint(str(directory)), found[0].layer)
    floats: dict[str, nn.Module] = {}
    files = floats
    activations = set()
    for one, twin, layer in layers_of(directory, found, seen, "floats"):
        floats[one.path] = twin
        activations.add(layer.config.activation)
    row["activation"] = ", ".join(sorted(activations))
    row["loads"] = "yes"
    try:
        for output_format in FORMATS:
            quantized = scratch / output_format
            nv.quantize_checkpoint(directory, quantized, output_format=output_format)
            files = {one.path: twin for one, twin, _ in layers_of(quantized, found, seen, output_format)}
        row["quantize"] = "yes"
    except nv.Error as error:
        row["quantize"] = reason(error, directory)
    source = scratch / FORMATS[-1] if row["quantize"] == "yes" else directory
    return {**row, **adapter_rows(model_class, source, model, {"enable": floats, "from_pretrained": files}, seen)}


# ---- the engines' registries


def registered(engines: pathlib.Path) -> dict[str, set[str]]:
    """{engine and version: names of its model classes}, read from its source without importing it."""
    names: dict[str, set[str]] = {}
    for title, package, models in (
        ("vLLM", "vllm", "model_executor/models/registry.py"),
        ("SGLang", "sglang", "srt/models/**/*.py"),
    ):
        for root in engines.glob(f"{package}/lib/python3*/site-packages"):
            version = next(root.glob(f"{package}*.dist-info")).name.split("-")[1].removesuffix(".dist")
            found = names.setdefault(f"{title} {version}", set())
            for file in (root / package).glob(models):
                found |= registered_in(ast.parse(file.read_text()))
    return names


def registered_in(tree: ast.Module) -> set[str]:
    """Names in the dicts of vLLM's registry (_TEXT_GENERATION_MODELS and others), or in SGLang's EntryClass."""
    found: set[str] = set()
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        if node.targets[0].id.endswith("_MODELS") and isinstance(node.value, ast.Dict):
            # A tuple is (module, class); a string is the last version that had it.
            pairs = zip(node.value.keys, node.value.values, strict=True)
            found |= {
                key.value for key, value in pairs if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple)
            }
        if node.targets[0].id == "EntryClass":
            found |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    return found


# ---- the table


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def render(record: dict[str, Any]) -> str:
    head = [
        BEGIN,
        "",
        f"Made by `tools/check/check_moe_classes.py` from transformers {record['transformers']}: {len(record['classes'])} classes. "
        f"{sum(row['loads'] == 'yes' for row in record['classes'].values())} load.",
        "",
        "| `model_type` | gate (or up) of an expert, in layer L | activation | shared expert | loads | in transformers | "
        + " | ".join(record["engines"])
        + " |",
        "|---|---|---|---|---|---|" + "---|" * len(record["engines"]),
    ]
    rows = []
    for model_type, row in record["classes"].items():
        loads = row["loads"]
        if loads == "yes" and row["quantize"] != "yes":
            loads = f"as it is; `quantize`: {row['quantize']}"
        cells = [f"`{row['names']}`" if "names" in row else "", row.get("activation", ""), row.get("shared", ""), loads]
        cells.append(" / ".join(dict.fromkeys(row[name] for name in ("enable", "from_pretrained") if name in row)))
        has = ["yes" if row["class"] in names else "no" for names in record["engines"].values()]
        cells += has if row["loads"] == "yes" else [""] * len(has)
        rows.append(f"| {model_type} | " + " | ".join(cell(text) for text in cells) + " |")
    return "\n".join([*head, *rows, "", END])


def between(text: str, begin: str, end: str, table: str) -> str:
    """Replaces the text between two markers, and the markers, by a table that contains both markers."""
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    if not rest or not after:
        raise ValueError(f"{PAGE.name}: expected {begin} and {end}")
    return before + table + after


def page(text: str, record: dict[str, Any]) -> str:
    return between(text, BEGIN, END, render(record))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--engines", type=pathlib.Path)
    args = parser.parse_args()
    if args.engines:
        record = json.loads(RECORD.read_text())
        classes = {row["class"] for row in record["classes"].values()}
        write(
            {**record, "engines": {name: sorted(names & classes) for name, names in registered(args.engines).items()}}
        )
        return 0
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    old = json.loads(RECORD.read_text())
    record = old if args.model_types else {"classes": {}}
    failed = False
    for model_class in moe_classes.model_classes():
        if args.model_types and model_class.model_type not in args.model_types:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            try:
                row = judge(model_class, pathlib.Path(scratch))
            except Exception as error:
                failed = True
                print(f"{model_class.model_type}: FAILED {type(error).__name__}: {str(error)[:500]}", flush=True)
                if args.model_types:
                    raise
                continue
        record["classes"][model_class.model_type] = row
        print(f"{model_class.model_type}: {row}", flush=True)
    record = {
        "transformers": transformers.__version__,
        "classes": dict(sorted(record["classes"].items())),
        "engines": old["engines"],
    }
    if not failed:
        write(record)
    return 1 if failed else 0


def write(record: dict[str, Any]) -> None:
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), record))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests/python"))
    sys.exit(main())
