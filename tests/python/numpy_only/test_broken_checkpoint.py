"""Checkpoints that do not load can still be inspected, and wrong questions about them are errors. NumPy only."""

from __future__ import annotations

import json
import math
import shutil

import nvfp4_moe as nv
import pytest
from qwen3_moe import EXPERTS, HIDDEN, write_safetensors


@pytest.fixture
def packed(model, tmp_path):
    nv.quantize_checkpoint(model[0], tmp_path / "packed")
    return tmp_path / "packed"


def errors(path, layers=None):
    return [finding for finding in nv.inspect(path, layers)["findings"] if finding["severity"] == "error"]


def change_config(path, **fields):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.attack("hostile files")
def test_inspect_lists_a_missing_expert(packed, attacked):
    change_config(packed, num_experts=1000)
    attacked()
    for layer, finding in enumerate(errors(packed)):
        assert (finding["id"], finding["layer"], finding["expert"]) == ("missing_expert", layer, EXPERTS)
        assert finding["count"] == 1000 - EXPERTS and len(finding["examples"]) == 3
    assert [finding["layer"] for finding in errors(packed, [])] == [0, 1]
    told = nv.inspect(packed)
    assert set(told["statistics"]) == {0, 1} and told["statistics"][0]["codes_bytes"] > 0
    with pytest.raises(nv.BadInput, match=rf"layer 1 expert {EXPERTS} .* \[missing_expert\]"):
        nv.MoeLayer.from_checkpoint(packed, 1)


@pytest.mark.attack("hostile files")
def test_inspect_lists_a_wrong_shape(packed, attacked):
    change_config(packed, hidden_size=2 * HIDDEN)
    attacked()
    found = errors(packed)
    assert [(finding["id"], finding["layer"]) for finding in found] == [("shape_mismatch", 0), ("shape_mismatch", 1)]
    assert all(finding["count"] == 3 * EXPERTS for finding in found)


@pytest.mark.attack("hostile files")
def test_a_float_checkpoint_without_an_expert(model, tmp_path, attacked):
    shutil.copy(model[0] / "config.json", tmp_path)
    kept = {name: t for name, t in model[1].items() if ".layers.1.mlp.experts.2." not in name}
    write_safetensors(tmp_path / "model.safetensors", kept)
    attacked()
    (finding,) = errors(tmp_path)
    assert (finding["id"], finding["layer"], finding["expert"]) == ("missing_expert", 1, 2)


def test_sizes_are_the_checkpoints(packed):
    words = (
        r"num_experts: expected the checkpoint's 4, got 2 \(a rank's part of the experts is asked for by first expert"
    )
    with pytest.raises(ValueError, match=words):
        nv.MoeLayer.from_checkpoint(packed, 0, num_experts=2)
    with pytest.raises(ValueError, match="hidden_size: expected the checkpoint's 64, got 32"):
        nv.MoeLayer.from_checkpoint(packed, 0, hidden_size=32)
    part = nv.MoeLayer.from_checkpoint(packed, 0, 1, 2)
    assert (part.first_expert, part.expert_count, part.config.num_experts) == (1, 2, EXPERTS)


def test_a_git_lfs_pointer_is_named(packed):
    (file,) = packed.glob("*.safetensors")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4998663184\n")
    with pytest.raises(nv.BadInput, match="got a Git-LFS pointer to it: run `git lfs pull`"):
        nv.inspect(packed)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_name_their_field(value):
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
    for field in ("swiglu_limit", "swiglu_alpha", "static_headroom", "max_router_weight", "intermediate_fixed"):
        with pytest.raises(nv.InvalidArgument, match=rf"^{field}: expected a finite number, got {value}$"):
            nv.MoeConfig(**sizes, activation="swiglu_oai", **{field: value})
        with pytest.raises(nv.InvalidArgument, match=rf"^{field}: expected a finite number, got {value}$"):
            nv.explain({**sizes, field: value})
