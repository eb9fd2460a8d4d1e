"""Tests of tests/other_cpu/run_room.py: it must reject reports with a planted fault."""

import copy

import pytest
import run_room

RUNS = ["avx2", "portable"]
STEPS = {"EveryStep/cpu_amx": "SKIPPED", "EveryStep/cpu_avx2": "COMPLETED", "EveryStep/cpu_portable": "COMPLETED"}
STEPS["EveryStep/reference"] = "COMPLETED"
HONEST = {
    "testsuites": [
        {"name": "Backends/Steps", "testsuite": [{"name": name, "result": result} for name, result in STEPS.items()]},
        {"name": "Registry", "testsuite": [{"name": "Auto", "result": "COMPLETED", "auto": "cpu:avx2"}]},
    ]
}


def test_an_honest_report_passes():
    assert run_room.faults(HONEST, RUNS) == ([], {"avx2": 1, "portable": 1}, {"amx": 1})


@pytest.mark.parametrize(
    ("suite", "test", "change", "words"),
    [
        (0, 0, {"result": "COMPLETED"}, "Steps.EveryStep/cpu_amx: ran on a processor that runs avx2, portable"),
        (0, 1, {"result": "SKIPPED"}, "Steps.EveryStep/cpu_avx2: skipped on a processor"),
        (0, 2, {"name": "EveryStep/other"}, "cpu:portable: no test ran"),
        (0, 3, {"failures": [{"failure": "a difference"}]}, "Steps.EveryStep/reference: failed"),
        (1, 0, {"auto": "cpu:portable"}, "expected auto to choose cpu:avx2, it chose cpu:portable"),
    ],
)
def test_a_planted_fault_is_named(suite, test, change, words):
    report = copy.deepcopy(HONEST)
    report["testsuites"][suite]["testsuite"][test].update(change)
    assert any(words in line for line in run_room.faults(report, RUNS)[0])
