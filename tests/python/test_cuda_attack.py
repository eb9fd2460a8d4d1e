"""Failures on a GPU: no memory, a lost context, a neighbour that is killed.

test_cuda_soak.py and test_cuda_replace.py replace weights under running streams. Each failure ends in an error or in right numbers, never in a hang: code that may hang runs in a process of its own with a time
limit. Needs torch with CUDA, a GPU, and a build with the CUDA backends: skipped by name elsewhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from gpu import LAYERS, assert_comes_back, needs_gpu, torch

pytestmark = [needs_gpu, pytest.mark.attack("gpu failures")]

LIMIT_S = 120  # memory of a process, mostly for the import of torch

# The beginning of every process: a small layer on the GPU and a batch for it.
PROLOGUE = f"""
import sys, time
sys.path.insert(0, {str(LAYERS)!r})
import layers, torch
import nvfp4_moe as nv

def opened(seed=0):
    return nv.MoeLayer.from_tensors(layers.config(), **layers.weights(seed), max_tokens=32, device="cuda:0")

def on_gpu(tokens):
    hidden, ids, weights = (torch.from_numpy(array).cuda() for array in layers.batch(tokens))
    return hidden.bfloat16(), ids, weights
"""


def run_apart(script: str) -> subprocess.CompletedProcess[str]:
    """Runs the script after PROLOGUE in a process of its own; TimeoutExpired if it hangs."""
    command = [sys.executable, "-c", PROLOGUE + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


# After a read beyond an array the driver gives up the context: every later call of the process fails.
LOSE = """
batch = on_gpu(8)
layer = opened()
out = layer.run(*batch)
torch.cuda.synchronize()
try:
    torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
    torch.cuda.synchronize()
except Exception as error:
    print("lost:", type(error).__name__)
def attempt(name, call):
    begin = time.monotonic()
    try:
        call()
        print(name, "returned")
    except nv.Error as error:
        print(name, type(error).__name__, f"{time.monotonic() - begin:.0f} s")
"""


def test_a_lost_context_is_an_error_everywhere(attacked: Callable[..., None]) -> None:
    """Run, status, replace, open: all raise this library's errors at once, and the process ends by itself."""
    ran = run_apart(
        LOSE
        + """
attempt("run", lambda: layer.run(*batch, out=out))
attempt("status", layer.status)
attempt("expert", lambda: layer.expert(0))
attempt("replace", lambda: layer.replace_expert(0, **layers.expert_of(layers.weights(), 0)))
attempt("open", opened)
del layer
nv.release_workspaces()
print("end")
"""
    )
    attacked()
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert lines[0].startswith("lost:"), ran.stdout
    for line, name in zip(lines[1:], ("run", "status", "expert", "replace", "open"), strict=False):
        assert line.startswith(name) and not line.endswith("returned"), ran.stdout
        assert int(line.split()[-2]) < 10, line
    assert lines[-1] == "end"


def test_no_memory_is_an_error_and_leaves_what_was_there(attacked: Callable[..., None]) -> None:
    """A layer that does not fit, and a workspace that does not fit. With room again, both work."""
    ran = run_apart(
        """
batch = on_gpu(32)
layer = opened()
right = layer.run(*batch)
out = torch.empty_like(right)
torch.cuda.synchronize()
nv.release_workspaces()
torch.cuda.empty_cache()
held = []
for size in (1 << 30, 1 << 24, 1 << 20, 1 << 16):  # in ever smaller pieces, until nothing is left
    try:
        while True:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        pass
refused = 0
random = layers.np.random.default_rng(0)
stacks = {name: layers.matrices(random, 64, 2048, 2048) for name in ("gate", "up", "down")}
for attempt in range(3):
    try:
        nv.MoeLayer.from_tensors(nv.MoeConfig(64, 2, 2048, 2048), **stacks, max_tokens=8, device="cuda:0")
    except nv.OutOfMemory as error:
        refused += 1
        assert isinstance(error, MemoryError) and "packed weights" in str(error), error
print("refused", refused)
try:
    layer.run(*batch, out=out)
    print("ran in what was left")
except nv.OutOfMemory as error:
    assert "workspace for 32 tokens of a layer of 6 experts, hidden_size 64" in str(error), error
    print("no workspace")
held.clear()
torch.cuda.empty_cache()
assert torch.equal(layer.run(*batch), right)
assert torch.equal(opened().run(*batch), right)
print("end")
"""
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert ran.stdout.splitlines()[0] == "refused 3"
    attacked(3)
    assert ran.stdout.splitlines()[-1] == "end"


NEIGHBOUR = """
layer = opened(int(sys.argv[1]))
batch = on_gpu(32)
right = layer.run(*batch).cpu()
print("ready", flush=True)
for _ in range(int(sys.argv[2])):
    assert torch.equal(layer.run(*batch).cpu(), right)
print("right", flush=True)
"""


def neighbour(seed: int, runs: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROLOGUE + NEIGHBOUR, str(seed), str(runs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_on_one_gpu_and_one_of_them_killed(attacked: Callable[..., None]) -> None:
    """Each process gets its own numbers. The one that is killed takes nothing from the other, or from the GPU."""
    free_before = free_bytes()
    first, second, doomed = neighbour(0, 500), neighbour(1, 500), neighbour(2, 1 << 30)
    try:
        assert doomed.stdout is not None
        assert doomed.stdout.readline() == "ready\n"
        time.sleep(0.2)
        os.kill(doomed.pid, signal.SIGKILL)
        attacked()
        for process in (first, second):
            out, error = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0 and out.endswith("right\n"), error[-2000:]
        assert doomed.wait(LIMIT_S) == -signal.SIGKILL
    finally:
        for process in (first, second, doomed):
            if process.poll() is None:
                process.kill()
            process.wait(LIMIT_S)
    assert_comes_back(free_before, free_bytes)


def test_killed_while_loading_gives_all_memory_back(attacked: Callable[..., None]) -> None:
    """A process that dies between two experts of a load leaves nothing on the GPU."""
    free_before = free_bytes()
    script = """
import os, signal
def die(progress):
    if progress["done"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return True
torch.empty(1, device="cuda")
nv.MoeLayer.from_tensors(layers.config(), **layers.weights(), max_tokens=32, device="cuda:0", progress=die)
"""
    attacked()
    assert run_apart(script).returncode == -signal.SIGKILL
    assert_comes_back(free_before, free_bytes)
