"""Checkpoints that can be read in more than one way, against a float64 oracle of their files. NumPy only."""

from __future__ import annotations

import json
import shutil

import numpy as np
import nvfp4_moe as nv
import pytest
from layers import batch, decoded, from_bf16, plain_layer, relative_l2, stacked
from qwen3_moe import EXPERTS, HIDDEN, SHAPES, write_safetensors


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def error(model, directory, layer=1, **reading):
    """Returns the relative error of a layer, as it is read, against float64 with one tensor scale per expert."""
    hidden, ids, weights = batch(12)
    hidden, ids = hidden.astype(np.float16).astype(np.float32), ids % EXPERTS
    stacks = stacked([nv.load_expert(model[0], layer, expert) for expert in range(EXPERTS)])
    for expert in range(EXPERTS):
        for stack, name in zip(stacks.values(), SHAPES, strict=True):
            want = from_bf16(model[1][f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"])
            assert relative_l2(decoded(*(part[expert] for part in stack)), want) < 0.15
    opened = nv.MoeLayer.from_checkpoint(directory, layer, activation_format="bf16", row_format="fp32", **reading)
    return relative_l2(opened.run(hidden, ids, weights), plain_layer(stacks, hidden, ids, weights))


def write_stacks(model, directory, order):
    """Writes all experts under an engine's names, with gate and up in one tensor."""
    shutil.copy(model[0] / "config.json", directory)
    tensors = {}
    for layer in (0, 1):
        stem = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([model[1][f"{stem}.{expert}.{name}.weight"] for expert in range(EXPERTS)]) for name in SHAPES
        )
        both = {"gate_first": [gate, up], "up_first": [up, gate]}.get(order)
        rows = np.stack([gate, up], 2).reshape(EXPERTS, -1, HIDDEN) if both is None else np.concatenate(both, 1)
        tensors |= {f"{stem}.w13_weight": rows, f"{stem}.w2_weight": down}
    write_safetensors(directory / "model.safetensors", tensors)


@pytest.mark.parametrize("order", ["gate_first", "up_first", "interleaved"])
def test_the_order_of_gate_and_up_is_the_callers(model, source, order):
    write_stacks(model, source, order)
    cache, out = source.parent / "cache", source.parent / "out"
    by_default = error(model, source, cache_directory=cache)  # gate first, as in the family's own checkpoints
    assert by_default < 2e-2 if order == "gate_first" else by_default > 0.2
    for _ in range(2):  # a cached layer has the order it was opened with
        assert error(model, source, cache_directory=cache, gate_up_order=order) < 2e-2
    opened = nv.Checkpoint(str(source), gate_up_order=order)
    assert error(model, opened) < 2e-2
    with pytest.raises(ValueError, match="expected none with an open Checkpoint"):
        nv.MoeLayer.from_checkpoint(opened, 1, gate_up_order=order)
    nv.quantize_checkpoint(source, out, gate_up_order=order, share_gate_up_scale=False)
    assert error(model, out) < 2e-2
    with pytest.raises(ValueError, match="gate_up_order: expected one of gate_first, up_first, interleaved"):
        nv.inspect(source, gate_up_order="up")


def test_a_tensor_that_no_format_has_is_refused_or_accepted(model, tmp_path):
    shutil.copy(model[0] / "config.json", tmp_path)
    name = "model.layers.1.mlp.experts.1.up_proj.lora_A.weight"
    write_safetensors(tmp_path / "model.safetensors", {**model[1], name: np.zeros(4, np.uint16)})
    with pytest.raises(nv.Unsupported, match=r"accept_tensors.*\[unknown_expert_tensor\]"):
        nv.MoeLayer.from_checkpoint(tmp_path, 1)
    found = {finding["id"]: finding for finding in nv.inspect(tmp_path)["findings"]}
    assert (found["unknown_expert_tensor"]["severity"], found["unknown_expert_tensor"]["tensor"]) == ("error", name)
    nv.MoeLayer.from_checkpoint(tmp_path, 0)
    assert error(model, tmp_path, accept_tensors=["*.lora_A.weight"]) < 2e-2
    found = {finding["id"] for finding in nv.inspect(tmp_path, accept_tensors=["*"])["findings"]}
    assert "accepted_tensor" in found and "unknown_expert_tensor" not in found


def test_an_unknown_model_type_is_read_as_the_callers_family(model, source):
    shutil.copy(model[0] / "model.safetensors", source)
    config = json.loads((model[0] / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "some_new_moe"}))
    with pytest.raises(nv.Unsupported, match=r"'some_new_moe' is not known; its files read as --family qwen3_moe \("):
        nv.inspect(source)
    cache, out = source.parent / "cache", source.parent / "out"
    for _ in range(2):
        assert error(model, source, family="qwen3_moe", cache_directory=cache) < 2e-2
    found = {finding["id"]: finding for finding in nv.inspect(source, family="qwen3_moe")["findings"]}
    assert found["read_as_family"]["severity"] == "warning"
    with pytest.raises(ValueError, match="expected none with an open Checkpoint"):
        nv.MoeLayer.from_checkpoint(nv.Checkpoint(str(source), family="qwen3_moe"), 1, family="qwen3_moe")
    nv.quantize_checkpoint(source, out, family="qwen3_moe", share_gate_up_scale=False)
    assert error(model, out, family="qwen3_moe") < 2e-2
    with pytest.raises(ValueError, match="family: expected a known model type or family, got 'qwen9'"):
        nv.inspect(source, family="qwen9")


def test_the_index_decides_which_copy_is_read(model, source):
    shutil.copy(model[0] / "config.json", source)
    overlay = {name: tensor for name, tensor in model[1].items() if ".layers.1.mlp.experts.2." in name}
    stale = {name: np.full_like(tensor, 0x4000) for name, tensor in overlay.items()}
    write_safetensors(source / "base.safetensors", {**model[1], **stale})
    write_safetensors(source / "overlay.safetensors", overlay)
    where = {name: "overlay.safetensors" if name in overlay else "base.safetensors" for name in model[1]}
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": float("nan")}, "weight_map": where}))
    assert error(model, source) < 2e-2
    nv.quantize_checkpoint(source, source.parent / "out", share_gate_up_scale=False)
    assert error(model, source.parent / "out") < 2e-2


def test_numbers_that_only_python_writes(model, source):
    shutil.copy(model[0] / "model.safetensors", source)
    config = json.loads((model[0] / "config.json").read_text())
    config |= {"time_step_limit": [0.0, float("inf")], "jitter": float("nan"), "x": {"y": -float("inf")}}
    (source / "config.json").write_text(json.dumps(config))
    assert error(model, source) < 2e-2
    nv.quantize_checkpoint(source, source.parent / "out", share_gate_up_scale=False)
    assert json.loads((source.parent / "out/config.json").read_text())["time_step_limit"] == [0.0, float("inf")]
