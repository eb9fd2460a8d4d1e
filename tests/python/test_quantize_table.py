"""docs/quantize.md shows what bench/results holds, and says of it what is true."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = json.loads((ROOT / "bench/results/quantize-quality-cpu-ac116c0.json").read_text())
PAGE = (ROOT / "docs/quantize.md").read_text()


def test_the_table_is_the_benchs():
    spec = importlib.util.spec_from_file_location("table", ROOT / "bench/quantize_quality_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table = module.table(BENCH)
    assert table in PAGE and len(table.splitlines()) == 2 + len({row["method"] for row in BENCH["results"]})
    assert f"commit {BENCH['commit']}" in PAGE and BENCH["device"] in PAGE
    assert f"hidden {BENCH['hidden']}, intermediate {BENCH['intermediate']}" in PAGE


def test_sweep_has_the_best_weights_and_with_calibration_the_best_outputs():
    for weights in {row["weights"] for row in BENCH["results"]}:
        rows = {row["method"]: row for row in BENCH["results"] if row["weights"] == weights}
        best = {key: max(rows.values(), key=lambda row: row[key]) for key in ("weight_sqnr_db", "output_snr_db")}
        assert best["weight_sqnr_db"] is rows["nvfp4-moe sweep"]
        assert best["output_snr_db"] is rows["nvfp4-moe sweep, calibration"]
