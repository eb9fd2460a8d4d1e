"""Runs a GoogleTest executable on an emulated older x86 processor and checks that it knew which one it was on.

    run_room.py --cpu MODEL --runs SET,SET... [--exclude PATTERNS] TEST_EXECUTABLE
    run_room.py --cpu MODEL --runs SET,SET... --foreign FOREIGN_INSTRUCTION_EXECUTABLE

A room passes if it ends by itself without a failed test, every test of an instruction set of --runs ran, every test of
another (its name ends in /cpu_SET) was skipped, and what "auto" chose (the property `auto` of a test) is the first of
--runs. --foreign checks the emulation itself: an instruction of a set outside --runs must be illegal there.
Exit status 77, with the reason, where nothing can be emulated.
"""

import argparse
import collections
import json
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile

SKIPPED = 77
OF_A_SET = re.compile(r"/cpu_(\w+)$")


def emulate(qemu, cpu, *command):
    """The finished process; a processor's missing features (qemu emulates no transactional memory) are no news."""
    return subprocess.run([qemu, "-cpu", cpu, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def check_foreign(qemu, cpu, runs, executable):
    wrong = []
    for name in ("portable", "avx2", "avx512"):
        expected = 0 if name in runs else -signal.SIGILL
        status = emulate(qemu, cpu, executable, name).returncode
        print(f"{name}: exit status {status}")
        if status != expected:
            wrong.append(f"{name}: expected exit status {expected} on {cpu}, got {status}")
    return wrong


def faults(report, runs):
    """What a room's report says against it, and how often it ran and skipped each instruction set."""
    wrong, ran, skipped = [], collections.Counter(), collections.Counter()
    for suite in report["testsuites"]:
        for test in suite["testsuite"]:
            name = f"{suite['name']}.{test['name']}"
            if test.get("failures"):
                wrong.append(f"{name}: failed")
            if "auto" in test and test["auto"] != f"cpu:{runs[0]}":
                wrong.append(f"{name}: expected auto to choose cpu:{runs[0]}, it chose {test['auto']}")
            of_a_set = OF_A_SET.search(test["name"])
            if not of_a_set:
                continue
            here = test["result"] == "COMPLETED"
            (ran if here else skipped)[of_a_set[1]] += 1
            if here != (of_a_set[1] in runs):
                wrong.append(f"{name}: {'ran' if here else 'skipped'} on a processor that runs {', '.join(runs)}")
    for name in runs if ran or skipped else []:
        if not ran[name]:
            wrong.append(f"cpu:{name}: no test ran")
    return wrong, ran, skipped


def check_room(qemu, cpu, runs, executable, exclude):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "report.json"
        options = ["--gtest_brief=1", f"--gtest_output=json:{path}", f"--gtest_filter=-{exclude}"]
        done = emulate(qemu, cpu, executable, *options)
        print(done.stdout[-8000:])
        if done.returncode < 0:
            return [f"ended by {signal.Signals(-done.returncode).name}"]
        if not path.exists():
            return [f"exit status {done.returncode} without a report"]
        report = json.loads(path.read_text())
    wrong, ran, skipped = faults(report, runs)
    if done.returncode != 0 and not wrong:
        wrong.append(f"exit status {done.returncode}")
    if not report["tests"]:
        wrong.append("no test ran")
    print(f"{report['tests']} tests on {cpu}")
    for name in sorted(ran | skipped):
        print(f"cpu:{name}: {ran[name]} ran, {skipped[name]} skipped")
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", required=True)
    parser.add_argument("--runs", required=True)
    parser.add_argument("--foreign", action="store_true")
    parser.add_argument("--exclude", default="", help="tests that stay out, as GoogleTest's filters name them")
    parser.add_argument("executable")
    args = parser.parse_args()
    qemu = shutil.which("qemu-x86_64")
    if platform.machine() != "x86_64":
        print(f"skipped: {args.cpu} is emulated on x86-64 hosts only, this one is {platform.machine()}")
        return SKIPPED
    if qemu is None:
        print("skipped: qemu-x86_64 is not on PATH (Debian: qemu-user)")
        return SKIPPED
    runs = args.runs.split(",")
    if args.foreign:
        wrong = check_foreign(qemu, args.cpu, runs, args.executable)
    else:
        wrong = check_room(qemu, args.cpu, runs, args.executable, args.exclude)
    for line in wrong:
        print(f"fault: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
