#!/usr/bin/env python3
"""Which of transformers' mixture-of-experts classes load here, and why the others do not: docs/moe-classes.json and the table
of docs/checkpoints.md that is made of it.

Each class that moe_classes.py finds is built tiny and saved as transformers saves it. The checkpoint is quantized by this
library, in both formats; every layer of it then runs on what the model's own router sent to its experts, and each element of
the output must lie within the bound below of the model's own experts in float64, which hold the dequantized weights. The same
is asked of the transformers adapter: enable() on the model in memory, from_pretrained() of the quantized files.

usage: PYTHONPATH=build/cpu/python check_moe_classes.py [MODEL_TYPE ...]
  names: only these are judged anew, and the record keeps the others
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import moe_classes
import nvfp4_moe as nv
import torch
import transformers
from moe_classes import Experts, ModelClass
from torch import Tensor, nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs/moe-classes.json"
PAGE = ROOT / "docs/checkpoints.md"
BEGIN, END = "<!-- classes: begin -->", "<!-- classes: end -->"
FORMATS = ("modelopt", "compressed-tensors")
TOKENS = 22
# W4A16, rows in fp32: what is left to differ from float64 is the rounding of h to bf16, and sums in fp32.
OPTIONS: dict[str, Any] = {"activation_format": "bf16", "row_format": "fp32"}


class Judged(AssertionError):
    """A class whose numbers are not the model's own: never a row of the table."""


class Batch(NamedTuple):
    hidden: Tensor  # (T, hidden), numbers of bf16
    ids: Tensor  # (T, top_k)
    weights: Tensor  # (T, top_k) fp32


# ---- the model's own experts


