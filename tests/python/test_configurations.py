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
TOP_KS = ("num_experts_per_tok", "num_experts_per_token")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Matrix(NamedTuple):
    tensors: dict[str, np.ndarray]  # part -> bytes or float32, as stored
    weights: np.ndarray  # (rows, cols) float64


def language(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def sizes(one: dict[str, Any]) -> tuple[int, int]:
    """(hidden, intermediate) of an expert."""
    text = language(one["config"])
    return text[one.get("hidden", "hidden_size")], text[one.get("intermediate", "moe_intermediate_size")]


def block(one: dict[str, Any]) -> int:
    nvfp4 = {"weight_scale_2", "weight_global_scale"} & one["parts"].keys()
    return 16 if nvfp4 else 32


def shape_of(part: str, rows: int, cols: int, size: int) -> tuple[int, ...]:
    if part in ("weight", "weight_packed"):
        return rows, cols // 2
    return (rows, cols // size) if part in ("weight_scale", "scale") else ()


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
        if part in ("weight", "weight_packed"):
            parts[part] = codes
        elif part in ("weight_scale", "scale"):
            parts[part] = scales
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
    for keys, value in ((COUNTS, EXPERTS), (TOP_KS, TOP_K)):
        text.update({key: value for key in keys if key in text})
    if isinstance(text.get("moe_layer_freq"), dict):
        text["moe_layer_freq"] = [0] * text["moe_layer_freq"]["dense"] + [1] * MOE_LAYERS
    quantization = config.get("quantization_config", {})
    if isinstance(name := quantization.get("quantized_layers"), str):
        quantization["quantized_layers"] = {
            name.format(l=layer): {"group_size": 16, "quant_algo": "NVFP4"} for layer in layers
        }
    return config, layers


def expand(one: dict[str, Any], directory: Path) -> dict[int, list[list[np.ndarray]]]:
    """Writes the tiny checkpoint. Returns each layer's experts as [gate, up, down]."""
    config, layers = shrink(one)
    random = np.random.default_rng(11)
    tensors: list[tuple[str, str, np.ndarray]] = []
    experts: dict[int, list[list[np.ndarray]]] = {}
    for layer in layers:
        experts[layer] = []
        for expert in range(EXPERTS):
            made = []
            for p, shape in zip(
                one["projections"], [(INTERMEDIATE, HIDDEN)] * 2 + [(HIDDEN, INTERMEDIATE)], strict=True
            ):
                built = matrix(one, *shape, random)
                stem = one["experts"].format(l=layer, e=expert, p=p)
                tensors += [(f"{stem}.{part}", one["parts"][part], value) for part, value in built.tensors.items()]
                made.append(built.weights)
            experts[layer].append(made)
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
    return experts


def activated(config: nv.MoeConfig, g: np.ndarray, u: np.ndarray) -> np.ndarray:
    if config.activation == "swiglu":
        return g / (1 + np.exp(-g)) * u
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
            gate, up, down = experts[expert]
            h = activated(config, gate @ x[token], up @ x[token])
            sums = [np.abs(w) @ np.abs(x[token]) for w in (gate, up)]
            # Before down, the product with the router weight is rounded once more.
            off = np.abs(h) * (2.0**-8 + 2.0**-20) + 2.2 * one * sums[0] * (sums[1] + 1)
            row = np.abs(down) @ off + (two + 2.0**-22) * (np.abs(down) @ np.abs(h))
            out[token] += weight * (down @ h)
            allowed[token] += weight * row
    return out, allowed * (1 + 2.0**-8) + 2.0**-100


@pytest.mark.parametrize("name", [name for name, one in REPOSITORIES.items() if one["shapes"]])
def test_the_published_shapes_are_those_of_the_published_sizes(name):
    one = REPOSITORIES[name]
    hidden, intermediate = sizes(one)
    assert one["source"] and set(one["parts"].values()) <= {"U8", "I8", "F8_E4M3", "F8_E8M0", "F32"}
    for tensor, shape in one["shapes"].items():
        p, part = tensor.split(".")
        down = one["projections"].index(p) == 2
        rows, cols = (hidden, intermediate) if down else (intermediate, hidden)
        assert tuple(shape) == shape_of(part, rows, cols, block(one)), tensor


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
    assert nv.Checkpoint(str(tmp_path)).inspect([])["options"]["activation_format"] == expect["activations"]
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
    swapped, _ = oracle(opened.config, [[up, gate, down] for gate, up, down in experts[layer]], hidden, ids, weights)
    assert (np.abs(got - swapped) > allowed).any()  # the bound sees gate and up exchanged
