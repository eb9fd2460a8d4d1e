"""MoeLayer, MoeConfig and Nvfp4Linear with NumPy arrays. test_layer_properties.py checks the numbers."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import layers
import numpy as np
import nvfp4_moe as nv
import pytest
import qwen3_moe
from layers import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    batch,
    bf16,
    config,
    expert_of,
    from_bf16,
    layer,
    matrices,
    plain_layer,
    relative_l2,
    stacked,
    weights,
)


def opened(w=None, chosen=None, **options) -> nv.MoeLayer:
    """A layer of these weights and config, or of the usual ones. options: of from_tensors, including weights."""
    return nv.MoeLayer.from_tensors(chosen or config(), **{"max_tokens": 16, **(w or weights()), **options})


# ---- runs


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_layer_is_near_the_same_layer_in_float64(backend):
    hidden, ids, router_weights = batch(9)
    ids[2] = -1  # a token without an assignment
    expected = plain_layer(weights(), hidden, ids, router_weights)
    exact = layer(backend=backend, activation_format="bf16", row_format="fp32").run(hidden, ids, router_weights)
    # Two roundings to bf16 on the way (2^-9 each, relative), random over many terms.
    assert relative_l2(exact, expected) < 2 * 2.0**-9
    quantized = layer(backend=backend).run(hidden, ids, router_weights)
    # E2M1 codes of half a step: about 0.1 in each of the two quantizations.
    assert 0.01 < relative_l2(quantized, expected) < 0.3
    assert not exact[2].any() and not quantized[2].any()


def test_bits_do_not_depend_on_how_arrays_come():
    hidden, ids, router_weights = batch(7)
    one = layer()
    out = one.run(hidden, ids, router_weights)
    assert out.dtype == np.float32 and out.shape == hidden.shape
    assert np.array_equal(out, one.run(hidden, ids.astype(np.int32), router_weights))
    given = np.full_like(out, np.nan)
    assert one.run(hidden, ids, router_weights, given) is given
    assert np.array_equal(out, given)
    assert one.run(hidden.astype(np.float16), ids, router_weights).dtype == np.float16
    # The bits of bfloat16 as uint16, in and out.
    narrow = one.run(bf16(hidden), ids, router_weights)
    assert narrow.dtype == np.uint16
    wide = one.run(from_bf16(bf16(hidden)), ids, router_weights, out=np.empty_like(out))
    assert np.array_equal(narrow, bf16(wide))
    for array in (hidden, ids, router_weights):
        array.setflags(write=False)
    assert np.array_equal(out, one.run(hidden, ids, router_weights))
    assert one.run(*batch(0)).shape == (0, HIDDEN)


def test_weights_may_lie_anywhere_in_memory():
    w, inputs = weights(), batch(5)
    right = layer().run(*inputs)
    codes, scales = (np.concatenate([w["gate"][part], w["up"][part]], axis=1) for part in (0, 1))
    # Rows twice as far apart as they are long.
    wide = [np.zeros((EXPERTS, HIDDEN, 2 * part.shape[2]), np.uint8) for part in w["down"][:2]]
    for to, part in zip(wide, w["down"], strict=False):
        to[:, :, : part.shape[2]] = part
    apart = {
        "gate": (codes[:, :INTERMEDIATE], scales[:, :INTERMEDIATE], w["gate"][2]),
        "up": (codes[:, INTERMEDIATE:], scales[:, INTERMEDIATE:], w["up"][2]),
        "down": (wide[0][:, :, : INTERMEDIATE // 2], wide[1][:, :, : INTERMEDIATE // 16], w["down"][2]),
    }
    assert np.array_equal(opened(apart).run(*inputs), right)
    strided, crooked = np.zeros(EXPERTS * 1000, np.float32)[::1000], np.zeros(4 * EXPERTS + 1, np.uint8)[1:].view("f")
    codes, scales, tensor_scales = w["gate"]
    strided[:] = crooked[:] = tensor_scales
    for given in (strided, tensor_scales[::-1].copy()[::-1], crooked):
        assert np.array_equal(opened(gate=(codes, scales, given)).run(*inputs), right)
    same = {name: (codes, scales, 0.01) for name, (codes, scales, _) in w.items()}
    each = {name: (c, s, np.full(EXPERTS, 0.01, np.float32)) for name, (c, s, _) in w.items()}
    assert np.array_equal(opened(same).run(*inputs), opened(each).run(*inputs))


@pytest.mark.parametrize(
    ("name", "strides"), [("codes", (2**62, 1, 1)), ("scales", (2**61, 2**61, 1)), ("tensor_scale", (2**62,))], ids=str
)
def test_strides_that_overflow_are_an_error(name, strides):
    part, gate = ("codes", "scales", "tensor_scale").index(name), list(weights()["gate"])
    gate[part] = np.lib.stride_tricks.as_strided(gate[part], strides=strides)
    with pytest.raises(ValueError, match=rf"gate {name}: expected \((E|{EXPERTS}),"):
        opened(gate=tuple(gate))


def test_from_bf16_is_quantize_and_from_tensors():
    floats, inputs = layers.floats(), batch(6)
    stacks = {}
    for name, array in floats.items():
        codes, scales, tensor_scales = zip(*map(nv.quantize, array), strict=True)
        stacks[name] = np.stack(codes), np.stack(scales), np.array(tensor_scales, np.float32)
    by_hand = opened(stacks).run(*inputs)
    # K need not be the last axis in memory.
    turned = {name: np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2) for name, array in floats.items()}
    for given in (floats, turned):
        assert np.array_equal(by_hand, nv.MoeLayer.from_bf16(config(), **given, max_tokens=8).run(*inputs))
    floats["up"][2, 1, 5] = np.inf
    with pytest.raises(nv.BadInput, match=r"expert 2 up: \(1, 5\): expected a finite weight, got inf"):
        nv.MoeLayer.from_bf16(config(), **floats)


# ---- descriptions, calibration and progress


def test_a_layer_tells_what_it_is():
    one = layer(max_tokens=32, activation="swiglu_clamped", swiglu_limit=7)
    assert one.config == config(activation="swiglu_clamped", swiglu_limit=7)
    described = one.describe()
    assert described["backend"] == "cpu" and described["max_tokens"] == one.max_tokens == 32
    assert described["activation_scale"] == {"hidden": "dynamic_token", "intermediate": "dynamic_token"}
    assert described["workspace_bytes"] == one.workspace_bytes() == one.workspace_bytes(32) > 0
    assert one.device == "cpu" and "64x48, experts 0..5 of 6, top-2" in repr(one)
    run = one.describe_run(5)
    assert (run["backend"], run["tokens"], run["workspace_bytes"]) == ("cpu", 5, one.workspace_bytes(5))
    assert run["steps"].keys() == described["kernels"].keys() >= {"route", "gemm1_swiglu", "gemm2", "combine"}
    # An input scale may be an array over all experts, whose maximum counts.
    pair = (np.array([0.01, 0.02, 0.005], np.float32), 0.03)
    static = opened(chosen=config(activation_scale="static", intermediate_scale="vllm_order"), input_scale=pair)
    assert static.describe()["activation_scale"] == {"hidden": 2.0**-5, "intermediate": pytest.approx(0.03)}


def test_calibrate_measures_what_static_takes():
    hidden, ids, router_weights = batch(16)
    ids[3] = -1
    hidden[3] = 1e6  # a token without an assignment does not count
    measured = layer().calibrate(hidden, ids, router_weights)
    amax = np.abs(np.delete(hidden, 3, axis=0)).max()
    assert measured["hidden_amax"] == amax and measured["hidden"] == np.float32(np.float64(amax) / 2688)
    assert measured["tokens"] == 15 and measured["experts_seen"] == EXPERTS
    assert measured["intermediate"] == pytest.approx(measured["intermediate_amax"] / 2688, rel=1e-6)
    scales = (measured["hidden"], measured["intermediate"])
    calibrated = opened(chosen=config(activation_scale="static", intermediate_scale="fixed"), input_scale=scales)
    calibrated.run(*(np.delete(array, 3, axis=0) for array in (hidden, ids, router_weights)))
    assert calibrated.status()["hidden_saturated"] == calibrated.status()["intermediate_saturated"] == 0


def test_progress_is_told_and_may_cancel():
    seen = []
    opened(progress=seen.append)
    assert [(p["what"], p["done"]) for p in seen] == [("pack", e + 1) for e in range(EXPERTS)]
    told = []
    layer().warmup(progress=told.append)
    assert told and told[-1]["done"] == told[-1]["total"] == len(told)
    for call in (opened, layer().warmup):
        with pytest.raises(nv.Cancelled):
            call(progress=lambda p: False)
    with pytest.raises(ZeroDivisionError):
        opened(progress=lambda p: 1 // 0)


@pytest.mark.parametrize("biased", [False, True])
def test_experts_come_back_and_are_replaced_in_place(biased):
    chosen, w, other, inputs = config(expert_biases=biased), weights(), weights(seed=5), batch(8)
    of = {seed: {"biases": layers.biases(seed)} if biased else {} for seed in (3, 5)}
    one = opened(w, chosen, **of[3])
    held = [one.expert(expert) for expert in range(EXPERTS)]
    for name, parts in stacked(held).items():
        assert all(np.array_equal(back, part) for back, part in zip(parts, w[name], strict=True))
    for name, bias in zip(("gate", "up", "down"), of[3].get("biases", ()), strict=False):
        assert np.array_equal(np.stack([expert[name]["bias"] for expert in held]), bias)
    for expert in range(EXPERTS):
        new = {"biases": tuple(bias[expert] for bias in of[5]["biases"])} if biased else {}
        one.replace_expert(expert, **expert_of(other, expert), **new)
    assert np.array_equal(one.run(*inputs), opened(other, chosen, **of[5]).run(*inputs))
    with pytest.raises(ValueError, match="local expert: expected 0 to 5, got 6"):
        one.expert(6)
    with pytest.raises(ValueError, match=r"gate codes: expected \(48, 32\) uint8 on cpu, contiguous, got \(64, 24\)"):
        one.replace_expert(0, **expert_of(dict.fromkeys(other, other["down"]), 0))
    with pytest.raises(ValueError, match="stream: expected None for a layer on cpu, got a stream"):
        one.replace_expert(0, **expert_of(other, 0), stream=0)


# ---- wrong arguments, with the library's messages


HIDDEN_STATES, IDS, ROUTER_WEIGHTS = batch(4)
LOCKED = np.zeros_like(HIDDEN_STATES)
LOCKED.setflags(write=False)
FLOATS = "bfloat16, float16 or float32 on cpu, contiguous, got"
# An argument of run instead of the one of batch(4), and the error of run.
WRONG_CALLS = [
    ("hidden", HIDDEN_STATES[:, :32].copy(), f"hidden: expected (4, 64) {FLOATS} (4, 32)"),
    ("hidden", HIDDEN_STATES[0], f"hidden: expected (tokens, 64) {FLOATS} (64,)"),
    ("hidden", np.asfortranarray(HIDDEN_STATES), f"hidden: expected (4, 64) {FLOATS} (4, 64) float32 on cpu, not"),
    ("topk_ids", IDS.astype("h"), "topk_ids: expected (4, 2) int32 or int64 on cpu, contiguous, got (4, 2) int16"),
    ("topk_ids", IDS[:3], "topk_ids: expected (4, 2) int32 or int64 on cpu, contiguous, got (3, 2) int64"),
    ("topk_weights", ROUTER_WEIGHTS.astype("d"), "topk_weights: expected (4, 2) float32 on cpu, contiguous, got"),
    ("topk_weights", None, "topk_weights: expected an array, got NoneType"),
    ("out", np.zeros((4, 48), "f"), f"out: expected (4, 64) {FLOATS} (4, 48) float32"),
    ("out", HIDDEN_STATES, "out: expected memory of its own, got memory that overlaps hidden"),
    ("out", LOCKED, "out: expected an array that can be written, got a read-only one"),
    ("stream", 1, "stream: expected None for arrays in host memory"),
    ("shared_weights", np.ones(4, "f"), "shared_weights: expected null"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_CALLS, ids=[message for *_, message in WRONG_CALLS])
def test_a_wrong_argument_of_run_is_named(name, value, message):
    given = {"hidden": HIDDEN_STATES, "topk_ids": IDS, "topk_weights": ROUTER_WEIGHTS} | {name: value}
    with pytest.raises(TypeError if "expected an array, got" in message else ValueError) as error:
        layer().run(**given)
    assert message in str(error.value)


W = weights()
NEGATIVE = W["gate"][1].copy()
NEGATIVE[4, 2, 1] |= 0x80
BOOLS = (*layers.biases()[:2], layers.biases()[2].astype(bool))
UINTS = (layers.biases()[0].astype(np.uint16), *layers.biases()[1:])
# Arguments of a layer's opening, and the error that they raise.
WRONG_OPENINGS = [
    ({"gate": W["gate"][0]}, r"gate: expected \(codes, scales, tensor_scale\), got ndarray"),
    ({"up": W["down"]}, r"up codes: expected \(E, 48, 32\) uint8 on cpu.*, got \(6, 64, 24\) uint8"),
    ({"up": (W["up"][0], W["up"][1][:5], W["up"][2])}, r"up scales: expected \(6, 48, 4\) uint8"),
    ({"down": (*W["down"][:2], W["down"][2][:5])}, r"down tensor_scale: expected \(6,\) float32 .* got \(5,\)"),
    ({"up": tuple(part[:5] for part in W["up"])}, "gate, up, down: expected as many experts in each, got 6, 5, 6"),
    ({"first_expert": 3}, r"expert range: expected a part of \[0, 6\), got first 3 count 6"),
    ({"gate": (W["gate"][0], NEGATIVE, W["gate"][2])}, "expert 4: gate block scale: expected E4M3 with sign 0"),
    ({"input_scale": (-1, 1)}, "input_scale hidden: expected a positive float32, got -1"),
    ({"input_scale": 0.1}, r"input_scale: expected None or \(hidden, intermediate\), got float"),
    ({"biases": BOOLS}, "biases down: expected float32, float16, bfloat16 .*, got bool"),
    ({"biases": UINTS}, "biases gate: expected float32, float16, bfloat16 .*, got uint16"),
    ({"device": "cuda:999"}, "device cuda:999: "),  # no machine has a thousand
    ({"backend": "sm999"}, "backend: expected one of auto, .*cpu.*reference, got"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPENINGS, ids=[message for _, message in WRONG_OPENINGS])
def test_a_wrong_opening_is_named(options, message):
    kind = nv.Unsupported if "cuda:999" in message else nv.BadInput if "sign 0" in message else ValueError
    with pytest.raises(kind, match=message):
        opened(chosen=config(expert_biases="biases" in options), **options)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"activation": "relu"},
            "activation: expected one of swiglu, swiglu_clamped, swiglu_step, swiglu_oai, relu2, gelu, gelu_tanh, ",
        ),
        (
            {"activation": "situ", "situ_gate_limit": 4},
            "situ_up_limit: expected a limit with activation situ, got none",
        ),
        ({"activation": "gelu", "situ_up_limit": 4}, "situ_up_limit: expected none with activation gelu, got 4"),
        ({"swiglu_alpha": "x"}, 'swiglu_alpha: expected a number, got "x"'),
        ({"top_k": 7}, "top_k: expected 1..6, got 7"),
    ],
)
def test_a_wrong_choice_is_named(choices, message):
    with pytest.raises(ValueError, match=message):
        nv.MoeConfig(**{"num_experts": 6, "top_k": 2, "hidden_size": 64, "intermediate_size": 48, **choices})


# ---- life


def resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_layers_leave_nothing_behind():
    w, chosen, inputs = weights(), config(), batch(2)

    def make(count: int) -> None:
        for _ in range(count):
            opened(w, chosen, max_tokens=4).run(*inputs)

    keep = layer()  # so that threads and workspace are not created again ten thousand times
    make(500)
    before, threads = resident_bytes(), threading.active_count()
    make(10_000)
    grown = resident_bytes() - before
    # A packed layer is 32 KiB: if one in a hundred had stayed, that would be 3 MiB.
    assert grown < 1 << 20, f"{grown} bytes"
    assert threading.active_count() == threads
    gone, handle = weakref.ref(keep), keep.handle
    del keep
    gc.collect()
    assert gone() is None and layer().handle > handle  # never the same again


# ---- swiglu_quantize, linear, checkpoints


def test_silu_mul_quantize_is_its_parts():
    random = np.random.default_rng(4)
    gate_up = (random.standard_normal((5, 2 * 32)) * 3).astype(np.float32)
    router = random.random(5).astype(np.float32)
    gate, up = gate_up[:, :32].astype(np.float64), gate_up[:, 32:].astype(np.float64)
    h = gate / (1 + np.exp(-gate)) * up * router[:, None]
    codes, scales, row_scales = nv.swiglu_quantize(gate_up, row_weights=router)
    # Codes may differ if fp32's last bits round to another bf16: rarely, and never by more than bf16's step.
    expected = nv.quantize(from_bf16(bf16(h)), mode="dynamic_token")
    assert np.array_equal(row_scales, expected[2]) and np.array_equal(scales, expected[1])
    assert np.count_nonzero(codes != expected[0]) <= 1
    interleaved = np.stack([gate_up[:, :32], gate_up[:, 32:]], axis=2).reshape(5, 64)
    again = nv.swiglu_quantize(interleaved, row_weights=router, interleaved=True)
    assert all(np.array_equal(a, b) for a, b in zip(again, (codes, scales, row_scales), strict=True))
    assert (nv.swiglu_quantize(gate_up, power_of_two=2.0**-6)[2] == 2.0**-6).all()
    for options, message in (
        ({"power_of_two": 0.3}, "power_of_two: expected a normal power of two, got 0.3"),
        ({"activation": "swiglu_oai"}, "swiglu_limit: expected a limit"),
        ({"row_weights": router[:4]}, r"row_weights: expected \(5,\) float32 on cpu, got \(4,\) float32 on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            nv.swiglu_quantize(gate_up, **options)


def test_linear_multiplies():
    random = np.random.default_rng(5)
    codes, scales, tensor_scale = (part[0] for part in matrices(random, 1, 40, 96))
    x = random.standard_normal((7, 96), dtype=np.float32)
    w = nv.dequantize(codes, scales, float(tensor_scale)).astype(np.float64)
    static = {"activation_scale": "static", "input_scale": 0.01, "static_headroom": 4.0}
    for options, rounded, scale in (
        ({"activation_format": "bf16"}, from_bf16(bf16(x)), None),
        ({}, nv.dequantize(*nv.quantize(x, mode="dynamic_token")), "dynamic_token"),
        (static, nv.dequantize(*nv.quantize(x, mode="static", tensor_scale=2.0**-4)), 2.0**-4),
    ):
        linear = nv.Nvfp4Linear.from_tensors((codes, scales, tensor_scale), max_tokens=8, **options)
        assert (linear.out_features, linear.in_features) == (40, 96)
        assert linear.describe()["activation_scale"] == scale
        rounded = rounded.astype(np.float64)
        # fp32 sums of 96 terms.
        bound = 96 * 2.0**-23 * (np.abs(rounded) @ np.abs(w).T)
        assert (np.abs(linear.run(x) - rounded @ w.T) <= bound).all()
    with pytest.raises(ValueError, match=r"x: expected \(tokens, 96\) .* got \(7, 80\) float32"):
        linear.run(np.ascontiguousarray(x[:, :80]))


def test_a_checkpoints_layer(model, tmp_path):
    experts, quantized = qwen3_moe.EXPERTS, tmp_path / "nvfp4"
    nv.quantize_checkpoint(model[0], quantized)
    hidden, ids, router_weights = batch(5)
    inputs = hidden, ids % experts, router_weights
    whole = nv.MoeLayer.from_checkpoint(quantized, 1, max_tokens=8)
    by_hand = stacked([nv.load_expert(quantized, 1, expert) for expert in range(experts)])
    assert np.array_equal(whole.run(*inputs), opened(by_hand, whole.config).run(*inputs))
    headers = nv.Checkpoint(str(quantized))  # headers are read once for all layers
    cached = {"activation_format": "bf16", "cache_directory": tmp_path / "cache"}

    def part(**options):
        return nv.MoeLayer.from_checkpoint(headers, 1, 2, 1, **cached, **options)

    w4a16 = part()
    assert w4a16.config.activation_format == "bf16" and (w4a16.first_expert, w4a16.expert_count) == (2, 1)
    assert "experts 2..2 of 4" in repr(w4a16)
    # A flipped bit of the packed bytes is found, unless cache_trusted is set: then the layer runs on the wrong bytes.
    (entry,) = (tmp_path / "cache").iterdir()
    good = entry.read_bytes()
    entry.write_bytes(good[:8192] + bytes([good[8192] ^ 1]) + good[8193:])
    unchecked = part(cache_trusted=True)
    assert not np.array_equal(w4a16.run(*inputs), unchecked.run(*inputs)) and entry.read_bytes() != good
    assert np.array_equal(w4a16.run(*inputs), part().run(*inputs)) and entry.read_bytes() == good
    cut = [nv.MoeLayer.from_checkpoint(headers, 1, intermediate_slice=s) for s in ((0, 32), (32, 16))]
    assert [s.config.intermediate_size for s in cut] == [32, 16]
    with pytest.raises(ValueError, match="options: expected fields of MoeConfig .* got activation_fromat"):
        nv.MoeLayer.from_checkpoint(headers, 1, activation_fromat="bf16")
    with pytest.raises(ValueError):
        nv.MoeLayer.from_checkpoint(headers, 99)
