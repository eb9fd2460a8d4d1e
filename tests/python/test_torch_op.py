"""The torch operators: torch's own opcheck, torch.compile(fullgraph), dynamic token counts, handles, overhead."""

from __future__ import annotations

import builtins
import gc
import statistics
import sys
import timeit
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent / "numpy_only"))

import layers  # noqa: E402
import nvfp4_moe as nv  # noqa: E402
import nvfp4_moe.torch_op  # noqa: E402, F401

op = torch.ops.nvfp4_moe

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(tokens: int, dtype=torch.bfloat16, seed: int = 1):
    hidden, ids, router_weights = layers.batch(tokens, seed)
    return torch.from_numpy(hidden).to(dtype), torch.from_numpy(ids), torch.from_numpy(router_weights)


@pytest.fixture(scope="module")
def layer():
    return layers.layer(max_tokens=64)


@pytest.fixture(scope="module")
def linear():
    parts = layers.matrices(np.random.default_rng(5), 1, 32, 64)
    return nv.Nvfp4Linear.from_tensors(tuple(part[0] for part in parts), max_tokens=64)


def test_an_input_whose_gradient_would_be_lost_is_refused(layer, linear):
    hidden, ids, router_weights = inputs(3)
    leaf, trained = hidden.clone().requires_grad_(), router_weights.clone().requires_grad_()
    calls = {
        "hidden": (
            lambda: layer.run(leaf, ids, router_weights),
            lambda: op.moe_layer(leaf, ids, router_weights, layer.handle),
        ),
        "topk_weights": (lambda: layer.run(hidden, ids, trained),),
        "x": (lambda: linear.run(leaf), lambda: op.linear(leaf, linear.handle, 32)),
    }
    for name, both in calls.items():
        for call in both:
            with pytest.raises(nv.Unsupported, match=f"{name}: expected a tensor that needs no gradient"):
                call()
    with torch.no_grad():
        assert torch.equal(layer.run(leaf, ids, trained), layer.run(hidden, ids, router_weights))


# ---- the ops give the layer's bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ops_give_what_run_gives(layer, linear, dtype):
    x = inputs(5, dtype)
    expected = layer.run(*x)
    y = linear.run(x[0])
    assert expected.dtype == dtype and isinstance(expected, torch.Tensor)
    assert torch.equal(torch.ops.nvfp4.moe_gemm(*x, layer.handle), expected), "the predecessor's name"
    for one, arguments, want in (
        (op.moe_layer, (*x, layer.handle), expected),
        (op.linear, (x[0], linear.handle, 32), y),
    ):
        out = torch.full_like(want, float("nan"))
        assert one(*arguments, out=out) is None
        assert torch.equal(out, want) and torch.equal(one(*arguments), want)


def test_format_ops_give_what_the_functions_give():
    x = inputs(6, torch.float32)[0]
    for mode, scale in (("weights", None), ("dynamic_token", None), ("static", 0.01), ("vllm_order", 0.01)):
        made, expected = op.quantize(x, mode, scale), nv.quantize(x, mode=mode, tensor_scale=scale)
        assert all(torch.equal(a, torch.as_tensor(b, dtype=a.dtype)) for a, b in zip(made, expected, strict=True))
        for dtype in (torch.float32, torch.bfloat16):
            y = op.dequantize(*made, dtype)
            assert torch.equal(y, nv.dequantize(*expected, str(dtype).removeprefix("torch."))) and y.dtype == dtype
    assert torch.equal(op.unswizzle_scales(op.swizzle_scales(made[1]), 6, 4), made[1])
    parts = op.swiglu_quantize(x, "swiglu_clamped", 2.0, interleaved=True)
    same = nv.swiglu_quantize(x, activation="swiglu_clamped", swiglu_limit=2.0, interleaved=True)
    assert all(torch.equal(a, b) for a, b in zip(parts, same, strict=True))


