"""CUDA graphs of layer steps, and the time of a step in a graph."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

TARGET_MS = 50.0  # of all replays together
REPLAYS = (5, 60)  # at least, at most


class Time(NamedTuple):
    us: float  # a step of the median replay
    fastest: float
    slowest: float


def capture(step: Callable[[int], None], count: int) -> torch.cuda.CUDAGraph:
    """Captures a graph of step(0) to step(count - 1), after a short warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(min(count, 3)):
            step(number)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            step(number)
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, count: int) -> Time:
    """Returns the microseconds of one of the graph's `count` steps: the median replay, the fastest and the slowest."""
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    replays = int(max(REPLAYS[0], min(REPLAYS[1], TARGET_MS / max(begin.elapsed_time(end), 1e-3))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    ms = sorted(before.elapsed_time(after) for before, after in pairwise(events))
    return Time(*(1e3 * ms[at] / count for at in (replays // 2, 0, -1)))
