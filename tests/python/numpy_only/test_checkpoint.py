"""A Qwen3-MoE checkpoint, written here byte by byte: inspect, quantize_checkpoint, load_expert. NumPy only."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import nvfp4_moe as nv
import pytest

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, TOP_K = 64, 48, 4, 2, 2
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, towards zero: any bfloat16 values will do."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """uint16 arrays as BF16."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        begin = len(data)
        data += tensor.tobytes()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """(directory, tensors as bfloat16 bits)"""
    random = np.random.default_rng(7)
    directory = tmp_path_factory.mktemp("qwen3_moe")
    tensors = {}
    for layer in range(LAYERS):
        mlp = f"model.layers.{layer}.mlp"
        tensors[f"{mlp}.gate.weight"] = bf16_bits(random.standard_normal((EXPERTS, HIDDEN)))
        for expert in range(EXPERTS):
            for name, shape in SHAPES.items():
                weight = random.standard_normal(shape) * 0.05
                tensors[f"{mlp}.experts.{expert}.{name}.weight"] = bf16_bits(weight)
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory, tensors


def test_inspect(model):
    told = nv.inspect(model[0])
    assert (told["format"], told["layers"], told["tensors"]) == ("float", [0, 1], len(model[1]))
    expected = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    assert {name: told["options"][name] for name in expected} == expected
    assert not [finding for finding in told["findings"] if finding["severity"] == "error"]
    assert nv.Checkpoint(str(model[0])).model()["options"] == told["options"]


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_quantize_and_read_back(model, form, tmp_path):
    directory, tensors = model
    seen = []
    done = nv.quantize_checkpoint(directory, tmp_path / "out", format=form, progress=lambda p: seen.append(p) or None)
    assert [layer["layer"] for layer in done["layers"]] == [0, 1] and seen
    told = nv.inspect(tmp_path / "out")
    assert told["format"] == form and set(told["statistics"]) == {0, 1}
    for name, part in (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")):
        ours = nv.load_expert(tmp_path / "out", 1, 3)[part]
        bits = tensors[f"model.layers.1.mlp.experts.3.{name}.weight"]
        x = (bits.astype(np.uint32) << 16).view(np.float32)
        codes, scales, _ = nv.quantize(x, tensor_scale=ours["tensor_scale"])
        if form == "modelopt":  # compressed-tensors stores the reciprocal: a scale an ulp away may move a code
            assert (ours["codes"] == codes).all() and (ours["scales"] == scales).all()
        y = nv.dequantize(ours["codes"], ours["scales"], ours["tensor_scale"])
        # Half a step of E2M1 is at most its block scale, which is amax/6 rounded to E4M3: at most 1/17 above.
        amax = np.abs(x).reshape(*x.shape[:-1], -1, 16).max(-1).repeat(16, -1)
        assert y.shape == x.shape and (np.abs(y - x) <= amax / 6 * (1 + 1 / 16)).all()


def test_progress_cancels(model, tmp_path):
    with pytest.raises(nv.Cancelled):
        nv.quantize_checkpoint(model[0], tmp_path / "out", progress=lambda _: False)
    with pytest.raises(ZeroDivisionError):
        nv.quantize_checkpoint(model[0], tmp_path / "out2", progress=lambda _: 1 / 0)
    with pytest.raises(TypeError):
        nv.quantize_checkpoint(model[0], tmp_path / "out3", progress=3)
