"""The layers that can be measured, one file per library. A library that cannot be imported is skipped by name."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from ..shapes import Shape
from ..workload import Routing


class Layer(Protocol):
    """The layers of one rotation. A step must only enqueue: it is captured in a CUDA graph."""

    def prepare(self, tokens: int) -> None:
        """Chooses kernels and allocates buffers for batches of that size. Not timed."""

    def run(self, number: int, x: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
        """One step of layer `number`: hidden, expert ids and router weights in, the finished bf16 output out."""


class Kind(NamedTuple):
    module: str  # file of this package
    variant: str  # passed to the module's open()
    packages: tuple[str, ...]  # distributions that it needs; their versions are recorded
    weights: str  # "nvfp4" or "bf16"
    activations: str  # a key of reference.TOLERANCE
    about: str


VLLM_TUNED = "with the tuning and the glue kernels that vLLM gives it on SM90"
KINDS = {
    "nvfp4_moe_bf16": Kind("ours", "bf16", (), "nvfp4", "bf16", "this library, W4A16"),
    "nvfp4_moe_fp8": Kind("ours", "fp8", (), "nvfp4", "fp8", "this library, W4A8 in E4M3"),
    "nvfp4_moe_nvfp4": Kind("ours", "nvfp4", (), "nvfp4", "nvfp4", "this library, W4A4"),
    "humming_indexed": Kind(
        "humming",
        "indexed",
        ("humming-kernels", "vllm"),
        "nvfp4",
        "bf16",
        f"Humming's indexed GEMM {VLLM_TUNED}; vLLM's choice there without expert parallelism",
    ),
    "humming_grouped": Kind(
        "humming",
        "grouped_contiguous",
        ("humming-kernels", "vllm"),
        "nvfp4",
        "bf16",
        f"Humming's grouped GEMM {VLLM_TUNED}; vLLM's choice there with expert parallelism",
    ),
    "marlin": Kind("marlin", "", ("vllm",), "nvfp4", "bf16", "vLLM's Marlin layer"),
    "grouped_mm": Kind(
        "grouped_mm",
        "",
        ("torch",),
        "bf16",
        "bf16",
        "torch's grouped_mm over unquantized weights, the rest in plain torch",
    ),
}


def version(name: str) -> str:
    """Returns the versions of a layer's packages, "humming-kernels 0.1.19, vllm 0.33.0"."""
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in KINDS[name].packages)


def opener(name: str) -> Callable[..., Layer]:
    """open(shape, weights of each layer in rotation, most tokens). ImportError if a package is missing."""
    kind = KINDS[name]
    return partial(importlib.import_module(f"{__name__}.{kind.module}").open_layer, kind.variant)


def compiler(name: str) -> Callable[[Sequence[Shape], Sequence[int]], None] | None:
    """Returns the function that compiles a layer's kernels before anything is timed, if it compiles any at run time."""
    kind = KINDS[name]
    found = getattr(importlib.import_module(f"{__name__}.{kind.module}"), "compile_kernels", None)
    return found and partial(found, kind.variant)


def expert_map(shape: Shape, device: torch.device) -> torch.Tensor | None:
    """Returns vLLM's map from the model's experts to a rank's, -1 for others; None if the rank has all."""
    if shape.local_experts == shape.experts:
        return None
    numbers = torch.full((shape.experts,), -1, dtype=torch.int32, device=device)
    numbers[: shape.local_experts] = torch.arange(shape.local_experts, dtype=torch.int32, device=device)
    return numbers
