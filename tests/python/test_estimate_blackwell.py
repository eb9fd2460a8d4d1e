"""Tests of bench/estimate_blackwell.py, layer_time.py and sass_loops.py.

They test loops in listings, the clocks of work that is known, and that the recorded estimate and its page follow from
their inputs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import estimate_blackwell as estimate
import layer_time
import pytest
import records
import sass_loops

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "bench/results/blackwell-estimate-2e0f1b0.json"
PAGE = ROOT / "docs/contribute/blackwell-estimate.md"

LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64 P0, [R2] ;
.L_x_2:
        /*0020*/              @!P0 BRA `(.L_x_9) ;        /* 0x0000001400048947 */
                                                          /* 0x000fea0003800000 */
        /*0030*/                   LDS.128 R4, [R3] ;     /* 0x0000000003047984 */
                                                          /* 0x000e280000000c00 */
        /*0040*/                   LDSM.16.M88.4 R8, [R3] ;
        /*0050*/                   OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R8, R4, R4, R8, R4, R5, URZ ;
        /*0060*/                   OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R8, R4, R4, R8, R4, R5, URZ ;
        /*0070*/               @P1 BRA `(.L_x_2) ;
.L_x_3:
        /*0080*/                   IADD3 R1, R1, R2, RZ ;
        /*0090*/               @P2 BRA `(.L_x_3) ;
        /*00a0*/               @P3 BRA `(.L_x_1) ;
.L_x_9:
        /*00b0*/                   EXIT ;
"""


def test_the_loop_over_k_is_the_shortest_with_all_products():
    loop = sass_loops.loop_over_k(LISTING, "OMMA")
    assert loop == {
        "instructions": 6,
        "clocks_of_one_warp": 5 + 4,  # of the two instructions that have them
        "products": 2,
        "before_first_load": 2,
        "families": {"OMMA": 2, "BRA": 2, "LDS": 1, "LDSM": 1},
    }
    assert sass_loops.loop_over_k(LISTING, "UTCOMMA") is None


def test_a_full_tile_takes_the_clocks_of_its_multiply_adds():
    """One k-block of 256: 128 x 128 x 256 multiply-adds, 18 KiB of weights and 128 rows of 144 bytes."""
    rtx = estimate.clocks_of_longest_cta(
        estimate.CHIPS["RTX 5090"], {"tile_n": 128, "block_k": 256},
        {"longest_k_blocks": 1, "longest_octet_k_blocks": 16}, {"instructions": 268, "before_first_load": 36},
    )  # fmt: skip
    assert rtx["products"] == 128 * 128 * 256 / 2048
    assert rtx["L2 to shared memory"] == (18432 + 128 * 144) / 64
    # Four schedulers have two warps each, and each warp issues the whole body.
    assert rtx["instructions"] == 2 * 268
    # Each of two columns of warps reads all weights, each of four rows of warps the rows of its column.
    assert rtx["shared memory"] == (2 * 18432 + 4 * 128 * 144) / 128


@pytest.fixture(scope="module")
def result():
    return json.loads(RESULT.read_text())


def test_the_recorded_estimate_and_its_page_follow_from_its_plans_and_machine_code(result):
    again = json.loads(json.dumps(estimate.estimate(result["plans"], result["machine_code"])))
    assert {key: result[key] for key in again} == again
    assert result["chips"] == json.loads(json.dumps(estimate.CHIPS))
    assert "was measured on such a chip" in result["what"] and "no figure" in result["what"]
    assert RESULT.read_text() == records.text(result)
    for cell in result["cells"]:
        assert cell["layer_us"] > cell["floor_us"], cell
    page = PAGE.read_text().splitlines()
    for line in "\n".join(estimate.tables(result)).splitlines():
        if line.strip():
            assert line in page, line


def test_the_model_predicts_the_measured_cells(result):
    """The counts may rise. The page names each cell that is farther off than 15 %."""
    cells = layer_time.compared(result["plans"])
    assert len(cells) == 512
    for card, least in (("H100", 256), ("H200", 255)):
        of_card = [cell for cell in cells if cell["card"] == card]
        assert result["hopper_within_15_percent"][card] == [layer_time.within(of_card), len(of_card)]
        assert layer_time.within(of_card) >= least, card
    page = PAGE.read_text()
    assert f"in {layer_time.within(cells)} of\n{len(cells)} cells" in page
    reasons = page.partition("Why it is farther off")[2].partition("\n## ")[0]
    for cell in cells:
        assert abs(cell["error"]) <= 0.15 or f"`{cell['shape']}` T = {cell['tokens']}" in reasons, cell


def test_a_faster_part_of_the_chip_never_makes_a_layer_slower(result):
    """Also, no constant is without effect."""
    base = [cell["model_us"] for cell in layer_time.compared(result["plans"])]
    for name, value in layer_time.CONSTANTS.items():
        is_rate = name in ("read_share", "clock_ghz", "rows_share") or name.startswith("power_")
        changed = {**layer_time.CONSTANTS, name: value * (1.2 if is_rate else 0.8)}
        faster = [cell["model_us"] for cell in layer_time.compared(result["plans"], changed)]
        assert all(a <= b for a, b in zip(faster, base, strict=True)), name
        assert any(a < 0.999 * b for a, b in zip(faster, base, strict=True)), name


def test_plans_of_this_tree_are_those_of_the_record(result):
    """If the program is built, compares new estimates with the record, to find changed configurations."""
    program = next((path for path in ROOT.glob("build/*/bench/bench_blackwell_plans")), None)
    if program is None:
        pytest.skip("no bench_blackwell_plans under build")
    plans = json.loads(subprocess.run([program], capture_output=True, check=True).stdout)
    chips = {cell["chip"] for cell in plans["cells"]}
    recorded = [cell for cell in result["plans"]["cells"] if cell["chip"] in chips]
    assert plans["cells"] == recorded, "run bench/estimate_blackwell.py again"
    assert plans["hopper"] == result["plans"]["hopper"], "run bench/estimate_blackwell.py again"


def test_machine_code_of_this_tree_is_that_of_the_record(result):
    objects = next((path for path in ROOT.glob("build/cpu/src/CMakeFiles/nvfp4_moe_sm120_objects.dir")), None)
    if objects is None or shutil.which("nvdisasm") is None:
        pytest.skip("no objects of sm120 under build/cpu, or no nvdisasm on PATH")
    assert estimate.machine_code([objects], "nvdisasm")["sm120"] == result["machine_code"]["sm120"]
