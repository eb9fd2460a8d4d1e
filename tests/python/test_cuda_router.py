"""select_experts, router_gemm and their torch ops on a GPU's tensors: the bits of the host's functions.

For every scoring, dtype and token count, in any stream, and captured in graphs. Needs torch with CUDA, a GPU, and a
build with the CUDA backends: skipped by name elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import nvfp4_moe as nv
import pytest
from gpu import captured, needs_gpu, on_gpu, torch
from router_bounds import numbers

pytestmark = needs_gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = (0, 1, 7, 4096)
GROUPED = {"num_expert_group": 8, "topk_group": 4, "group_score": "top2_sum", "correction_bias": True}

# One for each way to select and to weight. tests/cuda/selection_test.cpp has all widths.
CONFIGS = {
    "mixtral": nv.RouterConfig(8, 2, renormalize=True),
    "qwen3": nv.RouterConfig(128, 8, renormalize=True),
    "llama4": nv.RouterConfig(128, 1, scoring="sigmoid"),
    "deepseek_v2": nv.RouterConfig(160, 6, routed_scaling_factor=16.0, num_expert_group=8, topk_group=3),
    "deepseek_v3": nv.RouterConfig(256, 8, "sigmoid", True, 1e-20, 2.5, **GROUPED),
    "groups of odd sizes": nv.RouterConfig(
        90, 5, "sigmoid", num_expert_group=6, topk_group=2, group_score="top2_sum", correction_bias=True
    ),
    "softmax with bias": nv.RouterConfig(512, 10, renormalize=True, correction_bias=True),
    "1024 experts": nv.RouterConfig(1024, 32, "sqrt_softplus", correction_bias=True),
    "gemma4": nv.RouterConfig(128, 8, renormalize=True, expert_scale=True),
    "deepseek_v4 hash": nv.RouterConfig(256, 6, "sqrt_softplus", True, 1e-20, 1.5, hash_routing=True),
}


def logits_of(tokens: int, experts: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Logits of many magnitudes, and rows of ties, of equal numbers, of infinities and of NaN."""
    x = numbers(tokens, experts, torch.float32, seed)
    g = torch.Generator().manual_seed(seed + 1)
    if tokens >= 7:
        x[0] = torch.randint(-2, 3, (experts,), generator=g).float()
        x[1] = 0.25
        x[2, ::3] = -math.inf
        x[3, 1::4] = math.inf
        x[4, experts // 2] = math.nan
        x[5] = -math.inf
        x[6] = torch.where(torch.rand(experts, generator=g) < 0.5, torch.tensor(-0.0), torch.tensor(0.0))
    return x.to(dtype)


def arrays_of(config: nv.RouterConfig, tokens: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    if config.hash_routing:
        table = torch.randint(0, config.num_experts, (50, config.top_k), generator=g)
        table[3, 0], table[4, 1] = -1, config.num_experts
        return {"token_ids": torch.randint(-2, 52, (tokens,), generator=g), "hash_table": table}
    options = {"correction_bias": config.correction_bias, "expert_scale": config.expert_scale}
    return {name: torch.randn(config.num_experts, generator=g) for name, used in options.items() if used}


def same(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    assert all(a.is_cuda and a.shape == e.shape and a.dtype == e.dtype for a, e in zip(actual, expected, strict=True))
    return torch.equal(actual[0].cpu(), expected[0]) and torch.equal(
        actual[1].cpu().view(torch.int32), expected[1].view(torch.int32)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_gives_the_hosts_bits(name: str) -> None:
    config = CONFIGS[name]
    for tokens, dtype, ids_dtype in zip(TOKENS, (*DTYPES, torch.bfloat16), ("int32", "int64") * 2, strict=True):
        logits, arrays = logits_of(tokens, config.num_experts, dtype, tokens), arrays_of(config, tokens)
        for renormalize in (False, True):
            one = dataclasses.replace(config, renormalize=renormalize, renormalize_epsilon=0.0)
            expected = nv.select_experts(logits, one, ids_dtype=ids_dtype, **arrays)
            actual = nv.select_experts(logits.cuda(), one, ids_dtype=ids_dtype, **on_gpu(arrays))
            assert same(actual, expected), tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_lie_apart_and_begin_anywhere(dtype: torch.dtype) -> None:
    for experts in (60, 1000):
        config = nv.RouterConfig(experts, 4, renormalize=True)
        whole = logits_of(33, experts + 11, dtype, experts)
        for first in (0, 1, 3, 8):
            view, gpu = whole[:, first : first + experts], whole.cuda()[:, first : first + experts]
            assert same(nv.select_experts(gpu[::3], config), nv.select_experts(view[::3], config))
        turned = whole.cuda()[:, :experts].t().contiguous().t()
        assert same(nv.select_experts(turned, config), nv.select_experts(whole[:, :experts], config))


def test_counts_bad_ids() -> None:
    config = CONFIGS["deepseek_v4 hash"]
    logits, arrays = logits_of(1000, 256, torch.bfloat16), arrays_of(config, 1000)
    host, gpu = torch.tensor([7]), torch.tensor([7], device="cuda")
    nv.select_experts(logits, config, bad_ids=host, **arrays)
    nv.select_experts(logits.cuda(), config, bad_ids=gpu, **on_gpu(arrays))
    assert host.item() == gpu.item() > 7


def test_a_graph_holds_it_and_allocates_nothing() -> None:
    for name in ("qwen3", "deepseek_v3", "deepseek_v4 hash"):
        config = CONFIGS[name]
        logits = logits_of(64, config.num_experts, torch.bfloat16).cuda()
        arrays = on_gpu(arrays_of(config, 64))
        out = (torch.empty(64, config.top_k, dtype=torch.int32, device="cuda"), torch.empty(64, config.top_k).cuda())
        nv.select_experts(logits, config, out=out, **arrays)
        torch.cuda.synchronize()

        def select(logits=logits, config=config, out=out, arrays=arrays) -> None:
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            nv.select_experts(logits, config, out=out, **arrays)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before

        graph, _ = captured(select)
        for seed in range(3):
            fresh = logits_of(64, config.num_experts, torch.bfloat16, seed + 20)
            logits.copy_(fresh)
            out[0].fill_(-7)
            graph.replay()
            torch.cuda.synchronize()
            host = {key: value.cpu() for key, value in arrays.items()}
            assert same(out, nv.select_experts(fresh, config, **host)), (name, seed)


def test_works_in_the_current_stream() -> None:
    config, logits = CONFIGS["qwen3"], logits_of(4096, 128, torch.bfloat16)
    expected = nv.select_experts(logits, config)
    gpu = torch.zeros(4096, 128, dtype=torch.bfloat16, device="cuda")
    pinned = logits.pin_memory()
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        with torch.cuda.stream(stream):
            gpu.zero_()
            torch.cuda._sleep(20_000_000)  # the copy comes late: another stream would read zeros
            gpu.copy_(pinned, non_blocking=True)
            actual = nv.select_experts(gpu, config)
        stream.synchronize()
        assert same(actual, expected)


def test_the_op_on_a_gpu() -> None:
    import nvfp4_moe.torch_op  # noqa: F401

    config = CONFIGS["deepseek_v3"]
    logits, bias = logits_of(33, 256, torch.bfloat16), arrays_of(config, 33)["correction_bias"]
    options: tuple[Any, ...] = (8, "sigmoid", True, 1e-20, 2.5, 8, 4, "top2_sum")
    expected = nv.select_experts(logits, config, correction_bias=bias)
    op = torch.ops.nvfp4_moe.select_experts
    assert same(op(logits.cuda(), *options, bias.cuda()), expected)
    finite = logits.nan_to_num()  # opcheck treats two NaN as different
    results = torch.library.opcheck(op.default, (finite.cuda(), *options, bias.cuda()))
    assert set(results.values()) == {"SUCCESS"}

    def routed(x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = op(x, *options, b)
        return ids, weights

    compiled = torch.compile(routed, fullgraph=True)
    assert same(compiled(logits.cuda(), bias.cuda()), expected)


def test_arrays_of_two_devices_are_refused() -> None:
    config = CONFIGS["deepseek_v3"]
    logits, bias = logits_of(3, 256, torch.bfloat16), arrays_of(config, 3)["correction_bias"]
    with pytest.raises(ValueError, match="correction_bias: expected an array on cuda:0"):
        nv.select_experts(logits.cuda(), config, correction_bias=bias)
    out = (torch.empty(3, 8, dtype=torch.int32), torch.empty(3, 8))
    with pytest.raises(ValueError, match="topk_ids: expected .* on cuda:0"):
        nv.select_experts(logits.cuda(), config, correction_bias=bias.cuda(), out=out)


def tiny_layer(config: nv.RouterConfig) -> nv.MoeLayer:
    g = torch.Generator().manual_seed(3)
    hidden, inner, experts = 128, 64, config.num_experts
    options = nv.MoeConfig(experts, config.top_k, hidden, inner)
    gate, up = (torch.randn(experts, inner, hidden, generator=g).bfloat16() / 8 for _ in range(2))
    down = torch.randn(experts, hidden, inner, generator=g).bfloat16() / 8
    return nv.MoeLayer.from_bf16(options, gate=gate, up=up, down=down, device="cuda:0", max_tokens=64)


# Runs that select: with one token to four each CTA selects for itself, with more a kernel does it before.
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gemma4"])
def test_a_layer_selects_for_itself(name: str) -> None:
    config = CONFIGS[name]
    layer = tiny_layer(config)
    for tokens in (0, 1, 4, 5, 64):
        hidden = numbers(tokens, 128, torch.bfloat16, 1).cuda()
        logits, arrays = logits_of(tokens, config.num_experts, torch.float16, tokens), arrays_of(config, tokens)
        logits, arrays = on_gpu(logits), on_gpu(arrays)
        ids, weights = nv.select_experts(logits, config, **arrays)
        expected = layer.run(hidden, ids, weights)
        topk = (torch.full_like(ids, -9), torch.full_like(weights, -9.0))
        actual = layer.run_logits(hidden, logits, config, topk=topk, **arrays)
        assert torch.equal(actual.view(torch.int16), expected.view(torch.int16)), tokens
        assert torch.equal(topk[0], ids) and torch.equal(topk[1].view(torch.int32), weights.view(torch.int32))


def test_router_gemm_gives_the_hosts_bits() -> None:
    for tokens, dtype in ((1, torch.bfloat16), (9, torch.float32)):
        g = torch.Generator().manual_seed(tokens)
        hidden, weight = (
            torch.randn(tokens, 2048, generator=g).bfloat16(),
            torch.randn(128, 2048, generator=g).bfloat16(),
        )
        name = str(dtype).removeprefix("torch.")
        actual = nv.router_gemm(hidden.cuda(), weight.cuda(), logits_dtype=name)
        assert torch.equal(actual.cpu(), nv.router_gemm(hidden, weight, logits_dtype=name))


def test_router_gemm_selection_and_layer_in_a_graph_behind_torch_s_kernels() -> None:
    """As in an engine, one of torch's kernels makes hidden in the same graph."""
    g = torch.Generator().manual_seed(3)
    config = CONFIGS["qwen3"]
    layer, weight = tiny_layer(config), torch.randn(128, 128, generator=g).bfloat16().cuda()
    layer.warmup()
    for tokens in (1, 8):
        source = torch.randn(tokens, 128, generator=g).cuda()

        def step(source: torch.Tensor = source) -> tuple[torch.Tensor, ...]:
            hidden = (source * 0.5).bfloat16()
            logits = nv.router_gemm(hidden, weight)
            return hidden, logits, *nv.select_experts(logits, config), layer.run_logits(hidden, logits, config)

        step()
        graph, (hidden, logits, ids, weights, out) = captured(step)
        for _ in range(5):
            source.copy_(torch.randn(tokens, 128, generator=g))
            graph.replay()
            assert torch.equal(logits.cpu(), nv.router_gemm(hidden.cpu(), weight.cpu()))
            assert same((ids, weights), nv.select_experts(logits.cpu(), config))
            assert torch.equal(out.view(torch.int16), layer.run(hidden, ids, weights).view(torch.int16))
