#!/usr/bin/env python3
"""Summarizes JUnit files of ctest and pytest: lists skipped and failed tests and ends with one line of counts.

    test_summary.py [--record OUT.json [--of WHAT] [--commit COMMIT]] FILE.xml...

Exit status 1 if a test failed or none ran. --record writes the counts (for the long tier, which CI does not run); --of
describes the part of the tests that ran.
"""

import argparse
import datetime
import json
import platform
import subprocess
import sys
import xml.etree.ElementTree as ET


def skip_reason(case, element):
    """Returns why a test was skipped; in ctest's files GoogleTest's message is only in the test's output."""
    message = (element.get("message") or "") if element is not None else ""
    if not message.startswith("SKIP_"):
        return message
    told = [line.strip() for line in (case.findtext("system-out") or "").splitlines()]
    told = [
        line
        for line in told
        if line and not line.startswith(("[", "Note", "Running", "attacked: ")) and "Skipped" != line
    ]
    return told[-1] if told else ""


def read(path, *, more=lambda case: ()):
    """Yields (name, state, reason, seconds, *more(its element)) for every test in a JUnit file; state is in STATES."""
    for case in ET.parse(path).getroot().iter("testcase"):
        room, name = case.get("classname"), case.get("name")
        name = name if room in (None, name) else f"{room}.{name}"
        seconds = float(case.get("time") or 0)
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None or case.get("status") == "fail":
            yield name, "failed", "", seconds, *more(case)
        elif skipped is not None or case.get("status") in ("notrun", "disabled"):
            yield name, "skipped", skip_reason(case, skipped), seconds, *more(case)
        else:
            yield name, "passed", "", seconds, *more(case)


STATES = ("passed", "failed", "skipped")


def count_states(tests):
    """Returns {state: number of tests} for the result of read()."""
    return {state: sum(test[1] == state for test in tests) for state in STATES}


def print_named(tests):
    """Prints one line for each test that did not pass."""
    for name, state, reason, *_ in tests:
        if state != "passed":
            print(f"{state}: {name}" + (f" ({reason})" if reason else ""))


def cpu_name():
    """Returns the processor's model, if the system reports it."""
    try:
        with open("/proc/cpuinfo") as info:
            lines = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    except OSError:
        lines = []
    return lines[0] if lines else platform.processor()


def record(path, tests, commit=None, **more):
    """Writes the run's date, commit, host, processor, seconds and counts; `more` precedes names of skipped tests."""
    commit = commit or subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout
    said = {
        "date": datetime.date.today().isoformat(),
        "commit": commit.strip(),
        "host": platform.machine(),
        "cpu": cpu_name(),
        "seconds": round(sum(test[3] for test in tests)),
        **count_states(tests),
        **more,
        "skipped_names": [test[0] for test in tests if test[1] == "skipped"],
    }
    with open(path, "w") as out:
        json.dump(said, out, indent=1)
        out.write("\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--record")
    parser.add_argument("--of")
    parser.add_argument("--commit", help="what was tested, where it may no longer be checked out; HEAD by default")
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    tests = [test for path in args.files for test in read(path)]
    count = count_states(tests)
    print_named(tests)
    if args.record:
        record(args.record, tests, args.commit, **({"of": args.of} if args.of else {}))
    print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    return 1 if count["failed"] or not count["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
