"""`python -m nvfp4_moe.verify` and `.bench` under torchrun, and that no exchange of ours listens on a socket."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import ForkServer
from rank_environment import rank_environment

pytest.importorskip("torch.distributed")

CHECKPOINT = str(Path(__file__).resolve().parents[1] / "vectors/modelopt_qwen3_moe")
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
ENVIRONMENT |= {"NVFP4_MOE_THREADS": "1", "OMP_NUM_THREADS": "1"}
# Starts the ranks and returns rank 0's or torchrun's exit code, the output and the errors.
Ranks = Callable[..., tuple[int, str, str]]


def torchrun(module: str, *options: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", "-m", f"nvfp4_moe.{module}", CHECKPOINT, *options]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def forked(fork_server: ForkServer, tmp_path: Path) -> Ranks:
    """Like torchrun, by torchrun's variables."""

    def run(module: str, *options: str) -> tuple[int, str, str]:
        out, err = tmp_path / "out", tmp_path / "err"
        command, ranks = ["-m", f"nvfp4_moe.{module}", CHECKPOINT, *options], []
        environment = rank_environment(2, LOCAL_WORLD_SIZE="2", NVFP4_MOE_THREADS="1", OMP_NUM_THREADS="1")
        for rank in ("0", "1"):
            own = environment | {"RANK": rank, "LOCAL_RANK": rank}
            ranks.append(fork_server.start(*command, env=own, out=out, err=err))
        codes = [rank.wait() for rank in ranks]
        return codes[0], out.read_text(), err.read_text()

    return run


def check_verdicts(done: tuple[int, str, str], combine: str) -> None:
    code, out, err = done
    assert code == 0, err
    head, _, *lines = out.splitlines()
    assert head == f"{CHECKPOINT}: 2 ranks, {combine} over torch.distributed"
    assert [line.split()[-1] for line in lines] == ["passed"] * 2, out
    assert combine == "all_reduce" or all(" equal " in line for line in lines), out


def test_layers_over_ranks_of_torchrun_are_those_of_one() -> None:
    check_verdicts(torchrun("verify", "--tokens", "9"), "all_to_all")


def test_sums_over_ranks_are_those_of_one(forked: Ranks) -> None:
    check_verdicts(forked("verify", "--combine", "all_reduce", "--tokens", "9"), "all_reduce")


def test_a_failure_is_one_line_of_each_rank_that_has_it(forked: Ranks) -> None:
    code, _, err = forked("verify", "--layer", "7")
    assert code != 0
    assert "rank 0: " in err and "layer" in err, err


def test_a_layer_is_timed(forked: Ranks) -> None:
    code, out, err = forked("bench", "--tokens", "1,8", "--runs", "3")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()[-2:]]
    assert [row[0] for row in rows] == ["1", "8"] and all(float(row[1]) > 0 for row in rows), out


# If one of gloo's threads frees a tensor while Python ends, the process aborts: about once in a hundred ends on a busy
# machine.
CLOSED = r"""
import glob, sys
from nvfp4_moe import _ranks, verify

options = _ranks.parser("verify", "")
options.add_argument("--tokens", type=int, default=3)
ranks = _ranks.Ranks(options.parse_args(sys.argv[1:]))
def gloo():
    return sum("gloo" in open(comm).read() for comm in glob.glob("/proc/self/task/*/comm"))
before = verify.verify(ranks) and gloo()
ranks.close()
print(before > 0, gloo())
"""


def test_no_thread_of_gloo_outlives_a_rank(fork_server: ForkServer, tmp_path: Path) -> None:
    fork_server.start("-c", CLOSED, CHECKPOINT, env=ENVIRONMENT, out=tmp_path / "out").wait()
    said = (tmp_path / "out").read_text()
    assert said.splitlines()[-1:] == ["True 0"], said


# ---- sockets

# Two processes over pipes, so that a socket of theirs could only be the library's.
RANK = r"""
import os, sys
import numpy as np
import nvfp4_moe

rank, read, write = (int(word) for word in sys.argv[1:4])

def all_to_all_v(send, send_bytes, recv, recv_bytes, timeout):
    first = send_bytes[0]
    blocks = [bytes(send[:first]), bytes(send[first : first + send_bytes[1]])]
    os.write(write, blocks[1 - rank])
    other = b""
    while len(other) < recv_bytes[1 - rank]:
        other += os.read(read, recv_bytes[1 - rank] - len(other))
    both = [blocks[0], other] if rank == 0 else [other, blocks[1]]
    recv[: len(both[0]) + len(both[1])] = both[0] + both[1]

def listening():
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [link for link in links if os.path.exists(link) and os.readlink(link).startswith("socket:")]

exchange = nvfp4_moe.callback_exchange(all_to_all_v, rank, 2)
layer = nvfp4_moe.MoeLayer.from_checkpoint(sys.argv[4], 0, max_tokens=8, exchange=exchange)
assert layer.describe()["expert_parallel"]["ends"] == "polled", layer.describe()
ids = np.arange(8 * layer.config.top_k).reshape(8, -1) % layer.config.num_experts
out = layer.run(np.ones((8, layer.config.hidden_size), np.float32), ids, np.ones(ids.shape, np.float32))
assert np.isfinite(out.astype(np.float32)).all()
assert listening() == [], listening()
exchange.barrier()
print("ok", rank)
"""


def test_processes_over_a_callers_pipes_have_no_socket() -> None:
    pipes = [os.pipe(), os.pipe()]
    ranks = []
    for rank in (0, 1):
        ends = pipes[1 - rank][0], pipes[rank][1]
        command = [sys.executable, "-c", RANK, str(rank), *map(str, ends), CHECKPOINT]
        said = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ranks.append(subprocess.Popen(command, env=ENVIRONMENT, pass_fds=ends, **said))
    for end in (*pipes[0], *pipes[1]):
        os.close(end)
    for rank, process in enumerate(ranks):
        said, _ = process.communicate(timeout=60)
        assert said.strip().endswith(f"ok {rank}"), said


def test_the_command_line_over_threads_has_no_socket() -> None:
    tool = os.environ.get("NVFP4_MOE_TOOL")
    if not tool:
        pytest.skip("NVFP4_MOE_TOOL names no command line tool")
    quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen([tool, "verify", CHECKPOINT, "--ep", "2", "--quiet"], **quiet)
    polls = 0
    while process.poll() is None:
        try:
            targets = [os.readlink(file) for file in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:  # a file or the process is gone meanwhile
            continue
        polls += 1
        assert not [target for target in targets if target.startswith("socket:")]
    assert process.returncode == 0 and polls > 0
