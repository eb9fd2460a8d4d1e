"""Checks a loaded model: its quantized modules against float64 at equal router decisions, and the rest of the model.

There are two judgements, and no gap between them. Each Nvfp4Experts and Nvfp4LinearModule: its output for its recorded
inputs must be in the interval of the numeric contract (moe_reference.py), computed in float64 from the files' codes and
scales. The model around them: transformers' own class with the original weights, whose experts and linears return the
recorded outputs, must get the same inputs and compute the same logits, bit for bit. So its routers decided the same.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import moe_reference as oracle
import nvfp4_moe as nv
import torch
from checkpoints import raw
from nvfp4_moe.transformers import Nvfp4Experts, Nvfp4LinearModule
from torch import nn


class Call(NamedTuple):
    inputs: tuple[torch.Tensor, ...]
    output: torch.Tensor


def record(model: nn.Module, run: Any) -> tuple[dict[str, Call], Any]:
    """Returns the inputs and the output of each quantized module in run(model), by path, and the result of run."""
    calls: dict[str, Call] = {}

    def hook(path: str) -> Any:
        def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            assert path not in calls, f"{path} ran twice"
            calls[path] = Call(tuple(tensor.clone() for tensor in inputs), output.clone())

        return keep

    hooks = [
        module.register_forward_hook(hook(path))
        for path, module in model.named_modules()
        if isinstance(module, (Nvfp4Experts, Nvfp4LinearModule))
    ]
    try:
        with torch.no_grad():
            returned = run(model)
    finally:
        for handle in hooks:
            handle.remove()
    return calls, returned


# ---- each module against the contract


def expert_weights(directory: Path, layer: int, experts: int) -> oracle.Weights:
    """A layer's codes, block scales and tensor scales as the files have them."""
    loaded = [nv.load_expert(directory, layer, expert) for expert in range(experts)]
    for one in loaded:
        one["gate"] = one["gate"] or one["up"]  # experts without a gate: the oracle does not read it
    return oracle.Weights(
        *(
            (
                torch.stack([torch.as_tensor(one[name]["codes"]) for one in loaded]),
                torch.stack([torch.as_tensor(one[name]["scales"]) for one in loaded]),
                torch.tensor([one[name]["tensor_scale"] for one in loaded], dtype=torch.float32),
            )
            for name in ("gate", "up", "down")
        )
    )


def options_of(layer: nv.MoeLayer) -> oracle.Options:
    known = {field.name for field in dataclasses.fields(oracle.Options)}
    return oracle.Options(**{k: v for k, v in dataclasses.asdict(layer.config).items() if k in known})


