"""Writes tiny models as GGUF files with the gguf package, from random blocks, and lists the supported architectures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import nvfp4_moe as nv
import pytest
from gguf import GGMLQuantizationType as Type

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 128, 192
PROJECTIONS = ("gate", "up", "down")


def shape_of(projection: str, intermediate: int = INTERMEDIATE) -> tuple[int, int]:
    return (HIDDEN, intermediate) if projection == "down" else (intermediate, HIDDEN)


@dataclass(frozen=True)
class Architecture:
    """One row of the table: the fields that not all architectures have, and the library's names for them."""

    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = (0, 1)  # of two blocks
    shared: int = 0
    activation: str = "swiglu"
    router_weight: str = "after_down"
    top_k: int = TOP_K

    @property
    def projections(self) -> tuple[str, ...]:
        return ("up", "down") if self.activation == "relu2" else PROJECTIONS


DENSE_FIRST = {"leading_dense_block_count": 1}
ARCHITECTURES = {
    "llama": Architecture("mixtral"),
    "qwen2moe": Architecture("qwen", {"expert_shared_feed_forward_length": 64}, shared=64),
    "qwen3moe": Architecture("qwen"),
    "qwen3next": Architecture("qwen", {"expert_shared_feed_forward_length": 64}, shared=64),
    "qwen35moe": Architecture("qwen", {"expert_shared_feed_forward_length": 64}, shared=64),
    "qwen3vlmoe": Architecture("qwen_vl"),
    "deepseek2": Architecture("deepseek_v3", {"expert_shared_count": 1} | DENSE_FIRST, (1,), INTERMEDIATE),
    "deepseek32": Architecture("deepseek_v3", {"expert_shared_count": 1} | DENSE_FIRST, (1,), INTERMEDIATE),
    "deepseek4": Architecture(
        "deepseek_v4",
        {"expert_shared_count": 1, "swiglu_clamp_exp": [10.0, 10.0], "expert_weights_scale": 1.5},
        shared=INTERMEDIATE,
        activation="swiglu_clamped",
        router_weight="before_down",
    ),
    "glm4moe": Architecture("glm", {"expert_shared_count": 1} | DENSE_FIRST, (1,), INTERMEDIATE),
    "glm-dsa": Architecture("glm", {"expert_shared_count": 2} | DENSE_FIRST, (1,), 2 * INTERMEDIATE),
    "kimi-linear": Architecture("kimi", {"expert_shared_count": 1} | DENSE_FIRST, (1,), INTERMEDIATE),
    "minimax-m2": Architecture("minimax"),
    "llama4": Architecture(
        "llama4", {"interleave_moe_layer_step": 2}, (1,), INTERMEDIATE, router_weight="on_input", top_k=1
    ),
    # Block 0 is Mamba's: its width is 0.
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        {"feed_forward_length": [0, 64], "expert_shared_count": 1, "expert_shared_feed_forward_length": 64},
        (1,),
        64,
        activation="relu2",
    ),
}