def test_the_router_op_gives_what_the_function_gives():
    logits, bias = inputs(6, torch.float32)[0][:, :16], torch.linspace(-1, 1, 16)
    fields = {"scoring": "sigmoid", "renormalize": True, "routed_scaling_factor": 2.5, "correction_bias": True}
    config = nv.RouterConfig(16, 3, num_expert_group=4, topk_group=2, group_score="top2_sum", **fields)
    ids, weights = nv.select_experts(logits, config, correction_bias=bias)
    arguments = (logits, 3, "sigmoid", True, 0.0, 2.5, 4, 2, "top2_sum", bias)
    out = {"topk_ids": torch.empty_like(ids), "topk_weights": torch.empty_like(weights)}
    op.select_experts(*arguments, **out)
    for made in (op.select_experts(*arguments), tuple(out.values())):
        assert torch.equal(made[0], ids) and torch.equal(made[1], weights)
    wide = op.select_experts(*arguments, ids_dtype=torch.int64)[0]
    assert wide.dtype == torch.int64 and torch.equal(wide, ids.long())
    with pytest.raises(ValueError, match="topk_ids: expected ids_dtype torch.int64"):
        op.select_experts(*arguments, ids_dtype=torch.int64, **out)


# ---- torch's own checks


def overloads_of(packet) -> list:
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    return [getattr(packet, name) for name in packet.overloads()]


def op_calls(layer, linear) -> dict[str, tuple]:
    x = inputs(5)
    codes, scales, tensor_scale = op.quantize(x[0], "dynamic_token")
    logits, bias = x[0][:, :16], torch.linspace(-1, 1, 16)
    table, gemm = torch.arange(20).reshape(10, 2) % 16, (x[0], x[0][:3].clone())
    router = (logits, 2, "sigmoid", True, 1e-20, 2.5, 4, 2, "top2_sum", bias)
    by_hash = (logits, 2, "sqrt_softplus", True, 0.0, 1.0, 1, 1, "max", None, torch.arange(5), table)
    chosen = {"topk_ids": torch.empty(5, 2, dtype=torch.int64), "topk_weights": torch.empty(5, 2)}
    return {
        "moe_layer": (op.moe_layer.default, (*x, layer.handle)),
        "moe_layer.out": (op.moe_layer.out, (*x, layer.handle), {"out": torch.empty_like(x[0])}),
        "linear": (op.linear.default, (x[0], linear.handle, 32)),
        "linear.out": (op.linear.out, (x[0], linear.handle, 32), {"out": x[0].new_empty(5, 32)}),
        "quantize weights": (op.quantize.default, (x[0],)),
        "quantize dynamic_token": (op.quantize.default, (x[0], "dynamic_token")),
        "dequantize": (op.dequantize.default, (codes, scales, tensor_scale, torch.bfloat16)),
        "swiglu_quantize": (op.swiglu_quantize.default, (x[0],)),
        "swizzle_scales": (op.swizzle_scales.default, (scales[:, :3].contiguous(),)),
        "unswizzle_scales": (op.unswizzle_scales.default, (op.swizzle_scales(scales), 5, 4)),
        "router_gemm": (op.router_gemm.default, gemm, {"logits_dtype": torch.float32}),
        "router_gemm.out": (op.router_gemm.out, gemm, {"out": torch.empty(5, 3, dtype=torch.bfloat16)}),
        "select_experts": (op.select_experts.default, router),
        "select_experts by hash": (op.select_experts.default, by_hash, {"ids_dtype": torch.int64}),
        "select_experts.out": (op.select_experts.out, router, {"ids_dtype": torch.int64, **chosen}),
    }


def test_opcheck(layer, linear):
    calls = op_calls(layer, linear)
    for name, (overload, *arguments) in calls.items():
        results = torch.library.opcheck(overload, *arguments)
        assert len(results) == 4 and set(results.values()) == {"SUCCESS"}, (name, results)
    checked = {overload for overload, *_ in calls.values()}
    defined = {overload for packet in (getattr(op, name) for name in dir(op)) for overload in overloads_of(packet)}
    assert checked == defined, "every op of the library is checked"


def test_schemas_suit_every_torch():
    """Torch 2.13 must not put an out form in the default's place, which fails on symbolic token counts. No parameter
    shadows a builtin."""
    packets = [getattr(op, name) for name in dir(op)]
    arguments = [
        argument.name for packet in packets for one in overloads_of(packet) for argument in one._schema.arguments
    ]
    assert not set(arguments) & set(dir(builtins))
    out_variant = pytest.importorskip("torch._library._out_variant")
    for packet in (op.moe_layer, op.linear, op.router_gemm, op.select_experts):
        assert out_variant.to_out_variant(packet.default) is None


