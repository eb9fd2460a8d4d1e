"""Ranks that a launcher starts, without torch: they meet by its variables, run a layer, and are given other experts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

CHECKPOINT = Path(__file__).resolve().parents[1] / "vectors/modelopt_qwen3_moe"

RANK = """
import sys
import numpy as np
import nvfp4_moe

exchange = nvfp4_moe.launched_exchange(timeout=30)
assert exchange.world == 2
checkpoint = nvfp4_moe.Checkpoint(sys.argv[1])
layer = nvfp4_moe.MoeLayer.from_checkpoint(sys.argv[1], 0, max_tokens=8, exchange=exchange)
options = layer.config
rng = np.random.default_rng(5)
hidden = rng.standard_normal((8, options.hidden_size), dtype=np.float32)
ids = rng.integers(0, options.num_experts, (8, options.top_k), dtype=np.int64)
weights = rng.random((8, options.top_k), dtype=np.float32)
before = layer.run(hidden, ids, weights)
load = layer.load()
assert load == [2 * int((ids == e).sum()) for e in range(options.num_experts)], load
placement = list(reversed(range(options.num_experts)))
layer.rearrange(placement, checkpoint, 0)
assert np.array_equal(layer.run(hidden, ids, weights), before)
try:
    layer.rearrange(placement[:-1] if exchange.rank == 1 else placement, checkpoint, 0)
except ValueError as error:
    assert "rank 1: placement" in str(error), error
else:
    raise AssertionError("a placement with a slot too few was taken")
assert np.array_equal(layer.run(hidden, ids, weights), before)
try:
    exchange.use_nccl("cpu")
except nvfp4_moe.Unsupported as error:
    assert "rank 0: nccl: expected a device cuda:N, got cpu" in str(error), error
else:
    raise AssertionError("NCCL between hosts was taken")
exchange.barrier()
print("ok", exchange.rank)
"""


def master_port() -> int:
    """A port that is free on all addresses, as the one behind it is: torch.distributed takes the first, a launched exchange
    the second."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def start(rank: int, port: int, launcher: str) -> subprocess.Popen[str]:
    known = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in known}
    if launcher == "torchrun":
        environment |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    else:
        environment |= {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        }
    environment |= {"MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(sys.path), "NVFP4_MOE_THREADS": "1"}
    command = [sys.executable, "-c", RANK, str(CHECKPOINT)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_processes_run_count_and_rearrange():
    for launcher in ("torchrun", "mpirun"):
        port = master_port()
        ranks = [start(rank, port, launcher) for rank in (0, 1)]
        for rank, process in enumerate(ranks):
            said, _ = process.communicate(timeout=60)
            assert said.strip().endswith(f"ok {rank}"), said


def test_a_process_that_no_launcher_started_is_refused_by_name():
    command = [sys.executable, "-c", "import nvfp4_moe; nvfp4_moe.launched_exchange()"]
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "RANK and WORLD_SIZE (torchrun)" in done.stderr
