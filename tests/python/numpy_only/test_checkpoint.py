"""A Qwen3-MoE checkpoint, written here byte by byte: inspect, quantize_checkpoint, load_expert. NumPy only."""

from __future__ import annotations

import json

import numpy as np
import nvfp4_moe as nv
import pytest
from layers import from_bf16
from qwen3_moe import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, write_model


def test_inspect(model):
    told = nv.inspect(model[0])
    assert (told["format"], told["layers"], told["tensors"]) == ("float", [0, 1], len(model[1]))
    expected = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    assert {name: told["options"][name] for name in expected} == expected
    assert not [finding for finding in told["findings"] if finding["severity"] == "error"]
    assert nv.Checkpoint(str(model[0])).model()["options"] == told["options"]
    assert nv.inspect(model[0], [])["statistics"] == {}


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_quantize_and_read_back(model, form, tmp_path):
    directory, tensors = model
    done = nv.quantize_checkpoint(directory, tmp_path / "out", output_format=form)
    assert [layer["layer"] for layer in done["layers"]] == [0, 1]
    told = nv.inspect(tmp_path / "out")
    assert told["format"] == form and set(told["statistics"]) == {0, 1}
    loaded = nv.load_expert(tmp_path / "out", 1, 3)
    assert loaded["gate"]["tensor_scale"] == loaded["up"]["tensor_scale"]
    for name, part in (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")):
        ours = loaded[part]
        x = from_bf16(tensors[f"model.layers.1.mlp.experts.3.{name}.weight"])
        codes, scales, _ = nv.quantize(x, tensor_scale=ours["tensor_scale"])
        if form == "modelopt":  # compressed-tensors stores the reciprocal: a scale an ulp away may move a code
            assert (ours["codes"] == codes).all() and (ours["scales"] == scales).all()
        y = nv.dequantize(ours["codes"], ours["scales"], ours["tensor_scale"])
        # Half a step of E2M1 is at most its block scale, which is amax/6 rounded to E4M3: at most 1/17 above.
        amax = np.abs(x).reshape(*x.shape[:-1], -1, 16).max(-1).repeat(16, -1)
        assert y.shape == x.shape and (np.abs(y - x) <= amax / 6 * (1 + 1 / 16)).all()


def test_coded_block_scales_load_as_the_plain_ones(model, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    write_model(source, intermediate=64)
    for coding in ("plain", "csf"):
        done = nv.quantize_checkpoint(source, tmp_path / coding, scale_coding=coding)
        assert done["scale_coding"] == coding
    plain, coded = (nv.inspect(tmp_path / coding)["statistics"] for coding in ("plain", "csf"))
    for layer in (0, 1):
        assert coded[layer]["csf"] and not plain[layer]["csf"]
        assert coded[layer]["decoded_scales_bytes"] == plain[layer]["scales_bytes"] != coded[layer]["scales_bytes"]
        for expert in range(EXPERTS):
            ours, theirs = (nv.load_expert(tmp_path / coding, layer, expert) for coding in ("csf", "plain"))
            for part in ("gate", "up", "down"):
                assert (ours[part]["codes"] == theirs[part]["codes"]).all()
                assert (ours[part]["scales"] == theirs[part]["scales"]).all()
    with pytest.raises(ValueError, match="scale_coding"):
        nv.quantize_checkpoint(source, tmp_path / "other", scale_coding="zip")
    with pytest.raises(nv.Unsupported, match="an even number of columns"):  # 48 / 16 scales a row of down
        nv.quantize_checkpoint(model[0], tmp_path / "other", scale_coding="csf")


def test_options_and_slices(model, tmp_path):
    done = nv.quantize_checkpoint(model[0], tmp_path, layers=[0], share_gate_up_scale=False)
    assert [layer["layer"] for layer in done["layers"]] == [0]
    whole, part = nv.load_expert(tmp_path, 0, 2), nv.load_expert(tmp_path, 0, 2, first=16, count=32)
    assert whole["gate"]["tensor_scale"] != whole["up"]["tensor_scale"]
    assert (part["up"]["codes"] == whole["up"]["codes"][16:48]).all()
    assert (part["down"]["codes"] == whole["down"]["codes"][:, 8:24]).all()


def test_progress_cancels(model, tmp_path):
    for answer, kind in ((lambda _: False, nv.Cancelled), (lambda _: 1 / 0, ZeroDivisionError), (3, TypeError)):
        with pytest.raises(kind):
            nv.quantize_checkpoint(model[0], tmp_path / "out", progress=answer)


@pytest.mark.parametrize(
    ("scales", "got"),
    [
        ({1: None}, "got 1: None"),
        ({0: 0.5}, "got 0: 0.5"),
        ({0: (0.1,)}, r"got 0: \(0.1,\)"),
        ({"0": (0.1, 0.2)}, r"got '0': \(0.1, 0.2\)"),
        ("scales.json", "got str"),
    ],
)
def test_input_scales_are_pairs_by_layer(model, tmp_path, scales, got):
    with pytest.raises(nv.InvalidArgument, match=f"input_scales: expected .*{got}$"):
        nv.quantize_checkpoint(model[0], tmp_path / "out", input_scales=scales)


def test_an_error_names_the_finding_behind_it(model, tmp_path):
    nv.quantize_checkpoint(model[0], tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    data[begin + header["model.layers.0.mlp.experts.2.up_proj.weight_scale"]["data_offsets"][0]] = 0x7F
    file.write_bytes(data)
    for load in (lambda: nv.load_expert(tmp_path, 0, 2), lambda: nv.MoeLayer.from_checkpoint(tmp_path, 0)):
        with pytest.raises(nv.BadInput, match=r"layer 0 expert 2 .*: expected .* \[block_scale_nan\]") as told:
            load()
        assert told.value.finding == "block_scale_nan"
    assert nv.load_expert(tmp_path, 0, 1)