def experts_outside(
    module: Nvfp4Experts, call: Call, weights: oracle.Weights, accuracy: oracle.Accuracy = oracle.CONTRACT
) -> torch.Tensor:
    """Returns (T, hidden) bool: the elements that the contract does not allow."""
    hidden, ids, router = call.inputs
    want = oracle.forward(options_of(module.packed), weights, hidden, ids, router.float(), accuracy=accuracy)
    assert not want.free.any()
    return oracle.outside(want, call.output)


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def lines_of(x: torch.Tensor, activation_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns lines (R, K) in float64 as a GEMM gets them: quantized values, and the scale (R, 1) of each line."""
    point, scale = oracle.Interval(x, x), torch.ones((len(x), 1), dtype=oracle.F64)
    if activation_format == "nvfp4":
        point, scale = oracle.quantize(point, oracle.RowScales("dynamic_token"))
    elif activation_format == "fp8":
        point, scale = oracle.quantize_fp8(point, oracle.RowScales("dynamic_token", holds=448.0))
    elif activation_format == "int8_block":
        point = oracle.quantize_int8(point)
    else:
        return oracle.round_to(x, oracle.BF16), scale
    return point.lo, scale


def layer_limit(config: nv.MoeConfig, tokens: int) -> float:
    """The relative L2 between two correct kernels (docs/explanation/numerics.md, section 8, with its symbols)."""
    k = config.hidden_size
    e = 2 * (k / 16 + (2 if config.expert_biases else 1)) * 2.0**-25 * (2 / math.pi) * k**0.5
    rows = tokens * config.top_k * config.intermediate_size
    squares, t, worth = 2 / math.pi * 2.0**-14 / (7 / 3), 21.0, {"nvfp4": 0.42, "fp8": 0.125}
    if config.activation_format == "fp8":
        inner = config.intermediate_size
        e, e2 = (times * 2.0**-14.2 * (2 / math.pi) * size**0.5 for times, size in ((2, k), (1, inner)))
        squares += e**2 + e2**2 + inner * (1.5 * 2.0**-9 / 448) ** 2
    if config.activation_format in worth:
        m = worth[config.activation_format] * e * rows
        squares += (m + (2 * m * t) ** 0.5 + t / 3) / rows
    return float(squares**0.5)


def contract_experts(layer: nv.MoeLayer, module: nn.Module) -> nn.Module:
    """Returns transformers' own experts (module: of gpt-oss's or Nemotron-H's class) in float64, with the numbers that
    a layer's GEMMs multiply: its weights and biases, and hidden and h rounded as its activation format requires
    (dynamic scales, rows in fp32)."""
    form = layer.config.activation_format
    assert (layer.config.activation_scale, layer.config.intermediate_scale, layer.config.row_format) == (
        "dynamic_token",
        "dynamic_token",
        "fp32",
    )
    experts = copy.deepcopy(module).cpu().double()
    experts.config._experts_implementation = "eager"  # torch's grouped products have no float64

    def weight(matrix: dict[str, Any]) -> torch.Tensor:
        parts = tuple(torch.as_tensor(matrix[part])[None] for part in ("codes", "scales"))
        decoded, shift = oracle.decode_fp8(parts, 0) if form == "fp8" else (oracle.decode(parts, 0), 0)
        return decoded * (float(matrix["tensor_scale"]) * 2.0**shift)

    with torch.no_grad():
        for e in range(layer.expert_count):
            held = layer.expert(e)
            if layer.config.expert_biases:  # gpt-oss: (K, N), gate and up in alternate columns
                for name, weights, biases in (
                    ("gate", experts.gate_up_proj[e][:, 0::2], experts.gate_up_proj_bias[e, 0::2]),
                    ("up", experts.gate_up_proj[e][:, 1::2], experts.gate_up_proj_bias[e, 1::2]),
                    ("down", experts.down_proj[e], experts.down_proj_bias[e]),
                ):
                    weights.copy_(weight(held[name]).T)
                    biases.copy_(torch.as_tensor(held[name]["bias"]))
            else:
                assert held["gate"] is None
                experts.up_proj[e], experts.down_proj[e] = weight(held["up"]), weight(held["down"])

    def quantized(x: torch.Tensor) -> torch.Tensor:
        lines, scale = lines_of(x, form)
        return lines * scale

    name = "act_fn" if hasattr(experts, "act_fn") else "_apply_gate"
    activation = getattr(experts, name)
    # In the instance, so that it replaces the class's own, a method or a module.
    experts.__dict__[name] = lambda x: quantized(oracle.round_to(activation(x), oracle.BF16))
    experts.register_forward_pre_hook(lambda _, inputs: (quantized(inputs[0]), *inputs[1:]))
    return experts.requires_grad_(False)


def linear_weight(tensors: dict[str, torch.Tensor], stem: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(codes (1, out, in/2), scales (1, out, in/16), tensor scale) of either format's names."""
    codes = tensors.get(f"{stem}.weight_packed", tensors.get(f"{stem}.weight"))
    if f"{stem}.weight_scale_2" in tensors:
        scale = float(tensors[f"{stem}.weight_scale_2"])
    else:
        scale = float((1 / tensors[f"{stem}.weight_global_scale"].double()).float())
    return codes[None], tensors[f"{stem}.weight_scale"].view(torch.uint8)[None], scale


def linear_outside(module: Nvfp4LinearModule, call: Call, weight: tuple[torch.Tensor, torch.Tensor, float]) -> Any:
    """(..., out) bool: the elements outside the bound of a GEMM element (docs/explanation/numerics.md, section 7)."""
    x = call.inputs[0].reshape(-1, module.in_features).double()
    form = module.packed.describe()["activation_format"]
    x, scale = lines_of(x, form)
    factor = oracle.CONTRACT.gemm(module.in_features, form)
    dtype = str(call.output.dtype).removeprefix("torch.")
    decoded, shift = oracle.decode_fp8(weight, 0) if form == "fp8" else (oracle.decode(weight, 0), 0)
    alpha = oracle._alpha(scale, weight[2] * 2.0**shift)
    want = oracle.gemm(oracle.Interval(x, x), decoded, alpha, factor, oracle.FORMATS[dtype])
    got = call.output.reshape(-1, module.out_features).double()
    return ~((got >= want.lo) & (got <= want.hi))


def outside(model: nn.Module, calls: dict[str, Call], directory: Path, stems: dict[str, str]) -> dict[str, int]:
    """Counts the elements of each quantized module's output that the contract does not allow. stems: of linears in the
    files, by path."""
    tensors = raw(directory)
    wrong = {}
    for path, call in calls.items():
        module = model.get_submodule(path)
        if isinstance(module, Nvfp4Experts):
            layer = int(path.split("layers.")[1].split(".")[0])
            weights = expert_weights(directory, layer, module.packed.config.num_experts)
            wrong[path] = int(experts_outside(module, call, weights).sum())
        else:
            wrong[path] = int(linear_outside(module, call, linear_weight(tensors, stems[path])).sum())
    return wrong


def judged(model: nn.Module, directory: Path, stems: dict[str, str], run: Any) -> tuple[dict[str, Call], Any]:
    """Returns the result of record after checking that the contract allows all outputs."""
    calls, returned = record(model, run)
    wrong = outside(model, calls, directory, stems)
    assert not any(wrong.values()), wrong
    return calls, returned


# ---- the model around them


class Replay(nn.Module):
    """Returns the recorded output. Fails if its input is not the recorded one."""

    def __init__(self, path: str, call: Call) -> None:
        super().__init__()
        self.path, self.call = path, call

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        for got, want in zip(inputs, self.call.inputs, strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want), f"{self.path}: another input"
        return self.call.output


def replayed(twin: nn.Module, calls: dict[str, Call], run: Any) -> Any:
    """Returns the result of run for a stock model whose modules at these paths replay their calls."""
    for path, call in calls.items():
        parent, _, child = path.rpartition(".")
        setattr(twin.get_submodule(parent), child, Replay(path, call))
    with torch.no_grad():
        return run(twin)


# ---- torch's memory


def memory_events(profile: Any) -> list[Any]:
    """Allocations and frees of torch.profiler with profile_memory, in order: each has total_allocated, in bytes."""

    def within(event: Any) -> Any:
        if event.name == "[memory]":
            yield event.extra_fields
        for child in event.children:
            yield from within(child)

    return [found for event in profile.profiler.kineto_results.experimental_event_tree() for found in within(event)]
