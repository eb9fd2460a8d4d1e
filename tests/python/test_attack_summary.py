"""Tests of tools/attack_summary.py: it adds the attack tests' attempts from JUnit files, and errors if they are too
few."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import attack_summary  # conftest puts tools/ on the path
import pytest

KINDS = attack_summary.kinds()


def of_ctest(name: str, output: str, state: str = "run") -> str:
    skipped = '<skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>' if state == "skipped" else ""
    status = {"skipped": "notrun"}.get(state, state)
    return (
        f'<testcase name="{name}" classname="{name}" time="0.5" status="{status}">{skipped}'
        f"<system-out>{output}</system-out></testcase>"
    )


def of_pytest(name: str, kind: str, attacked: int, inside: str = "") -> str:
    properties = f'<property name="attack" value="{kind}"/><property name="attacked" value="{attacked}"/>'
    return f'<testcase classname="tests" name="{name}" time="0.25"><properties>{properties}</properties>{inside}</testcase>'


ALL = [of_ctest(f"room/A.{number}", f"[ OK ]\nattacked: {kind} {number + 1}\n") for number, kind in enumerate(KINDS)]


@pytest.fixture
def summary(tmp_path, capsys, monkeypatch):
    """summary(test case...) -> (exit status, lines, the record)"""

    def run(*cases: str) -> tuple[int, list[str], dict]:
        junit, kept = tmp_path / "junit.xml", tmp_path / "kept.json"
        junit.write_text(f"<testsuite>{''.join(cases)}</testsuite>")
        monkeypatch.setattr(sys, "argv", ["attack_summary.py", "--tier", "long", "--record", str(kept), str(junit)])
        code = attack_summary.main()
        return code, capsys.readouterr().out.splitlines(), json.loads(kept.read_text())

    return run


def test_counts_of_both_languages_are_added(summary):
    code, lines, kept = summary(*ALL, of_ctest("room/B", "attacked: forks 40\n"), of_pytest("test_forks", "forks", 2))
    own, total = KINDS.index("forks") + 1, sum(range(1, len(KINDS) + 1))
    count = f"{len(KINDS)} kinds, {len(KINDS) + 2} passed, 0 failed, 0 skipped, 0 faults"
    assert code == 0 and lines[-1] == f"{total + 42} attacks of {count}"
    assert kept["kinds"]["forks"] == {"tried": own + 42, "tests": 3, "passed": 3, "failed": 0, "skipped": 0}


OTHERS = [case for case in ALL if "attacked: gpu failures" not in case]
SKIPPED = of_ctest("cuda/C", "no device\n[  SKIPPED ] C\nattacked: gpu failures 0\n", state="skipped")


@pytest.mark.parametrize(
    ("cases", "code", "faults"),
    [
        ([*ALL, of_pytest("test_idle", "forks", 0)], 1, ["tests.test_idle: passed and attacked nothing"]),
        ([*ALL, of_ctest("B", "cut off")], 1, ["B: expected a report of one kind of attack, got none or several"]),
        ([*ALL, of_ctest("B", "attacked: fork 1\n")], 1, ["B: expected a kind of attack_kinds.def, got fork"]),
        ([*ALL, of_ctest("B", "attacked: forks 3\n", state="fail")], 1, []),
        (OTHERS, 1, ["gpu failures: expected attacks, got none in 0 tests"]),
        ([*OTHERS, SKIPPED], 0, []),
        (
            [*OTHERS, SKIPPED, of_ctest("cuda/D", "attacked: gpu failures 0\n", state="fail")],
            1,
            ["gpu failures: expected attacks, got none in 2 tests"],
        ),
    ],
)
def test_reports_without_a_kind_or_an_attack_and_failures_are_errors(summary, cases, code, faults):
    found, lines, kept = summary(*cases)
    assert (found, kept["faults"]) == (code, faults) and all(f"fault: {fault}" in lines for fault in faults)


CHOSEN = """
import pytest

@pytest.mark.attack("forks")
def test_counts(attacked):
    attacked()
    attacked(2)

@pytest.mark.attack("gpu failures")
@pytest.mark.skipif(True, reason="no GPU")
def test_skipped(attacked):
    attacked()

def test_other():
    pass
"""


def test_what_pytest_writes_is_what_is_read(tmp_path):
    """The marker and the fixture of this folder's conftest.py, through pytest's own JUnit file."""
    root = repr(attack_summary.TABLE.parents[2]).replace("PosixPath", "Path")
    conftest = (Path(__file__).parent / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest.replace("Path(__file__).resolve().parents[2]", root))

    def pytest_of(text: str, *options: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_chosen.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", *options, "."]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    ran = pytest_of(CHOSEN, "-m", "attack", "-o", "junit_family=xunit1", "--junitxml=out.xml")
    assert ran.returncode == 0, ran.stdout
    tests = [attack_summary.Test(*t) for t in attack_summary.read(tmp_path / "out.xml", more=attack_summary.reported)]
    assert [(t.name, t.state, t.kind, t.tried) for t in tests] == [
        ("test_chosen.test_counts", "passed", "forks", 3),
        ("test_chosen.test_skipped", "skipped", "gpu failures", 0),
    ]
    ran = pytest_of(CHOSEN.replace('"forks"', '"forkz"'))
    assert ran.returncode != 0 and "expected a kind of attack_kinds.def, got 'forkz'" in ran.stdout + ran.stderr
