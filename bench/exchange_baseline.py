#!/usr/bin/env python3
"""Times dispatch and combine of a layer over ranks with torch.distributed (all_to_all_single in bf16), without the
GEMMs.

    torchrun --nproc-per-node 2 bench/exchange_baseline.py --hidden 4096 --experts 256 --top-k 6 --tokens 2,32,1024
    --out FILE.json

A baseline for `nvfp4-moe bench --ep`, with the same --tokens and --routing: tokens of all ranks together, each rank has
a part.

by_assignment: one copy of a token per expert, permuted by expert, and one row back per copy, as token dispatchers do.
by_token:      one copy per rank with experts of the token, and one row back per assignment.
wire_...:      only their transfers, in a CUDA graph with known sizes, without permutations and counts.
all_reduce_...: the sum of all tokens' outputs over the ranks, in a CUDA graph.

The first two count, wait for the counts on the host, and permute in each call, with torch's operations. They do less
than a real dispatcher: they send no expert ids and router weights, and by_token's rows exist beforehand. A call begins
on all ranks together and takes as long as its slowest rank. A figure is the median of --runs. The results of both are
compared once with the expected sums.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import records

ROOT = Path(__file__).resolve().parent.parent
ROUTINGS = ("uniform", "zipf", "hot")
REPLAYED = 8  # calls in a graph
COLUMNS = {
    "tokens": "tokens",
    "routing": "routing",
    "by_assignment_us": "by assignment us",
    "by_token_us": "by token us",
    "wire_by_assignment_us": "its wire us",
    "wire_by_token_us": "its wire us",
    "all_reduce_f32_us": "all_reduce fp32 us",
    "all_reduce_bf16_us": "bf16 us",
    "by_assignment_sent_bytes": "sent by a rank",
    "by_token_sent_bytes": "by token",
}


def table(bench: dict) -> str:
    def text(value: object) -> str:
        return "" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---:|" * len(COLUMNS)]
    lines += ["| " + " | ".join(text(row[key]) for key in COLUMNS) + " |" for row in bench["results"]]
    return "\n".join(lines)


class Sizes(NamedTuple):
    hidden: int
    experts: int
    top_k: int


def draw_ids(sizes: Sizes, tokens: int, routing: str, world: int, seed: int):
    """Draws (tokens, top_k) distinct experts per token, the same on every rank. hot: only those of rank 0."""
    import torch

    random = torch.Generator().manual_seed(seed)
    weights = torch.ones(sizes.experts)
    if routing == "zipf":
        places = torch.randperm(sizes.experts, generator=random)
        weights = 1.0 / (places + 1)
    elif routing == "hot":
        weights[sizes.experts // world :] = 0
    if int((weights > 0).sum()) < sizes.top_k:
        raise SystemExit(
            f"--top-k: expected at most {int((weights > 0).sum())} under {routing} routing, got {sizes.top_k}"
        )
    if tokens == 0:
        return torch.empty(0, sizes.top_k, dtype=torch.int64)
    return torch.multinomial(weights.expand(tokens, -1), sizes.top_k, generator=random)


class Exchange:
    """This rank's part of one cell: its tokens, and both ways to get their rows from the experts' ranks."""

    def __init__(self, sizes: Sizes, ids, rank: int, world: int, device) -> None:
        import torch

        self.torch, self.dist = torch, torch.distributed
        self.sizes, self.rank, self.world, self.device = sizes, rank, world, device
        bounds = [r * len(ids) // world for r in range(world + 1)]
        owner_of_all = ids * world // sizes.experts
        self.owner = owner_of_all[bounds[rank] : bounds[rank + 1]].to(device)  # (T, k) the rank of each assignment
        self.ids = ids[bounds[rank] : bounds[rank + 1]].to(device)
        self.tokens = len(self.ids)
        random = torch.Generator().manual_seed(1000 + rank)
        self.x = torch.randn(self.tokens, sizes.hidden, generator=random).to(device, torch.bfloat16)
        self.weights = torch.rand(self.tokens, sizes.top_k, generator=random).to(device)
        # The rows of this rank's experts: for each received token in turn, one row per assignment to this rank.
        here = [owner_of_all[bounds[r] : bounds[r + 1]] == rank for r in range(world)]
        counts = torch.cat([of_rank.sum(1)[of_rank.any(1)] for of_rank in here])
        self.token_of_row = torch.repeat_interleave(torch.arange(len(counts)), counts).to(device)
        self.rows = torch.zeros(len(self.token_of_row), sizes.hidden, device=device, dtype=torch.bfloat16)
        # Known sizes: (world) assignments, and tokens, to and from each rank.
        to_rank = self.owner.cpu()
        self.assignments_to = [int((to_rank == r).sum()) for r in range(world)]
        self.assignments_from = [int(of_rank.sum()) for of_rank in here]
        self.tokens_to = [int((to_rank == r).any(1).sum()) for r in range(world)]
        self.tokens_from = [int(of_rank.any(1).sum()) for of_rank in here]

    def empty(self, rows: int):
        return self.torch.empty(rows, self.sizes.hidden, device=self.device, dtype=self.torch.bfloat16)

    def counts(self, mine) -> tuple[list, list]:
        """Exchanges mine (world, ...) between the ranks; returns it and the received counts on the host."""
        got = self.torch.empty_like(mine)
        self.dist.all_to_all_single(got, mine)
        sent, received = self.torch.stack([mine, got]).tolist()
        return sent, received

    def combine(self, rows, order):
        """Adds rows, ordered by assignment, to the tokens' sums."""
        of_assignment = self.torch.empty_like(rows)
        of_assignment[order] = rows
        of_assignment = of_assignment.view(self.tokens, self.sizes.top_k, self.sizes.hidden)
        return (of_assignment * self.weights.unsqueeze(-1)).sum(1)

    def by_assignment(self):
        order = self.torch.argsort(self.ids.flatten(), stable=True)
        to, come = self.counts(self.torch.bincount(self.owner.flatten(), minlength=self.world))
        copies = self.x[order // self.sizes.top_k]
        there = self.empty(sum(come))
        self.dist.all_to_all_single(there, copies, come, to)
        back = self.empty(len(copies))  # the experts' rows; here each equals its token
        self.dist.all_to_all_single(back, there, to, come)
        return self.combine(back, order)

    def by_token(self, make_rows: bool = False):
        has = self.torch.zeros(self.tokens, self.world, dtype=self.torch.bool, device=self.device)
        has.scatter_(1, self.owner, True)
        rank_and_token = has.t().nonzero()
        both = self.torch.stack([has.sum(0), self.torch.bincount(self.owner.flatten(), minlength=self.world)], 1)
        to, come = self.counts(both)
        copies = self.x[rank_and_token[:, 1]]
        there = self.empty(sum(tokens for tokens, _ in come))
        self.dist.all_to_all_single(there, copies, [tokens for tokens, _ in come], [tokens for tokens, _ in to])
        if make_rows:
            self.rows = there[self.token_of_row]
        back = self.empty(self.owner.numel())
        self.dist.all_to_all_single(back, self.rows, [rows for _, rows in to], [rows for _, rows in come])
        return self.combine(back, self.torch.argsort(self.owner.flatten(), stable=True))

    def check(self) -> None:
        """Checks the results.

        Experts return their input here, so a token's result is itself times the sum of its weights.
        """
        expected = self.x.float() * self.weights.sum(1, keepdim=True)
        for name, got in {"by_assignment": self.by_assignment(), "by_token": self.by_token(make_rows=True)}.items():
            # The tolerance of 2 * top_k products and sums in fp32.
            self.torch.testing.assert_close(
                got.float(),
                expected,
                rtol=self.sizes.top_k * 2.0**-22,
                atol=0,
                msg=lambda text, name=name: f"{name}: {text}",
            )

    def wires(self) -> dict[str, Callable[[], None]]:
        """Returns functions that do only the transfers."""
        assignments, rows = self.empty(sum(self.assignments_to)), self.empty(sum(self.assignments_from))
        tokens, there = self.empty(sum(self.tokens_to)), self.empty(sum(self.tokens_from))
        rows_back = (assignments, rows, self.assignments_to, self.assignments_from)

        def of_assignments() -> None:
            self.dist.all_to_all_single(rows, assignments, self.assignments_from, self.assignments_to)
            self.dist.all_to_all_single(*rows_back)

        def of_tokens() -> None:
            self.dist.all_to_all_single(there, tokens, self.tokens_from, self.tokens_to)
            self.dist.all_to_all_single(*rows_back)

        return {"wire_by_assignment_us": of_assignments, "wire_by_token_us": of_tokens}

    def sums(self, tokens: int) -> dict[str, Callable[[], None]]:
        """tokens: of all ranks; each rank has partial outputs of them."""
        calls = {}
        for name, dtype in {"f32": self.torch.float32, "bf16": self.torch.bfloat16}.items():
            part = self.torch.zeros(tokens, self.sizes.hidden, device=self.device, dtype=dtype)
            calls[f"all_reduce_{name}_us"] = lambda part=part: self.dist.all_reduce(part)
        return calls

    def sent_bytes(self) -> tuple[int, int]:
        """Returns the bytes to other ranks, in both directions, by assignment and by token."""
        others = [r for r in range(self.world) if r != self.rank]
        rows = sum(self.assignments_from[r] for r in others)
        row_bytes = 2 * self.sizes.hidden
        by_assignment = sum(self.assignments_to[r] for r in others) + rows
        by_token = sum(self.tokens_to[r] for r in others) + rows
        return by_assignment * row_bytes, by_token * row_bytes


class Clock:
    """Times calls that begin on all ranks together: the median over the runs of the slowest rank, in microseconds."""

    def __init__(self, device, runs: int) -> None:
        import torch

        self.torch, self.dist, self.device, self.runs = torch, torch.distributed, device, runs

    def slowest(self, call: Callable[[], object], warmups: int = 3) -> float:
        times = self.torch.tensor([self.once(call) for _ in range(warmups + self.runs)][warmups:], device=self.device)
        self.dist.all_reduce(times, op=self.dist.ReduceOp.MAX)
        return statistics.median(times.tolist())

    def once(self, call: Callable[[], object]) -> float:
        self.dist.barrier()
        if self.device.type == "cpu":
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e6
        self.torch.cuda.synchronize()
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def replayed(self, call: Callable[[], object]) -> float | None:
        """Times one call in a graph of several; None on a host."""
        if self.device.type == "cpu":
            return None
        stream = self.torch.cuda.Stream()
        stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(stream):
            for _ in range(3):
                call()
        self.torch.cuda.current_stream().wait_stream(stream)
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for _ in range(REPLAYED):
                call()
        return self.slowest(graph.replay) / REPLAYED


def measure(options: argparse.Namespace, rank: int, world: int, device) -> list[dict]:
    import torch

    sizes = Sizes(options.hidden, options.experts, options.top_k)
    clock = Clock(device, options.runs)
    results = []
    for tokens in options.tokens:
        for routing in options.routing:
            exchange = Exchange(sizes, draw_ids(sizes, tokens, routing, world, options.seed), rank, world, device)
            exchange.check()
            sent = torch.tensor(exchange.sent_bytes(), device=device)
            torch.distributed.all_reduce(sent, op=torch.distributed.ReduceOp.MAX)
            row = {"tokens": tokens, "routing": routing}
            row["by_assignment_us"] = clock.slowest(exchange.by_assignment)
            row["by_token_us"] = clock.slowest(exchange.by_token)
            for name, call in {**exchange.wires(), **exchange.sums(tokens)}.items():
                row[name] = clock.replayed(call)
            row["by_assignment_sent_bytes"], row["by_token_sent_bytes"] = sent.tolist()
            results.append(row)
    return results


def describe(device, world: int) -> dict:
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    on_gpu = device.type == "cuda"
    return {
        "schema": 1,
        "what": "dispatch and combine by torch.distributed in bf16",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "world": world,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "commit": commit.stdout.strip() or None,
        "command": f"torchrun --nproc-per-node {world} " + shlex.join(["bench/exchange_baseline.py", *sys.argv[1:]]),
    }


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def routings(text: str) -> list[str]:
    for one in text.split(","):
        if one not in ROUTINGS:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(ROUTINGS)}, got {one}")
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--tokens", type=numbers, default=[2, 8, 32, 1024, 8192], help="of all ranks together, a list")
    parser.add_argument("--routing", type=routings, default=["uniform"], help=f"a list of {', '.join(ROUTINGS)}")
    parser.add_argument("--runs", type=int, default=20, help="that are timed, of each")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: over gloo, on trial")
    parser.add_argument("--out", help="where the JSON goes")
    options = parser.parse_args()
    import torch

    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "0")))
    if world == 0:
        parser.error("expected to be started by torchrun, a process a rank")
    if options.experts % world != 0:
        parser.error(f"--experts: expected a multiple of {world} ranks, got {options.experts}")
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl", device_id=device)
    else:
        torch.distributed.init_process_group("gloo")
    with torch.inference_mode():
        results = measure(options, rank, world, device)
    if rank == 0:
        bench = {
            **describe(device, world),
            "hidden": options.hidden,
            "experts": options.experts,
            "top_k": options.top_k,
            "runs": options.runs,
            "results": results,
        }
        if options.out:
            Path(options.out).write_text(records.text(bench))
        print(table(bench))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
