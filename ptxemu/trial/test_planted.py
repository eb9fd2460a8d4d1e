"""Checks the tests: each fault of runtime/planted.def, planted in the emulator, must fail some test."""

import concurrent.futures
import os
import re
import subprocess
import sys

import pytest

from trial.emulator import ROOT

DEFINITIONS = (ROOT / "runtime/planted.def").read_text()
FAULTS = re.findall(r"^PLANTED\((\w+), \"(.*)\"\)", DEFINITIONS, re.M)
BY_OTHERS = re.findall(r"^PLANTED\((\w+)", DEFINITIONS.partition("// Kinds of faults that others chose")[2], re.M)
SURVIVORS = ()  # faults that no test can see, with the reason after each


def seen_by(names):
    """The first test that fails, by fault; "" for none."""
    command = [sys.executable, "-m", "trial.planted"]
    environment = os.environ | {"PTXEMU_PATIENCE": "15"}  # faults of waits make others wait in vain
    done = subprocess.run(
        command, cwd=ROOT, env=environment, input="\n".join(names), stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(line.split("\t") for line in done.stdout.splitlines())


@pytest.mark.long  # three minutes of a core
def test_every_planted_fault_is_seen(capsys):
    names = [name for name, _ in FAULTS]
    assert len(names) >= 30 and len(BY_OTHERS) >= 12
    jobs = os.cpu_count()
    assert seen_by(["none"])["none"] == "", "without a fault all tests pass"
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = {}
        for part in pool.map(seen_by, [names[i::jobs] for i in range(jobs)]):
            results |= part
    survived = [name for name in names if not results[name]]
    with capsys.disabled():
        print()
        for name, what in FAULTS:
            print(f"  {name}: {what}: {results[name] or 'NOT SEEN'}")
        print(f"planted faults seen: {len(names) - len(survived)} of {len(names)}")
        print(f"of kinds that others chose: {len(set(BY_OTHERS) - set(survived))} of {len(BY_OTHERS)}")
    assert sorted(survived) == sorted(SURVIVORS)
