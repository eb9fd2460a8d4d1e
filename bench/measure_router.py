#!/usr/bin/env python3
"""What a router takes on a GPU: router_gemm and select_experts beside torch's own operations, all in CUDA graphs.

    PYTHONPATH=build/gpu/python python bench/measure_router.py OUT.json --commit SHA

A graph holds COPIES calls, each of arrays of its own, weights too; reported is the least of the rounds, divided by COPIES.
The peer is the model's router as transformers writes it, in torch's operations: a linear layer (cuBLAS), and logits to ids
and weights. The floor is the bytes of a call over the memory's bandwidth; both together come last, as a model has them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import nvfp4_moe as nv
import records
import torch

COPIES, ROUNDS = 20, 30
BYTES_PER_S = 4.8e12  # an H200's HBM3e


def softmax_in_torch(logits: torch.Tensor, config: nv.RouterConfig) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.topk(torch.softmax(logits.float(), -1), config.top_k, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True)


def groups_in_torch(
    logits: torch.Tensor, config: nv.RouterConfig, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.float().sigmoid()
    biased = (scores + bias).view(len(logits), config.num_expert_group, -1)
    groups = biased.topk(2, dim=-1)[0].sum(-1).topk(config.topk_group, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(biased[..., 0]).scatter_(1, groups, 1).unsqueeze(-1).expand_as(biased).bool()
    ids = biased.masked_fill(~mask, 0.0).flatten(1).topk(config.top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


def microseconds(select: Callable[[int], object]) -> float:
    """Of one select(i), i in range(COPIES)."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(COPIES):
            select(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [select(i) for i in range(COPIES)]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    least = float("inf")
    for _ in range(ROUNDS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        least = min(least, begin.elapsed_time(end) * 1000 / COPIES)
    del kept
    return least


def measured_gemm(name: str, experts: int, size: int, tokens: int) -> dict[str, object]:
    config = nv.RouterConfig(experts, min(8, experts // 4), renormalize=True)
    weights = [torch.randn(experts, size, device="cuda").bfloat16() / size**0.5 for _ in range(COPIES)]
    hidden = [torch.randn(tokens, size, device="cuda").bfloat16() for _ in range(COPIES)]

    def own_logits(i: int) -> torch.Tensor:
        return nv.router_gemm(hidden[i], weights[i])

    def torch_logits(i: int) -> torch.Tensor:
        return torch.nn.functional.linear(hidden[i], weights[i])

    run: dict[str, object] = {
        "router": name,
        "experts": experts,
        "hidden_size": size,
        "tokens": tokens,
        "floor_us": round((experts * size + tokens * (size + experts)) * 2 / BYTES_PER_S * 1e6, 3),
    }
    for side, logits in (("router_gemm", own_logits), ("torch_linear", torch_logits)):
        run[f"{side}_us"] = round(microseconds(logits), 2)
        both = microseconds(lambda i, logits=logits: nv.select_experts(logits(i), config))
        run[f"{side}_and_select_experts_us"] = round(both, 2)
    print(run)
    return run


GATES = {"qwen3_moe": (128, 2048), "mixtral": (8, 4096), "qwen3_next": (512, 2048), "glm4_moe": (160, 5120)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", required=True)
    asked = parser.parse_args()
    softmax = nv.RouterConfig(128, 8, renormalize=True)
    groups = nv.RouterConfig(
        256, 8, "sigmoid", renormalize=True, renormalize_epsilon=1e-20, routed_scaling_factor=2.5,
        num_expert_group=8, topk_group=4, group_score="top2_sum", correction_bias=True,
    )  # fmt: skip
    bias = torch.rand(256, device="cuda")
    runs = []
    for name, config in (("qwen3_moe", softmax), ("deepseek_v3", groups)):
        for tokens in (1, 64, 512, 4096):
            logits = [torch.randn(tokens, config.num_experts, device="cuda").bfloat16() for _ in range(COPIES)]
            if name == "qwen3_moe":
                ours = microseconds(lambda i: nv.select_experts(logits[i], config))  # noqa: B023
                torchs = microseconds(lambda i: softmax_in_torch(logits[i], config))  # noqa: B023
            else:
                ours = microseconds(lambda i: nv.select_experts(logits[i], config, correction_bias=bias))  # noqa: B023
                torchs = microseconds(lambda i: groups_in_torch(logits[i], config, bias))  # noqa: B023
            floor = tokens * (config.num_experts * 2 + config.top_k * 8) / BYTES_PER_S * 1e6
            runs.append(
                {
                    "router": name,
                    "experts": config.num_experts,
                    "top_k": config.top_k,
                    "tokens": tokens,
                    "floor_us": round(floor, 3),
                    "select_experts_us": round(ours, 2),
                    "torch_us": round(torchs, 2),
                }
            )
            print(runs[-1])
    said = {
        "what": "a router on a GPU, us of one call in a CUDA graph of 20: hidden to logits (bf16), logits to ids and weights",
        "device": torch.cuda.get_device_name(),
        "commit": asked.commit,
        "command": f"python bench/measure_router.py OUT.json --commit {asked.commit}",
        "torch": torch.__version__,
        "gemms": [measured_gemm(name, *gate, tokens) for name, gate in GATES.items() for tokens in (1, 2, 4, 8, 16)],
        "runs": runs,
    }
    asked.out.write_text(records.text(said))


if __name__ == "__main__":
    main()
