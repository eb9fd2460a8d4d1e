"""Nemotron-3 in GGUF (nemotron_h_moe): experts of two matrices, MoE layers by a list of widths, latent projections. Values as any
architecture's: test_gguf.py."""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv
import pytest

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Type  # noqa: E402
from gguf_files import HIDDEN, INTERMEDIATE, Model, check, refused  # noqa: E402


def test_experts_behind_a_latent_projection(tmp_path, count):
    """Nemotron-3 Super: the experts have a width of their own, and the shared expert the model's."""
    model = Model("nemotron_h_moe", shared_kind=Type.NVFP4)
    model.fields |= {"embedding_length": 2 * HIDDEN, "moe_latent_size": HIDDEN}
    for name, shape in (("down", (HIDDEN, 2 * HIDDEN)), ("up", (2 * HIDDEN, HIDDEN))):
        model.add(f"blk.1.ffn_latent_{name}.weight", np.zeros(shape, np.float32), Type.F32)
    path = model.write(tmp_path / "model.gguf")
    info = nv.inspect(path)
    assert info["options"]["hidden_size"] == HIDDEN and info["options"]["shared_intermediate_size"] == 0
    found = {finding["id"]: finding for finding in info["findings"]}
    assert "shared_expert_of_other_width" in found
    assert not [finding for finding in info["findings"] if finding["severity"] == "error"]
    assert "projection between the model's width and the experts'" in " ".join(f["text"] for f in info["findings"])
    check(path, model, count, "latent")
    layer = nv.MoeLayer.from_checkpoint(path, 1, activation_format="bf16", row_format="fp32")
    assert layer.config.activation == "relu2"
    x = np.random.default_rng(0).normal(size=(5, HIDDEN)).astype(np.float32)
    ids, weights = np.array([[0, 1], [2, 3], [3, 0], [1, 2], [0, 3]], np.int32), np.full((5, 2), 0.5, np.float32)
    expected = np.zeros((5, HIDDEN))
    for token in range(5):
        for k, expert in enumerate(ids[token]):
            up, down = (model.values[1, p][expert].astype(np.float64) for p in ("up", "down"))
            expected[token] += weights[token, k] * (down @ np.square(np.maximum(up @ x[token], 0)))
    error = np.linalg.norm(layer.run(x, ids, weights) - expected) / np.linalg.norm(expected)
    assert error < 5 * 2.0**-9  # hidden and h rounded to bf16: 2^-9 and the square's twice that, as in test_nemotron.py


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("feed_forward_length", None, "missing"),
        ("feed_forward_length", 64, "an array of 2 integers"),
        ("feed_forward_length", [64], "an array of 2 integers"),
        ("feed_forward_length", [0, 0], "no layer of the model"),
        ("expert_used_count", [2, 2], "an integer"),  # a width for each layer, as Puzzle's models have
        ("expert_feed_forward_length", [INTERMEDIATE, INTERMEDIATE], "an integer"),
        ("moe_latent_size", 0, "an integer"),
    ],
)
def test_what_nemotrons_metadata_may_not_say(field, value, says, tmp_path):
    model = Model("nemotron_h_moe")
    model.fields[field] = value
    if value is None:
        del model.fields[field]
    refused(model, tmp_path, nv.BadInput, says)
