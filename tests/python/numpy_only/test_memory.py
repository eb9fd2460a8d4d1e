"""Workspaces of layers on the CPU: sized for the run, shared, given back, and the caller's own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import nvfp4_moe as nv
import pytest
from layers import HIDDEN, aligned, batch, layer, matrices, on_threads


def linear(max_tokens: int = 32) -> nv.Nvfp4Linear:
    parts = matrices(np.random.default_rng(5), 1, 48, HIDDEN)
    return nv.Nvfp4Linear.from_tensors(tuple(part[0] for part in parts), max_tokens=max_tokens)


@pytest.fixture(autouse=True)
def nothing_kept():
    nv.release_workspaces()
    yield
    nv.release_workspaces()


# ---- the library's


def test_a_workspace_has_the_size_of_the_largest_run():
    one = layer(max_tokens=4096)
    sizes = [one.workspace_bytes(tokens) for tokens in (0, 1, 2, 64, 4096)]
    assert sizes == sorted(sizes) and sizes[1] < sizes[3] < sizes[4] == one.workspace_bytes()
    for runs, kept in (((1,), 1), ((64, 1), 64), ((1, 64), 64), ((2, 1, 2), 2)):
        for tokens in runs:
            one.run(*batch(tokens))
        assert nv.release_workspaces("cpu") == one.workspace_bytes(kept)
        assert nv.release_workspaces() == 0


def test_opening_a_layer_takes_no_workspace():
    keep = [layer(max_tokens=1 << 20), linear(max_tokens=1 << 20)]
    assert nv.release_workspaces() == 0
    one = layer(max_tokens=64)
    one.warmup()  # warmup() allocates one workspace for later runs
    assert nv.release_workspaces() == one.workspace_bytes() and len(keep) == 2


def test_layers_and_linears_share_one():
    many, dense = [layer(seed) for seed in range(3)], linear()
    for one in many:
        one.run(*batch(9))
    dense.run(batch(32)[0])
    assert nv.release_workspaces() == max(many[0].workspace_bytes(9), dense.workspace_bytes(32))


def test_the_last_layer_gives_it_back():
    python("""
        import nvfp4_moe as nv
        from layers import batch, layer
        one, other = layer(0), layer(1)
        one.run(*batch(32))
        del one
        assert nv.release_workspaces() == other.workspace_bytes(32)
        other.run(*batch(32))
        del other
        again = layer()
        assert nv.release_workspaces() == 0
        again.run(*batch(1))
        assert nv.release_workspaces() == again.workspace_bytes(1)
    """)


def test_a_device_that_is_not_here_is_named():
    with pytest.raises(ValueError, match="device: expected cpu or cuda:N, got gpu"):
        nv.release_workspaces("gpu")
    with pytest.raises(nv.Unsupported, match="device cuda:999: "):
        nv.release_workspaces("cuda:999")


def test_releasing_disturbs_no_run():
    one, arrays = layer(), [batch(tokens, tokens) for tokens in (1, 7, 32)]
    expected = [one.run(*array) for array in arrays]
    wrong, ended = [], threading.Event()

    def work(first: int) -> None:
        for i in range(60):
            j = (first + i) % len(arrays)
            if not np.array_equal(one.run(*arrays[j]), expected[j]):
                wrong.append(j)

    def release() -> None:
        while not ended.is_set():
            nv.release_workspaces()

    releasing = threading.Thread(target=release)
    releasing.start()
    on_threads(4, work)
    ended.set()
    releasing.join()
    assert not wrong


def test_tokens_out_of_range_are_named():
    for one in (layer(max_tokens=32), linear(max_tokens=32)):
        for tokens in (-1, 33):
            with pytest.raises(ValueError, match=f"tokens: expected 0 to 32, got {tokens}"):
                one.workspace_bytes(tokens)
    with pytest.raises(ValueError, match="tokens: expected 0 to 32, got 33"):
        layer(max_tokens=32).run(*batch(33))
    assert nv.release_workspaces() == 0  # refused before anything was allocated


# ---- the caller's


def test_the_callers_workspace_is_used_and_no_other():
    one, dense, arrays = layer(max_tokens=4096), linear(), batch(9)
    expected, y = one.run(*arrays), dense.run(arrays[0])
    nv.release_workspaces()
    for size in (one.workspace_bytes(9), one.workspace_bytes()):
        workspace = aligned(size)
        workspace[:] = 0xFF
        assert np.array_equal(one.run(*arrays, workspace=workspace), expected)
        assert (workspace != 0xFF).any()
    assert one.status()["hidden_blocks"] == 9 * HIDDEN // 16
    shaped = aligned(dense.workspace_bytes(9) // 256 * 256 + 256).reshape(-1, 256)
    assert np.array_equal(dense.run(arrays[0], workspace=shaped), y)
    assert nv.release_workspaces() == 0


def test_a_wrong_workspace_is_named():
    one, dense, arrays = layer(), linear(), batch(9)
    size, linear_size = one.workspace_bytes(9), dense.workspace_bytes(9)

    def refused(kind: type[Exception], message: str, workspace: object) -> None:
        for run in (lambda: one.run(*arrays, workspace=workspace), lambda: dense.run(arrays[0], workspace=workspace)):
            with pytest.raises(kind, match=message):
                run()

    with pytest.raises(ValueError, match=f"workspace: expected at least {size} bytes, got {size - 1}"):
        one.run(*arrays, workspace=aligned(size - 1))
    with pytest.raises(ValueError, match=f"workspace: expected at least {linear_size} bytes, got {linear_size - 1}"):
        dense.run(arrays[0], workspace=aligned(linear_size - 1))
    refused(ValueError, "workspace: expected a base aligned to 256 bytes, got one 16 bytes past", aligned(size, 16))
    expected = r"workspace: expected \(bytes,\) uint8 on cpu, contiguous, got "
    refused(ValueError, expected + r"\(\d+,\) int8 on cpu", aligned(size).view(np.int8))
    refused(ValueError, expected + r"\(\d+,\) float32 on cpu", np.zeros(size, np.float32))
    refused(ValueError, expected + r"\(\d+,\) uint8 on cpu, not contiguous", aligned(2 * size)[::2])
    refused(TypeError, "workspace: expected an array, got int", size)
    locked = aligned(size)
    locked.setflags(write=False)
    refused(ValueError, "workspace: expected an array that can be written, got a read-only one", locked)
    both = aligned(size + 9 * HIDDEN * 4)
    out = both[: 9 * HIDDEN * 4].view(np.float32).reshape(9, HIDDEN)
    with pytest.raises(ValueError, match="workspace: expected memory of its own, got memory that overlaps out"):
        one.run(*arrays, out=out, workspace=both)
    assert nv.release_workspaces() == 0
    one.run(*arrays)  # usable as before


def test_threads_with_workspaces_of_their_own():
    one, arrays = layer(), batch(16)
    expected, wrong = one.run(*arrays), []
    nv.release_workspaces()

    def work(_: int) -> None:
        workspace = aligned(one.workspace_bytes(16))
        for _ in range(50):
            if not np.array_equal(one.run(*arrays, workspace=workspace), expected):
                wrong.append(1)

    on_threads(4, work)
    assert not wrong and nv.release_workspaces() == 0


# ---- processes


def python(program: str) -> str:
    here = str(Path(__file__).parent)
    program = f"import sys; sys.path.insert(0, {here!r})\n" + textwrap.dedent(program)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.attack("allocation failures")
def test_no_memory_is_told_and_everything_stays_usable(attacked):
    attacked()
    told = python("""
        import resource
        import numpy as np
        import nvfp4_moe as nv
        from layers import batch, layer

        one = layer(max_tokens=1 << 16)
        few, many = batch(2), batch(1 << 16)
        expected, out = one.run(*few), np.empty_like(many[0])
        pages = int(open("/proc/self/statm").read().split()[0])
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20), limits[1]))
        try:
            one.run(*many, out=out)
        except nv.OutOfMemory as error:
            print(error)
        assert np.array_equal(one.run(*few), expected)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        one.run(*many, out=out)
        print("ran")
    """)
    assert "workspace for 65536 tokens of a layer of 6 experts, hidden_size 64, intermediate_size 48: " in told
    assert told.endswith("ran\n")


@pytest.mark.attack("interpreter exits")
@pytest.mark.parametrize("left", ["a layer", "a cycle", "an exit handler"])
def test_the_interpreter_ends_quietly(left: str, attacked):
    last = {
        "a layer": "pass",
        "a cycle": "ring = [one]; ring.append(ring); del one",
        "an exit handler": "atexit.register(lambda: one.run(*batch(20)))",
    }[left]
    attacked()
    assert not python(f"""
        import atexit
        from layers import batch, layer
        one = layer()
        one.run(*batch(9))
        {last}
    """)


def test_a_run_is_described_by_its_tokens():
    one = layer(max_tokens=32)
    described = one.describe_run(5)
    assert described["backend"] == "cpu" and described["tokens"] == 5
    assert described["steps"].keys() == one.describe()["kernels"].keys()
    assert described["workspace_bytes"] == one.workspace_bytes(5)
    with pytest.raises(ValueError, match="tokens: expected 0 to 32, got 33"):
        one.describe_run(33)
