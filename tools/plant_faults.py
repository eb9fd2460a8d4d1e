#!/usr/bin/env python3
"""Plants each fault of tests/planted_faults/*.json in the sources, one at a time, and runs the tests that should find
it.

A fault is {"file", "find", "replace", "tests"}. `find` occurs once in the file. `tests` is a room (a folder of tests/
with its own C++ program) or files of pytest; those of ptxemu/ use its own build, build/ptxemu. The file is restored
after each fault, also if this script is stopped. Prints one line per fault with the first test that failed, then the
counts. Exits with 1 if no test found a fault.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT_S = 600  # a fault may make a test wait forever


def run(command: list[str]) -> tuple[int, str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "build/cpu/python"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["NVFP4_MOE_TOOL"] = str(ROOT / "build/cpu/cli/nvfp4-moe")
    environment["PTXEMU_BUILD"] = str(ROOT / "build/ptxemu")
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, text=True, timeout=LIMIT_S, stdout=-1, stderr=-2)
    except subprocess.TimeoutExpired:
        return 1, f"no answer in {LIMIT_S} s"
    return done.returncode, done.stdout


def first_failure(tests: str) -> str:
    """Builds and runs the tests. Returns the first failed test, "" if all passed, or "does not compile"."""
    room = (ROOT / "tests" / tests).is_dir() and any((ROOT / "tests" / tests).glob("*_test.cpp"))
    folder, target = ("build/ptxemu", "ptxemu") if tests.startswith("ptxemu/") else ("build/cpu", "all")
    code, log = run(["cmake", "--build", folder, "--target", f"test_{tests}" if room else target])
    if code != 0:
        return "does not compile"
    if room:
        code, log = run(
            ["ctest", "--test-dir", "build/cpu", "-j2", "-L", f"^{tests}$", "-LE", "long", "--stop-on-failure"]
        )
        failed = re.search(r"Test +#\d+: (\S+) [.]*\*", log)
    else:
        engine = re.match(r"tests/engines/(\w+)/", tests)
        python = ROOT / f".deps/engines/{engine[1]}/bin/python" if engine else pathlib.Path(sys.executable)
        if not python.exists():
            return f"cannot be planted: ./dev engines {engine[1]} makes the environment of its tests"
        code, log = run(
            [str(python), "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not long", *tests.split()]
        )
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)
    return "" if code == 0 else failed.group(1) if failed else (log.strip().splitlines() or ["no output"])[-1]


def plant(fault: dict) -> str:
    path = ROOT / fault["file"]
    text = path.read_text()
    if text.count(fault["find"]) != 1:
        return f"cannot be planted: {fault['find']!r} occurs {text.count(fault['find'])} times"
    try:
        path.write_text(text.replace(fault["find"], fault["replace"]))
        return first_failure(fault["tests"])
    finally:
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="*", help="names of lists, such as moe; all by default")
    lists = parser.parse_args().lists or sorted(path.stem for path in (ROOT / "tests/planted_faults").glob("*.json"))
    found = missed = 0
    for name in lists:
        for fault in json.loads((ROOT / f"tests/planted_faults/{name}.json").read_text()):
            seen = plant(fault)
            good = seen != "" and not seen.startswith(("cannot be planted", "does not compile"))
            found, missed = found + good, missed + (not good)
            print(
                f"{'found ' if good else 'MISSED'} {fault['file']}: {fault['find']!r} -> {fault['replace']!r}: {seen or 'no test failed'}",
                flush=True,
            )
    print(f"{found} planted faults found, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
