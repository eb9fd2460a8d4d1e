"""Checkpoints written by nvidia-modelopt's and compressed-tensors' own export code load, decode to the producers' own
values, and verify. The exports run here, from transformers models with random weights (tests/vectors/
make_checkpoint_vectors.py); the Qwen3-MoE ones are also committed under tests/vectors, for hosts without the producers.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import nvfp4_moe as nv
import pytest
from checkpoints import experts, raw, same_values

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "tests" / "vectors"
TOOL = Path(os.environ.get("NVFP4_MOE_TOOL", ROOT / "build" / "cpu" / "cli" / "nvfp4-moe"))
PRODUCERS = ("modelopt", "compressed_tensors")
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")
NAMES = {"qwen3_moe": "qwen"}  # family in nvfp4_moe's words, where it differs
CASES = [(family, producer) for family in FAMILIES for producer in PRODUCERS]


@pytest.mark.parametrize("producer", PRODUCERS)
def test_committed_checkpoints_are_what_the_producers_write(made, producer):
    import make_checkpoint_vectors as vectors
    import torch

    committed = json.loads((VECTORS / "checkpoints.json").read_text())
    if committed != {"seed": vectors.SEED, "versions": vectors.versions()}:
        pytest.skip(f"made with {committed['versions']}, installed are {vectors.versions()}")
    again, kept = made("qwen3_moe") / producer, VECTORS / f"{producer}_qwen3_moe"
    for file in kept.glob("*.json"):
        assert json.loads(file.read_text()) == json.loads((again / file.name).read_text()), file.name
    new, old = raw(again), raw(kept)
    assert set(new) == set(old)
    for name, tensor in new.items():
        assert tensor.dtype == old[name].dtype and tensor.shape == old[name].shape, name
        assert torch.equal(
            tensor.view(torch.uint8) if tensor.dim() else tensor,
            old[name].view(torch.uint8) if tensor.dim() else old[name],
        ), name


@pytest.mark.parametrize("producer", PRODUCERS)
def test_committed_checkpoints_load(producer):
    """Needs none of the producers: the committed bytes alone."""
    check_inspect(VECTORS / f"{producer}_qwen3_moe", "qwen3_moe", producer)
    for expert, _, _ in experts(VECTORS / f"{producer}_qwen3_moe"):
        for part in ("gate", "up", "down"):
            decoded = nv.dequantize(*expert[part].values())
            assert np.isfinite(decoded).all() and np.abs(decoded).max() > 0


def check_inspect(directory: Path, family: str, producer: str) -> None:
    info = nv.inspect(directory)
    assert [f["text"] for f in info["findings"] if f["severity"] != "note"] == []
    assert info["family"] == NAMES.get(family, family)
    assert info["format"] == producer.replace("_", "-")
    assert info["layers"] == ([1] if family == "deepseek_v3" else [0, 1])
    assert info["shared_experts"] == (1 if family == "deepseek_v3" else 0)
    expected = {"num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 48, "activation": "swiglu"}
    assert {key: info["options"][key] for key in expected} == expected
    for statistics in info["statistics"].values():
        assert statistics["experts"] == 4
        assert statistics["codes_bytes"] == 4 * 3 * 64 * 48 // 2
        assert statistics["scales_bytes"] == 4 * 3 * 64 * 48 // 16
        assert statistics["input_scale"]["hidden"] > 0 and statistics["input_scale"]["intermediate"] > 0


@pytest.mark.parametrize(("family", "producer"), CASES)
def test_loads_without_errors(made, family, producer):
    check_inspect(made(family) / producer, family, producer)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoded_weights_are_modelopts(made, family):
    """NVFP4QTensor.dequantize in double, where nothing rounds, rounded once to float32."""
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    directory = made(family) / "modelopt"
    tensors, seen = raw(directory), 0
    for expert, layer, _ in experts(directory):
        for part in ("gate", "up", "down"):
            name = expert["names"][part].removesuffix(".weight")
            codes, scales = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
            s = tensors[f"{name}.weight_scale_2"]
            mine = expert[part]
            assert (mine["codes"] == codes.numpy()).all()
            assert (mine["scales"] == scales.view(torch.uint8).numpy()).all()
            assert mine["tensor_scale"] == float(s)
            shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
            theirs = (
                NVFP4QTensor(shape, torch.bfloat16, codes)
                .dequantize(torch.float64, scale=scales.double(), double_scale=s.double(), block_sizes={-1: 16})
                .float()
            )
            assert same_values(torch.from_numpy(nv.dequantize(*mine.values())), theirs), name
            seen += 1
        check_input_scales(expert, tensors, layer, "input_scale", lambda value: value)
    assert seen == 12 * len(nv.inspect(directory, layers=[])["layers"])


@pytest.mark.parametrize("family", FAMILIES)
def test_decoded_weights_are_compressed_tensors(made, family, count):
    """Its files hold G, the reciprocal; a reader multiplies with s = float32(1/G). Its own dequantize with v*s for scale
    gives our bits; with v/G, as its decompress has it, the two differ by the roundings of 1/G and v/G only."""
    import torch
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    directory = made(family) / "compressed_tensors"
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    tensors, differing, total = raw(directory), 0, 0
    for expert, layer, _ in experts(directory):
        for part in ("gate", "up", "down"):
            name = expert["names"][part].removesuffix(".weight_packed")
            state = {
                key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")
            }
            codes, scales, g = state["weight_packed"], state["weight_scale"], state["weight_global_scale"]
            mine = expert[part]
            assert (mine["codes"] == codes.numpy()).all()
            assert (mine["scales"] == scales.view(torch.uint8).numpy()).all()
            assert mine["tensor_scale"] == float(np.float32(1 / np.float64(g)))
            shape = codes.shape[0], codes.shape[1] * 2
            values = unpack_fp4_from_uint8(codes, *shape, dtype=torch.float64)
            ours = torch.from_numpy(nv.dequantize(*mine.values()))
            product = scales.double() * mine["tensor_scale"]
            theirs = dequantize(values, product, None, scheme.weights, dtype=torch.float64).float()
            assert same_values(ours, theirs), name
            single = dequantize(
                values.float(), scales.float(), None, scheme.weights, dtype=torch.float32, global_scale=g
            )
            # Ours rounds 1/G and the product, theirs v/G and the product: four roundings of 2^-24 apart at most.
            assert ((ours - single).abs() <= 4 * 2.0**-24 * ours.abs() * (1 + 2.0**-20)).all()
            differing, total = differing + int((ours != single).sum()), total + ours.numel()
            # decompress itself rounds the product to bfloat16: 8 significant bits, so 2^-8 more.
            bf16 = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
            assert bf16.dtype == torch.bfloat16
            bound = (2.0**-8 + 4 * 2.0**-24) * ours.abs() * (1 + 2.0**-20)
            assert ((bf16.float() - ours).abs() <= bound).all()
        check_input_scales(
            expert, tensors, layer, "input_global_scale", lambda value: np.float32(1 / np.float64(value))
        )
    count("last bits against decompress in float32", differing, total)


def check_input_scales(expert, tensors, layer, suffix, to_scale) -> None:
    """The layer's activation scales are the maximum over all experts, gate and up together."""
    values = {"hidden": [], "intermediate": []}
    for name, tensor in tensors.items():
        if f"layers.{layer}." in name and ".experts." in name and name.endswith(f".{suffix}"):
            projection = name.split(".")[-2]
            which = "intermediate" if projection in ("down_proj", "w2") else "hidden"
            values[which].append(np.float32(to_scale(tensor.reshape(()).numpy())))
    assert len(values["hidden"]) == 8 and len(values["intermediate"]) == 4
    for which, of in values.items():
        assert np.float32(expert["input_scale"][which]) == max(of)


def run_tool(*arguments: str) -> subprocess.CompletedProcess:
    if not TOOL.exists():
        pytest.skip(f"no command line at {TOOL}")
    return subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(("family", "producer"), CASES)
def test_verify_passes(made, family, producer):
    """verify: packed weights against the file's bytes, kernels against the reference, and against the original, whose
    every weight lies within half a step of its block."""
    directory = made(family)
    result = run_tool("verify", directory / producer, "--tokens", "8")
    assert result.returncode == 0, result.stdout + result.stderr
    result = run_tool("verify", directory / producer, "--against", directory / "original", "--tokens", "8")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("producer", PRODUCERS)
def test_verify_passes_on_the_committed_checkpoints(producer):
    result = run_tool("verify", VECTORS / f"{producer}_qwen3_moe", "--tokens", "8", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    json.loads(result.stdout)
