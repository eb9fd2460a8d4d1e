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


def python(program: str) -> str:
    """Runs a program in a process of its own. Returns its output."""
    here = str(Path(__file__).parent)
    program = f"import sys; sys.path.insert(0, {here!r})\n" + textwrap.dedent(program)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(autouse=True)
def nothing_kept():
    nv.release_workspaces()
    yield
    nv.release_workspaces()


# ---- the library's


def test_a_workspace_has_the_size_of_the_largest_run():
    keep = [layer(max_tokens=1 << 20), linear(max_tokens=1 << 20)]
    assert nv.release_workspaces() == 0, "opening a layer takes none"
    one, dense = layer(max_tokens=4096), linear()
    sizes = [one.workspace_bytes(tokens) for tokens in (0, 1, 2, 64, 4096)]
    assert sizes == sorted(sizes) and sizes[1] < sizes[3] < sizes[4] == one.workspace_bytes()
    for runs, kept in (((1,), 1), ((64, 1), 64), ((1, 64), 64), ((2, 1, 2), 2)):
        for tokens in runs:
            one.run(*batch(tokens))
            keep[0].run(*batch(tokens))  # layers and linears share one
        dense.run(batch(1)[0])
        assert nv.release_workspaces("cpu") == max(one.workspace_bytes(kept), dense.workspace_bytes(1))
        assert nv.release_workspaces() == 0
    one.warmup()  # allocates one workspace for later runs
    assert nv.release_workspaces() == one.workspace_bytes()


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


def test_releasing_disturbs_no_run():
    one, arrays = layer(), [batch(tokens, tokens) for tokens in (1, 7, 32)]
    expected = [one.run(*array) for array in arrays]
    wrong, ended = [], threading.Event()

    def work(first: int) -> None:
        workspace = aligned(one.workspace_bytes()) if first % 2 else None  # shared workspaces, and the threads' own
        for i in range(60):
            j = (first + i) % len(arrays)
            if not np.array_equal(one.run(*arrays[j], workspace=workspace), expected[j]):
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


def test_what_is_out_of_range_or_not_here_is_named():
    one, dense = layer(max_tokens=32), linear(max_tokens=32)
    for call in (one.workspace_bytes, dense.workspace_bytes, one.describe_run, lambda tokens: one.run(*batch(tokens))):
        with pytest.raises(ValueError, match="tokens: expected 0 to 32, got 33"):
            call(33)
    with pytest.raises(ValueError, match="tokens: expected 0 to 32, got 33"):
        dense.run(batch(33)[0])
    assert nv.release_workspaces() == 0  # refused before anything was allocated
    with pytest.raises(ValueError, match="device: expected cpu or cuda:N, got gpu"):
        nv.release_workspaces("gpu")
    with pytest.raises(nv.Unsupported, match="device cuda:999: "):
        nv.release_workspaces("cuda:999")


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
    size = one.workspace_bytes(9)
    locked = aligned(size)
    locked.setflags(write=False)
    expected = r"expected \(bytes,\) uint8 on cpu, contiguous, got "
    for workspace, message in (
        (aligned(size, 16), "expected a base aligned to 256 bytes, got one 16 bytes past"),
        (aligned(size).view(np.int8), expected + r"\(\d+,\) int8 on cpu"),
        (np.zeros(size, np.float32), expected + r"\(\d+,\) float32 on cpu"),
        (aligned(2 * size)[::2], expected + r"\(\d+,\) uint8 on cpu, not contiguous"),
        (size, "expected an array, got int"),
        (locked, "expected an array that can be written, got a read-only one"),
    ):
        for run in (lambda w: one.run(*arrays, workspace=w), lambda w: dense.run(arrays[0], workspace=w)):
            with pytest.raises(TypeError if workspace is size else ValueError, match="workspace: " + message):
                run(workspace)
    both = aligned(size + 9 * HIDDEN * 4)
    out = both[: 9 * HIDDEN * 4].view(np.float32).reshape(9, HIDDEN)
    for workspace, message in (
        (aligned(size - 1), f"expected at least {size} bytes, got {size - 1}"),
        (both, "expected memory of its own, got memory that overlaps out"),
    ):
        with pytest.raises(ValueError, match="workspace: " + message):
            one.run(*arrays, out=out, workspace=workspace)
    assert nv.release_workspaces() == 0


# ---- processes


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
@pytest.mark.parametrize("left", ["pass", "ring = [one]; ring.append(ring); del one", "at_exit(one.run, *batch(20))"])
def test_the_interpreter_ends_quietly(left: str, attacked):
    attacked()
    assert not python(f"""
        from atexit import register as at_exit
        from layers import batch, layer
        one = layer()
        one.run(*batch(9))
        {left}
    """)
