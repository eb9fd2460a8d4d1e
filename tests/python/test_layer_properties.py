"""Layers through the Python surface against the oracle of the contract (moe_reference.py), every named choice.

Random small layers on both host backends: the reference must give the oracle's bits, the cpu backend a value inside the
interval that the bound of one GEMM element leaves. Then the judge itself is tested: layers with one fault must be
outside.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

torch = pytest.importorskip("torch")

import layer_cases  # noqa: E402
import moe_reference as oracle  # noqa: E402
import nvfp4_moe  # noqa: E402
from layer_cases import Case, build, cases  # noqa: E402
from moe_reference import Options, Weights  # noqa: E402

ACCURACY = {"reference": oracle.EXACT, "cpu": oracle.CONTRACT}
# The same examples everywhere, and the whole example in the message: only sizes could shrink.
FIXED = dict(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


pytestmark = pytest.mark.usefixtures("one_thread")


def run(case: Case, backend: str) -> torch.Tensor:
    layer = nvfp4_moe.MoeLayer.from_tensors(
        nvfp4_moe.MoeConfig(**asdict(case.options)),
        gate=None if case.options.activation == "relu2" else case.weights.gate,
        up=case.weights.up,
        down=case.weights.down,
        input_scale=case.input_scale,
        first_expert=case.first_expert,
        max_tokens=max(len(case.hidden), 1),
        backend=backend,
    )
    out = None if case.out_dtype is None else torch.empty(case.hidden.shape, dtype=layer_cases.DTYPES[case.out_dtype])
    return layer.run(case.hidden, case.topk_ids, case.topk_weights, out=out)


def expected(case: Case, backend: str) -> oracle.Output:
    arrays = case.weights, case.hidden, case.topk_ids, case.topk_weights
    options = {name: getattr(case, name) for name in ("input_scale", "first_expert", "out_dtype")}
    return oracle.forward(case.options, *arrays, **options, accuracy=ACCURACY[backend])


def judge(case: Case, backend: str, want: oracle.Output) -> None:
    """Checks that the contract allows every element of the layer."""
    out = run(case, backend)
    assert out.dtype == layer_cases.DTYPES[want.dtype] and out.shape == case.hidden.shape
    wrong = oracle.outside(want, out)
    if wrong.any():
        t, c = torch.nonzero(wrong)[0].tolist()
        raise AssertionError(
            f"{backend}: {int(wrong.sum())} of {wrong.numel()} elements, the first at token {t} channel {c}: "
            f"expected {want.lo[t, c]} to {want.hi[t, c]}, got {out[t, c]}"
        )
    if backend == "reference":  # bits: a zero has the oracle's sign too
        zero = (want.lo == 0) & (want.hi == 0) & (want.lo.signbit() == want.hi.signbit())
        assert torch.equal(out[zero].signbit(), want.lo[zero].signbit())


def cpu_backends() -> list[str]:
    """ "cpu", and each of its instruction sets that this host has."""
    listed = nvfp4_moe.explain(asdict(SHAPE))
    return [
        c["backend"] for c in listed if c["backend"].startswith("cpu") and (c["chosen"] or "supports" in c["reason"])
    ]


@pytest.mark.parametrize("examples", [200, pytest.param(4000, marks=pytest.mark.long)])
@pytest.mark.parametrize("backend", ACCURACY)
def test_random_layers(backend, examples, count):
    names = ["reference"] if backend == "reference" else cpu_backends()
    assert backend in names
    points = elements = 0

    @settings(max_examples=examples, **FIXED)
    @given(cases())
    def check(case):
        nonlocal points, elements
        want = expected(case, backend)
        for name in names:
            judge(case, name, want)
        points += int(((want.lo == want.hi) | want.lo.isnan()).sum())
        elements += want.lo.numel()

    check()
    count(f"elements with more than one allowed value, {', '.join(names)}", elements - points, elements)
    # Wide intervals would not test anything.
    assert points >= (0.999 if backend == "reference" else 0.9) * elements


# ---- tests of the judge ----

PLAIN = dict(
    tokens=6, local=(0, 4), gains=(2.0, 1.0, 1.0), per_expert=True, same_gate_up_scale=False,
    gate=("uniform", "modelopt"), up=("uniform", "modelopt"), down=("uniform", "modelopt"),
    hidden="normal", amplitude=1.0, dtype="bfloat16", poison=False, router="uniform", ids="random", id_dtype="int32",
    out_dtype=None, scale_error=1.0, scale_per_expert=True,
)  # fmt: skip
SHAPE = Options(num_experts=4, top_k=3, hidden_size=96, intermediate_size=64)


def layer(seed: int, choices: dict, **build_choices) -> Case:
    return build(replace(SHAPE, **choices), seed, **{**PLAIN, **build_choices})


def matrix(name: str, part: int, change):
    """Changes an array of a matrix. part 0: codes, 1: scales, 2: tensor scales. change(array, id of a used expert)."""

    def plant(case: Case) -> Case:
        arrays = list(getattr(case.weights, name))
        arrays[part] = change(arrays[part].clone(), int(case.topk_ids.flatten()[0]))
        return case.changed(weights=case.weights._replace(**{name: tuple(arrays)}))

    return plant


def options(**choices):
    return lambda case: case.changed(options=replace(case.options, **choices))


def changed(**changes):
    """Changes fields of the case, each by a function of the case."""
    return lambda case: case.changed(**{name: change(case) for name, change in changes.items()})


def at(index, change):
    """Changes one element of an array. index: the indices after the expert's."""

    def apply(array, used):
        where = (used, *index)
        array[where] = change(array[where])
        return array

    return apply


def plus_four(hidden):
    hidden[0, 0] += 4
    return hidden


