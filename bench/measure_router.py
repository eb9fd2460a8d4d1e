#!/usr/bin/env python3
"""Measures the selection of experts on a GPU, and vLLM's kernel for the same router in turns with it, if vLLM is there.

    python bench/measure_router.py OUT.json --commit SHA

In microseconds of one selection in a CUDA graph: `cached`, one after the other, so that instructions and arrays stay in
caches; and `between`, after a kernel that reads 256 MiB, as between a model's other kernels. The time of that kernel
is subtracted. Medians of REPLAYS replays.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import nvfp4_moe as nv
import records
import torch

STEPS, REPLAYS = 20, 15
DEVICE = torch.device("cuda:0")
GROUPS = {"num_expert_group": 8, "topk_group": 4, "group_score": "top2_sum"}
SIGMOID = {"scoring": "sigmoid", "renormalize": True, "correction_bias": True, "routed_scaling_factor": 2.5}
# The model, the dtype of its logits, its router.
ROUTERS = {
    "Qwen3-30B-A3B": (torch.bfloat16, nv.RouterConfig(128, 8, renormalize=True)),
    "Qwen3-Next": (torch.bfloat16, nv.RouterConfig(512, 10, renormalize=True)),
    "Nemotron-3-Nano": (torch.float32, nv.RouterConfig(128, 6, **SIGMOID)),
    "DeepSeek-V3": (torch.float32, nv.RouterConfig(256, 8, **SIGMOID, **GROUPS)),
    "DeepSeek-V4": (torch.float32, nv.RouterConfig(256, 6, **{**SIGMOID, "scoring": "sqrt_softplus"})),
    "Kimi-K2": (torch.float32, nv.RouterConfig(384, 8, **SIGMOID)),
}  # fmt: skip

Step = Callable[[], object]


def vllm_step(config: nv.RouterConfig, logits: torch.Tensor, bias: torch.Tensor) -> Step:
    """Returns a call of vLLM's kernel for this router."""
    from vllm import _custom_ops as ops

    tokens, k = len(logits), config.top_k
    weights = torch.empty(tokens, k, device=DEVICE)
    ids, indices = (torch.empty(tokens, k, dtype=torch.int32, device=DEVICE) for _ in range(2))
    if config.scoring == "softmax":
        return lambda: ops.topk_softmax(weights, ids, indices, logits, True)
    factor = config.routed_scaling_factor
    if config.scoring == "sqrt_softplus":
        return lambda: ops.topk_hash_softplus_sqrt(weights, ids, indices, logits, True, factor, bias)
    groups = config.num_expert_group, config.topk_group
    return lambda: ops.grouped_topk(logits, *groups, k, True, factor, bias, 1)


def replay_us(steps: list[Step]) -> float:
    """Returns the median time of one of STEPS rounds of `steps`."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for step in steps:
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps * STEPS:
            step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(before.elapsed_time(after) for before, after in itertools.pairwise(events))
    return 1e3 * times[REPLAYS // 2] / STEPS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--tokens", default="1,8,64,512,4096")
    asked = parser.parse_args()
    try:
        import vllm

        peer = vllm.__version__
    except ImportError:
        peer = None
    filler = torch.zeros(64 << 20, device=DEVICE)
    total = torch.zeros((), device=DEVICE)

    def other() -> None:
        torch.sum(filler, dim=0, out=total)

    rows = []
    for (model, (dtype, config)), tokens in itertools.product(ROUTERS.items(), map(int, asked.tokens.split(","))):
        logits = torch.randn(tokens, config.num_experts, device=DEVICE).to(dtype)
        bias = torch.randn(config.num_experts, device=DEVICE) / 8
        out = (
            torch.empty(tokens, config.top_k, dtype=torch.int32, device=DEVICE),
            torch.empty(tokens, config.top_k, device=DEVICE),
        )
        own_bias = bias if config.correction_bias else None
        steps: dict[str, Step] = {
            "nvfp4_moe": lambda: nv.select_experts(logits, config, correction_bias=own_bias, out=out)  # noqa: B023
        }
        if peer:
            steps["vllm"] = vllm_step(config, logits, bias)
        row: dict[str, object] = {"router": model, "tokens": tokens}
        for name, step in steps.items():
            between = replay_us([other, step]) - replay_us([other])
            row[name] = {"cached": round(replay_us([step]), 2), "between": round(between, 2)}
        rows.append(row)
        print(row, flush=True)
    asked.out.write_text(records.text({
        "schema": 1, "what": "one selection of experts, us", "device": torch.cuda.get_device_name(),
        "commit": asked.commit, "command": "python bench/measure_router.py OUT.json", "torch": torch.__version__,
        "vllm": peer, "rows": rows,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
