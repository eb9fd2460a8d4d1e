#!/usr/bin/env python3
"""Runs the soak in several builds at the same time, and prints and records the results.

    soak.py --minutes M [--record OUT.json] NAME=PATH_OF_TEST_SOAK...

Each program writes build/soak.NAME.log. Exit status 1 if one of them failed or its log has a sanitizer's report.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys

REPORT = re.compile(r"(WARNING|ERROR|SUMMARY): \w*Sanitizer|runtime error:")
# A report ends the process, so that a parent sees the failure of a forked child.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=1", "TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}


def start(name, program, seconds):
    log = open(f"build/soak.{name}.log", "w")
    environment = {**os.environ, **OPTIONS, "NVFP4_MOE_SOAK_SECONDS": str(seconds)}
    command = [program, f"--gtest_output=json:build/soak.{name}.json"]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def judge(name, code):
    """Returns the program's counts, and whether it was clean."""
    with open(f"build/soak.{name}.log", errors="replace") as log:
        text = log.read()
    clean = code == 0 and REPORT.search(text) is None
    counts = {}
    if clean:
        with open(f"build/soak.{name}.json") as report:
            (test,) = json.load(report)["testsuites"][0]["testsuite"]
        counts = {key: int(value) for key, value in test.items() if str(value).isdecimal() and key != "line"}
    else:
        print(f"{name}: exit status {code}, the end of build/soak.{name}.log:\n{text[-4000:]}")
    return clean, counts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--record")
    parser.add_argument("programs", nargs="+", metavar="NAME=PATH")
    asked = parser.parse_args()
    programs = dict(program.split("=", 1) for program in asked.programs)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()

    running = {name: start(name, path, max(1, round(asked.minutes * 60))) for name, path in programs.items()}
    try:
        results = {name: judge(name, process.wait()) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()

    for name, (clean, counts) in results.items():
        print(f"{name}: {'clean' if clean else 'NOT clean'}; " + ", ".join(f"{k} {v}" for k, v in counts.items()))
    clean = all(result[0] for result in results.values())
    if clean and asked.record:
        said = {"date": datetime.date.today().isoformat(), "commit": commit}
        said |= {name: counts for name, (_, counts) in results.items()}
        with open(asked.record, "w") as out:
            json.dump(said, out, indent=1)
            out.write("\n")
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
