"""Fixtures of the Python tests, and a table of counted differences at the end of the run.

The module comes from the build tree: PYTHONPATH=build/<preset>/python. A test file whose oracle is not installed is
skipped by name (pytest.importorskip).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRIED = ("tools", "tools/check", "tools/release", "tests/vectors", "tests/acceptance", "tests/other_cpu", "bench")
for folder in (*TRIED, "tools/docs", "examples/python"):
    sys.path.insert(0, str(ROOT / folder))  # scripts that the tests import
sys.path.append(str(ROOT))  # bench.moe_bench

import attack_summary  # noqa: E402


@pytest.fixture
def count(request):
    """count(what, differing, of): adds a line to the table at the end of the run."""

    def add(what: str, differing: int, of: int) -> None:
        # A property of the report reaches the process that writes the table from the one that ran the test.
        request.node.user_properties.append(("count", (what, int(differing), int(of))))

    return add


@pytest.fixture(scope="session")
def tool():
    """tool(arguments...) -> the finished command line tool."""
    path = os.environ.get("NVFP4_MOE_TOOL")
    if not path:
        pytest.skip("NVFP4_MOE_TOOL names no command line tool")
    return lambda *words: subprocess.run([path, *map(str, words)], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="session")
def fork_server():
    """Starts processes that need torch."""
    from fork_server import ForkServer  # here, because a test copies this file into another folder

    with ForkServer() as server:
        yield server


@pytest.fixture
def one_thread():
    """torch with one thread: for matrices of a few kilobytes its threads only wait for each other."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items):
    """Runs the slowest file first: one process runs it (--dist loadfile), and the others would wait for it at the end.
    Records the kind of each test with the marker in the JUnit file, also if it is skipped."""
    items.sort(key=lambda item: item.path.name != "test_wheel.py")
    known = attack_summary.kinds()
    for item in items:
        if marker := item.get_closest_marker("attack"):
            (kind,) = marker.args
            if kind not in known:
                raise pytest.UsageError(f"{item.nodeid}: expected a kind of {attack_summary.TABLE.name}, got {kind!r}")
            item.user_properties.append(("attack", kind))


@pytest.fixture
def attacked(request, record_property):
    """attacked(count=1): counts each attempt of a test with the marker `attack`. Call it at the attempt."""
    tried = 0

    def add(count: int = 1) -> None:
        nonlocal tried
        tried += count

    assert request.node.get_closest_marker("attack"), "expected the marker `attack`, which names the kind"
    yield add
    record_property("attacked", tried)


def pytest_terminal_summary(terminalreporter):
    counts = [
        (report.nodeid.removeprefix("tests/python/"), *value)
        for state in ("passed", "failed")
        for report in terminalreporter.getreports(state)
        for name, value in report.user_properties
        if name == "count"
    ]
    if not counts:
        return
    terminalreporter.section("counted differences from the oracles")
    for test, what, differing, of in counts:
        if differing:
            terminalreporter.write_line(f"{differing:8d} of {of:9d}  {what}  [{test}]")
    none = sum(differing == 0 for _, _, differing, _ in counts)
    terminalreporter.write_line(f"{none} more comparisons without a difference")


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """made(family) -> directory with original/, modelopt/ and compressed_tensors/, exported once per session."""
    for package in ("torch", "transformers", "modelopt", "compressed_tensors", "safetensors"):
        pytest.importorskip(package)
    import make_checkpoint_vectors as vectors

    done: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in done:
            root = tmp_path_factory.mktemp(family)
            vectors.make_original(root / "original", family)
            for producer, export in vectors.EXPORTERS.items():
                export(root / "original", root / producer)
            done[family] = root
        return done[family]

    return make


@pytest.fixture(scope="session")
def tiny_originals(tmp_path_factory):
    """A folder of tiny bf16 models, by kind, made once per session."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def checkpoint(tiny_originals, tmp_path):
    """checkpoint(kind, format, layers) -> (original, a directory whose experts are NVFP4), of tiny_models.py."""
    import nvfp4_moe as nv
    import tiny_models

    def make(kind="qwen3_moe", output_format="modelopt", layers=()):
        original = tiny_originals / kind
        if not original.exists():
            tiny_models.write_original(original, kind)
        nv.quantize_checkpoint(original, tmp_path / kind, output_format=output_format, layers=layers)
        return original, tmp_path / kind

    return make
