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
def test_inspect_lists_what_is_missing_or_has_a_wrong_shape(model, packed, tmp_path, attacked):
    attacked(3)
    change_config(packed, num_experts=1000)
    for layer, finding in enumerate(errors(packed)):
        assert (finding["id"], finding["layer"], finding["expert"]) == ("missing_expert", layer, EXPERTS)
        assert finding["count"] == 1000 - EXPERTS and len(finding["examples"]) == 3
    assert [finding["layer"] for finding in errors(packed, [])] == [0, 1]
    told = nv.inspect(packed)
    assert set(told["statistics"]) == {0, 1} and told["statistics"][0]["codes_bytes"] > 0
    with pytest.raises(nv.BadInput, match=rf"layer 1 expert {EXPERTS} .* \[missing_expert\]"):
        nv.MoeLayer.from_checkpoint(packed, 1)
    change_config(packed, num_experts=EXPERTS, hidden_size=2 * HIDDEN)
    found = [(finding["id"], finding["layer"], finding["count"]) for finding in errors(packed)]
    assert found == [("shape_mismatch", layer, 3 * EXPERTS) for layer in (0, 1)]
    shutil.copy(model[0] / "config.json", tmp_path)
    kept = {name: t for name, t in model[1].items() if ".layers.1.mlp.experts.2." not in name}
    write_safetensors(tmp_path / "model.safetensors", kept)
    (finding,) = errors(tmp_path)
    assert (finding["id"], finding["layer"], finding["expert"]) == ("missing_expert", 1, 2)


def test_sizes_are_the_checkpoints(packed):
    with pytest.raises(ValueError, match="num_experts: expected the checkpoint's 4, got 2"):
        nv.MoeLayer.from_checkpoint(packed, 0, num_experts=2)
    part = nv.MoeLayer.from_checkpoint(packed, 0, 1, 2)
    assert (part.first_expert, part.expert_count, part.config.num_experts) == (1, 2, EXPERTS)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_numbers_that_are_not_finite_name_their_field(value):
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
    for make in (nv.MoeConfig, lambda **options: nv.explain(options)):
        with pytest.raises(nv.InvalidArgument, match=rf"^swiglu_limit: expected a finite number, got {value}$"):
            make(**sizes, activation="swiglu_oai", swiglu_limit=value)
