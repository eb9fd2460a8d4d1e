"""A layer over torch.distributed: processes with gloo, whole and with one that is killed or stops."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from rank_environment import rank_environment

pytest.importorskip("torch.distributed")

# Forks the ranks from one process, because importing torch takes longer than all else. Waits for them in order, except
# for one that stops.
FORK = r"""
import os, sys
import nvfp4_moe, torch.distributed

ranks = []
for rank in range(int(os.environ["WORLD_SIZE"])):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        os.environ["RANK"] = str(rank)
        break
else:
    for rank, process in enumerate(ranks):
        if not (sys.argv[1] == "stopped" and rank == 1):
            os.waitpid(process, 0)
    sys.exit()
"""

RANK = r"""
import os, signal, sys, time
import numpy as np
import torch
from torch import distributed
import nvfp4_moe as nv

what, out = sys.argv[1:]
torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
if what == "part":
    group = distributed.new_group([0, 2])
    if rank != 1:
        exchange = nv.torch_exchange(group, timeout=float(os.environ["EXCHANGE_TIMEOUT"]))
        assert (exchange.rank, exchange.world) == (rank // 2, 2)
        exchange.barrier()
    with open(f"{out}/{rank}", "w") as file:
        file.write("fine")
    distributed.barrier()
    sys.exit()
if what == "again":  # all ranks have failed once, by a rank that came too late, and connect again
    first = nv.torch_exchange(timeout=2)
    if rank == 1:
        time.sleep(4)
    try:
        first.barrier()
        sys.exit("expected a barrier that fails")
    except nv.IoError:
        pass
exchange = nv.torch_exchange(timeout=float(os.environ["EXCHANGE_TIMEOUT"]))
assert (exchange.rank, exchange.world) == (rank, world)
random = np.random.default_rng(0)
def matrices(rows, cols):
    return (random.integers(0, 256, (6, rows, cols // 2), dtype=np.uint8),
            random.integers(0x28, 0x40, (6, rows, cols // 16), dtype=np.uint8),
            random.uniform(0.005, 0.02, 6).astype(np.float32))
arrays = {"gate": matrices(48, 64), "up": matrices(48, 64), "down": matrices(64, 48)}
hidden = torch.from_numpy(random.standard_normal((13, 64), dtype=np.float32)).bfloat16()
ids = torch.from_numpy(random.integers(0, 6, (13, 2)))
weights = torch.from_numpy(random.random((13, 2), dtype=np.float32))
late = what == "stopped" and rank == 1
def pack(_):  # one rank takes longer to open than the exchange's timeout
    global late
    if late:
        late = False
        time.sleep(float(os.environ["EXCHANGE_TIMEOUT"]) + 1)
config = nv.MoeConfig(6, 3 if what == "config" and rank == 1 else 2, 64, 48)
try:
    layer = nv.MoeLayer.from_tensors(config, **arrays, max_tokens=16, exchange=exchange, progress=pack)
    mine = slice(rank * 13 // world, (rank + 1) * 13 // world)
    batch = hidden[mine].contiguous(), ids[mine].contiguous(), weights[mine].contiguous()
    result = layer.run(*batch)
    if what == "whole":
        expected = nv.MoeLayer.from_tensors(config, **arrays, max_tokens=16).run(hidden, ids, weights)
        assert torch.equal(result, expected[mine])
        assert layer.describe()["expert_parallel"]["ends"] == "polled"
        reduced = nv.MoeLayer.from_tensors(config, **arrays, max_tokens=16, exchange=exchange, combine="all_reduce")
        sums = reduced.run(hidden, ids, weights)
        gathered = [torch.empty_like(sums) for _ in range(world)]
        distributed.all_gather(gathered, sums)
        assert all(torch.equal(other, sums) for other in gathered)
        torch.testing.assert_close(sums, expected, rtol=2**-7, atol=1e-3)
        try:
            exchange.use_nccl("cpu")
        except nv.Unsupported as refused:
            assert "rank 0: nccl: expected a device cuda:N, got cpu" in str(refused), refused
        assert torch.equal(layer.run(*batch), result)
    if what in ("killed", "again") and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stopped":
        assert not late
        open(f"{out}/opened by {rank}", "w").close()
        if rank == 1:
            time.sleep(120)
    layer.run(*batch)
    message = "fine"
except Exception as error:
    message = f"{type(error).__name__}: {error}"
with open(f"{out}/{rank}", "w") as file:
    file.write(message)
# The interpreter ends with the exchange still there, as a script does.
"""


def launch(tmp_path, what, world, timeout):
    """The message of each rank (None if it left none), and how long they took."""
    environment = rank_environment(world, EXCHANGE_TIMEOUT=str(timeout), NVFP4_MOE_THREADS="1")
    command = [sys.executable, "-c", FORK + RANK, what, str(tmp_path)]
    start = time.monotonic()
    ranks = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        ranks.wait(100)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    took = time.monotonic() - start
    return [(tmp_path / str(r)).read_text() if (tmp_path / str(r)).exists() else None for r in range(world)], took


@pytest.mark.parametrize("world", [1, 3])
def test_processes_give_the_bits_of_one(tmp_path, world):
    assert launch(tmp_path, "whole", world, 60)[0] == ["fine"] * world


def test_a_group_s_ranks_connect_without_the_others(tmp_path):
    assert launch(tmp_path, "part", 3, 20)[0] == ["fine"] * 3


def test_configs_that_differ_are_named_in_every_process(tmp_path):
    messages, _ = launch(tmp_path, "config", 3, 60)
    expected = "InvalidArgument: config of rank 1: expected top_k 2 as on rank 0, got 3"
    assert messages == [expected] * 3


@pytest.mark.parametrize(("what", "timeout"), [("killed", 20), ("stopped", 3), ("again", 20)])
def test_a_process_that_is_gone_is_named_by_all_others(tmp_path, what, timeout):
    messages, took = launch(tmp_path, what, 3, timeout)
    assert messages[1] is None
    for rank in (0, 2):
        assert messages[rank] is not None and messages[rank].startswith("IoError: exchange: "), messages
        assert "no word from rank 1" in messages[rank], messages
        if what == "killed":  # detected by polling its process, independently of gloo's report
            assert "exchange: expected rank 1, got none: it has left" in messages[rank], messages
    assert took < timeout + 40
    if what == "stopped":  # all had waited for rank 1 to open, which took longer than the timeout; a run does not
        assert sorted(path.name for path in tmp_path.glob("opened by *")) == [f"opened by {rank}" for rank in range(3)]
        assert any(f" {timeout * 1000}ms " in message for message in (messages[0], messages[2])), messages
