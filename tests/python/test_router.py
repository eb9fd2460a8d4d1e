"""select_experts against a loop over Python's floats: ties, Inf, NaN, groups, hash tables, arrays, refusals.

router_gemm against torch's float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import nvfp4_moe as nv
import pytest
from router_bounds import numbers, weight_bound

torch = pytest.importorskip("torch")
import nvfp4_moe.torch_op  # noqa: E402, F401

# ---- properties, against a loop over Python's floats


def chosen_by_loop(config: nv.RouterConfig, x: list[float], bias: list[float] | None) -> list[int]:
    """Selects ids as the contract defines them, in float64: for scores whose ties are exact."""

    def key(value: float) -> tuple[bool, float]:
        return (not math.isnan(value), 0.0 if math.isnan(value) else value)

    scores = list(x)
    if bias is not None:
        sigmoid = [1 / (1 + math.exp(-v)) if v > -700 else 0.0 for v in x]
        scores = [float(np.float32(np.float32(s) + np.float32(b))) for s, b in zip(sigmoid, bias, strict=True)]
    size = config.num_experts // config.num_expert_group
    groups = []
    for g in range(config.num_expert_group):
        best = sorted(scores[g * size : (g + 1) * size], key=key, reverse=True)
        groups.append(best[0] if config.group_score == "max" else best[0] + best[1])
    kept = sorted(range(len(groups)), key=lambda g: (key(groups[g]), -g), reverse=True)[: config.topk_group]
    legal = [e for e in range(config.num_experts) if e // size in kept]
    return sorted(legal, key=lambda e: (key(scores[e]), -e), reverse=True)[: config.top_k]


def random_fields(rng: np.random.Generator) -> dict[str, Any]:
    groups = int(rng.choice([1, 2, 3, 4, 7, 8, 32]))
    size = int(rng.integers(1, 1024 // groups + 1)) if rng.random() < 0.5 else int(rng.integers(1, 9))
    kept = int(rng.integers(1, groups + 1))
    return {
        "num_experts": groups * size,
        "top_k": int(rng.integers(1, min(32, kept * size) + 1)),
        "renormalize": bool(rng.random() < 0.5),
        "num_expert_group": groups,
        "topk_group": kept,
    }


def test_ids_of_ties_groups_and_special_values() -> None:
    rng = np.random.default_rng(11)
    special = np.array([0.0, -0.0, 1.0, 1.0, -1.0, 2.0, math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-45], np.float32)
    exact = np.array([0.0, 200.0, -200.0, math.inf, -math.inf], np.float32)  # their sigmoids: ties of sums are exact
    for biased in [False, True] * 100:
        fields = random_fields(rng)
        scoring = "sigmoid" if biased else str(rng.choice(["softmax", "sigmoid", "sqrt_softplus"]))
        by_sum = biased and fields["num_experts"] // fields["num_expert_group"] >= 2 and rng.random() < 0.7
        group_score = "top2_sum" if by_sum else "max"
        config = nv.RouterConfig(**fields, scoring=scoring, correction_bias=biased, group_score=group_score)
        x = rng.choice(exact if biased else special, size=(4, config.num_experts))
        bias = None
        if biased:
            bias = rng.choice(np.array([0.0, 0.5, -0.5, -2.0, 1.0], np.float32), size=config.num_experts)
        else:
            x[1:3] = rng.integers(-2, 3, config.num_experts), np.full(config.num_experts, 0.5)
        ids, weights = nv.select_experts(x, config, correction_bias=bias, ids_dtype="int64")
        assert ids.dtype == np.int64 and weights.dtype == np.float32
        assert ids.tolist() == [
            chosen_by_loop(config, row, None if bias is None else bias.tolist()) for row in x.tolist()
        ]
        assert np.isnan(weights[np.isnan(x).any(1)]).all()
        if biased and not config.renormalize:
            chosen = np.take_along_axis(x, ids, 1)
            assert ((weights == 1) == (chosen > 0)).all() and ((weights == 0.5) == (chosen == 0)).all()
        elif scoring == "softmax" and config.renormalize:
            assert np.allclose(weights[1:3].sum(1), 1, atol=1e-5) and (weights[2] == weights[2, 0]).all()
        if biased:
            bias[0] = math.nan
            assert np.isnan(nv.select_experts(x, config, correction_bias=bias)[1]).all()


EXACT = {
    "softmax": lambda v: v.softmax(-1),
    "sigmoid": lambda v: torch.exp(-torch.nn.functional.softplus(-v, threshold=700)),
    "sqrt_softplus": lambda v: torch.log1p(torch.exp(v)).sqrt(),
}


@pytest.mark.parametrize("scoring", EXACT)
@pytest.mark.parametrize("factor", [1.0, 2.0**-6, 2.0**-20])
def test_scores_from_end_to_end_and_under_small_factors(scoring: str, factor: float) -> None:
    x = np.concatenate([np.linspace(-104, 104, 4001), [-19.999999, -20.000001, -87.5, 88.9]]).astype("f4")[:, None]
    x = np.concatenate([x, np.zeros_like(x)], 1)
    config = nv.RouterConfig(2, 2, scoring=scoring, routed_scaling_factor=factor)
    ids, weights = nv.select_experts(x, config)
    wide = torch.from_numpy(x)
    got = torch.from_numpy(np.take_along_axis(weights, ids.argsort(1), 1))
    exact = factor * EXACT[scoring](wide.double())
    in_order = torch.tensor([[0, 1]]).expand(len(x), 2)
    assert ((got.double() - exact).abs() <= weight_bound(config, wide, in_order, exact)).all()


def test_arrays_of_every_kind() -> None:
    config = nv.RouterConfig(64, 6, renormalize=True)
    logits = numbers(9, 128, torch.float32, 4)
    strided = logits[:, :64]
    ids, weights = nv.select_experts(strided.contiguous(), config)
    assert torch.equal(nv.select_experts(strided[4:5], config)[1], weights[4:5]), "a token without its batch"
    negated = torch.complex(strided, -strided).conj().imag
    assert negated.is_neg()
    every_second = logits[::2, 1::2][:5]
    same = nv.select_experts(every_second.contiguous(), config)
    cases = [
        (view, ids, weights) for view in (strided, strided.t().contiguous().t(), negated, strided.requires_grad_())
    ]
    for view, want_ids, want_weights in [
        *cases,
        (every_second, *same),
        (strided[:1].expand(5, 64), ids[:1], weights[:1]),
    ]:
        got = nv.select_experts(view, config)
        assert (got[0] == want_ids).all() and (got[1] == want_weights).all()
    bits = strided.detach().bfloat16()
    as_bits = nv.select_experts(bits.view(torch.uint16).numpy(), config)
    assert isinstance(as_bits[0], np.ndarray)
    assert np.array_equal(as_bits[1], nv.select_experts(bits, config)[1].numpy())
    out = (torch.empty(9, 6, dtype=torch.int64), torch.empty(9, 6))
    got = nv.select_experts(strided, config, out=out)
    assert got[0] is out[0] and got[1] is out[1]
    assert torch.equal(out[0], ids.long()) and torch.equal(out[1], weights)
    assert [array.shape for array in nv.select_experts(logits[:0, :64], config)] == [(0, 6), (0, 6)]


def test_hash_tables_that_are_wrong() -> None:
    config = nv.RouterConfig(8, 2, scoring="sigmoid", renormalize=True, hash_routing=True)
    logits = torch.zeros(6, 8)
    table = torch.tensor([[0, 1], [7, 3], [8, 2], [-1, 2**40]])
    bad = torch.tensor([5])
    tokens = torch.tensor([1, -1, 4, 2**40, 2, 3])
    ids, weights = nv.select_experts(logits, config, token_ids=tokens, hash_table=table, bad_ids=bad)
    assert ids.tolist() == [[7, 3], [-1, -1], [-1, -1], [-1, -1], [-1, 2], [-1, -1]]
    assert weights.tolist() == [[0.5, 0.5], [0, 0], [0, 0], [0, 0], [0, 1], [0, 0]]
    assert bad.item() == 5 + 3 + 1 + 2
    narrow = nv.select_experts(logits[:1], config, token_ids=tokens[:1].int(), hash_table=table[:2].int())
    assert narrow[0].tolist() == [[7, 3]]


HASHED = {"hash_routing": True, "scoring": "sigmoid"}
# tests/moe/router_test.cpp has the other fields.
CONFIGS = [
    ({"num_experts": 64, "top_k": 33}, "top_k: expected 1..32, got 33"),
    ({"num_expert_group": 8, "topk_group": 4, "group_score": "top2_sum"}, "group_score: expected groups of two"),
    ({"num_experts": 66, "num_expert_group": 33, "topk_group": 33}, "num_expert_group: expected 1..32, got 33"),
    ({"renormalize_epsilon": 1e-20}, "renormalize_epsilon: expected 0 without renormalize"),
    ({"renormalize": True, "renormalize_epsilon": 1e-20}, "renormalize_epsilon: expected 0 with scoring softmax"),
    ({"renormalize": True, "renormalize_epsilon": -1.0}, "renormalize_epsilon: expected finite and >= 0, got -1"),
    ({"routed_scaling_factor": math.nan}, "routed_scaling_factor: expected finite"),
    ({**HASHED, "correction_bias": True}, "correction_bias: expected none with hash_routing"),
    ({**HASHED, "num_expert_group": 2, "topk_group": 2}, "num_expert_group: expected 1 with hash_routing"),
    ({"hash_routing": True}, "scoring: expected sigmoid or sqrt_softplus with hash_routing"),
]


@pytest.mark.parametrize(("fields", "message"), CONFIGS, ids=[m for _, m in CONFIGS])
def test_configs_that_are_refused(fields: dict[str, Any], message: str) -> None:
    error = nv.Unsupported if message.startswith("scoring: expected sigmoid or") else nv.InvalidArgument
    with pytest.raises(error, match=message.replace("..", r"\.\.")):
        nv.RouterConfig(**{"num_experts": 8, "top_k": 2, **fields})


def test_calls_that_are_refused() -> None:
    config = nv.RouterConfig(8, 2)
    biased = nv.RouterConfig(8, 2, scoring="sigmoid", correction_bias=True)
    hashed = nv.RouterConfig(8, 2, scoring="sigmoid", hash_routing=True)
    scaled = nv.RouterConfig(8, 2, expert_scale=True)
    x, ids, weights = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    tokens, table = torch.zeros(3, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int64)
    calls = [
        (r"logits: expected \(T, 8\)", (torch.zeros(3, 9), config), {}),
        ("expected an array, since RouterConfig.correction_bias is set, got None", (x, biased), {}),
        (r"correction_bias: expected \(8,\) float32", (x, biased), {"correction_bias": torch.zeros(7)}),
        ("expert_scale: expected an array", (x, scaled), {}),
        ("expert_scale: expected None, since .* is not set", (x, config), {"expert_scale": torch.ones(8)}),
        (r"expert_scale: expected \(8,\) float32", (x, scaled), {"expert_scale": torch.ones(8, dtype=torch.float64)}),
        ("hash_table: expected both, since RouterConfig.hash_routing is set", (x, hashed), {"token_ids": tokens}),
        (r"token_ids: expected \(3,\) int32", (x, hashed), {"token_ids": tokens[:2], "hash_table": table}),
        (r"hash_table: expected \(vocab_size, 2\)", (x, hashed), {"token_ids": tokens, "hash_table": table[:, :1]}),
        ("out: expected a tuple", (x, config), {"out": ids}),
        (r"topk_ids: expected \(3, 2\)", (x, config), {"out": (ids[:2], weights)}),
        (r"topk_weights: expected \(3, 2\) float32", (x, config), {"out": (ids, torch.zeros(2, 3).t())}),
        (r"bad_ids: expected \(1,\) int64", (x, config), {"bad_ids": torch.zeros(1, dtype=torch.int32)}),
    ]
    for message, arguments, options in calls:
        with pytest.raises(nv.InvalidArgument, match=message):
            nv.select_experts(*arguments, **options)


# ---- a layer that selects experts itself


def tiny_layer() -> nv.MoeLayer:
    rng = np.random.default_rng(4)
    gate, up = (rng.normal(size=(8, 32, 64)).astype(np.float32) / 8 for _ in range(2))
    down = rng.normal(size=(8, 64, 32)).astype(np.float32) / 8
    return nv.MoeLayer.from_bf16(nv.MoeConfig(8, 2, 64, 32), gate=gate, up=up, down=down, max_tokens=16)


ROUTED: list[tuple[nv.RouterConfig, dict[str, Any]]] = [
    (nv.RouterConfig(8, 2, renormalize=True), {}),
    (
        nv.RouterConfig(8, 2, "sigmoid", correction_bias=True, num_expert_group=4, topk_group=2),
        {"correction_bias": torch.linspace(-1, 1, 8)},
    ),
    (
        nv.RouterConfig(8, 2, "sqrt_softplus", hash_routing=True),
        {"token_ids": torch.arange(16) % 3, "hash_table": torch.tensor([[0, 1], [7, 3], [5, 5]])},
    ),
    (
        nv.RouterConfig(8, 2, "sigmoid", hash_routing=True, expert_scale=True, routed_scaling_factor=2.5),
        {
            "token_ids": torch.arange(16) % 3,
            "hash_table": torch.tensor([[0, 1], [7, 3], [5, 5]]),
            "expert_scale": torch.linspace(-1, 2, 8),
        },
    ),
]


@pytest.mark.parametrize(("config", "arrays"), ROUTED, ids=["softmax", "bias", "hash", "scales"])
@pytest.mark.parametrize("tokens", [0, 16])
def test_run_logits_is_a_selection_and_a_run(config: nv.RouterConfig, arrays: dict[str, Any], tokens: int) -> None:
    layer = tiny_layer()
    hidden, logits = numbers(tokens, 64, torch.float32, 3), numbers(tokens, 8, torch.float32, 7)
    arrays = {name: array[:tokens] if name == "token_ids" else array for name, array in arrays.items()}
    ids, weights = nv.select_experts(logits, config, **arrays)
    topk = (torch.full_like(ids, -9), torch.full_like(weights, -9.0))
    out = layer.run_logits(hidden, logits, config, topk=topk, **arrays)
    assert torch.equal(out, layer.run(hidden, ids, weights))
    assert torch.equal(topk[0], ids) and torch.equal(topk[1], weights)
    assert torch.equal(layer.run_logits(hidden, logits, config, **arrays), out)


def test_run_logits_refuses() -> None:
    layer, hidden, logits = tiny_layer(), torch.zeros(3, 64), torch.zeros(3, 8)
    config = nv.RouterConfig(8, 2)
    for message, logits_of, router, options in (
        ("router num_experts: expected the layer's 8, got 9", torch.zeros(3, 9), nv.RouterConfig(9, 2), {}),
        ("logits", torch.zeros(3, 9), config, {}),
        ("correction_bias", logits, config, {"correction_bias": torch.zeros(8)}),
        ("out: expected a tuple of topk_ids and topk_weights", logits, config, {"topk": torch.zeros(3, 2)}),
    ):
        with pytest.raises(ValueError, match=message):
            layer.run_logits(hidden, logits_of, router, **options)
    with pytest.raises(TypeError, match="router: expected a RouterConfig, got NoneType"):
        layer.run_logits(hidden, logits, None)
    with pytest.raises(TypeError, match="config: expected a RouterConfig, got dict"):
        nv.select_experts(logits, {"num_experts": 8, "top_k": 2})


# ---- router_gemm, against torch's float64


def problem(tokens: int, experts: int, size: int):
    g = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=g).bfloat16() for shape in ((tokens, size), (experts, size)))


@pytest.mark.parametrize("size", [8, 1000, 7168])
def test_router_gemm_stays_within_the_bound_of_its_additions(size: int) -> None:
    hidden, weight = problem(5, 33, size)
    exact = hidden.double() @ weight.double().T
    # The number of additions that a product goes through (docs/explanation/numerics.md, section 12), and 1 % for terms
    # that are not of first order.
    additions = (size + 1023) // 1024 - 1 + 10
    bound = 1.01 * additions * 2.0**-24 * (hidden.double().abs() @ weight.double().abs().T)
    wide = nv.router_gemm(hidden, weight, logits_dtype="float32")
    assert wide.dtype == torch.float32 and ((wide.double() - exact).abs() <= bound).all()
    assert torch.equal(nv.router_gemm(hidden, weight), wide.bfloat16())


def test_router_gemm_takes_arrays_of_every_kind() -> None:
    hidden, weight = problem(4, 6, 64)
    expected = nv.router_gemm(hidden, weight)
    bits = [x.view(torch.uint16).numpy() for x in (hidden, weight)]
    assert np.array_equal(nv.router_gemm(*bits), expected.view(torch.uint16).numpy())
    apart = torch.zeros(4, 80, dtype=torch.bfloat16)
    apart[:, :64] = hidden
    assert torch.equal(nv.router_gemm(apart[:, :64], weight), expected)
    assert nv.router_gemm(hidden[:0], weight).shape == (0, 6)
    out = torch.empty(4, 6)
    assert nv.router_gemm(hidden, weight, out=out) is out
    assert torch.equal(out.bfloat16(), expected)
    # The op gives the same; its out form checks the dtype.
    op = torch.ops.nvfp4_moe.router_gemm
    assert torch.equal(op(hidden, weight), expected)
    assert torch.equal(op(hidden, weight, logits_dtype=torch.float32), out)
    into = torch.zeros_like(out)
    op(hidden, weight, logits_dtype=torch.float32, out=into)
    assert torch.equal(into, out)
    with pytest.raises(ValueError, match="out: expected logits_dtype torch.bfloat16"):
        op(hidden, weight, out=into)


def test_router_gemm_refuses() -> None:
    hidden, weight = problem(4, 6, 64)
    unaligned = torch.zeros(1, 72, dtype=torch.bfloat16)[:, 4:68]
    for message, arguments, options in (
        ("hidden: expected two dimensions of bfloat16", (hidden.float(), weight), {}),
        (r"weight: expected \(E, 64\) on cpu", (hidden, weight[:, :56]), {}),
        ("logits_dtype: expected bfloat16 or float32, got float16", (hidden, weight), {"logits_dtype": "float16"}),
        (r"out: expected \(4, 6\)", (hidden, weight), {"out": torch.empty(4, 5)}),
        ("hidden: expected an address that is a multiple of 16", (unaligned, weight), {}),
    ):
        with pytest.raises(ValueError, match=message):
            nv.router_gemm(*arguments, **options)
