"""Tests of tests/other_cpu/run_room.py: it must reject reports with a planted fault."""

import copy

import pytest
import run_room

RUNS = ["avx2", "portable"]


def test_case(name, result="COMPLETED", **more):
    return {"name": name, "result": result, **more}


test_case.__test__ = False

HONEST = {
    "testsuites": [
        {
            "name": "Backends/Steps",
            "testsuite": [
                test_case("EveryStep/cpu_amx", "SKIPPED"),
                test_case("EveryStep/cpu_avx2"),
                test_case("EveryStep/cpu_portable"),
                test_case("EveryStep/reference"),
            ],
        },
        {"name": "Registry", "testsuite": [test_case("Auto", auto="cpu:avx2")]},
    ]
}


def planted(suite, test, **change):
    report = copy.deepcopy(HONEST)
    report["testsuites"][suite]["testsuite"][test].update(change)
    return report


def test_an_honest_report_passes():
    wrong, ran, skipped = run_room.faults(HONEST, RUNS)
    assert wrong == []
    assert ran == {"avx2": 1, "portable": 1}
    assert skipped == {"amx": 1}


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (planted(0, 0, result="COMPLETED"), "Steps.EveryStep/cpu_amx: ran on a processor that runs avx2, portable"),
        (planted(0, 1, result="SKIPPED"), "Steps.EveryStep/cpu_avx2: skipped on a processor"),
        (planted(0, 2, name="EveryStep/other"), "cpu:portable: no test ran"),
        (planted(0, 3, failures=[{"failure": "a difference"}]), "Steps.EveryStep/reference: failed"),
        (planted(1, 0, auto="cpu:portable"), "expected auto to choose cpu:avx2, it chose cpu:portable"),
    ],
)
def test_a_planted_fault_is_named(report, words):
    assert any(words in line for line in run_room.faults(report, RUNS)[0])
