"""MoeLayer, MoeConfig and Nvfp4Linear with NumPy arrays. test_layer_properties.py checks the numbers.

Long because every method of the three classes has its test here.
"""

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
    TOP_K,
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
    half = hidden.astype(np.float16)
    assert one.run(half, ids, router_weights).dtype == np.float16
    # The bits of bfloat16 as uint16, in and out.
    narrow = one.run(bf16(hidden), ids, router_weights)
    assert narrow.dtype == np.uint16
    wide = one.run(from_bf16(bf16(hidden)), ids, router_weights, out=np.empty_like(out))
    assert np.array_equal(narrow, bf16(wide))
    # Read-only inputs work too.
    for array in (hidden, ids, router_weights):
        array.setflags(write=False)
    assert np.array_equal(out, one.run(hidden, ids, router_weights))


def test_no_tokens_is_a_legal_call():
    hidden, ids, router_weights = batch(0)
    assert layer().run(hidden, ids, router_weights).shape == (0, HIDDEN)


def test_experts_and_rows_may_lie_apart():
    w = weights()
    fused = {
        name: np.concatenate([w["gate"][part], w["up"][part]], axis=1) for part, name in enumerate(("codes", "scales"))
    }
    halves = {
        "gate": (fused["codes"][:, :INTERMEDIATE], fused["scales"][:, :INTERMEDIATE], w["gate"][2]),
        "up": (fused["codes"][:, INTERMEDIATE:], fused["scales"][:, INTERMEDIATE:], w["up"][2]),
        "down": w["down"],
    }
    wide = np.zeros((EXPERTS, HIDDEN, INTERMEDIATE), np.uint8)  # rows twice as far apart as they are long
    wide[:, :, : INTERMEDIATE // 2] = w["down"][0]
    halves["down"] = (wide[:, :, : INTERMEDIATE // 2], *w["down"][1:])
    assert np.array_equal(opened(halves).run(*batch(5)), layer().run(*batch(5)))


def test_tensor_scales_are_one_number_or_lie_anywhere_in_memory():
    w, inputs = weights(), batch(5)
    same = {name: (codes, scales, 0.01) for name, (codes, scales, _) in w.items()}
    each = {name: (c, s, np.full(EXPERTS, 0.01, np.float32)) for name, (c, s, _) in w.items()}
    assert np.array_equal(opened(same).run(*inputs), opened(each).run(*inputs))
    codes, scales, tensor_scales = w["gate"]
    apart = np.zeros(EXPERTS * 1000, np.float32)[::1000]
    apart[:] = tensor_scales
    crooked = np.zeros(4 * EXPERTS + 1, np.uint8)[1:].view(np.float32)
    crooked[:] = tensor_scales
    for given in (apart, tensor_scales[::-1].copy()[::-1], crooked):
        assert np.array_equal(opened(gate=(codes, scales, given)).run(*inputs), layer().run(*inputs))


OVERFLOWS = [
    ("codes", (2**62, 1, 1)),
    ("codes", (2**61, 2**61, 1)),
    ("scales", (2**62, 1, 1)),
    ("tensor_scale", (2**62,)),
]


@pytest.mark.parametrize(("name", "strides"), OVERFLOWS, ids=str)
def test_strides_that_overflow_are_an_error(name, strides):
    part, gate = ("codes", "scales", "tensor_scale").index(name), list(weights()["gate"])
    gate[part] = np.lib.stride_tricks.as_strided(gate[part], strides=strides)
    with pytest.raises(ValueError, match=rf"gate {name}: expected \((E|{EXPERTS}),"):
        opened(gate=tuple(gate))


def test_two_ranks_add_up_to_the_whole():
    w = weights()
    hidden, ids, router_weights = batch(11)
    whole = layer(row_format="fp32").run(hidden, ids, router_weights).astype(np.float64)
    parts = []
    for first in (0, 4):
        local = {name: tuple(part[first : first + 4] for part in matrix) for name, matrix in w.items()}
        rank = opened(local, config(row_format="fp32"), first_expert=first)
        assert (rank.first_expert, rank.expert_count) == (first, len(local["gate"][0]))
        parts.append(rank.run(hidden, ids, router_weights).astype(np.float64))
    # One more fp32 sum, of two terms.
    assert np.all(np.abs(parts[0] + parts[1] - whole) <= 2.0**-23 * (np.abs(parts[0]) + np.abs(parts[1])))


def test_from_bf16_is_quantize_and_from_tensors():
    floats, inputs = layers.floats(), batch(6)
    stacks = {}
    for name, array in floats.items():
        codes, scales, tensor_scales = zip(*map(nv.quantize, array), strict=True)
        stacks[name] = np.stack(codes), np.stack(scales), np.array(tensor_scales, np.float32)
    by_hand = opened(stacks).run(*inputs)
    assert np.array_equal(by_hand, nv.MoeLayer.from_bf16(config(), **floats, max_tokens=8).run(*inputs))
    # K need not be the last axis in memory.
    turned = {name: np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2) for name, array in floats.items()}
    assert np.array_equal(by_hand, nv.MoeLayer.from_bf16(config(), **turned, max_tokens=8).run(*inputs))
    floats["up"][2, 1, 5] = np.inf
    with pytest.raises(nv.BadInput, match=r"expert 2 up: \(1, 5\): expected a finite weight, got inf"):
        nv.MoeLayer.from_bf16(config(), **floats)


def test_input_scales_are_the_maximum_over_all_experts():
    pair = (np.array([0.01, 0.02, 0.005], np.float32), 0.03)
    one = opened(chosen=config(activation_scale="static", intermediate_scale="compat"), input_scale=pair)
    assert one.describe()["activation_scale"] == {"hidden": 2.0**-5, "intermediate": pytest.approx(0.03)}


# ---- descriptions


def test_a_layer_tells_what_it_is():
    one = layer(max_tokens=32, activation="swiglu_clamped", swiglu_limit=7)
    assert one.config == config(activation="swiglu_clamped", swiglu_limit=7)
    described = one.describe()
    assert described["backend"] == "cpu" and described["max_tokens"] == one.max_tokens == 32
    assert {"route", "gemm1_swiglu", "gemm2", "combine"} <= set(described["kernels"])
    assert described["activation_scale"] == {"hidden": "dynamic_token", "intermediate": "dynamic_token"}
    assert described["workspace_bytes"] == one.workspace_bytes() == one.workspace_bytes(32) > 0
    assert one.device == "cpu" and "64x48, experts 0..5 of 6, top-2" in repr(one)
    assert layer(backend="reference").describe()["backend"] == "reference"


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
    calibrated.run(np.delete(hidden, 3, axis=0), np.delete(ids, 3, axis=0), np.delete(router_weights, 3, axis=0))
    assert calibrated.status()["hidden_saturated"] == calibrated.status()["intermediate_saturated"] == 0
    hidden[0, 0] = np.inf
    with pytest.raises(nv.BadInput, match="token 0 holds NaN or Inf"):
        layer().calibrate(hidden, ids, router_weights)


def test_progress_is_told_and_may_cancel():
    seen = []
    opened(progress=seen.append)
    assert [(p["what"], p["done"]) for p in seen] == [("pack", e + 1) for e in range(EXPERTS)]
    with pytest.raises(nv.Cancelled):
        opened(progress=lambda p: False)
    with pytest.raises(ZeroDivisionError):
        opened(progress=lambda p: 1 // 0)
    told = []
    layer().warmup(progress=told.append)
    assert told and told[-1]["done"] == told[-1]["total"] == len(told)
    with pytest.raises(nv.Cancelled):
        layer().warmup(progress=lambda p: False)


def test_experts_come_back_and_are_replaced_in_place():
    w, inputs = weights(), batch(8)
    one = layer()
    for name, parts in stacked([one.expert(expert) for expert in range(EXPERTS)]).items():
        assert all(np.array_equal(back, part) for back, part in zip(parts, w[name], strict=True))
    other = weights(seed=5)
    for expert in range(EXPERTS):
        one.replace_expert(expert, **expert_of(other, expert))
    assert np.array_equal(one.run(*inputs), layer(seed=5).run(*inputs))
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
    ("hidden", HIDDEN_STATES.astype("d"), f"hidden: expected (4, 64) {FLOATS} (4, 64) float64"),
    ("hidden", np.asfortranarray(HIDDEN_STATES), f"hidden: expected (4, 64) {FLOATS} (4, 64) float32 on cpu, not"),
    ("hidden", batch(33)[0], "topk_ids: expected (33, 2) int32 or int64 on cpu, contiguous, got (4, 2) int64"),
    ("topk_ids", IDS.astype("h"), "topk_ids: expected (4, 2) int32 or int64 on cpu, contiguous, got (4, 2) int16"),
    ("topk_ids", IDS[:3], "topk_ids: expected (4, 2) int32 or int64 on cpu, contiguous, got (3, 2) int64"),
    ("topk_ids", IDS.tolist(), "topk_ids: expected an array, got list"),
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


WRONG_CHOICES = [
    ({"activation": "gelu"}, "activation: expected one of swiglu, swiglu_clamped, swiglu_step, swiglu_oai, relu2, got"),
    ({"activation": "swiglu_step"}, "swiglu_limit: expected a limit with activation swiglu_step, got none"),
    ({"swiglu_limit": 7}, "swiglu_limit: expected none with activation swiglu, got 7"),
    ({"activation_format": "fp6"}, "activation_format: expected one of nvfp4, bf16"),
    ({"static_headroom": 3}, "static_headroom: expected a power of two"),
    ({"intermediate_fixed": 1.0}, "intermediate_fixed: expected none with intermediate_scale dynamic_token, got 1"),
    ({"batch_invariant": 1}, "batch_invariant: expected true or false, got 1"),
    ({"swiglu_alpha": "x"}, 'swiglu_alpha: expected a number, got "x"'),
    ({"swiglu_alpha": 1.0}, "swiglu_alpha: expected none (1.702) with activation swiglu, got 1"),
    ({"activation": "relu2", "swiglu_alpha": 2}, "swiglu_alpha: expected none (1.702) with activation relu2, got 2"),
    ({"static_headroom": 16}, "static_headroom: expected none (1) with activation_scale dynamic_token, got 16"),
    ({"max_router_weight": 0.0}, "max_router_weight: expected finite and > 0, got 0"),
    ({"top_k": 7}, "top_k: expected 1..6, got 7"),
    ({"hidden_size": 65}, "hidden_size: expected a positive multiple of 16"),
]


@pytest.mark.parametrize(("choices", "message"), WRONG_CHOICES)
def test_a_wrong_choice_is_named(choices, message):
    sizes = {"num_experts": 6, "top_k": 2, "hidden_size": 64, "intermediate_size": 48}
    with pytest.raises(ValueError) as error:
        nv.MoeConfig(**(sizes | choices))
    assert message in str(error.value)


W = weights()
NEGATIVE = W["gate"][1].copy()
NEGATIVE[4, 2, 1] |= 0x80
STATIC = {"chosen": config(activation_scale="static", static_headroom=2.0**20), "input_scale": (1e33, 1.0)}
NO_LIMIT = config(activation="swiglu_clamped", swiglu_limit=1e19, intermediate_scale="fixed")
# Arguments of a layer's opening, and the error that they raise.
WRONG_OPENINGS = [
    ({"gate": W["gate"][0]}, r"gate: expected \(codes, scales, tensor_scale\), got ndarray"),
    ({"up": W["down"]}, r"up codes: expected \(E, 48, 32\) uint8 on cpu.*, got \(6, 64, 24\) uint8"),
    ({"up": (W["up"][0], W["up"][1][:5], W["up"][2])}, r"up scales: expected \(6, 48, 4\) uint8"),
    (
        {"down": (*W["down"][:2], W["down"][2][:5])},
        r"down tensor_scale: expected \(6,\) float32 on cpu or cuda, or one number, got \(5,\)",
    ),
    ({"up": tuple(part[:5] for part in W["up"])}, "gate, up, down: expected as many experts in each, got 6, 5, 6"),
    ({"first_expert": 3}, r"expert range: expected a part of \[0, 6\), got first 3 count 6"),
    ({"max_tokens": 0}, "max_tokens: expected 1 to"),
    ({"gate": (W["gate"][0], NEGATIVE, W["gate"][2])}, "expert 4: gate block scale: expected E4M3 with sign 0"),
    ({"input_scale": (-1, 1)}, "input_scale hidden: expected a positive float32, got -1"),
    ({"input_scale": 0.1}, r"input_scale: expected None or \(hidden, intermediate\), got float"),
    ({"chosen": config(activation_scale="static")}, "static"),  # nothing provides one
    (STATIC, "activation_scale static: gate/up input_scale x static_headroom: expected"),
    ({"chosen": NO_LIMIT}, "intermediate_scale fixed: expected a swiglu_limit .*; give intermediate_fixed"),
    ({"device": "gpu"}, "device: expected cpu or cuda:N, got gpu"),
    ({"device": "cuda:999"}, "device cuda:999: "),  # no machine has a thousand
    ({"backend": "sm999"}, "backend: expected one of auto, .*cpu.*reference, got"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPENINGS, ids=[message for _, message in WRONG_OPENINGS])
def test_a_wrong_opening_is_named(options, message):
    kind = nv.Unsupported if "cuda:999" in message else nv.BadInput if "sign 0" in message else ValueError
    with pytest.raises(kind, match=message):
        opened(**options)


@pytest.mark.parametrize("dtype", ["int32", "uint16", "bool"])
def test_biases_of_integers_are_refused(dtype):
    for index, wrong in enumerate(("gate", "up", "down")):
        biases = list(layers.biases())
        biases[index] = biases[index].astype(dtype)
        with pytest.raises(ValueError, match=f"biases {wrong}: expected float32, float16, bfloat16 .*, got {dtype}"):
            opened(chosen=config(expert_biases=True), biases=tuple(biases))


# ---- life


def test_a_dropped_layer_is_gone():
    one = layer()
    gone = weakref.ref(one)
    handle = one.handle
    del one
    gc.collect()
    assert gone() is None
    assert layer().handle > handle >= 2  # never the same again


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
    before = resident_bytes()
    make(10_000)
    grown = resident_bytes() - before
    # A packed layer is 32 KiB: if one in a hundred had stayed, that would be 3 MiB.
    assert grown < 1 << 20, f"{grown} bytes"
    del keep
    threads = threading.active_count()
    make(50)
    assert threading.active_count() == threads


# ---- swiglu_quantize, linear


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
    fixed = nv.swiglu_quantize(gate_up, power_of_two=2.0**-6)
    assert (fixed[2] == 2.0**-6).all()
    gate_up[2, 40] = np.nan
    assert np.isnan(nv.swiglu_quantize(gate_up)[2]).tolist() == [False, False, True, False, False]
    with pytest.raises(ValueError, match="power_of_two: expected a normal power of two, got 0.3"):
        nv.swiglu_quantize(gate_up, power_of_two=0.3)
    with pytest.raises(ValueError, match="swiglu_limit: expected a limit"):
        nv.swiglu_quantize(gate_up, activation="swiglu_oai")
    with pytest.raises(ValueError, match="tensor_scale: expected a row scale of at most 2"):
        nv.quantize(np.ones((1, 16), np.float32), mode="static", tensor_scale=3e38)
    with pytest.raises(ValueError, match=r"row_weights: expected \(5,\) float32 on cpu, got \(4,\) float32 on cpu"):
        nv.swiglu_quantize(gate_up, row_weights=router[:4])


def test_linear_multiplies():
    random = np.random.default_rng(5)
    codes, scales, tensor_scale = (part[0] for part in matrices(random, 1, 40, 96))
    x = random.standard_normal((7, 96), dtype=np.float32)
    w = nv.dequantize(codes, scales, float(tensor_scale)).astype(np.float64)
    linear = nv.Nvfp4Linear.from_tensors((codes, scales, tensor_scale), activation_format="bf16", max_tokens=8)
    assert (linear.out_features, linear.in_features) == (40, 96)
    x_bf16 = from_bf16(bf16(x)).astype(np.float64)
    # fp32 sums of 96 terms.
    bound = 96 * 2.0**-23 * (np.abs(x_bf16) @ np.abs(w).T)
    assert (np.abs(linear.run(x) - x_bf16 @ w.T) <= bound).all()
    four_bit = nv.Nvfp4Linear.from_tensors((codes, scales, tensor_scale), max_tokens=8)
    q = nv.dequantize(*nv.quantize(x, mode="dynamic_token")).astype(np.float64)
    assert (np.abs(four_bit.run(x) - q @ w.T) <= 96 * 2.0**-23 * (np.abs(q) @ np.abs(w).T)).all()
    assert four_bit.describe()["activation_scale"] == "dynamic_token"
    with pytest.raises(ValueError, match=r"x: expected \(tokens, 96\) .* got \(7, 80\) float32"):
        linear.run(np.ascontiguousarray(x[:, :80]))
    with pytest.raises(ValueError, match="tokens: expected 0 to 8, got 9"):
        linear.run(np.zeros((9, 96), np.float32))


def test_a_checkpoints_layer(model, tmp_path):
    experts, hidden_size = qwen3_moe.EXPERTS, qwen3_moe.HIDDEN
    quantized = tmp_path / "nvfp4"
    nv.quantize_checkpoint(model[0], quantized)
    random = np.random.default_rng(6)
    inputs = (
        random.standard_normal((5, hidden_size), dtype=np.float32),
        random.integers(0, experts, (5, TOP_K)),
        random.random((5, TOP_K), dtype=np.float32),
    )
    whole = nv.MoeLayer.from_checkpoint(quantized, 1, max_tokens=8)
    by_hand = stacked([nv.load_expert(quantized, 1, expert) for expert in range(experts)])
    assert np.array_equal(whole.run(*inputs), opened(by_hand, whole.config).run(*inputs))
    headers = nv.Checkpoint(str(quantized))  # headers are read once for all layers
    cached = {"activation_format": "bf16", "cache_directory": tmp_path / "cache"}

    def part(**options):
        return nv.MoeLayer.from_checkpoint(headers, 1, 2, 1, **cached, **options)

    w4a16 = part()
    assert w4a16.config.activation_format == "bf16" and (w4a16.first_expert, w4a16.expert_count) == (2, 1)
    assert np.array_equal(w4a16.run(*inputs), part().run(*inputs)) and len(list((tmp_path / "cache").iterdir())) == 1
    # A flipped bit of the packed bytes is found, unless cache_trusted is set: then the layer runs on the wrong bytes.
    (entry,) = (tmp_path / "cache").iterdir()
    good = entry.read_bytes()
    entry.write_bytes(good[:8192] + bytes([good[8192] ^ 1]) + good[8193:])
    unchecked = part(cache_trusted=True)
    assert not np.array_equal(w4a16.run(*inputs), unchecked.run(*inputs)) and entry.read_bytes() != good
    assert np.array_equal(w4a16.run(*inputs), part().run(*inputs)) and entry.read_bytes() == good
    slices = (0, 32), (32, 16)
    cut = [nv.MoeLayer.from_checkpoint(headers, 1, intermediate_slice=s, row_format="fp32") for s in slices]
    assert [s.config.intermediate_size for s in cut] == [32, 16]
    with pytest.raises(ValueError, match="options: expected fields of MoeConfig .* got activation_fromat"):
        nv.MoeLayer.from_checkpoint(headers, 1, activation_fromat="bf16")
    with pytest.raises(ValueError):
        nv.MoeLayer.from_checkpoint(headers, 99)