def random_blocks(rng: np.random.Generator, kind: Type, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 (..., bytes of a row): any codes under any legal scales. MXFP4: scales within 2^17 of each other."""
    elems, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // elems, size), dtype=np.uint8)
    if kind == Type.NVFP4:
        blocks[..., :4] = rng.integers(1, 0x7F, blocks[..., :4].shape)
    elif kind == Type.MXFP4:
        blocks[..., :1] = rng.integers(110, 128, blocks[..., :1].shape)
    return blocks.reshape(*shape[:-1], -1)


def random_tensor(rng: np.random.Generator, kind: Type, shape: tuple[int, ...]) -> np.ndarray:
    if kind in (Type.F32, Type.F16):
        return rng.normal(size=shape).astype(np.float32 if kind == Type.F32 else np.float16)
    if kind == Type.BF16:
        return gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
    return random_blocks(rng, kind, shape)


class Model:
    """tensors: (array, type) of each; values: the gguf package's values of them, by (layer, projection)."""

    def __init__(
        self,
        architecture: str = "qwen3moe",
        kind: Type = Type.NVFP4,
        *,
        fused: bool = False,
        scales: bool = True,
        shared_kind: Type | None = None,
        seed: int = 0,
    ):
        self.row = ARCHITECTURES[architecture]
        self.architecture = architecture
        self.kind = kind
        self.fields: dict[str, Any] = {
            "block_count": 2,
            "embedding_length": HIDDEN,
            "expert_count": EXPERTS,
            "expert_used_count": self.row.top_k,
            ("feed_forward_length" if architecture == "llama" else "expert_feed_forward_length"): INTERMEDIATE,
        } | self.row.fields
        self.tensors: dict[str, tuple[np.ndarray, Type]] = {}
        self.values: dict[tuple[int, str], np.ndarray] = {}
        rng, projections = np.random.default_rng(seed), self.row.projections
        self.add("token_embd.weight", rng.normal(size=(16, HIDDEN)).astype(np.float32), Type.F32)
        for layer in self.row.layers:
            self.add(
                f"blk.{layer}.ffn_gate_inp.weight", rng.normal(size=(EXPERTS, HIDDEN)).astype(np.float32), Type.F32
            )
            stacks = {p: random_tensor(rng, kind, (EXPERTS, *shape_of(p))) for p in projections}
            factors = {p: np.ones(EXPERTS, np.float32) for p in projections}
            if kind == Type.NVFP4 and scales:
                factors = {p: rng.uniform(1e-4, 1e-3, EXPERTS).astype(np.float32) for p in projections}
            if fused:
                stacks["gate_up"] = np.concatenate([stacks["gate"], stacks["up"]], axis=1)
                factors["up"] = factors["gate_up"] = factors["gate"]
            for name in ("gate_up", "down") if fused else projections:
                stem = f"blk.{layer}.ffn_{name}_exps"
                self.add(f"{stem}.weight", stacks[name], kind)
                if kind == Type.NVFP4 and scales:
                    self.add(f"{stem}.scale", factors[name], Type.F32)
                    self.add(f"{stem}.input_scale", rng.uniform(1e-3, 1e-2, EXPERTS).astype(np.float32), Type.F32)
            for p in projections:
                self.values[layer, p] = dequantized(stacks[p], kind) * factors[p][:, None, None]
            if shared_kind is not None:
                for p in projections:
                    stored = random_tensor(rng, shared_kind, shape_of(p, self.row.shared))
                    factor = np.float32(rng.uniform(1e-4, 1e-3) if shared_kind == Type.NVFP4 else 1)
                    self.add(f"blk.{layer}.ffn_{p}_shexp.weight", stored, shared_kind)
                    if shared_kind == Type.NVFP4:
                        self.add(f"blk.{layer}.ffn_{p}_shexp.scale", np.array([factor]), Type.F32)
                    if shared_kind in (Type.NVFP4, Type.MXFP4):
                        self.values[layer, "shared " + p] = dequantized(stored, shared_kind) * factor

    def add(self, name: str, array: np.ndarray, kind: Type) -> None:
        self.tensors[name] = (array, kind)

    def write(self, path: Path, **options: Any) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture, **options)
        for name, value in self.fields.items():
            key = f"{self.architecture}.{name}"
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_uint32(key, value)
        writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(100)])
        for name, (array, kind) in self.tensors.items():
            writer.add_tensor(name, array, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def dequantized(stored: np.ndarray, kind: Type) -> np.ndarray:
    """float32, by the gguf package."""
    return gguf.quants.dequantize(stored, kind).astype(np.float32)


# ---- comparisons with the values that the library loads


def values(matrix) -> np.ndarray:
    return nv.dequantize(matrix["codes"], matrix["scales"], matrix["tensor_scale"])


def differing(ours: np.ndarray, theirs: np.ndarray) -> int:
    """Counts elements whose bits differ; ggml has no -0."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == np.float32
    return int(((ours.view(np.uint32) != theirs.view(np.uint32)) & ((ours != 0) | (theirs != 0))).sum())


def check(path, model: Model, count, what: str) -> None:
    wrong = total = 0
    for layer in model.row.layers:
        for expert in range(EXPERTS):
            loaded = nv.load_expert(path, layer, expert)
            assert (loaded["gate"] is None) == ("gate" not in model.row.projections)
            for p in model.row.projections:
                theirs = model.values[layer, p][expert]
                wrong += differing(values(loaded[p]), theirs)
                total += theirs.size
    count(what, wrong, total)
    matrices = len(model.row.layers) * EXPERTS * len(model.row.projections)
    assert wrong == 0 and total == matrices * HIDDEN * INTERMEDIATE


def refused(model: Model, tmp_path, kind, *words: str) -> None:
    path = model.write(tmp_path / "model.gguf")
    with pytest.raises(kind) as error:
        nv.load_expert(path, 0, 0)
    for word in words:
        assert word in str(error.value)
