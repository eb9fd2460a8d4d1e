"""The safetensors package as the other side: it reads files and writes them again here, and the copies are read back.

The copies are made by safetensors_copy, a small program of the C++ tests, found next to the command line of the build.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
import make_safetensors_vectors  # noqa: E402  (conftest puts tests/vectors/ on the path)
from safetensors import safe_open  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "tests" / "vectors" / "safetensors"


@pytest.fixture(scope="module")
def copy():
    """copy(source, directory, max_shard_bytes): the finished process."""
    tool = Path(os.environ.get("NVFP4_MOE_TOOL", ROOT / "build" / "cpu" / "cli" / "nvfp4-moe"))
    program = tool.parent.parent / "tests" / "safetensors_copy"
    if not program.exists():
        pytest.skip(f"{program} is not built")

    def run(source: Path, directory: Path, max_shard_bytes: int) -> subprocess.CompletedProcess:
        directory.mkdir(exist_ok=True)
        command = [str(program), str(source), str(directory), str(max_shard_bytes)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return run


def raw(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_all(files) -> dict:
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                assert name not in found
                found[name] = raw(opened.get_tensor(name))
    return found


def test_the_committed_vectors_are_what_the_package_writes(tmp_path, monkeypatch):
    expected = json.loads((VECTORS / "python.expected.json").read_text(encoding="utf-8"))
    if expected["safetensors"] != safetensors.__version__:
        pytest.skip(f"made with safetensors {expected['safetensors']}, here is {safetensors.__version__}")
    monkeypatch.setattr("sys.argv", ["make_safetensors_vectors.py", str(tmp_path)])
    make_safetensors_vectors.main()
    for name in ("python.safetensors", "python.expected.json"):
        assert (tmp_path / name).read_bytes() == (VECTORS / name).read_bytes(), name


@pytest.mark.parametrize("max_shard_bytes", [1, 100, 1 << 30])
def test_the_package_reads_every_dtype_back(tmp_path, copy, max_shard_bytes):
    done = copy(VECTORS / "python.safetensors", tmp_path, max_shard_bytes)
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("model-*-of-*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 1 << 30)
    assert read_all(files) == read_all([VECTORS / "python.safetensors"])
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert all(weight_map[name] == file.name for name in opened.keys())
