"""MoeLayer, MoeConfig and Nvfp4Linear as NumPy arrays see them. What the numbers must be is test_layer_properties.py's.

Long because every method of the three classes has its test here.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref

import numpy as np
import nvfp4_moe as nv
import pytest
import qwen3_moe
from layers import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, batch, config, layer, matrices, weights


def decode(matrix, expert: int) -> np.ndarray:
    codes, scales, tensor_scale = (part[expert] for part in matrix)
    return nv.dequantize(codes, scales, float(tensor_scale)).astype(np.float64)


def plain_layer(stack, hidden, ids, router_weights) -> np.ndarray:
    """The layer in float64 without any rounding: near, not equal."""
    out = np.zeros(hidden.shape)
    for token, choices in enumerate(ids):
        for choice, expert in enumerate(choices):
            if expert < 0:
                continue
            gate, up, down = (decode(stack[name], expert) for name in ("gate", "up", "down"))
            g, u = gate @ hidden[token], up @ hidden[token]
            out[token] += router_weights[token, choice] * (down @ (g / (1 + np.exp(-g)) * u))
    return out


def relative_l2(actual, expected) -> float:
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected))


# ---- what runs


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_layer_is_near_the_same_layer_in_float64(backend):
    hidden, ids, router_weights = batch(9)
    ids[2] = -1  # a token without a choice
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
    bits = (hidden.view(np.uint32) >> 16).astype(np.uint16)
    narrow = one.run(bits, ids, router_weights)
    assert narrow.dtype == np.uint16
    wide = one.run((bits.astype(np.uint32) << 16).view(np.float32), ids, router_weights, out=np.empty_like(out))
    nearest = (wide.view(np.uint32) + 0x7FFF + (wide.view(np.uint32) >> 16 & 1)) >> 16
    assert np.array_equal(narrow, nearest)
    # Read-only inputs are as good as others.
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
    inputs = batch(5)
    apart = nv.MoeLayer.from_tensors(config(), **halves, max_tokens=8)
    assert np.array_equal(apart.run(*inputs), layer().run(*inputs))


def test_one_number_is_every_experts_tensor_scale():
    w = weights()
    same = {name: (codes, scales, 0.01) for name, (codes, scales, _) in w.items()}
    each = {name: (c, s, np.full(EXPERTS, 0.01, np.float32)) for name, (c, s, _) in w.items()}
    inputs = batch(5)
    a, b = (nv.MoeLayer.from_tensors(config(), **v, max_tokens=8).run(*inputs) for v in (same, each))
    assert np.array_equal(a, b)


def test_two_ranks_add_up_to_the_whole():
    w = weights()
    hidden, ids, router_weights = batch(11)
    whole = layer(row_format="fp32").run(hidden, ids, router_weights).astype(np.float64)
    parts = []
    for first in (0, 4):
        local = {name: tuple(part[first : first + 4] for part in matrix) for name, matrix in w.items()}
        rank = nv.MoeLayer.from_tensors(config(row_format="fp32"), **local, first_expert=first, max_tokens=16)
        assert (rank.first_expert, rank.expert_count) == (first, len(local["gate"][0]))
        parts.append(rank.run(hidden, ids, router_weights).astype(np.float64))
    # One more fp32 sum, of two terms.
    assert np.all(np.abs(parts[0] + parts[1] - whole) <= 2.0**-23 * (np.abs(parts[0]) + np.abs(parts[1])))


def test_from_bf16_is_quantize_and_from_tensors():
    random = np.random.default_rng(3)
    floats = {
        "gate": random.standard_normal((EXPERTS, INTERMEDIATE, HIDDEN), dtype=np.float32),
        "up": random.standard_normal((EXPERTS, INTERMEDIATE, HIDDEN), dtype=np.float32),
        "down": random.standard_normal((EXPERTS, HIDDEN, INTERMEDIATE), dtype=np.float32),
    }
    stacks = {}
    for name, array in floats.items():
        each = [nv.quantize(matrix) for matrix in array]
        stacks[name] = (
            np.stack([codes for codes, _, _ in each]),
            np.stack([scales for _, scales, _ in each]),
            np.array([scale for _, _, scale in each], np.float32),
        )
    inputs = batch(6)
    by_hand = nv.MoeLayer.from_tensors(config(), **stacks, max_tokens=8).run(*inputs)
    assert np.array_equal(by_hand, nv.MoeLayer.from_bf16(config(), **floats, max_tokens=8).run(*inputs))
    # K need not be the last axis in memory.
    turned = {name: np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2) for name, array in floats.items()}
    assert np.array_equal(by_hand, nv.MoeLayer.from_bf16(config(), **turned, max_tokens=8).run(*inputs))
    floats["up"][2, 1, 5] = np.inf
    with pytest.raises(nv.BadInput, match=r"expert 2 up: \(1, 5\): expected a finite weight, got inf"):
        nv.MoeLayer.from_bf16(config(), **floats)


def test_input_scales_are_the_maximum_over_all_experts():
    pair = (np.array([0.01, 0.02, 0.005], np.float32), 0.03)
    one = nv.MoeLayer.from_tensors(
        config(activation_scale="static", intermediate_scale="compat"), **weights(), input_scale=pair
    )
    assert one.describe()["activation_scale"] == {"hidden": 2.0**-5, "intermediate": pytest.approx(0.03)}
    with pytest.raises(ValueError, match="input_scale hidden: expected a positive float32, got -1"):
        nv.MoeLayer.from_tensors(config(), **weights(), input_scale=(-1, 1))
    with pytest.raises(ValueError, match=r"input_scale: expected None or \(hidden, intermediate\), got float"):
        nv.MoeLayer.from_tensors(config(), **weights(), input_scale=0.1)
    with pytest.raises(ValueError, match="static"):
        layer(activation_scale="static")  # nothing provides one


# ---- what a layer tells


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
    hidden[3] = 1e6  # a token without a choice does not count
    measured = layer().calibrate(hidden, ids, router_weights)
    amax = np.abs(np.delete(hidden, 3, axis=0)).max()
    assert measured["hidden_amax"] == amax and measured["hidden"] == np.float32(np.float64(amax) / 2688)
    assert measured["tokens"] == 15 and measured["experts_seen"] == EXPERTS
    assert measured["intermediate"] == pytest.approx(measured["intermediate_amax"] / 2688, rel=1e-6)
    scales = (measured["hidden"], measured["intermediate"])
    calibrated = nv.MoeLayer.from_tensors(
        config(activation_scale="static", intermediate_scale="fixed"), **weights(), input_scale=scales, max_tokens=16
    )
    calibrated.run(np.delete(hidden, 3, axis=0), np.delete(ids, 3, axis=0), np.delete(router_weights, 3, axis=0))
    assert calibrated.status()["hidden_saturated"] == calibrated.status()["intermediate_saturated"] == 0
    hidden[0, 0] = np.inf
    with pytest.raises(nv.BadInput, match="token 0 holds NaN or Inf"):
        layer().calibrate(hidden, ids, router_weights)


def test_progress_is_told_and_may_cancel():
    seen = []
    nv.MoeLayer.from_tensors(config(), **weights(), progress=seen.append)
    assert [(p["what"], p["done"]) for p in seen] == [("pack", e + 1) for e in range(EXPERTS)]
    with pytest.raises(nv.Cancelled):
        nv.MoeLayer.from_tensors(config(), **weights(), progress=lambda p: False)
    with pytest.raises(ZeroDivisionError):
        nv.MoeLayer.from_tensors(config(), **weights(), progress=lambda p: 1 // 0)
    told = []
    layer().warmup(progress=told.append)
    assert told and told[-1]["done"] == told[-1]["total"] == len(told)
    with pytest.raises(nv.Cancelled):
        layer().warmup(progress=lambda p: False)


def test_experts_come_back_and_are_replaced_in_place():
    w, inputs = weights(), batch(8)
    one = layer()
    for expert in range(EXPERTS):
        back = one.expert(expert)
        for name, (codes, scales, tensor_scale) in w.items():
            assert np.array_equal(back[name]["codes"], codes[expert])
            assert np.array_equal(back[name]["scales"], scales[expert])
            assert np.float32(back[name]["tensor_scale"]) == tensor_scale[expert]
    other = weights(seed=5)
    for expert in range(EXPERTS):
        one.replace_expert(expert, **{name: tuple(part[expert] for part in m) for name, m in other.items()})
    assert np.array_equal(one.run(*inputs), layer(seed=5).run(*inputs))
    with pytest.raises(ValueError, match="local expert: expected 0 to 5, got 6"):
        one.expert(6)
    with pytest.raises(ValueError, match=r"gate codes: expected \(48, 32\) uint8 on cpu, contiguous, got \(64, 24\)"):
        one.replace_expert(0, **{name: tuple(part[0] for part in other["down"]) for name in other})
    with pytest.raises(ValueError, match="stream: expected None for a layer on cpu, got a stream"):
        one.replace_expert(0, **{name: tuple(part[0] for part in m) for name, m in other.items()}, stream=0)


# ---- wrong arguments, in the library's words


def wrong_calls():
    hidden, ids, router_weights = batch(4)
    yield (
        "hidden: expected (4, 64) bfloat16, float16 or float32 on cpu, contiguous, got (4, 32) float32",
        (
            np.ascontiguousarray(hidden[:, :32]),
            ids,
            router_weights,
        ),
    )
    yield (
        "hidden: expected (tokens, 64) bfloat16, float16 or float32 on cpu, contiguous, got (64,) float32",
        (
            hidden[0],
            ids,
            router_weights,
        ),
    )
    yield (
        "hidden: expected (4, 64) bfloat16, float16 or float32 on cpu, contiguous, got (4, 64) float64",
        (
            hidden.astype(np.float64),
            ids,
            router_weights,
        ),
    )
    yield "got (4, 64) float32 on cpu, not contiguous", (np.asfortranarray(hidden), ids, router_weights)
    yield (
        "topk_ids: expected (4, 2) int32 or int64 on cpu, contiguous, got (4, 2) int16",
        (
            hidden,
            ids.astype(np.int16),
            router_weights,
        ),
    )
    yield (
        "topk_ids: expected (4, 2) int32 or int64 on cpu, contiguous, got (3, 2) int64",
        (hidden, ids[:3], router_weights),
    )
    yield (
        "topk_weights: expected (4, 2) float32 on cpu, contiguous, got (4, 2) float64",
        (
            hidden,
            ids,
            router_weights.astype(np.float64),
        ),
    )
    yield (
        "out: expected (4, 64) bfloat16, float16 or float32 on cpu, contiguous, got (4, 48) float32",
        (
            hidden,
            ids,
            router_weights,
            np.zeros((4, 48), np.float32),
        ),
    )
    yield "tokens: expected 0 to 32, got 33", batch(33)


@pytest.mark.parametrize("message, arguments", list(wrong_calls()))
def test_a_wrong_array_is_named(message, arguments):
    with pytest.raises(ValueError) as error:
        layer().run(*arguments)
    assert message in str(error.value)


def test_more_wrong_calls():
    hidden, ids, router_weights = batch(4)
    one = layer()
    with pytest.raises(TypeError, match="topk_ids: expected an array, got list"):
        one.run(hidden, ids.tolist(), router_weights)
    with pytest.raises(TypeError, match="topk_weights: expected an array, got NoneType"):
        one.run(hidden, ids, None)
    with pytest.raises(ValueError, match="out: expected memory of its own, got memory that overlaps hidden"):
        one.run(hidden, ids, router_weights, out=hidden)
    locked = np.zeros_like(hidden)
    locked.setflags(write=False)
    with pytest.raises(ValueError, match="out: expected an array that can be written, got a read-only one"):
        one.run(hidden, ids, router_weights, out=locked)
    with pytest.raises(ValueError, match="stream: expected None for arrays in host memory"):
        one.run(hidden, ids, router_weights, stream=1)
    with pytest.raises(ValueError, match="shared_weights: expected null"):
        one.run(hidden, ids, router_weights, shared_weights=np.ones(4, np.float32))


@pytest.mark.parametrize(
    "choices, message",
    [
        (
            {"activation": "gelu"},
            "activation: expected one of swiglu, swiglu_clamped, swiglu_step, swiglu_oai, relu2, got",
        ),
        ({"activation": "swiglu_step"}, "swiglu_limit: expected a limit with activation swiglu_step, got none"),
        ({"swiglu_limit": 7}, "swiglu_limit: expected none with activation swiglu, got 7"),
        ({"activation_format": "fp6"}, "activation_format: expected one of nvfp4, bf16"),
        ({"static_headroom": 3}, "static_headroom: expected a power of two"),
        ({"intermediate_fixed": 1.0}, "intermediate_fixed: expected none with intermediate_scale dynamic_token, got 1"),
        ({"batch_invariant": 1}, "batch_invariant: expected true or false, got 1"),
        ({"swiglu_alpha": "x"}, 'swiglu_alpha: expected a number, got "x"'),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha: expected none (1.702) with activation swiglu, got 1"),
        (
            {"activation": "relu2", "swiglu_alpha": 2},
            "swiglu_alpha: expected none (1.702) with activation relu2, got 2",
        ),
        ({"static_headroom": 16}, "static_headroom: expected none (1) with activation_scale dynamic_token, got 16"),
        ({"max_router_weight": 0.0}, "max_router_weight: expected finite and > 0, got 0"),
    ],
)
def test_a_wrong_choice_is_named(choices, message):
    with pytest.raises(ValueError) as error:
        config(**choices)
    assert message in str(error.value)


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match="top_k: expected 1..4, got 5"):
        nv.MoeConfig(4, 5, 64, 48)
    with pytest.raises(ValueError, match="hidden_size: expected a positive multiple of 16"):
        nv.MoeConfig(4, 2, 65, 48)


def test_wrong_weights_are_named():
    w = weights()
    with pytest.raises(ValueError, match=r"gate: expected \(codes, scales, tensor_scale\), got ndarray"):
        nv.MoeLayer.from_tensors(config(), **{**w, "gate": w["gate"][0]})
    with pytest.raises(ValueError, match=r"up codes: expected \(E, 48, 32\) uint8 on cpu.*, got \(6, 64, 24\) uint8"):
        nv.MoeLayer.from_tensors(config(), **{**w, "up": w["down"]})
    with pytest.raises(ValueError, match=r"up scales: expected \(6, 48, 4\) uint8"):
        nv.MoeLayer.from_tensors(config(), **{**w, "up": (w["up"][0], w["up"][1][:5], w["up"][2])})
    with pytest.raises(
        ValueError, match=r"down tensor_scale: expected \(6,\) float32 on cpu or cuda, or one number, got \(5,\)"
    ):
        nv.MoeLayer.from_tensors(config(), **{**w, "down": (*w["down"][:2], w["down"][2][:5])})
    with pytest.raises(ValueError, match="gate, up, down: expected as many experts in each, got 6, 5, 6"):
        nv.MoeLayer.from_tensors(config(), **{**w, "up": tuple(part[:5] for part in w["up"])})
    with pytest.raises(ValueError, match=r"expert range: expected a part of \[0, 6\), got first 3 count 6"):
        nv.MoeLayer.from_tensors(config(), **w, first_expert=3)
    with pytest.raises(ValueError, match="max_tokens: expected 1 to"):
        nv.MoeLayer.from_tensors(config(), **w, max_tokens=0)
    negative = w["gate"][1].copy()
    negative[4, 2, 1] |= 0x80
    with pytest.raises(nv.BadInput, match="expert 4: gate block scale: expected E4M3 with sign 0"):
        nv.MoeLayer.from_tensors(config(), **{**w, "gate": (w["gate"][0], negative, w["gate"][2])})


@pytest.mark.parametrize("dtype", ["int32", "uint16", "bool"])
def test_biases_of_integers_are_refused(dtype):
    chosen = config(expert_biases=True)
    sizes = {"gate": INTERMEDIATE, "up": INTERMEDIATE, "down": HIDDEN}
    for wrong in sizes:
        biases = [np.zeros((EXPERTS, size), dtype if name == wrong else "float32") for name, size in sizes.items()]
        with pytest.raises(ValueError, match=f"biases {wrong}: expected float32, float16, bfloat16 .*, got {dtype}"):
            nv.MoeLayer.from_tensors(chosen, **weights(), biases=tuple(biases))


def test_a_static_scale_beyond_a_float_is_refused_by_name():
    chosen = config(activation_scale="static", static_headroom=2.0**20)
    with pytest.raises(ValueError, match="activation_scale static: gate/up input_scale x static_headroom: expected"):
        nv.MoeLayer.from_tensors(chosen, **weights(), input_scale=(1e33, 1.0))
    with pytest.raises(ValueError, match="tensor_scale: expected a row scale of at most 2"):
        nv.quantize(np.ones((1, 16), np.float32), mode="static", tensor_scale=3e38)


def test_a_fixed_scale_of_a_limit_that_means_none_is_refused_by_name():
    chosen = config(activation="swiglu_clamped", swiglu_limit=1e19, intermediate_scale="fixed")
    with pytest.raises(
        ValueError, match="intermediate_scale fixed: expected a swiglu_limit .*; give intermediate_fixed"
    ):
        nv.MoeLayer.from_tensors(chosen, **weights())


def test_a_device_or_backend_that_is_not_here_is_named():
    with pytest.raises(nv.Unsupported, match="device cuda:999: "):  # no machine has a thousand
        nv.MoeLayer.from_tensors(config(), **weights(), device="cuda:999")
    with pytest.raises(ValueError, match="device: expected cpu or cuda:N, got gpu"):
        nv.MoeLayer.from_tensors(config(), **weights(), device="gpu")
    with pytest.raises(ValueError, match="backend: expected one of auto, .*cpu.*reference, got"):
        layer(backend="sm999")


# ---- life


def test_threads_run_one_layer_at_once():
    one, inputs = layer(), batch(16)
    expected = one.run(*inputs)
    wrong = []

    def work():
        for _ in range(50):
            if not np.array_equal(one.run(*inputs), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.attack("forks")
def test_a_layer_runs_in_a_forked_child(attacked):
    one, inputs = layer(), batch(16)
    expected = one.run(*inputs)
    attacked()
    child = os.fork()
    if child == 0:  # the pool's threads stayed in the parent
        same = np.array_equal(one.run(*inputs), expected)
        del one
        gc.collect()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


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
    w, cfg = weights(), config()
    inputs = batch(2)

    def make(count: int) -> None:
        for _ in range(count):
            nv.MoeLayer.from_tensors(cfg, **w, max_tokens=4).run(*inputs)

    keep = layer()  # so that threads and workspace are not made anew ten thousand times
    make(500)
    before = resident_bytes()
    make(10_000)
    grown = resident_bytes() - before
    # A packed layer is 32 KiB: had one in a hundred stayed, it were 3 MiB.
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

    def to_bf16(h):
        bits = h.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(np.float32)

    h = gate / (1 + np.exp(-gate)) * up * router[:, None]
    codes, scales, row_scales = nv.swiglu_quantize(gate_up, row_weights=router)
    # Where fp32's last bits round to another bf16, codes may differ: hardly ever, and never by more than bf16's step.
    expected = nv.quantize(to_bf16(h), mode="dynamic_token")
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
    with pytest.raises(ValueError, match=r"row_weights: expected \(5,\) float32 on cpu, got \(4,\) float32 on cpu"):
        nv.swiglu_quantize(gate_up, row_weights=router[:4])


def test_linear_multiplies():
    random = np.random.default_rng(5)
    codes, scales, tensor_scale = (part[0] for part in matrices(random, 1, 40, 96))
    x = random.standard_normal((7, 96), dtype=np.float32)
    w = nv.dequantize(codes, scales, float(tensor_scale)).astype(np.float64)
    linear = nv.Nvfp4Linear.from_tensors((codes, scales, tensor_scale), activation_format="bf16", max_tokens=8)
    assert (linear.out_features, linear.in_features) == (40, 96)
    bits = x.view(np.uint32)
    x_bf16 = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(np.float32).astype(np.float64)
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
    by_hand = {name: [] for name in ("gate", "up", "down")}
    for expert in range(experts):
        loaded = nv.load_expert(quantized, 1, expert)
        for name, parts in by_hand.items():
            parts.append(loaded[name])
    stacks = {
        name: (
            np.stack([p["codes"] for p in parts]),
            np.stack([p["scales"] for p in parts]),
            np.array([p["tensor_scale"] for p in parts], np.float32),
        )
        for name, parts in by_hand.items()
    }
    assert np.array_equal(
        whole.run(*inputs), nv.MoeLayer.from_tensors(whole.config, **stacks, max_tokens=8).run(*inputs)
    )
    opened = nv.Checkpoint(str(quantized))  # headers are read once for all layers
    w4a16 = nv.MoeLayer.from_checkpoint(opened, 1, 2, 1, activation_format="bf16", cache_directory=tmp_path / "cache")
    assert w4a16.config.activation_format == "bf16" and (w4a16.first_expert, w4a16.expert_count) == (2, 1)
    cached = nv.MoeLayer.from_checkpoint(opened, 1, 2, 1, activation_format="bf16", cache_directory=tmp_path / "cache")
    assert np.array_equal(w4a16.run(*inputs), cached.run(*inputs)) and len(list((tmp_path / "cache").iterdir())) == 1
    # A flipped bit of the packed bytes is found, unless that is not asked for; then the layer runs on what is there.
    (entry,) = (tmp_path / "cache").iterdir()
    good = entry.read_bytes()
    entry.write_bytes(good[:8192] + bytes([good[8192] ^ 1]) + good[8193:])
    again = {"activation_format": "bf16", "cache_directory": tmp_path / "cache"}
    unchecked = nv.MoeLayer.from_checkpoint(opened, 1, 2, 1, cache_trusted=True, **again)
    assert not np.array_equal(w4a16.run(*inputs), unchecked.run(*inputs)) and entry.read_bytes() != good
    checked = nv.MoeLayer.from_checkpoint(opened, 1, 2, 1, **again)
    assert np.array_equal(w4a16.run(*inputs), checked.run(*inputs)) and entry.read_bytes() == good
    cut = [nv.MoeLayer.from_checkpoint(opened, 1, intermediate_slice=s, row_format="fp32") for s in ((0, 32), (32, 16))]
    assert [s.config.intermediate_size for s in cut] == [32, 16]
    with pytest.raises(ValueError, match="options: expected fields of MoeConfig .* got activation_fromat"):
        nv.MoeLayer.from_checkpoint(opened, 1, activation_fromat="bf16")
    with pytest.raises(ValueError):
        nv.MoeLayer.from_checkpoint(opened, 99)
