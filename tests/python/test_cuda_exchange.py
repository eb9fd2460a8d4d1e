"""A layer over an exchange with NCCL on a GPU: a world of one rank, eager and captured, against the layer without
exchange.

Needs torch with CUDA (which brings NCCL), a GPU, and a build with the CUDA backends: skipped by name elsewhere.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import subprocess
import sys
import time

import nvfp4_moe as nv
import pytest
from gpu import captured, needs_gpu, on_gpu, torch
from test_cuda_layer import batch, config, weights

pytestmark = needs_gpu


def connected(**options: object) -> nv.Exchange:
    exchange = nv.ThreadGroup(1).join(0)
    exchange.use_nccl("cuda:0", **options)
    return exchange


def over(exchange: nv.Exchange | None, **options: object) -> nv.MoeLayer:
    return nv.MoeLayer.from_tensors(
        config("bf16"), **weights(), device="cuda:0", max_tokens=64, exchange=exchange, **options
    )


def test_one_rank_over_nccl_gives_the_bits_of_the_layer_alone_and_in_a_graph() -> None:
    layer, alone = over(connected(), combine="all_reduce"), over(None)
    assert layer.describe()["expert_parallel"]["over"].startswith("nccl 2.")
    arrays = on_gpu(batch(64))
    assert torch.equal(layer.run(*arrays), alone.run(*arrays))
    assert layer.status() == alone.status()
    assert sum(layer.expert_load()) == arrays[1].numel()
    with torch.cuda.stream(torch.cuda.Stream()):
        out = layer.run(*arrays)
    torch.cuda.synchronize()
    assert torch.equal(out, alone.run(*arrays))
    graph, out = captured(lambda: layer.run(*arrays), capture_error_mode="thread_local")
    for seed in range(1, 4):
        for array, fresh in zip(arrays, batch(64, seed), strict=True):
            array.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, alone.run(*arrays))


def captured_and_dropped(first: str) -> None:
    """Runs in a process of its own. A graph and the layer it captured are dropped, in either order, or both end with
    the process."""
    faulthandler.dump_traceback_later(90, exit=True)
    layer = over(connected(), combine="all_reduce")  # the layer has the only exchange
    held = on_gpu(batch(16))
    out = torch.empty_like(held[0])
    layer.run(*held)
    graph, _ = captured(functools.partial(layer.run, *held, out=out), capture_error_mode="thread_local")
    graph.replay()
    torch.cuda.synchronize()
    if first == "neither":
        globals().update(layer=layer, graph=graph)
        return
    begin = time.monotonic()
    if first == "graph":
        del graph
    del layer
    took = time.monotonic() - begin
    assert took < 10, f"waited {took:.1f} s for the graph"
    if first == "layer":
        del graph
    again = over(connected(), combine="all_reduce").run(*held)
    assert torch.equal(again, out)


@pytest.mark.parametrize("first", ["graph", "layer", "neither"])
def test_a_graph_and_its_layer_go_in_any_order(first: str) -> None:
    command = [sys.executable, "-c", f"import test_cuda_exchange as test; test.captured_and_dropped({first!r})"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_what_nccl_cannot_is_said_by_name() -> None:
    exchange = nv.ThreadGroup(1).join(0)
    with pytest.raises(nv.Unsupported, match="nccl: expected nonesuch.so as the caller names it, got none"):
        exchange.use_nccl("cuda:0", library="nonesuch.so")
    text = "expected cpu for a layer over an exchange without NCCL or peers, got cuda:0"
    with pytest.raises(nv.Unsupported, match=text):
        over(exchange, combine="all_reduce")
    exchange.use_nccl("cuda:0")
    with pytest.raises(ValueError, match="nccl: expected an exchange without devices, got one with nccl"):
        exchange.use_nccl("cuda:0")
