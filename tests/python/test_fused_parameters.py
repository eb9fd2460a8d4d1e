"""Fused parameters with biases, interleaved gate and up, or no gate, against a layer of separate experts."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import nvfp4_moe as nv  # noqa: E402
from fused_layers import INNER, E, H, K, inputs, layers, opened, parameters, run  # noqa: E402
from nvfp4_moe import _fused_experts as fused  # noqa: E402
from nvfp4_moe._fused_parameters import FusedParameters  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def biases(seed: int = 3) -> dict:
    """w13_bias (E, 2I) in the order [gate; up] and w2_bias (E, H), in bfloat16 as engines keep them."""
    random = torch.Generator().manual_seed(seed)
    return {
        "w13_bias": torch.randn(E, 2 * INNER, generator=random).bfloat16(),
        "w2_bias": torch.randn(E, H, generator=random).bfloat16(),
    }


OAI = {"activation": "swiglu_oai", "swiglu_limit": 7.0}


def in_turn(tensor):
    """Interleaves rows [gate; up] as gate's and up's alternately."""
    return torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2)


def apart(seed: int = 0, **options):
    """The same experts with separate matrices and biases."""
    stacks = {name: tuple(map(torch.from_numpy, stack)) for name, stack in layers.weights(seed).items()}
    config = nv.MoeConfig(E, K, H, INNER, activation_format="bf16", **options)
    if config.activation == "relu2":
        del stacks["gate"]
    parts = None
    if config.expert_biases:
        w13, w2 = biases().values()
        parts = (None if config.activation == "relu2" else w13[:, :INNER], w13[:, INNER:], w2)
    return nv.MoeLayer.from_tensors(config, **stacks, biases=parts, max_tokens=32)


@pytest.mark.parametrize("order", ["halves", "up first", "in turn"])
def test_biases_go_with_their_rows(order):
    given, added = parameters(up_first=order == "up first"), biases()
    if order == "up first":
        added["w13_bias"] = torch.cat([added["w13_bias"][:, INNER:], added["w13_bias"][:, :INNER]], 1)
    if order == "in turn":
        for name in ("w13", "w13_scale"):
            given[name] = in_turn(given[name].view(torch.uint8))
        added["w13_bias"], given["interleaved"] = in_turn(added["w13_bias"]), True
    experts = opened(given | added, expert_biases=True, **OAI)
    batch, expected = inputs(), apart(expert_biases=True, **OAI)
    assert torch.equal(run(experts, *batch), expected.run(*batch))
    assert not torch.equal(run(experts, *batch), apart(**OAI).run(*batch))
    other = parameters(seed=1) | biases(4)
    fused.replace_fused(experts, FusedParameters(**other))
    fused.replace_fused(experts, FusedParameters(**given, **added))
    assert torch.equal(run(experts, *batch), expected.run(*batch)), "back at the first weights and biases"


def test_experts_without_a_gate_have_one_matrix_in_w13():
    given = parameters()
    given |= {name: given[name].view(torch.uint8)[:, INNER:] for name in ("w13", "w13_scale")}
    relu2 = {"activation": "relu2", "gated": False}
    batch, expected = inputs(), apart(activation="relu2")
    for scale in (given["w13_tensor_scale"][:, 1], given["w13_tensor_scale"][:, 1:]):
        experts = opened(given | {"w13_tensor_scale": scale}, **relu2)
        assert torch.equal(run(experts, *batch), expected.run(*batch))
    fused.replace_fused(experts, FusedParameters(**given | {"w13_tensor_scale": scale, "gated": False}))
    assert torch.equal(run(experts, *batch), expected.run(*batch))
    added = {"w13_bias": biases()["w13_bias"][:, INNER:], "w2_bias": biases()["w2_bias"]}
    experts = opened(given | added | {"w13_tensor_scale": scale}, expert_biases=True, **relu2)
    assert torch.equal(run(experts, *batch), apart(activation="relu2", expert_biases=True).run(*batch))
    with pytest.raises(nv.InvalidArgument, match="w13_tensor_scale"):
        opened(given, **relu2)


def test_biases_of_slices_count_once_where_one_rank_has_down_s():
    """Two slices, with down biases only on the first rank: their sum is the sum of the whole layer's two halves."""
    added = biases()
    given, batch = parameters(), inputs()
    # One expert per token, so that a rank's result is one rounded row.
    batch = (batch[0], batch[1][:, :1].contiguous(), torch.ones(len(batch[0]), 1))
    total = torch.zeros(len(batch[0]), H)
    for rank, columns in enumerate((slice(0, 16), slice(16, INNER))):
        rows = torch.cat([torch.arange(INNER)[columns], torch.arange(INNER)[columns] + INNER])
        part = {
            "w13": given["w13"][:, rows],
            "w13_scale": given["w13_scale"].view(torch.uint8)[:, rows],
            "w13_tensor_scale": given["w13_tensor_scale"],
            "w2": given["w2"][:, :, columns.start // 2 : columns.stop // 2],
            "w2_scale": given["w2_scale"].view(torch.uint8)[:, :, columns.start // 16 : columns.stop // 16],
            "w2_tensor_scale": given["w2_tensor_scale"],
            "w13_bias": added["w13_bias"][:, rows],
            "w2_bias": added["w2_bias"] * (rank == 0),
        }
        total += run(opened(part, expert_biases=True, top_k=1, row_format="fp32", **OAI), *batch).float()
    config = nv.MoeConfig(E, 1, H, INNER, activation_format="bf16", expert_biases=True, row_format="fp32", **OAI)
    stacks = {name: tuple(map(torch.from_numpy, stack)) for name, stack in layers.weights(0).items()}
    w13, w2 = added.values()
    whole = nv.MoeLayer.from_tensors(config, **stacks, biases=(w13[:, :INNER], w13[:, INNER:], w2), max_tokens=32)
    expected = whole.run(*batch).float()
    # Three roundings to bfloat16, of each rank's result and of the whole one's, each half an ulp of its value.
    assert ((total - expected).abs() <= 2.0**-8 * (expected.abs() + total.abs() + w2.float().abs().max())).all()
    twice = expected + w2.float()[batch[1][:, 0].long()]
    assert (total - expected).norm() < 0.05 * (total - twice).norm(), "twice the bias is far off"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"w2_bias": None}, "expected both or neither"),
        ({"w2_bias": torch.zeros(E, H + 1)}, "w13_bias, w2_bias: expected"),
        ({"w13_bias": torch.full((E, 2 * INNER), float("nan"))}, "bias"),
    ],
)
def test_biases_that_are_wrong_are_an_error(wrong, words):
    with pytest.raises(nv.Error, match=words):
        opened(parameters() | biases() | wrong, expert_biases=True, **OAI)
    for given, options in ((biases(), {}), ({}, {"expert_biases": True})):
        with pytest.raises(nv.Error, match="biases"):
            opened(parameters() | given, **options, **OAI)