# ---- torch.compile


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(hidden, ids, router_weights, handle):
    y = op.moe_layer(torch.nn.functional.rms_norm(hidden, hidden.shape[-1:]), ids, router_weights, handle)
    return hidden + y


def block_out(hidden, ids, router_weights, handle):
    out = torch.empty_like(hidden)
    op.moe_layer(hidden * 2, ids, router_weights, handle, out=out)
    return out + 1


def routed_block(hidden, ids, router_weights, handle):
    chosen = op.select_experts(hidden[:, :8], 2, "softmax", True)
    return op.moe_layer(hidden, *chosen, handle)


@pytest.mark.parametrize("function", [block, block_out, routed_block])
def test_one_graph_serves_every_layer_and_token_count(function):
    graphs = []
    compiled = torch.compile(
        function, fullgraph=True, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    many = [layers.layer(seed) for seed in range(3)]
    for tokens in (3, 7, 32):
        for one in many:
            x = inputs(tokens, seed=tokens)
            assert torch.equal(compiled(*x, one.handle), function(*x, one.handle))
    assert len(graphs) == 1


@pytest.mark.long
def test_inductor_compiles_layers_and_routers(layer):
    # Inductor may keep fp32 when eager code rounds to bf16. Inputs in fp32 have no such rounding.
    x = inputs(5, torch.float32)
    for function in (block_out, routed_block):
        compiled = torch.compile(function, fullgraph=True, dynamic=function is routed_block)
        assert torch.equal(compiled(*x, layer.handle), function(*x, layer.handle))


# ---- handles and wrong calls


def test_a_dropped_layers_handle_says_so(layer, linear):
    x = inputs(3)
    gone = layers.layer()
    handle = gone.handle
    op.moe_layer(*x, handle)
    del gone
    gc.collect()
    doubles = (x[0], x[1], x[2].double(), layer.handle)
    for words, call, arguments in (
        (f"layer handle {handle}: expected a live layer, got one that was dropped", op.moe_layer, (*x, handle)),
        ("layer handle 1000000000: expected one that a layer gave out", op.moe_layer, (*x, 1_000_000_000)),
        ("out_features: expected 32, the linear's, got 48", op.linear, (x[0], linear.handle, 48)),
        ("linear handle 0: expected one that a linear gave out", op.linear, (x[0], 0, 32)),
        (r"topk_weights: expected \(3, 2\) float32 on cpu.*float64", op.moe_layer, doubles),
    ):
        with pytest.raises(ValueError, match=words):
            call(*arguments)


# ---- the cost of a call in addition to the layer's own work


def medians_us(calls: dict) -> dict[str, float]:
    """The least of ten medians of each call, in turns, so that a slow minute of the machine reaches all of them."""
    rounds = [
        {name: statistics.median(timeit.repeat(call, number=1, repeat=300)) for name, call in calls.items()}
        for _ in range(10)
    ]
    return {name: min(each[name] for each in rounds) * 1e6 for name in calls}


def test_a_call_costs_little(layer):
    """A batch of no tokens: the C++ run returns after its checks, so the time is only that of the call.

    Its unit is an op from Python with the same schema that does nothing, since machines differ.
    """
    library = torch.library.Library("nothing", "DEF")
    library.define("op(Tensor hidden, Tensor topk_ids, Tensor topk_weights, SymInt handle, *, Tensor(a!) out) -> ()")
    library.impl("op", lambda hidden, topk_ids, topk_weights, handle, *, out: None, "CPU")
    x = inputs(0)
    out, handle = torch.empty_like(x[0]), layer.handle
    nothing, moe_layer, moe_layer_out = torch.ops.nothing.op.default, op.moe_layer.default, op.moe_layer.out
    cost = medians_us(
        {
            "nothing": lambda: nothing(*x, handle, out=out),
            "run": lambda: layer.run(*x, out),
            "op": lambda: moe_layer(*x, handle),
            "op.out": lambda: moe_layer_out(*x, handle, out=out),
        }
    )
    assert cost["run"] < cost["nothing"], cost
    assert cost["op"] < 2.5 * cost["nothing"], cost
    assert cost["op.out"] < 2.5 * cost["nothing"], cost
