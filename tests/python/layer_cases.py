"""Random small layers for the property tests: every named choice of the contract, and awkward numbers.

Hypothesis chooses the shapes, the named choices and a flavour for each kind of number; the numbers themselves come from
NumPy by one drawn seed, so that an example is cheap and a failure names all of it.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st
from moe_reference import E2M1_VALUES, E4M3_VALUES, Options, Weights

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SCALE_FLAVOURS = ("modelopt", "modelopt", "full range", "zero blocks", "saturating", "tiny", "power of two")
HIDDEN_FLAVOURS = ("normal", "normal", "outliers", "octaves", "eighths", "tiny", "zero rows")


class Case(SimpleNamespace):
    """options, weights, hidden (T, hidden), topk_ids (T, top_k), topk_weights (T, top_k) torch tensors, input_scale
    (a pair, floats or one per expert), first_expert, out_dtype (None: hidden's), made_from (what `build` was given)."""

    def __repr__(self) -> str:  # the tensors follow from it
        return f"build({self.options}, {self.made_from})"

    def changed(self, **what) -> Case:
        return Case(**{**vars(self), **what})


def _codes(rng, shape, flavour):
    """uint8 (..., K/2) of both nibbles."""
    pairs = (*shape, 2)
    if flavour == "six":  # every product near the top
        nibbles = rng.choice(np.array([7, 15, 6, 14], dtype=np.uint8), pairs)
    else:  # one sign, without cancellation: errors of truncation add up
        nibbles = rng.integers(1 if flavour == "one sign" else 0, 8 if flavour == "one sign" else 16, pairs, np.uint8)
    if flavour == "sparse":
        nibbles = nibbles * (rng.random(pairs) < 0.15).astype(np.uint8)
    return nibbles[..., 0] | nibbles[..., 1] << 4


# The least and the largest byte; tiny: subnormals and zeros.
SCALE_BYTES = {"full range": (0, 0x7F), "saturating": (0x78, 0x7F), "tiny": (0, 0x0A)}


def _scales(rng, shape, flavour):
    """uint8 E4M3 bytes 0..0x7E."""
    if flavour == "power of two":
        return (rng.integers(0, 16, shape, dtype=np.uint8) << 3).astype(np.uint8)
    scales = rng.integers(*SCALE_BYTES.get(flavour, (0x60, 0x7F)), shape, dtype=np.uint8)
    if flavour == "zero blocks":
        scales[rng.random(shape) < 0.4] = 0
    return scales


def _matrix(rng, experts, rows, cols, flavours, gain, per_expert):
    """A matrix that multiplies a line's rms by about `gain`, for any codes and block scales."""
    codes = _codes(rng, (experts, rows, cols // 2), flavours[0])
    scales = _scales(rng, (experts, rows, cols // 16), flavours[1])
    values = E2M1_VALUES.numpy()[np.stack([codes & 15, codes >> 4], -1)].reshape(experts, rows, cols)
    values = values * E4M3_VALUES.numpy()[scales].repeat(16, axis=-1)
    rms = max(np.sqrt((values**2).mean()), 2.0**-12)
    spread = np.exp2(rng.uniform(-1.5, 1.5, experts)) if per_expert else np.ones(experts)
    return codes, scales, (gain / (rms * np.sqrt(cols)) * spread).astype(np.float32)


def _hidden(rng, tokens, cols, flavour, amplitude):
    x = rng.standard_normal((tokens, cols))
    if flavour == "outliers":
        x[rng.random(x.shape) < 0.02] *= 100
    elif flavour == "octaves":
        x *= np.exp2(rng.uniform(-14, 0, (tokens, cols // 16))).repeat(16, axis=1)
    elif flavour == "eighths":  # many ties of E2M1 and E4M3
        x = rng.integers(-96, 97, x.shape) / 8.0
        x.reshape(tokens, cols // 16, 16)[..., 0] = 6
    elif flavour == "tiny":
        x *= np.exp2(rng.uniform(-30, 0, (tokens, 1)))
    elif flavour == "zero rows":
        x[rng.random(tokens) < 0.5] = 0
    return x * amplitude


def _topk_ids(rng, options, tokens, flavour, dtype):
    n, k = options.num_experts, options.top_k
    if flavour == "distinct" and k <= n:
        ids = np.stack([rng.permutation(n)[:k] for _ in range(tokens)]) if tokens else np.zeros((0, k))
    elif flavour == "one expert":
        ids = np.full((tokens, k), rng.integers(n))
    else:
        ids = rng.integers(0, n, (tokens, k))
    ids = ids.astype(np.int64)
    if flavour in ("masked", "bad"):
        ids[rng.random(ids.shape) < 0.3] = -1
    if flavour == "bad":
        # 2^32 becomes 0 if an id is narrowed before the comparison.
        wild = [n, -2, 2**31 - 1, -(2**31)] + ([2**32, 2**63 - 1, -(2**32)] if dtype == "int64" else [])
        ids[rng.random(ids.shape) < 0.3] = rng.choice(np.array(wild, dtype=np.int64))
    return torch.from_numpy(ids.astype(dtype))


def build(options: Options, seed: int, **choices) -> Case:
    """choices: gate, up, down (code flavour, scale flavour); gains (gate, up, down); amplitude; hidden, ids, router,
    dtype, id_dtype, out_dtype; local (first, count); poison; scale_error; tokens."""
    rng = np.random.default_rng(seed)
    first, count = choices["local"]
    tokens = choices["tokens"]
    shape = (options.intermediate_size, options.hidden_size)
    gain = choices["gains"]
    weights = Weights(
        *(
            tuple(
                torch.from_numpy(part) for part in _matrix(rng, count, *dims, choices[name], g, choices["per_expert"])
            )
            for name, dims, g in zip(("gate", "up", "down"), (shape, shape, shape[::-1]), gain, strict=True)
        )
    )
    if choices["same_gate_up_scale"]:
        weights = weights._replace(up=(*weights.up[:2], weights.gate[2].clone()))
    x = _hidden(rng, tokens, options.hidden_size, choices["hidden"], choices["amplitude"])
    hidden = torch.from_numpy(x).to(DTYPES[choices["dtype"]])
    if choices["poison"] and tokens:
        spoiled = rng.random(tokens) < 0.3
        spoiled[rng.integers(tokens)] = True
        for t in np.flatnonzero(spoiled):
            hidden[t, rng.integers(options.hidden_size)] = rng.choice([np.nan, np.inf, -np.inf])
    router = rng.random((tokens, options.top_k))
    if choices["router"] == "signed":
        router = rng.standard_normal(router.shape) * 3
    elif choices["router"] == "with zeros":
        router[rng.random(router.shape) < 0.4] = 0
    elif choices["router"] == "not finite":
        router[rng.random(router.shape) < 0.2] = rng.choice([np.nan, np.inf])
    # amax/2688 of the values in such a layer, per expert, times a random factor.
    intermediate = abs(gain[1 if options.activation == "relu2" else 0] * gain[1]) * choices["amplitude"] ** 2
    amax = np.array([choices["amplitude"], min(max(intermediate, 2.0**-30), 2.0**30)]) * 4
    scales = (amax[:, None] / 2688 * choices["scale_error"] * rng.uniform(0.3, 1, (2, options.num_experts))).astype(
        np.float32
    )
    per_expert = [torch.from_numpy(s) for s in scales]
    return Case(
        options=options,
        weights=weights,
        hidden=hidden,
        topk_ids=_topk_ids(rng, options, tokens, choices["ids"], choices["id_dtype"]),
        topk_weights=torch.from_numpy(router.astype(np.float32)),
        input_scale=tuple(per_expert) if choices["scale_per_expert"] else tuple(float(s.max()) for s in per_expert),
        first_expert=first,
        out_dtype=choices["out_dtype"],
        made_from={"seed": seed, **choices},
    )


@st.composite
def options(draw) -> Options:
    swiglu = ["swiglu", "swiglu_clamped", "swiglu_step", "swiglu_oai"]
    activation = draw(st.sampled_from([*swiglu, "relu2", "gelu", "gelu_tanh", "situ"]))
    num_experts = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8]))
    activation_format = draw(st.sampled_from(["nvfp4"] * 4 + ["bf16", "int8_block", "fp8", "fp8"]))
    has_line_scales = activation_format in ("nvfp4", "fp8")
    vllm_order = ["vllm_order"] if activation_format == "nvfp4" else []
    intermediate_scale = draw(st.sampled_from(["dynamic_token", "dynamic_token", "fixed", *vllm_order]))
    activation_scale = draw(st.sampled_from(["dynamic_token", "dynamic_token", "static", *vllm_order]))
    if not has_line_scales:
        activation_scale = "dynamic_token"
    router_weight = draw(st.sampled_from(["after_down", "before_down", "on_input"]))
    return Options(
        num_experts=num_experts,
        top_k=1 if router_weight == "on_input" else draw(st.sampled_from(range(1, min(4, num_experts) + 1))),
        hidden_size=16 * draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 10])),
        intermediate_size=16 * draw(st.sampled_from([1, 2, 3, 4, 5, 6])),
        activation=activation,
        swiglu_limit=draw(st.sampled_from([0.1, 0.5, 1.5, 7.0, 10.0])) if activation in swiglu[1:] else None,
        situ_gate_limit=draw(st.sampled_from([0.3, 1.0, 4.0])) if activation == "situ" else None,
        situ_up_limit=draw(st.sampled_from([0.5, 2.0, 25.0])) if activation == "situ" else None,
        swiglu_alpha=draw(st.sampled_from([1.702, 1.0, 0.25, 3.0])) if activation == "swiglu_oai" else 1.702,
        activation_format=activation_format,
        activation_scale=activation_scale,
        intermediate_scale=intermediate_scale if has_line_scales else "dynamic_token",
        intermediate_fixed=draw(st.sampled_from([None, 2.0**-11, 2.0**-6, 1.0]))
        if has_line_scales and intermediate_scale == "fixed"
        else None,
        max_router_weight=draw(st.sampled_from([1.0, 2.5])),
        static_headroom=draw(st.sampled_from([1.0, 16.0, 0.25])) if activation_scale == "static" else 1.0,
        router_weight=router_weight,
        row_format=draw(st.sampled_from(["bf16", "bf16", "fp32"])),
    )


@st.composite
def cases(draw) -> Case:
    chosen = draw(options())
    first = draw(st.integers(0, chosen.num_experts - 1))
    whole = draw(st.sampled_from([True, True, False]))
    matrix = st.tuples(
        st.sampled_from(["uniform", "uniform", "sparse", "six", "one sign"]), st.sampled_from(SCALE_FLAVOURS)
    )
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    gain = st.sampled_from([0.05, 0.5, 1.0, 1.0, 3.0, 40.0])
    huge = draw(st.sampled_from([False] * 15 + [True])) and dtype != "float16"  # h exceeds bf16's largest number
    return build(
        chosen,
        draw(st.integers(0, 2**32 - 1)),
        tokens=draw(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9])),
        local=(0, chosen.num_experts) if whole else (first, draw(st.integers(1, chosen.num_experts - first))),
        gate=draw(matrix),
        up=draw(matrix),
        down=draw(matrix),
        gains=(2.0**66, 2.0**62, 2.0**-20) if huge else (draw(gain), draw(gain), draw(gain)),
        per_expert=draw(st.booleans()),
        same_gate_up_scale=draw(st.sampled_from([False, False, True])),
        hidden=draw(st.sampled_from(HIDDEN_FLAVOURS)),
        amplitude=draw(
            st.sampled_from([1.0, 1.0, 0.02, 2.0**-9, 6.0] + ([1e4, 2.0**-40] if dtype != "float16" else []))
        ),
        dtype=dtype,
        poison=draw(st.sampled_from([False, False, False, True])),
        router=draw(st.sampled_from(["uniform"] * 3 + ["signed"] * 2 + ["with zeros", "not finite"])),
        ids=draw(st.sampled_from(["distinct", "distinct", "random", "one expert", "masked", "bad"])),
        id_dtype=draw(st.sampled_from(["int32", "int64"])),
        out_dtype=draw(st.sampled_from([None, None, *sorted(DTYPES)])),
        scale_error=draw(st.sampled_from([1.0, 0.1, 3.3])),
        scale_per_expert=draw(st.booleans()),
    )
