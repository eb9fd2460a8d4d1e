"""Times an MoE layer over the ranks of torchrun.

    torchrun --nproc-per-node 2 -m nvfp4_moe.bench MODEL --device cuda --tokens 1,64,1024

Each run begins with a barrier and ends on a rank when its output is complete. The reported time is the median over the
runs of the slowest rank's time. On GPUs a run replays a CUDA graph. `nvfp4-moe bench --ep` times threads and MPI in
more detail.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

from . import Checkpoint
from ._ranks import Ranks, main, parser, print_table

__all__ = ["bench"]


def __dir__() -> list[str]:
    return __all__


def captured(run: Callable[[], object]) -> Callable[[], object]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def bench(ranks: Ranks) -> bool:
    asked = ranks.asked
    checkpoint = Checkpoint(asked.checkpoint)
    number = asked.layer[0] if asked.layer else checkpoint.model()["layers"][0]
    most = max(asked.tokens)
    # A graph's messages have a fixed size: room for all tokens of a rank.
    capacity = most if asked.device == "cuda" and asked.combine == "all_to_all" else 0
    layer = ranks.open(checkpoint, number, most, capacity)
    rows = []
    for tokens in asked.tokens:
        hidden, ids, weights = ranks.mine(ranks.batch(layer.config, tokens))
        out = torch.empty_like(hidden)
        run = functools.partial(layer.run, hidden, ids, weights, out=out)
        timed = captured(run) if asked.device == "cuda" else run
        times = []
        for _ in range(asked.runs + 2):
            ranks.exchange.barrier()
            begin = time.perf_counter()
            timed()
            times.append(1e6 * (time.perf_counter() - begin))
        slowest = [max(of_run) for of_run in zip(*ranks.gather(times[2:]), strict=True)]
        rows.append({"tokens": str(tokens), "us": f"{statistics.median(slowest):.1f}", "least": f"{min(slowest):.1f}"})
    if ranks.rank == 0:
        described = layer.describe()
        print(f"{asked.checkpoint}, layer {number}: {ranks.title()}")
        print(f"{described['backend']}, activations {described['activation_format']}, medians of {asked.runs} runs")
        print_table(rows)
    return True


if __name__ == "__main__":
    options = parser("bench", "Times a layer over ranks (default: the first MoE layer).")
    options.add_argument("--tokens", type=lambda text: [int(each) for each in text.split(",")], default=[1, 64, 512])
    options.add_argument("--runs", type=int, default=30)
    main(bench, options.parse_args())
