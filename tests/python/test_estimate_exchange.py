"""Tests of bench/estimate_exchange.py: it returns the measured times, work that is known, and the page's tables."""

from __future__ import annotations

from pathlib import Path

import estimate_exchange as estimate
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/benchmarks.md"


def test_the_lines_are_near_what_was_measured_and_work_that_is_known():
    times = {"all_reduce": estimate.all_reduce_us, "all_to_all": lambda size, ranks: estimate.all_to_all_us(
        estimate.wire_bytes("all_to_all", size, ranks), ranks)}  # fmt: skip
    for kind, measured in estimate.MEASURED.items():
        for size, us in measured:
            assert times[kind](size, estimate.MEASURED_RANKS) == pytest.approx(us, rel=0.205), (kind, size)
    # 1 GB from one of 16 ranks: 8 of 15 blocks cross at 45 GB/s.
    us = estimate.all_to_all_us(1e9, 16)
    assert us == pytest.approx(1e9 * 8 / 15 / 45_000 + estimate.line("all_to_all")[0] + 8 + 8 * 0.3)
    # docs/explanation/expert-parallel.md, section 3; ParallelRun.TheWireCarriesCodesAndScales counts the bytes.
    assert estimate.record_bytes({"hidden": 7168, "top_k": 8}) == 4112
    assert estimate.other_ranks_of_a_token({"top_k": 1}, 4) == pytest.approx(3 / 4)
    assert estimate.uneven_slots({"experts": 384}, 256) == pytest.approx(2 / 1.5)


def test_the_page_has_the_tables_of_the_script():
    page = PAGE.read_text().splitlines()
    lines = [text for text in estimate.tables().splitlines() if text.strip()]
    assert len(lines) > 20
    for text in lines:
        assert text in page, "run bench/estimate_exchange.py again"
