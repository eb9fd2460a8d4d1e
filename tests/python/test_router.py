"""select_experts against a loop over Python's floats: ties, Inf, NaN, groups, hash tables, arrays, refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import nvfp4_moe as nv
import pytest
from router_bounds import numbers, weight_bound

torch = pytest.importorskip("torch")

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


def random_config(rng: np.random.Generator) -> nv.RouterConfig:
    groups = int(rng.choice([1, 2, 3, 4, 7, 8, 32]))
    size = int(rng.integers(1, 1024 // groups + 1)) if rng.random() < 0.5 else int(rng.integers(1, 9))
    experts = groups * size
    kept = int(rng.integers(1, groups + 1))
    return nv.RouterConfig(
        num_experts=experts,
        top_k=int(rng.integers(1, min(32, kept * size) + 1)),
        scoring=str(rng.choice(["softmax", "sigmoid", "sqrt_softplus"])),
        renormalize=bool(rng.random() < 0.5),
        num_expert_group=groups,
        topk_group=kept,
    )


def test_ids_of_many_ties_and_special_values() -> None:
    rng = np.random.default_rng(11)
    special = np.array([0.0, -0.0, 1.0, 1.0, -1.0, 2.0, math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-45], np.float32)
    for _ in range(120):
        config = random_config(rng)
        x = rng.choice(special, size=(4, config.num_experts))
        x[1] = rng.integers(-2, 3, config.num_experts)
        x[2] = 0.5
        x[3] = math.nan
        ids, weights = nv.select_experts(x, config, ids_dtype="int64")
        assert ids.dtype == np.int64 and weights.dtype == np.float32
        for row, got in zip(x, ids, strict=True):
            assert got.tolist() == chosen_by_loop(config, row.tolist(), None)
        nan_rows = np.isnan(x).any(1)
        assert np.isnan(weights[nan_rows]).all()
        assert np.isfinite(weights[1:3]).all()
        if config.scoring == "softmax" and config.renormalize:
            assert np.allclose(weights[1:3].sum(1), 1, atol=1e-5) and (weights[2] == weights[2, 0]).all()


def test_biased_ids_with_groups_and_ties() -> None:
    rng = np.random.default_rng(12)
    for _ in range(80):
        base = random_config(rng)
        by_sum = base.num_experts // base.num_expert_group >= 2 and rng.random() < 0.7
        fields = {"scoring": "sigmoid", "correction_bias": True, "group_score": "top2_sum" if by_sum else "max"}
        config = nv.RouterConfig(**{**{f: getattr(base, f) for f in base.__dataclass_fields__}, **fields})
        # sigmoid(0) and the saturated ends are exact, so that ties of sums are exact too.
        x = rng.choice(np.array([0.0, 200.0, -200.0, math.inf, -math.inf], np.float32), size=(3, config.num_experts))
        bias = rng.choice(np.array([0.0, 0.5, -0.5, -2.0, 1.0], np.float32), size=config.num_experts)
        ids, weights = nv.select_experts(x, config, correction_bias=bias)
        for row, got in zip(x, ids, strict=True):
            assert got.tolist() == chosen_by_loop(config, row.tolist(), bias.tolist())
        if not config.renormalize:
            chosen = np.take_along_axis(x, ids, 1)
            assert ((weights == 1) == (chosen > 0)).all() and ((weights == 0.5) == (chosen == 0)).all()
        bias[int(rng.integers(config.num_experts))] = math.nan
        assert np.isnan(nv.select_experts(x, config, correction_bias=bias)[1]).all()


EXACT = {
    "softmax": lambda v: v.softmax(-1),
    "sigmoid": lambda v: torch.exp(-torch.nn.functional.softplus(-v, threshold=700)),
    "sqrt_softplus": lambda v: torch.log1p(torch.exp(v)).sqrt(),
}


@pytest.mark.parametrize("scoring", EXACT)
@pytest.mark.parametrize("factor", [1.0, 0.25, 2.0**-6, 2.0**-20])
def test_scores_from_end_to_end_and_under_small_factors(scoring: str, factor: float) -> None:
    x = np.concatenate([np.linspace(-104, 104, 4001), [-19.999999, -20.000001, -87.5, 88.9]]).astype("f4")[:, None]
    x = np.concatenate([x, np.zeros_like(x)], 1)
    config = nv.RouterConfig(2, 2, scoring=scoring, routed_scaling_factor=factor)
    ids, weights = nv.select_experts(x, config)
    wide = torch.from_numpy(x)
    got = torch.from_numpy(np.take_along_axis(weights, ids.argsort(1), 1))
    exact = factor * EXACT[scoring](wide.double())
    in_order = torch.tensor([[0, 1]]).expand(len(x), 2)
    error = (got.double() - exact).abs()
    assert (error <= weight_bound(config, wide, in_order, exact)).all()
    if scoring != "sqrt_softplus" and factor < 0.25:  # the last rounding, to a multiple of 2^-149
        tiny = wide[:, 0] <= -60
        assert error[tiny].max() > factor * 2.0**-148


def test_a_token_does_not_depend_on_its_batch() -> None:
    groups = dict(num_expert_group=8, topk_group=4, group_score="top2_sum", correction_bias=True)
    config = nv.RouterConfig(256, 8, scoring="sigmoid", renormalize=True, **groups)
    logits, bias = numbers(40, 256, torch.bfloat16, 3), torch.linspace(-1, 1, 256)
    ids, weights = nv.select_experts(logits, config, correction_bias=bias)
    for t in range(40):
        one = nv.select_experts(logits[t : t + 1], config, correction_bias=bias)
        assert torch.equal(one[0][0], ids[t]) and torch.equal(one[1][0], weights[t])


def test_arrays_of_every_kind() -> None:
    config = nv.RouterConfig(64, 6, renormalize=True)
    logits = numbers(9, 128, torch.float32, 4)
    strided = logits[:, :64]
    expected = nv.select_experts(strided.contiguous(), config)
    for view in (strided, strided.t().contiguous().t(), logits[::2, 1::2][:5]):
        same = nv.select_experts(view.contiguous(), config)
        got = nv.select_experts(view, config)
        assert torch.equal(got[0], same[0]) and torch.equal(got[1], same[1])
    for odd in (torch.complex(strided, -strided).conj().imag, strided.clone().requires_grad_()):
        assert odd.is_neg() or odd.requires_grad
        got = nv.select_experts(odd, config)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    one = strided[:1].expand(5, 64)
    assert torch.equal(nv.select_experts(one, config)[0], expected[0][:1].expand(5, 6))
    bits = strided.bfloat16().view(torch.uint16).numpy()
    as_bits = nv.select_experts(bits, config)
    assert isinstance(as_bits[0], np.ndarray)
    assert np.array_equal(as_bits[1], nv.select_experts(strided.bfloat16(), config)[1].numpy())
    out = (torch.empty(9, 6, dtype=torch.int64), torch.empty(9, 6))
    got = nv.select_experts(strided, config, out=out)
    assert got[0] is out[0] and got[1] is out[1]
    assert torch.equal(out[0], expected[0].long()) and torch.equal(out[1], expected[1])
    ids, weights = nv.select_experts(logits[:0, :64], config)
    assert ids.shape == (0, 6) and weights.shape == (0, 6)


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
CONFIGS = [
    ({"num_experts": 0}, "num_experts: expected 1..1024, got 0"),
    ({"num_experts": 1025}, "num_experts: expected 1..1024, got 1025"),
    ({"num_experts": 64, "top_k": 33}, "top_k: expected 1..32, got 33"),
    ({"top_k": 9}, "top_k: expected at most the 8 experts, got 9"),
    ({"scoring": "relu"}, "scoring: expected one of softmax, sigmoid, sqrt_softplus"),
    ({"group_score": "sum"}, "group_score: expected one of max, top2_sum"),
    ({"num_expert_group": 3}, "num_expert_group: expected a divisor of the 8 experts, got 3"),
    ({"num_expert_group": 4, "topk_group": 5}, "topk_group: expected 1..4, got 5"),
    ({"num_expert_group": 4, "topk_group": 1, "top_k": 3}, "topk_group: expected groups that hold top_k 3 experts"),
    ({"num_expert_group": 8, "topk_group": 4, "group_score": "top2_sum"}, "group_score: expected groups of two"),
    ({"num_experts": 66, "num_expert_group": 33, "topk_group": 33}, "num_expert_group: expected 1..32, got 33"),
    ({"renormalize_epsilon": 1e-20}, "renormalize_epsilon: expected 0 without renormalize"),
    ({"renormalize": True, "renormalize_epsilon": 1e-20}, "renormalize_epsilon: expected 0 with scoring softmax"),
    ({"renormalize": True, "renormalize_epsilon": -1.0}, "renormalize_epsilon: expected finite and >= 0, got -1"),
    ({"routed_scaling_factor": 0.0}, "routed_scaling_factor: expected finite and > 0, got 0"),
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
    x, ids, weights = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    tokens, table = torch.zeros(3, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int64)
    calls = [
        ("logits: expected \\(T, 8\\)", (torch.zeros(3, 9), config), {}),
        ("logits: expected \\(T, 8\\)", (torch.zeros(8), config), {}),
        ("logits: expected \\(T, 8\\)", (x.double(), config), {}),
        ("correction_bias: expected None", (x, config), {"correction_bias": torch.zeros(8)}),
        ("correction_bias: expected an array", (x, biased), {}),
        ("correction_bias: expected \\(8,\\) float32", (x, biased), {"correction_bias": torch.zeros(7)}),
        ("correction_bias: expected \\(8,\\) float32", (x, biased), {"correction_bias": torch.zeros(8).half()}),
        ("token_ids, hash_table: expected both", (x, hashed), {"token_ids": tokens}),
        ("token_ids, hash_table: expected neither", (x, config), {"token_ids": tokens, "hash_table": table}),
        ("token_ids: expected \\(3,\\) int32", (x, hashed), {"token_ids": tokens[:2], "hash_table": table}),
        ("hash_table: expected \\(vocab_size, 2\\)", (x, hashed), {"token_ids": tokens, "hash_table": table[:, :1]}),
        ("hash_table: expected \\(vocab_size, 2\\)", (x, hashed), {"token_ids": tokens, "hash_table": table[:0]}),
        ("ids_dtype: expected int32 or int64", (x, config), {"ids_dtype": "int16"}),
        ("out: expected a tuple", (x, config), {"out": ids}),
        ("topk_ids: expected \\(3, 2\\)", (x, config), {"out": (ids[:2], weights)}),
        ("topk_weights: expected \\(3, 2\\) float32", (x, config), {"out": (ids, weights.double())}),
        ("topk_weights: expected \\(3, 2\\) float32", (x, config), {"out": (ids, torch.zeros(2, 3).t())}),
        ("bad_ids: expected \\(1,\\) int64", (x, config), {"bad_ids": torch.zeros(1, dtype=torch.int32)}),
        ("topk_ids", (x.numpy(), config), {"out": (x.numpy()[:, :2].view("i4"), weights.numpy())}),
    ]
    for message, arguments, options in calls:
        with pytest.raises(nv.InvalidArgument, match=message):
            nv.select_experts(*arguments, **options)
    locked = np.zeros((3, 2), np.int32)
    locked.flags.writeable = False
    with pytest.raises(nv.InvalidArgument, match="can be written"):
        nv.select_experts(x.numpy(), config, out=(locked, weights.numpy()))
    shared = np.zeros((3, 8), np.float32)
    weights_there = shared.reshape(-1)[:6].reshape(3, 2)
    with pytest.raises(nv.InvalidArgument, match="overlap|apart"):
        nv.select_experts(shared, config, out=(ids.numpy(), weights_there))


# ---- a layer that selects experts itself


def tiny_layer(activation_format: str) -> nv.MoeLayer:
    rng = np.random.default_rng(4)
    config = nv.MoeConfig(8, 2, 64, 32, activation_format=activation_format)
    gate, up = (rng.normal(size=(8, 32, 64)).astype(np.float32) / 8 for _ in range(2))
    down = rng.normal(size=(8, 64, 32)).astype(np.float32) / 8
    return nv.MoeLayer.from_bf16(config, gate=gate, up=up, down=down, max_tokens=16)


@pytest.mark.parametrize("activation_format", ["nvfp4", "bf16"])
def test_run_logits_is_a_selection_and_a_run(activation_format: str) -> None:
    layer = tiny_layer(activation_format)
    configs = [
        nv.RouterConfig(8, 2, renormalize=True),
        nv.RouterConfig(8, 2, "sigmoid", correction_bias=True, num_expert_group=4, topk_group=2),
        nv.RouterConfig(8, 2, "sqrt_softplus", hash_routing=True),
    ]
    for config in configs:
        for tokens in (0, 1, 16):
            hidden = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens))
            logits = numbers(tokens, 8, torch.float32, 7)
            arrays: dict[str, Any] = {}
            if config.correction_bias:
                arrays["correction_bias"] = torch.linspace(-1, 1, 8)
            if config.hash_routing:
                arrays["token_ids"] = torch.arange(tokens) % 3
                arrays["hash_table"] = torch.tensor([[0, 1], [7, 3], [5, 5]])
            ids, weights = nv.select_experts(logits, config, **arrays)
            topk = (torch.full_like(ids, -9), torch.full_like(weights, -9.0))
            out = layer.run_logits(hidden, logits, config, topk=topk, **arrays)
            assert torch.equal(out, layer.run(hidden, ids, weights))
            assert torch.equal(topk[0], ids) and torch.equal(topk[1], weights)
            assert torch.equal(layer.run_logits(hidden, logits, config, **arrays), out)


def test_run_logits_refuses() -> None:
    layer, hidden, logits = tiny_layer("bf16"), torch.zeros(3, 64), torch.zeros(3, 8)
    config = nv.RouterConfig(8, 2)
    for message, logits_of, router, options in (
        ("router num_experts: expected the layer's 8, got 9", torch.zeros(3, 9), nv.RouterConfig(9, 2), {}),
        (r"topk_ids: expected \(3, 2\) int32 or int64 on cpu", logits, nv.RouterConfig(8, 3), {}),
        ("logits", torch.zeros(3, 9), config, {}),
        ("topk_ids", torch.zeros(4, 8), config, {}),
        ("correction_bias", logits, config, {"correction_bias": torch.zeros(8)}),
        ("out: expected a tuple of topk_ids and topk_weights", logits, config, {"topk": torch.zeros(3, 2)}),
    ):
        with pytest.raises(ValueError, match=message):
            layer.run_logits(hidden, logits_of, router, **options)
    for wrong in ({"num_experts": 8, "top_k": 2}, None):
        with pytest.raises(TypeError, match=f"router: expected a RouterConfig, got {type(wrong).__name__}"):
            layer.run_logits(hidden, logits, wrong)
        with pytest.raises(TypeError, match=f"config: expected a RouterConfig, got {type(wrong).__name__}"):
            nv.select_experts(logits, wrong)
