"""docs/numerics.md shows what bench/results holds of the activation formats' errors, and says of it what is true."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = json.loads((ROOT / "bench/results/activation-accuracy-cpu-990086d.json").read_text())
PAGE = (ROOT / "docs/numerics.md").read_text()


def module():
    spec = importlib.util.spec_from_file_location("activation_accuracy", ROOT / "bench/activation_accuracy.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_table_is_the_benchs():
    bench = module()
    assert bench.table(BENCH) in PAGE and f"commit {BENCH['commit']}" in PAGE and BENCH["device"] in PAGE
    assert len(BENCH["results"]) == len(bench.SHAPES) * len(bench.DISTRIBUTIONS) * len(bench.FORMATS)


def test_fp8_errs_two_fifths_of_nvfp4():
    errors = {
        (row["shape"], row["activations"], row["activation_format"]): row["relative_l2_to_w4a16"]
        for row in BENCH["results"]
    }
    ratios = [error / errors[(*key[:2], "nvfp4")] for key, error in errors.items() if key[2] == "fp8"]
    assert 0.36 < min(ratios) and max(ratios) < 0.405


def test_bf16_is_rounded_to_nearest_even():
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    assert np.array_equal(module().to_bf16(x), torch.from_numpy(x).to(torch.bfloat16).float().numpy())