def _standard(module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return module(hidden, ids, weights).reshape(hidden.shape)


def _llama4(module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Every expert sees every token, times its router weight, which is 0 for those not chosen."""
    scores = torch.zeros(len(hidden), module.num_experts, dtype=hidden.dtype).scatter(1, ids.long(), weights)
    return module((scores.T.unsqueeze(-1) * hidden).reshape(-1, hidden.shape[1])).reshape(-1, *hidden.shape).sum(0)


def _aria(module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Takes router logits, whose softmax over the chosen ones are the weights."""
    logits = torch.full((len(hidden), module.config.moe_num_experts), -1e9, dtype=hidden.dtype)
    module.config.moe_topk = ids.shape[1]
    return module(hidden, logits.scatter(1, ids.long(), weights.log()))


CALLS: dict[str, Callable[..., Tensor]] = {"Llama4TextExperts": _llama4, "AriaExperts": _aria}


def call(module: nn.Module, batch: Batch) -> Tensor:
    """The routed experts' sum in the module's dtype."""
    dtype = next(module.parameters()).dtype
    run = CALLS.get(type(module).__name__, _standard)
    with torch.no_grad():
        return run(module, batch.hidden.to(dtype), batch.ids, batch.weights.to(dtype))


def stacks(module: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Views of a module's parameters: gate (E, I, H), up (E, I, H), down (E, H, I), and down's bias (E, H) or None."""
    named = dict(module.named_parameters())
    gate_up = named["gate_up_proj"] if "gate_up_proj" in named else named["fc1.weight"]
    down = named["down_proj"] if "down_proj" in named else named["fc2.weight"]
    gate_up = gate_up.data[: len(down)]
    down = down.data
    if gate_up.shape[2] != moe_classes.HIDDEN:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    alternate = not getattr(module, "is_concatenated", True)
    gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if alternate else gate_up.chunk(2, 1)
    return gate, up, down, named.get("down_proj_bias")


def decoded(matrix: dict[str, Any]) -> Tensor:
    """(rows, K) float64 of a matrix as the library loads it, by its definition and none of the library's code."""
    import moe_reference as oracle

    codes, scales = (torch.as_tensor(matrix[part])[None] for part in ("codes", "scales"))
    return oracle.decode((codes, scales), 0) * float(matrix["tensor_scale"])


def check_weights(original: Tensor, found: Tensor, what: str) -> None:
    """Nearest codes under a block scale that E4M3 rounds by at most 1/16: at most (1 + 1/16) / 6 of the block's largest."""
    error = (found - original.double()).abs().unflatten(-1, (-1, 16))
    largest = original.double().abs().unflatten(-1, (-1, 16)).amax(-1, keepdim=True)
    if not bool((error <= largest * (17 / 96) * (1 + 2.0**-20)).all()):
        raise Judged(f"{what}: not the model's own weights")


def twin_of(module: nn.Module, expert: Callable[[int], dict[str, Any]], what: str) -> nn.Module:
    """The module in float64 with the weights that the library holds, each of which must be that of its place."""
    twin = copy.deepcopy(module).double()
    if hasattr(twin, "config"):
        twin.config = copy.deepcopy(module.config)
        twin.config._experts_implementation = "eager"
    for e, (originals, places) in enumerate(
        zip(zip(*stacks(module)[:3], strict=True), zip(*stacks(twin)[:3], strict=True), strict=True)
    ):
        loaded = expert(e)
        for name, original, place in zip(("gate", "up", "down"), originals, places, strict=True):
            weights = decoded(loaded[name])
            check_weights(original, weights, f"{what} expert {e} {name}")
            place.copy_(weights)
    return twin


# ---- the bound


def bound(twin: nn.Module, batch: Batch) -> Tensor:
    """(T, hidden): how far an output may be from float64 where h is rounded to bf16 and sums are fp32's.

    With f = (K/16 + 1) 2^-22 of one GEMM element (docs/numerics.md, section 7) and S the sum of |x| |W| of gate or up, g and u
    are off by f S. silu has a slope of at most 1.1 and is below its argument in magnitude, and so are the clamped ones; OAI adds
    1 to u: h is off by at most 2.2 f S_gate (S_up + 1). Rounding to 8 bits adds 2^-8 of |h|, the activation 2^-20. Row n of down then
    carries each |h| error by |D|, and its own sum adds f. h itself comes from the module, under a down projection that is the
    identity.
    """
    gate, up, down, _ = stacks(twin)
    hidden, inter = down.shape[1:]
    probe = copy.deepcopy(twin)
    stacks(probe)[2].copy_(torch.eye(hidden, inter, dtype=torch.float64).expand_as(down))
    for name, parameter in probe.named_parameters():
        if name == "down_proj_bias":
            parameter.data.zero_()
    one, two = ((k / 16 + 1) * 2.0**-22 for k in (hidden, inter))
    x = batch.hidden.double()
    on_input = type(twin).__name__ == "Llama4TextExperts"
    total = torch.zeros_like(x)
    for k in range(batch.ids.shape[1]):
        ids, weights = batch.ids[:, k], batch.weights[:, k : k + 1].double().abs()
        single = Batch(batch.hidden, ids[:, None], batch.weights[:, k : k + 1] if on_input else torch.ones_like(batch.weights[:, :1]))
        if type(twin).__name__ not in CALLS:  # of one choice alone some classes make a vector; a second one of weight 0 adds nothing
            single = Batch(batch.hidden, ids[:, None].expand(-1, 2), torch.tensor([1.0, 0.0]).expand(len(ids), 2))
        h = call(probe, single)[:, :inter].abs()
        biases = dict(twin.named_parameters()).get("gate_up_proj_bias")
        largest = 0.0 if biases is None else float(biases.detach().abs().max())
        sums = [(x.abs().unsqueeze(1) * w[ids].abs()).sum(-1) + largest for w in (gate, up)]
        d = down[ids].abs()
        off = h * (2.0**-8 + 2.0**-20) + 2.2 * one * sums[0] * (sums[1] + 1)
        row = (d * off.unsqueeze(1)).sum(-1) + (two + 2.0**-22) * ((d * h.unsqueeze(1)).sum(-1) + largest)
        total += row if on_input else row * weights
    return total * (1 + 2.0**-8) + 2.0**-100


def check_output(got: Tensor, twin: nn.Module, batch: Batch, what: str) -> None:
    want, allowed = call(twin, batch), bound(twin, batch)
    wrong = ~((got.double() - want).abs() <= allowed)
    if wrong.any() or not float(want.std()) > 0:
        raise Judged(f"{what}: {int(wrong.sum())} of {wrong.numel()} outputs are not the model's own")


# ---- what a model's routers sent to its experts


def batches(model: nn.Module, found: list[Experts]) -> dict[str, Batch]:
    """By path, of one run of the model; of a module with a call of its own, random ones whose products are numbers of bf16."""
    seen: dict[str, Batch] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            given = [*inputs, *kwargs.values()]
            hidden = given[0].reshape(-1, given[0].shape[-1]).to(torch.bfloat16).float()
            if type(module).__name__ not in CALLS:
                seen[path] = Batch(hidden, given[1], given[2].float())
                return
            generator = torch.Generator().manual_seed(3)
            scores = torch.rand(TOKENS, moe_classes.EXPERTS, generator=generator)
            top_k = 1 if CALLS[type(module).__name__] is _llama4 else moe_classes.TOP_K
            ids = scores.topk(top_k).indices
            weights = torch.full((TOKENS, top_k), 1 / 2 if top_k > 1 else 1 / 4)
            seen[path] = Batch(hidden[:TOKENS], ids, weights)

        return hook

    hooks = [one.module.register_forward_pre_hook(keep(one.path), with_kwargs=True) for one in found]
    tokens = torch.arange(3, 3 + TOKENS).reshape(2, TOKENS // 2) * 7 % 150 + 3
    try:
        with torch.no_grad():
            getattr(model, "thinker", model)(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def routed(batch: Batch, experts: int) -> Batch:
    """Without assignments to identity experts, which are the host's: their weight is 0, in any expert."""
    mine = batch.ids < experts
    return Batch(batch.hidden, batch.ids.where(mine, 0), batch.weights.where(mine, 0))


# ---- one class


def reason(error: Exception, directory: pathlib.Path) -> str:
    text = str(error).replace(str(directory), "").strip(": ")
    return re.sub(r"; known are .*", "", re.sub(r"^config\.json model_type [^:]*: ", "", text))


def shared_of(model: nn.Module, layer: int) -> nn.Module | None:
    pattern = re.compile(rf"(?:^|\.)layers\.{layer}\..*?(?:shared_experts?|shared_mlp|share_expert)$")
    return next((m for path, m in model.named_modules() if pattern.search(path) and "talker" not in path), None)


def check_shared(model: nn.Module, checkpoint: Any, layer: int) -> str:
    """"none", "loaded" (the layer's own, with the model's weights) or "beside" (the model keeps it)."""
    module = shared_of(model, layer)
    if module is None:
        return "none"
    try:
        loaded = checkpoint.shared_expert(layer)
    except nv.Error:
        return "beside"
    named = {name.removesuffix(".weight").removesuffix("_proj"): p.data for name, p in module.named_parameters()}
    for fused in ("gate_up", "input_linear"):
        if fused in named:
            named["gate"], named["up"] = named[fused].chunk(2)
    for name, others in (("gate", ("w1",)), ("up", ("w3",)), ("down", ("w2", "output_linear"))):
        original = next(named[one] for one in (name, *others) if one in named)
        check_weights(original, decoded(loaded[name]), f"layer {layer} shared expert {name}")
    return "loaded"


def layers_of(directory: pathlib.Path, found: list[Experts], seen: dict[str, Batch], what: str) -> Iterator[tuple[Experts, nn.Module, Any]]:
    """Each layer of a checkpoint, judged; its experts, their twin and the open layer."""
    checkpoint = nv.Checkpoint(str(directory))
    numbers = [one.layer for one in found]
    if checkpoint.inspect([])["layers"] != numbers:
        raise Judged(f"{what}: layers {checkpoint.inspect([])['layers']}, and the model has experts in {numbers}")
    for one in found:
        place = f"{what} layer {one.layer}"
        twin = twin_of(one.module, lambda e, layer=one.layer: checkpoint.expert(layer, e), place)
        layer = nv.MoeLayer.from_checkpoint(checkpoint, one.layer, max_tokens=64, shared_intermediate_size=0, **OPTIONS)
        batch = routed(seen[one.path], layer.config.num_experts)
        check_output(layer.run(batch.hidden, batch.ids.int().contiguous(), batch.weights.contiguous()), twin, batch, place)
        yield one, twin, layer


def judge_adapter(module: nn.Module, twin: nn.Module, batch: Batch, what: str) -> None:
    with torch.no_grad():
        got = module(batch.hidden, batch.ids, batch.weights).reshape(batch.hidden.shape)
    check_output(got, twin, batch, what)


def adapter_rows(model_class: ModelClass, quantized: pathlib.Path, model: nn.Module, twins: dict[str, Any], seen: dict[str, Batch]) -> dict[str, str]:
    """enable() and from_pretrained(): "yes", or why not. twins: {"enable", "from_pretrained"} to {path: twin}."""
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
            row[name] = re.sub(r"^[\w.]+ \(", "(", reason(error, quantized))[:200]
            continue
        packed = {path: m for path, m in made.named_modules() if isinstance(m, adapter.Nvfp4Experts)}
        if not set(packed) >= set(twins[name]):  # enable() takes the experts of speech too
            raise Judged(f"{name}: packed {sorted(packed)}, expected {sorted(twins[name])}")
        for path, twin in twins[name].items():
            judge_adapter(packed[path], twin, seen[path], f"{name} {path}")
        row[name] = "yes"
    return row


def judge(model_class: ModelClass, scratch: pathlib.Path) -> dict[str, Any]:
    """The row of a class. Judged where something loads that is not the model's own."""
    directory = scratch / "floats"
    model = moe_classes.tiny_model(model_class).to(torch.bfloat16)
    model.save_pretrained(directory)
    model = model.float()
    found = moe_classes.experts_of(model)
    row: dict[str, Any] = {"class": model_class.model.__name__, "experts": type(found[0].module).__name__ if found else ""}
    try:
        inspected = nv.inspect(directory, layers=[])
    except nv.Error as error:
        return {**row, "loads": reason(error, directory)}
    found = [one for one in found if "talker" not in one.path]
    seen = batches(model, found)
    names = nv.Checkpoint(str(directory)).expert(found[0].layer, 0)["names"]
    row["names"] = re.sub(rf"^.*?\.{found[0].layer}\.", "", names["gate"].replace("experts.0.", "experts.E."))
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


# ---- the table


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def render(record: dict[str, Any]) -> str:
    head = [
        BEGIN,
        "",
        f"Made by `scripts/check_moe_classes.py` from transformers {record['transformers']}: {len(record['classes'])} classes, of which "
        f"{sum(row['loads'] == 'yes' for row in record['classes'].values())} load.",
        "",
        "| `model_type` | gate of an expert, in layer L | activation | shared expert | loads | enable() | from_pretrained() |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = []
    for model_type, row in record["classes"].items():
        loads = row["loads"]
        if loads == "yes" and row["quantize"] != "yes":
            loads = f"as it is; `quantize`: {row['quantize']}"
        cells = [f"`{row['names']}`" if "names" in row else "", row.get("activation", ""), row.get("shared", ""), loads]
        cells += [row.get(name, "") for name in ("enable", "from_pretrained")]
        rows.append(f"| {model_type} | " + " | ".join(cell(text) for text in cells) + " |")
    return "\n".join([*head, *rows, "", END])


def page(text: str, record: dict[str, Any]) -> str:
    """The page with the record's table between the markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        raise ValueError(f"{PAGE.name}: expected {BEGIN} and {END}")
    return before + render(record) + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text()) if args.model_types and RECORD.exists() else {"classes": {}}
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
    record = {"transformers": transformers.__version__, "classes": dict(sorted(record["classes"].items()))}
    if not failed:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(page(PAGE.read_text(), record))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests/python"))
    sys.exit(main())
