"""A layer over torch.distributed: processes with gloo, whole and with one that is killed or stops."""

from __future__ import annotations

import time

import pytest
from rank_environment import rank_environment

pytest.importorskip("torch.distributed")

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


@pytest.fixture
def launch(fork_server, tmp_path):
    """launch(what, world, timeout) -> the message of each rank (None if it left none), and how long they took.

    Waits for all ranks, except for one that stops.
    """

    def run(what, world, timeout):
        environment = rank_environment(world, EXCHANGE_TIMEOUT=str(timeout), NVFP4_MOE_THREADS="1")
        start = time.monotonic()
        ranks = []
        for rank in range(world):
            own = environment | {"RANK": str(rank)}
            ranks.append(fork_server.start("-c", RANK, what, str(tmp_path), env=own, out=tmp_path / f"{rank}.log"))
        try:
            for rank, process in enumerate(ranks):
                if not (what == "stopped" and rank == 1):
                    process.wait(100)
        finally:
            for process in ranks:
                process.kill()
        took = time.monotonic() - start
        messages = [
            (tmp_path / str(rank)).read_text() if (tmp_path / str(rank)).exists() else None for rank in range(world)
        ]
        return messages, took

    return run


@pytest.mark.parametrize("world", [1, 3])
def test_processes_give_the_bits_of_one(launch, world):
    assert launch("whole", world, 60)[0] == ["fine"] * world


def test_a_group_s_ranks_connect_without_the_others(launch):
    assert launch("part", 3, 20)[0] == ["fine"] * 3


def test_configs_that_differ_are_named_in_every_process(launch):
    messages, _ = launch("config", 3, 60)
    expected = "InvalidArgument: config of rank 1: expected top_k 2 as on rank 0, got 3"
    assert messages == [expected] * 3


@pytest.mark.parametrize(("what", "timeout"), [("killed", 20), ("stopped", 3), ("again", 20)])
def test_a_process_that_is_gone_is_named_by_all_others(launch, tmp_path, what, timeout):
    messages, took = launch(what, 3, timeout)
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