CLAMPED = dict(activation="swiglu_clamped", swiglu_limit=1.5)
ANY_GATE = dict(activation="swiglu_oai", swiglu_limit=7.0, activation_format="bf16")
STATIC = dict(activation_scale="static")
FIXED_SCALE = dict(intermediate_scale="fixed", intermediate_fixed=2.0**-9)
# name: (the right layer, the fault of the one that runs)
FAULTS = {
    "gate's tensor scale doubled": ({}, matrix("gate", 2, at((), lambda s: 2 * s))),
    "one ulp of a tensor scale": (
        dict(row_format="fp32", out="float32"),
        matrix("down", 2, at((), lambda s: torch.nextafter(s, 2 * s))),
    ),
    "a block scale one step down": ({}, matrix("down", 1, at((5, 2), lambda s: s - 1))),
    "one code's sign": ({}, matrix("down", 0, at((7, 3), lambda b: b ^ 0x88))),
    "block scales of another row": ({}, matrix("gate", 1, lambda s, _: s.roll(1, 1))),
    "gate and up swapped": ({}, changed(weights=lambda c: Weights(c.weights.up, c.weights.gate, c.weights.down))),
    "alpha of the next expert": ({}, matrix("down", 2, lambda s, _: s.roll(1))),
    "experts one off": ({}, changed(topk_ids=lambda c: (c.topk_ids + 1) % 4)),
    "weights of another choice": ({}, changed(topk_weights=lambda c: c.topk_weights.roll(1, 1))),
    "combined from the last choice": (
        dict(out="float32"),
        changed(topk_ids=lambda c: c.topk_ids.flip(1), topk_weights=lambda c: c.topk_weights.flip(1)),
    ),
    "router weight before down": ({}, options(router_weight="before_down")),
    "router weight on the output": (dict(router_weight="on_input", top_k=1), options(router_weight="after_down")),
    "no clamp": (CLAMPED, options(activation="swiglu", swiglu_limit=None)),
    "clamp after silu": (CLAMPED, options(activation="swiglu_step")),
    "another limit": (dict(activation="swiglu_oai", swiglu_limit=2.0), options(swiglu_limit=2.0 + 2.0**-6)),
    "another slope": (ANY_GATE, options(swiglu_alpha=1.7)),
    "no gate where there is one": ({}, options(activation="relu2")),
    "W4A16 instead of W4A4": ({}, options(activation_format="bf16")),
    "W4A16 instead of W4A8": (dict(activation_format="int8_block"), options(activation_format="bf16")),
    "W4A16 instead of fp8": (dict(activation_format="fp8"), options(activation_format="bf16")),
    "rows not rounded": (dict(out="float32"), options(row_format="fp32")),
    "one element of hidden": (dict(dtype="float32"), changed(hidden=lambda c: plus_four(c.hidden.clone()))),
    "static scale of one expert": (STATIC, changed(input_scale=lambda c: tuple(s / 16 for s in c.input_scale))),
    "vllm_order instead of static": (STATIC, options(activation_scale="vllm_order")),
    "fixed scale too small": (FIXED_SCALE, options(intermediate_fixed=2.0**-14)),
    "masked choices sent to expert 0": (dict(ids="masked"), changed(topk_ids=lambda c: c.topk_ids.clamp(min=0))),
    "another rank's range": (dict(local=(1, 3), ids="random"), changed(first_expert=lambda _: 0)),
    "NaN tokens computed": (dict(poison=True), changed(hidden=lambda c: c.hidden.nan_to_num(0, 0, 0))),
}
BUILD = {"dtype", "ids", "local", "poison"}


# Smaller than the error that the bound allows any other backend.
BIT_FAULTS = {"one ulp of a tensor scale"}


@pytest.mark.parametrize(
    ("fault", "backend"), [(f, b) for f in FAULTS for b in ACCURACY if b == "reference" or f not in BIT_FAULTS]
)
def test_a_fault_falls_outside(fault, backend):
    what, plant = FAULTS[fault]
    choices = {k: v for k, v in what.items() if k not in BUILD and k != "out"}
    for seed in range(2):
        case = layer(seed, choices, **{k: v for k, v in what.items() if k in BUILD}, out_dtype=what.get("out"))
        want = expected(case, backend)
        judge(case, backend, want)
        assert oracle.outside(want, run(plant(case), backend)).any(), f"seed {seed}: the fault passed"


@pytest.mark.parametrize("backend", ACCURACY)
def test_one_last_bit_falls_outside(backend):
    """If one value is allowed, its neighbours are not."""
    for seed, dtype in enumerate(["bfloat16", "float16", "float32"]):
        case = layer(seed, {}, dtype=dtype)
        want, out = expected(case, backend), run(case, backend)
        for toward in (torch.inf, -torch.inf):
            wrong = oracle.outside(want, torch.nextafter(out, torch.full_like(out, toward)))
            assert (wrong | (want.lo < want.hi)).all()
            assert wrong.float().mean() > 0.5


@pytest.mark.parametrize("backend", ACCURACY)
def test_masked_routings_and_no_tokens(backend):
    case = layer(0, {})
    for ids in (torch.full_like(case.topk_ids, -1), torch.full_like(case.topk_ids, 4)):
        assert torch.equal(run(case.changed(topk_ids=ids), backend), torch.zeros_like(case.hidden))
    # torch's casts leave strides of 0 in a tensor without elements.
    hidden = torch.from_numpy(np.zeros((0, SHAPE.hidden_size))).to(torch.bfloat16)
    assert hidden.stride() == (0, 0)
    out = run(layer(0, {}, tokens=0).changed(hidden=hidden), backend)
    assert out.shape == (0, SHAPE.hidden_size) and out.dtype == torch.bfloat16
