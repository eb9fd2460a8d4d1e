"""Ranks of an exchange that are threads of a test."""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv
from layers import config, on_threads, weights


def on_ranks(world, body, connect=None):
    """Runs body(exchange) on a thread for each rank. Returns its results or exceptions by rank."""
    group = nv.ThreadGroup(world)
    results = [None] * world

    def rank(index):
        try:
            exchange = group.join(index, timeout=60) if connect is None else connect(index)
            results[index] = body(exchange)
            exchange.barrier()  # leaving earlier would end the other ranks' runs
        except Exception as error:
            results[index] = error.with_traceback(None)  # frames would keep the exchange alive

    on_threads(world, rank)
    return results


def whole(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def on_two(body, connect=None):
    """Runs body on two ranks. It must succeed on both."""
    return whole(on_ranks(2, body, connect))


def split(arrays, rank, world=2):
    """A rank's tokens."""
    return [np.array_split(array, world)[rank] for array in arrays]


def open_over(exchange, **choices):
    options = {name: choices.pop(name) for name in ("combine", "capacity", "placement") if name in choices}
    return nv.MoeLayer.from_tensors(config(**choices), **weights(), max_tokens=32, exchange=exchange, **options)
