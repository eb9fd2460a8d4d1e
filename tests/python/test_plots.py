"""The pictures of docs/benchmarks.md: what bench/plots.py draws of the records, with the figures that the page has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import plots
from bench.moe_bench.record import OURS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/benchmarks.md").read_text()


@pytest.mark.parametrize("file", plots.PICTURES)
def test_a_picture_is_what_the_script_draws_of_the_records(file):
    drawn = plots.PICTURES[file]()
    assert drawn == (ROOT / "docs/images" / file).read_text(), "python3 -m bench.plots"
    assert "prefers-color-scheme:dark" in drawn and "nan" not in drawn and len(drawn) < 20000
    assert f"(images/{file})" in PAGE


def test_the_pictures_show_the_figures_of_the_page():
    record = plots.records()["H200"]
    mean = plots.geometric_mean(record.leads("nvfp4_moe_bf16").values())
    shown = re.findall(r"<title>W4A16, \d+ tokens: ([\d.]+)</title>", plots.speed())[len(record.tokens) :]
    assert plots.geometric_mean(map(float, shown)) == pytest.approx(mean, abs=0.005)
    assert set(re.findall(r"<title>(W4A\d+),", plots.floor())) == set(OURS.values())
    row = re.search(r"two Zen 4 cores \| llama.cpp, NVFP4 \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", PAGE)
    assert list(row.groups()) == re.findall(r"<title>W4A8, int8_block, .*: ([\d.]+)<", plots.cpu())[:4]
