"""Two processes with a GPU each: they give the bits of one rank, and after every failure the other rank names the
cause.

Each test starts tests/python/rank_process.py twice and checks how it ended. Needs two GPUs, torch with CUDA and a build
with the CUDA backends, and is skipped by name elsewhere. The way "host" runs the same ranks on the CPU, forked from one
process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fork_server import ForkServer
from gpu import torch, why_not
from rank_process import STOPPED_TIMEOUT, expected
from rank_replays import AFTER, SCENARIOS

RANK = Path(__file__).with_name("rank_process.py")
REPLAYS = Path(__file__).with_name("rank_replays.py")
NO_GPUS = why_not() or ("" if torch.cuda.device_count() > 1 else "torch finds one GPU, and two ranks need two")
# The longest time until the remaining ranks have reported a failure, and ended.
SOON = 30
# The longest time a rank takes after the exchange's timeout, including the error and the end of the process.
GONE = 5
GPU_WAYS = ("nccl", "peers")


def there(way: str) -> str:
    """Returns the way if this machine and this version have it, else skips the test."""
    if way == "host" and not why_not():
        pytest.skip("the host's ranks run where there is no GPU, whose time is dear")
    if way != "host" and NO_GPUS:
        pytest.skip(NO_GPUS)
    return way


@pytest.fixture(params=[*GPU_WAYS, "host"])
def way(request: pytest.FixtureRequest) -> str:
    """How the ranks are connected."""
    return there(request.param)


@pytest.fixture(params=GPU_WAYS)
def gpu_way(request: pytest.FixtureRequest) -> str:
    """Like way, for tests that need graphs."""
    return there(request.param)


class Ranks:
    """Two processes of a scenario. They are gone at the end of the scope, even after an error."""

    def __init__(
        self, server: ForkServer, what: str, out: Path, way: str, limit: float = 150, script: Path = RANK
    ) -> None:
        self.out, self.limit = out, limit
        known = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NVFP4_MOE_CHECK", "NVFP4_MOE_DUMP")
        environment = {name: value for name, value in os.environ.items() if name not in known}
        environment |= {
            "GLOO_SOCKET_IFNAME": "lo",
            "NVFP4_MOE_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "RANK_TIME_LIMIT": str(limit),
        }
        self.processes = []
        for rank in (0, 1):
            command, own = [str(script), what, str(out), way], environment | {"RANK": str(rank)}
            if way == "host":
                self.processes.append(server.start(*command, env=own, out=out / f"{rank}.log"))
                continue
            with (out / f"{rank}.log").open("w") as log:
                command = [sys.executable, *command]
                self.processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(30)

    def logs(self) -> str:
        return "\n".join(f"-- rank {rank}\n" + (self.out / f"{rank}.log").read_text() for rank in (0, 1))

    def wait_until(self, have: str) -> None:
        """Waits until both ranks have left a file with that suffix."""
        deadline = time.monotonic() + self.limit
        while not all((self.out / f"{rank}.{have}").exists() for rank in (0, 1)):
            ended = [rank for rank in (0, 1) if self.processes[rank].poll() is not None]
            assert not ended or have == "here", f"ranks {ended} ended before: {self.messages()}\n{self.logs()}"
            assert time.monotonic() < deadline, f"the ranks do not come to {have}\n{self.logs()}"
            time.sleep(0.02)

    def messages(self) -> list[str]:
        texts = [self.out / f"{rank}.txt" for rank in (0, 1)]
        return [text.read_text() if text.exists() else "" for text in texts]

    def end(self, rank: int, limit: float) -> str:
        """Returns how the rank ended. It must end by itself and in time."""
        try:
            code = self.processes[rank].wait(limit)
        except subprocess.TimeoutExpired:
            self.processes[rank].send_signal(signal.SIGABRT)  # every thread's Python frames, by faulthandler
            time.sleep(2)
            pytest.fail(f"rank {rank} has not ended within {limit} s: {self.messages()}\n{self.logs()}")
        assert code == 0, f"rank {rank} ended with {code}: {self.messages()}\n{self.logs()}"
        return self.messages()[rank]


def test_two_processes_give_the_bits_of_one(way: str, fork_server: ForkServer, tmp_path: Path) -> None:
    with Ranks(fork_server, "whole", tmp_path, way, limit=400) as ranks:
        for rank in (0, 1):
            assert ranks.end(rank, 420) == "fine", ranks.logs()
    outputs = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    alone = expected("cpu" if way == "host" else "cuda:0")
    for rank in (0, 1):
        assert outputs[rank].keys() == alone.keys()
        for name, of_ranks in alone.items():
            assert torch.equal(outputs[rank][name], of_ranks[rank]), f"rank {rank}: {name}"


KILLED = [(way, f"eager {what}") for way in (*GPU_WAYS, "host") for what in ("sum", "exact", "capacity")]
KILLED += [(way, f"replayed {what}") for way in GPU_WAYS for what in ("sum", "capacity")]


@pytest.mark.parametrize(("killed_way", "what"), KILLED)
def test_a_killed_rank_is_named(killed_way: str, what: str, fork_server: ForkServer, tmp_path: Path) -> None:
    """The other rank names it before the exchange's own timeout."""
    with Ranks(fork_server, what, tmp_path, there(killed_way)) as ranks:
        ranks.wait_until("runs")
        ranks.processes[1].kill()
        message = ranks.end(0, SOON)
    assert message.startswith("IoError: ") and "rank 1" in message, message


@pytest.mark.parametrize("what", SCENARIOS)
def test_no_replay_after_a_rank_is_killed_is_finite_and_wrong(
    gpu_way: str, what: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    with Ranks(fork_server, what, tmp_path, gpu_way, script=REPLAYS) as ranks:
        ranks.wait_until("runs")
        time.sleep(0.2)
        ranks.processes[1].kill()
        message = ranks.end(0, SOON)
    counts = json.loads((tmp_path / "0.counts.json").read_text())
    assert counts["wrong"] == 0, counts
    assert counts["right"] > 0 and counts["after"] >= AFTER, counts
    assert counts["nan"] + counts["partly"] == counts["after"], f"a replay after the failure is right: {counts}"
    assert message.startswith("IoError: ") and "rank 1" in message, message


@pytest.mark.parametrize("what", ["stopped sum", "stopped capacity"])
def test_a_rank_that_stops_ends_the_other_by_the_timeout(
    way: str, what: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    with Ranks(fork_server, what, tmp_path, way) as ranks:
        ranks.wait_until("runs")
        ranks.processes[1].send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        message = ranks.end(0, SOON)
        took = time.monotonic() - begin
    assert message.startswith("IoError: "), message
    # Reported by the host's exchange, which knows the missing rank, or, if the device is waiting, by the monitor of
    # that wait.
    assert "rank 1" in message or "a rank has stopped" in message, message
    assert took > STOPPED_TIMEOUT[way] / 2
    assert way == "host" or took < STOPPED_TIMEOUT[way] + GONE, f"gone after {took:.1f} s: {message}"
