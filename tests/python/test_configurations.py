"""Published configurations (tests/vectors/configurations.json): each is expanded to a tiny checkpoint with the same names
and layouts, then inspected, verified, and one layer compared with a float64 oracle of the files. NumPy only.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import nvfp4_moe as nv
import pytest

VECTORS = json.loads((Path(__file__).resolve().parents[1] / "vectors/configurations.json").read_text())
REPOSITORIES = {one["repository"]: one for one in VECTORS["repositories"]}
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MOE_LAYERS, TOKENS = 128, 64, 8, 2, 2, 12
COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
TOP_KS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Matrix(NamedTuple):
    tensors: dict[str, np.ndarray]  # part -> bytes or float32, as stored
    weights: np.ndarray  # (rows, cols) float64


class Projection(NamedTuple):
    weights: np.ndarray  # (rows, cols) float64
    bias: np.ndarray  # (rows,)


def language(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def sizes(one: dict[str, Any]) -> tuple[int, int]:
    """(hidden, intermediate) of an expert."""
    text = language(one["config"])
    return text[one.get("hidden", "hidden_size")], text[one.get("intermediate", "moe_intermediate_size")]


def count_of(one: dict[str, Any]) -> int:
    """The number of experts."""
    return next(language(one["config"])[key] for key in COUNTS if key in language(one["config"]))


def block(one: dict[str, Any]) -> int:
    nvfp4 = {"weight_scale_2", "weight_global_scale"} & one["parts"].keys()
    return 16 if nvfp4 else 32


def shape_of(part: str, rows: int, cols: int, size: int) -> tuple[int, ...]:
    if part in ("weight", "weight_packed"):
        return rows, cols // 2
    if part == "blocks":
        return rows, cols // size, size // 2
    if part == "bias":
        return (rows,)
    return (rows, cols // size) if part in ("weight_scale", "scale", "scales") else ()


def matrix(one: dict[str, Any], rows: int, cols: int, random: np.random.Generator) -> Matrix:
    size = block(one)
    codes = random.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    e4m3 = size == 16
    low, high = (0x28, 0x40) if e4m3 else (119, 122)
    scales = random.integers(low, high, (rows, cols // size), dtype=np.uint8)
    tensor_scale = np.float32(2.0 ** -random.integers(5, 8)) if e4m3 else np.float32(1)
    # Powers of two, so that compressed-tensors' reciprocals are exact.
    block_scale = (
        (8 + (scales & 7)) * 2.0 ** ((scales >> 3).astype(int) - 10) if e4m3 else 2.0 ** (scales.astype(int) - 127)
    )
    values = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(rows, cols)]
    parts = {}
    for part in one["parts"]:
        if part in ("weight", "weight_packed", "blocks"):
            parts[part] = codes.reshape(shape_of(part, rows, cols, size))
        elif part in ("weight_scale", "scale", "scales"):
            parts[part] = scales
        elif part == "bias":
            parts[part] = random.choice(np.array([0x3F00, 0xBE80, 0x3E00], np.uint16), rows)  # 1/2, -1/4, 1/8
        else:
            scale = tensor_scale if part.startswith("weight") else np.float32(2.0**-6)
            parts[part] = np.float32(1) / scale if "global" in part else scale
    return Matrix(parts, values * np.repeat(block_scale, size, 1) * np.float64(tensor_scale))


def shrink(one: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """The config of a tiny model, and its MoE layers."""
    config = copy.deepcopy(one["config"])
    text = language(config)
    first = one["expect"].get("first_layer", text.get("first_k_dense_replace", 0))
    layers = list(range(first, first + MOE_LAYERS))
    text["hidden_size"] = 2 * HIDDEN if "hidden" in one else HIDDEN
    text[one.get("hidden", "hidden_size")] = HIDDEN
    text[one.get("intermediate", "moe_intermediate_size")] = INTERMEDIATE
    text["num_hidden_layers"] = first + MOE_LAYERS
    text.update(one.get("shrink", {}))
    for keys, value in ((COUNTS, EXPERTS), (TOP_KS, TOP_K)):
        text.update({key: value for key in keys if key in text})
    if isinstance(text.get("moe_layer_freq"), dict):
        text["moe_layer_freq"] = [0] * text["moe_layer_freq"]["dense"] + [1] * MOE_LAYERS
    quantization = config.get("quantization_config", {})
    if isinstance(name := quantization.get("quantized_layers"), str):
        quantization["quantized_layers"] = {
            name.format(l=layer, e=expert, p=p): {"group_size": 16, "quant_algo": "NVFP4"}
            for layer in layers
            for expert in range(EXPERTS)
            for p in one["projections"]
        }
    return config, layers


def stack(made: list[list[Matrix]], part: str) -> np.ndarray:
    """A part of all experts, (experts, rows, ...). The rows of gate and up alternate."""
    return np.stack(
        [
            np.stack([one.tensors[part] for one in expert], 1).reshape(-1, *expert[0].tensors[part].shape[1:])
            for expert in made
        ]
    )


def expand(one: dict[str, Any], directory: Path) -> dict[int, list[list[Projection]]]:
    """Writes the tiny checkpoint. Returns each layer's experts as [gate, up, down], or [up, down] without a gate."""
    config, layers = shrink(one)
    random = np.random.default_rng(11)
    tensors: list[tuple[str, str, np.ndarray]] = []
    experts: dict[int, list[list[Projection]]] = {}
    stacked = "{e}" not in one["experts"]
    first = 2 if stacked else len(one["projections"]) - 1
    for layer in layers:
        made = [
            [matrix(one, *shape, random) for shape in [(INTERMEDIATE, HIDDEN)] * first + [(HIDDEN, INTERMEDIATE)]]
            for _ in range(EXPERTS)
        ]
        for part, dtype in one["parts"].items():
            if stacked:
                for p, of in zip(one["projections"], ([m[:2] for m in made], [m[2:] for m in made]), strict=True):
                    tensors.append((f"{one['experts'].format(l=layer, p=p)}_{part}", dtype, stack(of, part)))
                continue
            for expert, matrices in enumerate(made):
                for p, built in zip(one["projections"], matrices, strict=True):
                    stem = one["experts"].format(l=layer, e=expert, p=p)
                    tensors.append((f"{stem}.{part}", dtype, built.tensors[part]))
        experts[layer] = [[projection(built) for built in matrices] for matrices in made]
    tensors += [(name, dtype, np.zeros((16, 16), np.uint8)) for name, dtype in one.get("beyond", {}).items()]
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, value in tensors:
        begin, end = end, end + np.asarray(value).nbytes
        header[name] = {"dtype": dtype, "shape": list(np.shape(value)), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (directory / "model.safetensors").write_bytes(
        b"".join([len(text).to_bytes(8, "little"), text, *(np.asarray(value).tobytes() for *_, value in tensors)])
    )
    (directory / "config.json").write_text(json.dumps(config))
    if "hf_quant" in one:
        (directory / "hf_quant_config.json").write_text(json.dumps(one["hf_quant"]))
    return experts


def projection(built: Matrix) -> Projection:
    bias = built.tensors.get("bias", np.zeros(len(built.weights), np.uint16))
    return Projection(built.weights, (bias.astype(np.uint32) << 16).view(np.float32).astype(np.float64))


def activated(config: nv.MoeConfig, g: np.ndarray | None, u: np.ndarray) -> np.ndarray:
    if g is None:
        assert config.activation == "relu2"
        return np.maximum(u, 0) ** 2
    if config.activation == "swiglu":
        return g / (1 + np.exp(-g)) * u
    if config.activation == "gelu_tanh":
        return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
    if config.activation == "situ":
        of_gate, of_up = float(config.situ_gate_limit), float(config.situ_up_limit)
        return of_gate * np.tanh(g / of_gate) / (1 + np.exp(-g)) * of_up * np.tanh(u / of_up)
    limit = float(config.swiglu_limit)
    g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    if config.activation == "swiglu_clamped":
        return g / (1 + np.exp(-g)) * u
    assert config.activation == "swiglu_oai"
    return g / (1 + np.exp(-float(config.swiglu_alpha) * g)) * (u + 1)


def oracle(config: nv.MoeConfig, experts, hidden, ids, weights) -> tuple[np.ndarray, np.ndarray]:
    """The layer in float64, and how far a W4A16 output may be from it: tools/check/own_experts.py derives the bound."""
    out, allowed = np.zeros((2, *hidden.shape))
    x = hidden.astype(np.float64)
    one, two = ((k / 16 + 1) * 2.0**-22 for k in (HIDDEN, INTERMEDIATE))
    for token, chosen in enumerate(ids):
        for expert, weight in zip(chosen, weights[token].astype(np.float64), strict=True):
            *gated, up, down = experts[expert]
            values = [w @ x[token] + bias for w, bias in (*gated, up)]
            h = activated(config, values[0] if gated else None, values[-1])
            sums = [np.abs(w) @ np.abs(x[token]) + np.abs(bias) for w, bias in (*gated, up)]
            into_h = (
                2.2 * one * sums[0] * (sums[1] + 1) if gated else 2 * np.sqrt(h) * one * sums[0] + (one * sums[0]) ** 2
            )
            # Before down, the product with the router weight is rounded once more.
            off = np.abs(h) * (2.0**-8 + 2.0**-20) + into_h
            d = np.abs(down.weights)
            row = d @ off + (two + 2.0**-22) * (d @ np.abs(h) + np.abs(down.bias))
            out[token] += weight * (down.weights @ h + down.bias)
            allowed[token] += weight * row
    return out, allowed * (1 + 2.0**-8) + 2.0**-100


@pytest.mark.parametrize("name", [name for name, one in REPOSITORIES.items() if one["shapes"]])
def test_the_published_shapes_are_those_of_the_published_sizes(name):
    one = REPOSITORIES[name]
    hidden, intermediate = sizes(one)
    assert one["source"] and set(one["parts"].values()) <= {"U8", "I8", "F8_E4M3", "F8_E8M0", "F32", "BF16"}
    for tensor, shape in one["shapes"].items():
        p, part = tensor.split(".")
        down = p == one["projections"][-1]
        both = p == "gate_up_proj"
        rows, cols = (hidden, intermediate) if down else (intermediate * (1 + both), hidden)
        stacked = () if "{e}" in one["experts"] else (count_of(one),)
        assert tuple(shape) == (*stacked, *shape_of(part, rows, cols, block(one))), tensor


@pytest.mark.parametrize("name", [name for name, one in REPOSITORIES.items() if "elements" in one])
def test_the_published_counts_of_elements_are_those_of_the_published_sizes(name):
    """Routed experts are all U8 elements of the repository but a tenth: shared experts, dense layers, attention."""
    one = REPOSITORIES[name]
    hidden, intermediate = sizes(one)
    text = language(one["config"])
    layers = one.get("moe_layers", text["num_hidden_layers"] - one["expect"]["first_layer"])
    codes = layers * count_of(one) * len(one["projections"]) * hidden * intermediate // 2
    assert 0.9 * one["elements"]["U8"] <= codes <= one["elements"]["U8"]
    # A block scale for 16 codes, so 8 bytes. Other FP8 tensors would be more.
    assert one["elements"].get("F8_E4M3", one["elements"]["U8"] // 8) * 8 == one["elements"]["U8"]


@pytest.mark.parametrize("name", REPOSITORIES)
def test_it_is_read_as_published_and_computes_what_the_files_hold(name, tmp_path, tool):
    one = REPOSITORIES[name]
    expect = one["expect"]
    experts = expand(one, tmp_path)
    found = nv.inspect(tmp_path)
    assert (found["family"], found["format"], found["layers"]) == (expect["family"], expect["format"], sorted(experts))
    assert not [f for f in found["findings"] if f["severity"] == "error"], found["findings"]
    verified = tool("verify", tmp_path, "--seed", 1)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    layer = max(experts)
    activations = nv.Checkpoint(str(tmp_path)).inspect([])["options"]["activation_format"]
    assert activations == expect.get("activations", activations)
    opened = nv.MoeLayer.from_checkpoint(
        tmp_path, layer, activation_format="bf16", row_format="fp32", max_tokens=TOKENS
    )
    assert opened.config.activation == expect["activation"]
    random = np.random.default_rng(5)
    hidden = (random.standard_normal((TOKENS, HIDDEN)).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    ids = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
    weights = random.uniform(0.25, 1, (TOKENS, TOP_K)).astype(np.float32)
    want, allowed = oracle(opened.config, experts[layer], hidden, ids, weights)
    got = opened.run(hidden, ids, weights).astype(np.float64)
    assert want.std() > 0 and (np.abs(got - want) <= allowed).all(), np.abs(got - want).max()
    # The bound sees gate and up exchanged, or the next expert's up if there is no gate.
    others = experts[layer][1:] + experts[layer][:1]
    wrong = [
        [up, *gate, down] if gate else [other[-2], down]
        for (*gate, up, down), other in zip(experts[layer], others, strict=True)
    ]
    swapped, _ = oracle(opened.config, wrong, hidden, ids, weights)
    assert (np.abs(got - swapped) > allowed).any()
