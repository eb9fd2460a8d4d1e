"""One rank of several, each a process, over torch_exchange: what test_cuda_processes.py starts and kills.

    rank_process.py WHAT OUT WAY      with RANK, 0 or 1, and numpy_only on PYTHONPATH in the environment

WHAT is a function of SCENARIOS; OUT a directory in which rank r leaves r.txt, how it ended, and r.pt, the outputs by
name; WAY one of WAYS: how devices are connected, or "host" for ranks on the CPU. The cases that the ranks run and what
one process makes of them (expected) are here too, so that both have the same.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import layers
import numpy as np
import nvfp4_moe as nv
import torch

EXPERTS, TOP_K, HIDDEN, INTER = 12, 3, 256, 192
MOST_TOKENS = 512
FORMATS = ("nvfp4", "bf16")
# Inputs that a captured run replays: tokens of each rank, and the number of different contents.
GRAPH_TOKENS, REPLAYS = (16, 5), 3

Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Add a way to connect GPUs here.
WAYS: dict[str, Callable[[nv.Exchange, str], None]] = {
    "nccl": lambda exchange, device: exchange.use_nccl(device),
    "peers": lambda exchange, device: exchange.use_peers(device),
    "host": lambda exchange, device: None,
}


def config(activation_format: str = "nvfp4") -> nv.MoeConfig:
    return nv.MoeConfig(EXPERTS, TOP_K, HIDDEN, INTER, activation_format=activation_format, batch_invariant=True)


def weights(first: int = 0, count: int = EXPERTS) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    made = layers.weights(1, EXPERTS, HIDDEN, INTER)
    return {name: tuple(part[first : first + count] for part in stack) for name, stack in made.items()}


def batch(tokens: int, seed: int, routing: str) -> Arrays:
    """routing: "spread", "holes" (a third of the ids are -1), "none" (all are), "rank 1" (only experts of rank 1)."""
    g = torch.Generator().manual_seed(1000 * tokens + seed)
    hidden = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
    first = EXPERTS // 2 if routing == "rank 1" else 0
    ids = first + torch.rand(tokens, EXPERTS - first, generator=g).topk(TOP_K, dim=1).indices.int()
    if routing == "holes":
        ids[torch.rand(tokens, TOP_K, generator=g) < 1 / 3] = -1
    if routing == "none":
        ids[:] = -1
    return hidden, ids, torch.rand(tokens, TOP_K, generator=g)


def eager_cases(combine: str) -> Iterator[tuple[str, list[Arrays]]]:
    """(name, each rank's batch)."""
    if combine == "all_reduce":
        for tokens, routing in ((1, "spread"), (7, "none"), (33, "holes"), (128, "rank 1"), (512, "spread")):
            yield f"{tokens} tokens, {routing}", [batch(tokens, 0, routing)] * 2
        return
    for counts in ((1, 0), (0, 1), (1, 1), (2, 7), (16, 64), (200, 0), (129, 33), (512, 512), (0, 0)):
        for routing in ("spread", "holes", "none", "rank 1"):
            yield f"{counts} tokens, {routing}", [batch(tokens, rank, routing) for rank, tokens in enumerate(counts)]


def graph_contents(combine: str) -> Iterator[tuple[str, list[Arrays]]]:
    for seed, routing in zip(range(REPLAYS), ("spread", "holes", "rank 1"), strict=True):
        counts = (GRAPH_TOKENS[0],) * 2 if combine == "all_reduce" else GRAPH_TOKENS
        own = (0, 0) if combine == "all_reduce" else (0, 10)
        yield f"replay {seed}", [batch(tokens, 20 + seed + own[rank], routing) for rank, tokens in enumerate(counts)]


# The layers of the whole run: (name, combine, capacity).
LAYERS = (("sum", "all_reduce", 0), ("exact", "all_to_all", 0), ("capacity", "all_to_all", MOST_TOKENS))


def on(device: str, arrays: Arrays) -> Arrays:
    return tuple(array.to(device) for array in arrays)


def expected(device: str) -> dict[str, list[torch.Tensor]]:
    """Returns every output of the whole run by its name, for each rank, made by layers of one process on one device."""
    made: dict[str, list[torch.Tensor]] = {}
    for name in FORMATS:
        alone = nv.MoeLayer.from_tensors(config(name), **weights(), max_tokens=MOST_TOKENS, device=device)
        half = EXPERTS // 2
        halves = [
            nv.MoeLayer.from_tensors(
                config(name), **weights(first, half), first_expert=first, max_tokens=MOST_TOKENS, device=device
            )
            for first in (0, half)
        ]

        def summed(arrays: Arrays, halves: list[nv.MoeLayer] = halves) -> torch.Tensor:
            parts = [torch.empty(arrays[0].shape, dtype=torch.float32, device=device) for _ in halves]
            for layer, part in zip(halves, parts, strict=True):
                layer.run(*on(device, arrays), out=part)
            return (parts[0] + parts[1]).bfloat16().cpu()

        def whole(arrays: Arrays, alone: nv.MoeLayer = alone) -> torch.Tensor:
            return alone.run(*on(device, arrays)).cpu()

        for layer, combine, _ in LAYERS:
            run = summed if combine == "all_reduce" else whole
            for case, batches in eager_cases(combine):
                made[f"{name}, {layer}: {case}"] = [run(arrays) for arrays in batches]
            for case, batches in graph_contents(combine):
                made[f"{name}, {layer}: {case}"] = [run(arrays) for arrays in batches]
    return made


class Rank:
    """This process, once it is connected to the others."""

    def __init__(self, out: Path, way: str) -> None:
        self.out, self.way = out, way
        self.rank = int(os.environ["RANK"])
        self.device = "cpu" if self.way == "host" else f"cuda:{self.rank}"
        if self.way != "host":
            torch.cuda.set_device(self.rank)
            torch.zeros(1, device=self.device)  # creates its context, which takes seconds, before any rank waits
        self.outputs: dict[str, torch.Tensor] = {}
        self.exchange: nv.Exchange | None = None
        self.say("here")
        self.wait_for("here")

    def say(self, what: str) -> None:
        (self.out / f"{self.rank}.{what}").touch()

    def wait_for(self, what: str) -> None:
        """Waits until both ranks have reported `what`, by files: the exchange's timeout must not count."""
        deadline = time.monotonic() + 120
        while not all((self.out / f"{rank}.{what}").exists() for rank in (0, 1)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected both ranks to say {what!r} within 120 s")
            time.sleep(0.01)

    def connect(self, timeout: float = 30) -> None:
        store = f"file://{self.out.resolve()}/store"
        torch.distributed.init_process_group("gloo", store, rank=self.rank, world_size=2)
        self.exchange = nv.torch_exchange(timeout=timeout)
        WAYS[self.way](self.exchange, self.device)

    def layer(self, activation_format: str = "nvfp4", max_tokens: int = MOST_TOKENS, **options: object) -> nv.MoeLayer:
        placed = {"max_tokens": max_tokens, "device": self.device, "exchange": self.exchange}
        return nv.MoeLayer.from_tensors(config(activation_format), **weights(), **placed, **options)

    def synchronize(self) -> None:
        if self.way != "host":
            torch.cuda.synchronize()

    def until_it_fails(self, step: Callable[[], object]) -> None:
        """Calls step() until it fails; prints "runs" once five calls have succeeded."""
        deadline = time.monotonic() + 90
        done = 0
        while time.monotonic() < deadline:
            step()
            done += 1
            if done == 5:
                self.say("runs")
        raise TimeoutError("expected a failure within 90 s, got none")


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph


def whole(rank: Rank) -> None:
    rank.connect(60)
    for name in FORMATS:
        for layer_name, combine, capacity in LAYERS:
            layer = rank.layer(name, combine=combine, capacity=capacity)
            label = f"{name}, {layer_name}: "
            for case, batches in eager_cases(combine):
                rank.outputs[label + case] = layer.run(*on(rank.device, batches[rank.rank])).cpu()
            contents = [(case, on(rank.device, batches[rank.rank])) for case, batches in graph_contents(combine)]
            if rank.way == "host" or layer_name == "exact":
                for case, arrays in contents:
                    rank.outputs[label + case] = layer.run(*arrays).cpu()
                continue
            held = tuple(array.clone() for array in contents[0][1])
            out = torch.empty_like(held[0])
            layer.run(*held, out=out)
            rank.synchronize()
            graph = capture(lambda run=layer.run, held=held, out=out: run(*held, out=out))
            for case, arrays in contents:
                for array, fresh in zip(held, arrays, strict=True):
                    array.copy_(fresh)
                out.fill_(math.nan)
                graph.replay()
                rank.synchronize()
                rank.outputs[label + case] = out.cpu()
            layer.status()
    rank.exchange.barrier()


def loop(rank: Rank, timeout: float, replays: bool, **options: object) -> None:
    rank.connect(timeout)
    layer = rank.layer(**options)
    arrays = on(rank.device, batch(64, 0 if options["combine"] == "all_reduce" else rank.rank, "spread"))
    out = torch.empty_like(arrays[0])
    layer.run(*arrays, out=out)
    rank.synchronize()
    graph = capture(lambda: layer.run(*arrays, out=out)) if replays else None

    def step() -> None:
        if graph is None:
            layer.run(*arrays, out=out)
            rank.synchronize()
        else:
            graph.replay()
            layer.status()  # waits for it

    rank.until_it_fails(step)


SUM = {"combine": "all_reduce"}
EXACT = {"combine": "all_to_all"}
CAPACITY = {"combine": "all_to_all", "capacity": 64}
# For the remaining rank. On GPUs half of it is for making a communicator, which takes seconds.
STOPPED_TIMEOUT = {"host": 3.0, "nccl": 14.0, "peers": 5.0}
SCENARIOS: dict[str, Callable[[Rank], None]] = {
    "whole": whole,
    "eager sum": lambda rank: loop(rank, 30, False, **SUM),
    "eager exact": lambda rank: loop(rank, 30, False, **EXACT),
    "eager capacity": lambda rank: loop(rank, 30, False, **CAPACITY),
    "replayed sum": lambda rank: loop(rank, 30, True, **SUM),
    "replayed capacity": lambda rank: loop(rank, 30, True, **CAPACITY),
    "stopped sum": lambda rank: loop(rank, STOPPED_TIMEOUT[rank.way], False, **SUM),
    "stopped capacity": lambda rank: loop(rank, STOPPED_TIMEOUT[rank.way], False, **CAPACITY),
}


def main(scenarios: dict[str, Callable[[Rank], None]] = SCENARIOS) -> None:
    what, out, way = sys.argv[1:]
    faulthandler.enable()  # for SIGABRT too
    faulthandler.dump_traceback_later(float(os.environ["RANK_TIME_LIMIT"]), exit=True)
    torch.set_num_threads(1)
    rank = Rank(Path(out), way)
    try:
        scenarios[what](rank)
        message = "fine"
    except Exception as error:  # read by the test
        message = f"{type(error).__name__}: {error}"
    torch.save(rank.outputs, rank.out / f"{rank.rank}.pt")
    (rank.out / f"{rank.rank}.txt").write_text(message)
    # The interpreter ends while exchange, layers and graphs still exist, as in a script.


if __name__ == "__main__":
    main()
