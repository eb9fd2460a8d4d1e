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
from safetensors import SafetensorError, safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

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


def test_one_shard_is_the_package_s_file_byte_for_byte(tmp_path, copy):
    assert copy(VECTORS / "python.safetensors", tmp_path, 1 << 30).returncode == 0
    written = (tmp_path / "model-00001-of-00001.safetensors").read_bytes()
    assert written == (VECTORS / "python.safetensors").read_bytes()


def test_transformers_style_shards_come_back(tmp_path, copy):
    torch.manual_seed(0)
    source = tmp_path / "source"
    source.mkdir()
    weight_map = {}
    for shard in range(3):
        file = f"model-{shard + 1:05}-of-00003.safetensors"
        tensors = {
            f"layers.{shard}.experts.{expert}.w{w}.weight": torch.randn(8, 16, dtype=torch.bfloat16)
            for expert in range(4)
            for w in (1, 2, 3)
        }
        save_file(tensors, source / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 36 * 256}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    done = copy(source, tmp_path / "out", 1000)
    assert done.returncode == 0, done.stderr
    assert read_all((tmp_path / "out").glob("*.safetensors")) == read_all(source.glob("*.safetensors"))


def test_what_the_package_refuses_is_refused_here_too(tmp_path, copy):
    good = (VECTORS / "python.safetensors").read_bytes()
    for name, data in {
        "cut.safetensors": good[:-1],
        "longer.safetensors": good + b"\0",
        "length.safetensors": b"\xff" * 8 + good[8:],
        "brace.safetensors": good.replace(b"}}", b"}]", 1),
        "dtype.safetensors": good.replace(b'"BF16"', b'"BF61"', 1),
        "bytes.safetensors": good.replace(b'"F64"', b'"F32"', 1),
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SafetensorError):
            with safe_open(tmp_path / name, framework="pt"):
                pass
        done = copy(tmp_path / name, tmp_path / "out", 1 << 30)
        assert done.returncode == 4, name
        assert done.stderr.count("\n") == 1 and name in done.stderr
