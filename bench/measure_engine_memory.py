#!/usr/bin/env python3
"""Measures the GPU memory of an engine's layers without weights: captured sizes, streams, and freed bytes.

    PYTHONPATH=build/release/python python bench/measure_engine_memory.py OUT.json

One rank of eight of kimi-k2: hidden 7168, intermediate 2048, 48 local of 384 experts, top-8, max_tokens 8192. All
layers pack the same random experts. Bytes are torch's (memory_reserved, memory_allocated) and the driver's
(mem_get_info).
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import nvfp4_moe
import records
import torch

ROOT = Path(__file__).resolve().parents[1]
EXPERTS, LOCAL, TOP_K, HIDDEN, INTER, MAX_TOKENS = 384, 48, 8, 7168, 2048, 8192
SIZES = [1, 2, 4, *range(16, 513, 16)]  # 35


def stacked(random: np.random.Generator, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Experts as overlapping windows of one array: all different, and together hardly larger than one."""

    def windows(low: int, high: int, width: int) -> np.ndarray:
        step = 48  # bytes from one expert's first to the next one's
        flat = random.integers(low, high, rows * width + LOCAL * step, dtype=np.uint8)
        return np.lib.stride_tricks.as_strided(flat, (LOCAL, rows, width), (step, width, 1), writeable=False)

    codes, scales = windows(0, 256, cols // 2), windows(0x58, 0x7E, cols // 16)
    return codes, scales, (random.uniform(0.75, 1.25, LOCAL) / (800 * cols**0.5)).astype(np.float32)


def make_stack(layers: int) -> list[nvfp4_moe.MoeLayer]:
    random = np.random.default_rng(0)
    config = nvfp4_moe.MoeConfig(num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, intermediate_size=INTER)
    weights = {
        "gate": stacked(random, INTER, HIDDEN),
        "up": stacked(random, INTER, HIDDEN),
        "down": stacked(random, HIDDEN, INTER),
    }
    return [
        nvfp4_moe.MoeLayer.from_tensors(config, **weights, first_expert=0, max_tokens=MAX_TOKENS, device="cuda:0")
        for _ in range(layers)
    ]


class Stack:
    """The layers and buffers that all runs share, so that runs allocate only workspaces."""

    def __init__(self, layers: int) -> None:
        self.layers = make_stack(layers)
        tokens = MAX_TOKENS
        self.hidden = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        self.ids = torch.randint(0, EXPERTS, (tokens, TOP_K), dtype=torch.int32, device="cuda")
        self.router = torch.rand(tokens, TOP_K, device="cuda")
        self.outs = torch.empty(2, tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def forward(self, tokens: int) -> None:
        hidden = self.hidden[:tokens]
        for i, layer in enumerate(self.layers):
            out = self.outs[i % 2, :tokens]
            layer.run(hidden, self.ids[:tokens], self.router[:tokens], out=out)
            hidden = out

    def capture(self, tokens: int, pool: object = None) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.forward(tokens)
        return graph

    def workspace_bytes(self, tokens: int) -> int:
        return max(layer.workspace_bytes(tokens) for layer in self.layers)


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    nvfp4_moe.release_workspaces()
    torch.cuda.empty_cache()


def standing() -> dict[str, int]:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "reserved": torch.cuda.memory_reserved(),
        "allocated": torch.cuda.memory_allocated(),
        "used": total - free,
    }


def grown(since: dict[str, int]) -> dict[str, int]:
    return {name: value - since[name] for name, value in standing().items()}


def measure(stack: Stack) -> dict[str, object]:
    warm = [stack.capture(tokens) for tokens in (1, SIZES[-1])]  # memory of the first graphs
    for graph in warm:
        graph.replay()
    stays = warm.pop(0)  # torch keeps it while one graph lives
    del warm, graph
    settle()
    start = standing()
    figures: dict[str, object] = {}

    pool = torch.cuda.graph_pool_handle()
    graphs = [stack.capture(tokens, pool) for tokens in reversed(SIZES)]
    figures["captured_sizes_one_pool"] = {"captures": len(graphs), "bytes": grown(start)}
    for graph in graphs:
        graph.replay()
    del graphs, graph
    settle()
    figures["left_after_deleting_them"] = grown(start)

    graphs = [stack.capture(1) for _ in range(10)]
    figures["ten_captures_of_one_token"] = grown(start)
    before = standing()
    for stream in [torch.cuda.Stream() for _ in range(6)]:
        with torch.cuda.stream(stream):
            stack.forward(1)
    figures["six_streams_of_one_token"] = grown(before)
    del graphs
    settle()
    figures["left_after_deleting_and_releasing"] = grown(start)

    stack.forward(1)
    figures["eager_one_token"] = grown(start)
    stack.forward(MAX_TOKENS)
    figures["eager_max_tokens"] = grown(start)
    settle()
    figures["left_in_the_end"] = grown(start)
    del stays
    return figures


def head_commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", nargs="?", help="where the JSON goes, beside standard output")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--commit", help="of a tree that is no checkout; else git is asked")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("measure_engine_memory: expected a GPU that torch finds, got none")
    stack = Stack(arguments.layers)
    figures = measure(stack)
    largest = stack.workspace_bytes(SIZES[-1])
    of_sizes = figures["captured_sizes_one_pool"]["bytes"]["reserved"]  # type: ignore[index]
    result = {
        "device": torch.cuda.get_device_name(),
        "commit": arguments.commit or head_commit(),
        "command": f"python bench/measure_engine_memory.py --layers {arguments.layers}",
        "torch": torch.__version__,
        "backend": stack.layers[0].describe()["backend"],
        "layer": {
            "num_experts": EXPERTS,
            "local_experts": LOCAL,
            "top_k": TOP_K,
            "hidden_size": HIDDEN,
            "intermediate_size": INTER,
            "max_tokens": MAX_TOKENS,
        },
        "sizes": SIZES,
        "workspace_bytes": {str(tokens): stack.workspace_bytes(tokens) for tokens in (1, SIZES[-1], MAX_TOKENS)},
        "captured_sizes_over_largest_workspace": round(of_sizes / largest, 4),
        "figures": figures,
    }
    text = records.text(result).rstrip()
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
