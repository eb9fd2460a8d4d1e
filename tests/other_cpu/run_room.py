"""Runs a GoogleTest executable on an emulated processor and checks that it detected that processor.

    run_room.py --of MACHINE --cpu MODEL --runs SET,SET... [--filter=PATTERNS] TEST_EXECUTABLE
    run_room.py --of MACHINE --cpu MODEL --runs SET,SET... --foreign FOREIGN_INSTRUCTION_EXECUTABLE

A room passes if it ends by itself without a failed test, every test of an instruction set of --runs ran, every test of
another (its name ends in /cpu_SET) was skipped, and "auto" chose the first of --runs (the property `auto` of a test).
--foreign checks the emulation itself: an instruction of a set outside --runs must be illegal there. If nothing can be
emulated, the exit status is 77 and the reason is printed.
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
# The instruction sets that foreign_instruction.cpp can execute.
SETS = {"x86_64": ("portable", "avx2", "avx512"), "aarch64": ("portable", "neon")}
# Debian's cross compilers put the loader and the libraries of another machine here.
LIBRARIES = {"aarch64": "/usr/aarch64-linux-gnu"}


def emulator(machine, cpu):
    """Returns the command that runs an executable of the machine on this model of it, or None and the reason."""
    if platform.machine() != "x86_64":
        return None, f"{machine} is emulated on x86-64 hosts only, this one is {platform.machine()}"
    qemu = shutil.which(f"qemu-{machine}")
    if qemu is None:
        return None, f"qemu-{machine} is not on PATH (Debian: qemu-user)"
    return [qemu, "-cpu", cpu, *(["-L", LIBRARIES[machine]] if machine in LIBRARIES else [])], ""


def emulate(qemu, *command):
    """Returns the finished process. Its output includes qemu's warnings of features that it does not emulate, such as
    transactional memory."""
    return subprocess.run([*qemu, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def check_foreign(qemu, machine, cpu, runs, executable):
    wrong = []
    for name in SETS[machine]:
        expected = 0 if name in runs else -signal.SIGILL
        status = emulate(qemu, executable, name).returncode
        print(f"{name}: exit status {status}")
        if status != expected:
            wrong.append(f"{name}: expected exit status {expected} on {cpu}, got {status}")
    return wrong


def faults(report, runs):
    """Returns the errors in a room's report, and how often it ran and skipped each instruction set."""
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


def check_room(qemu, cpu, runs, executable, chosen):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "report.json"
        options = ["--gtest_brief=1", f"--gtest_output=json:{path}", f"--gtest_filter={chosen}"]
        done = emulate(qemu, executable, *options)
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
    parser.add_argument("--of", required=True, choices=SETS)
    parser.add_argument("--cpu", required=True)
    parser.add_argument("--runs", required=True)
    parser.add_argument("--foreign", action="store_true")
    parser.add_argument("--filter", default="*", help="the tests that run, as GoogleTest's filters name them")
    parser.add_argument("executable")
    args = parser.parse_args()
    qemu, reason = emulator(args.of, args.cpu)
    if qemu and not pathlib.Path(args.executable).exists():
        qemu, reason = None, f"{args.executable} is not built (./dev test --other-cpu; Debian: g++-aarch64-linux-gnu)"
    if not qemu:
        print(f"skipped: {reason}")
        return SKIPPED
    runs = args.runs.split(",")
    if args.foreign:
        wrong = check_foreign(qemu, args.of, args.cpu, runs, args.executable)
    else:
        wrong = check_room(qemu, args.cpu, runs, args.executable, args.filter)
    for line in wrong:
        print(f"fault: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
