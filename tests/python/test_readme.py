"""What README.md shows: its examples run, and its figures are those of the record that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nvfp4_moe
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CPU, GPU = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHAPES = {
    "DeepSeek-V4-Pro, one rank of 8": "v4pro_ep8",
    "DeepSeek-V4-Flash": "v4flash",
    "Qwen3-30B-A3B": "qwen30b",
    "Mixtral-8x7B": "mixtral",
}


@pytest.mark.parametrize("example", [CPU, GPU], ids=["cpu", "gpu"])
def test_an_example_has_five_lines(example):
    assert len([line for line in example.splitlines() if line]) == 5


def test_the_cpu_example_runs():
    names = {}
    exec(CPU, names)
    assert isinstance(names["layer"], nvfp4_moe.MoeLayer)
    assert names["out"].shape == (3, 64)
    assert names["np"].isfinite(names["out"]).all()
    assert names["np"].abs(names["out"]).max() > 0


def test_the_gpu_example_runs():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    names = {}
    exec(GPU, names)
    assert names["out"].shape == (3, 512)
    assert names["out"].is_cuda
    assert names["out"].isfinite().all()


def test_the_figures_are_the_records():
    record = json.loads((ROOT / "bench/results/moe-bench-h200.json").read_text())
    rows = {(row["shape"], row["T"]): row for row in record["rows"] if row["format"] == "bf16"}
    tokens = [int(count) for count in re.findall(r"(\d+) tokens?\b", re.search(r"\| layer \|.*", README)[0])]
    assert tokens == [1, 64, 1024, 8192]
    for name, shape in SHAPES.items():
        cells = re.search(rf"\| {re.escape(name)} \|(.*)\|", README)[1].split("|")
        for count, cell in zip(tokens, cells, strict=True):
            row = rows[shape, count]
            figures = f"{row['us']:.0f} us, {row['speedup']:.2f}x, {row['over_floor']:.2f}"
            assert cell.strip().removesuffix(" floors") == figures, (name, count)
    assert f"all {len(record['rows'])} cells, each of them" in README.replace("\n", " ")
    assert all(row["speedup"] > 1 for row in record["rows"])
