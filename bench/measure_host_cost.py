#!/usr/bin/env python3
"""What a run costs the host: the time that MoeLayer.run takes to enqueue one run on a GPU, in Python, by token count.

    PYTHONPATH=build/gpu/python python bench/measure_host_cost.py OUT.json --commit SHA

A layer of qwen3-30b's shape. Runs are enqueued in bursts that the launch queue holds, with a wait between them, so that
no run waits for the device. A burst gives the mean of its runs; reported are the least and the median of the bursts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import nvfp4_moe
import records
import torch

EXPERTS, TOP_K, HIDDEN, INTER = 128, 8, 2048, 768
BURST, BURSTS = 100, 200


def matrices(random: np.random.Generator, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes = random.integers(0, 256, (EXPERTS, rows, cols // 2), dtype=np.uint8)
    scales = random.integers(0x58, 0x7E, (EXPERTS, rows, cols // 16), dtype=np.uint8)
    return codes, scales, np.full(EXPERTS, 1 / (800 * cols**0.5), np.float32)


def measure(activation_format: str, tokens: int) -> dict[str, object]:
    random = np.random.default_rng(0)
    config = nvfp4_moe.MoeConfig(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=INTER,
        activation_format=activation_format,
    )
    layer = nvfp4_moe.MoeLayer.from_tensors(
        config,
        gate=matrices(random, INTER, HIDDEN),
        up=matrices(random, INTER, HIDDEN),
        down=matrices(random, HIDDEN, INTER),
        max_tokens=1024,
        device="cuda:0",
    )
    hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).to("cuda", torch.int32)
    weights = torch.rand(tokens, TOP_K, device="cuda")
    out = torch.empty_like(hidden)
    us = []
    for burst in range(BURSTS + 5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(BURST):
            layer.run(hidden, ids, weights, out=out)
        taken = time.perf_counter() - begin
        if burst >= 5:
            us.append(taken / BURST * 1e6)
    return {
        "activation_format": activation_format,
        "tokens": tokens,
        "least_us": round(min(us), 2),
        "median_us": round(statistics.median(us), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out")
    parser.add_argument("--commit", required=True)
    arguments = parser.parse_args()
    result = {
        "device": torch.cuda.get_device_name(),
        "commit": arguments.commit,
        "command": "python bench/measure_host_cost.py OUT.json",
        "runs": [measure(f, tokens) for f in ("bf16", "nvfp4") for tokens in (1, 8, 256)],
    }
    text = records.text(result).rstrip()
    print(text)
    Path(arguments.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
