"""`python -m nvfp4_moe.verify` and `.bench` under torchrun, and that no exchange of ours listens on a socket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

CHECKPOINT = str(Path(__file__).resolve().parents[1] / "vectors/modelopt_qwen3_moe")
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
ENVIRONMENT |= {"NVFP4_MOE_THREADS": "1", "OMP_NUM_THREADS": "1"}


def torchrun(module: str, *options: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), "-m", f"nvfp4_moe.{module}", CHECKPOINT, *options]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("combine", ["all_to_all", "all_reduce"])
def test_layers_over_ranks_are_those_of_one(combine: str) -> None:
    done = torchrun("verify", "--combine", combine, "--tokens", "9")
    assert done.returncode == 0, done.stderr
    head, _, *lines = done.stdout.splitlines()
    assert head == f"{CHECKPOINT}: 2 ranks, {combine} over torch.distributed"
    assert [line.split()[-1] for line in lines] == ["passed"] * 2, done.stdout
    assert combine == "all_reduce" or all(" equal " in line for line in lines), done.stdout


def test_a_failure_is_one_line_of_each_rank_that_has_it() -> None:
    done = torchrun("verify", "--layer", "7")
    assert done.returncode != 0
    assert "rank 0: " in done.stderr and "layer" in done.stderr, done.stderr


def test_a_layer_is_timed() -> None:
    done = torchrun("bench", "--tokens", "1,8", "--runs", "3")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert [row[0] for row in rows] == ["1", "8"] and all(float(row[1]) > 0 for row in rows), done.stdout


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


def test_no_thread_of_gloo_outlives_a_rank() -> None:
    command = [sys.executable, "-c", CLOSED, CHECKPOINT]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines()[-1:] == ["True 0"], done.stdout + done.stderr


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
