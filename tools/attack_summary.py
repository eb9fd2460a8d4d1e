#!/usr/bin/env python3
"""Counts the attacks of the attack tests: prints a table by kind of attack, and a summary as the last line.

    attack_summary.py --tier short|long [--record OUT.json] FILE.xml...

The files are JUnit files of ctest and pytest that have only the tests of ./dev attack. A C++ test reports its attacks
in its output ("attacked: KIND COUNT", tests/support/attack.h), a Python test as properties (tests/python/conftest.py).
Exit status 1 if a test failed, if a test passed without naming a kind or trying an attack, or if a kind has no attacks
although not all of its tests were skipped.
"""

import argparse
import collections
import pathlib
import re
import sys

from test_summary import STATES, count_states, print_named, read, record

TABLE = pathlib.Path(__file__).resolve().parent.parent / "tests/support/attack_kinds.def"
REPORT = re.compile(r"^attacked: (.+) (\d+)$", re.MULTILINE)

Test = collections.namedtuple("Test", "name state reason seconds kind tried")


def kinds():
    """Returns the kinds in the table's order, spelled as in reports."""
    return re.findall(r'^ATTACK_KIND\(k\w+, "([^"]+)"', TABLE.read_text(), re.MULTILINE)


def reported(case):
    """Returns (kind, attacks) of a test's element; kind None unless it names exactly one."""
    properties = {item.get("name"): item.get("value") for item in case.iter("property")}
    if "attack" in properties:
        return properties["attack"], int(properties.get("attacked", 0))
    lines = REPORT.findall(case.findtext("system-out") or "")
    of = {kind for kind, _ in lines}
    return of.pop() if len(of) == 1 else None, sum(int(count) for _, count in lines)


def faults(tests, known):
    """Returns the problems of the reports themselves, one line each."""
    for test in tests:
        if test.kind is None and test.state == "passed":
            yield f"{test.name}: expected a report of one kind of attack, got none or several"
        elif test.kind is not None and test.kind not in known:
            yield f"{test.name}: expected a kind of {TABLE.name}, got {test.kind}"
        elif test.state == "passed" and test.tried == 0:
            yield f"{test.name}: passed and attacked nothing"
    for kind in known:
        of_kind = [test for test in tests if test.kind == kind]
        if not any(test.tried for test in of_kind) and not (of_kind and all(t.state == "skipped" for t in of_kind)):
            yield f"{kind}: expected attacks, got none in {len(of_kind)} tests"


def table(tests, known):
    """{kind: {tried, tests, passed, failed, skipped}}"""
    rows = {}
    for kind in known:
        of_kind = [test for test in tests if test.kind == kind]
        rows[kind] = {"tried": sum(test.tried for test in of_kind), "tests": len(of_kind), **count_states(of_kind)}
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tier", choices=("short", "long"), required=True)
    parser.add_argument("--record")
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    known = kinds()
    tests = [Test(*test) for path in args.files for test in read(path, more=reported)]
    rows = table(tests, known)
    found = list(faults(tests, known))
    print_named(tests)
    for fault in found:
        print(f"fault: {fault}")
    print(f"{'attack':<22}{'tried':>9}{'tests':>7}" + "".join(f"{state:>9}" for state in STATES))
    for kind, row in rows.items():
        print(f"{kind:<22}{row['tried']:>9}{row['tests']:>7}" + "".join(f"{row[state]:>9}" for state in STATES))
    tried, count = sum(row["tried"] for row in rows.values()), count_states(tests)
    if args.record:
        record(args.record, tests, tier=args.tier, faults=found, attacks=tried, kinds=rows)
    counts = ", ".join(f"{count[state]} {state}" for state in STATES)
    print(f"{tried} attacks of {sum(row['tried'] > 0 for row in rows.values())} kinds, {counts}, {len(found)} faults")
    return 1 if count["failed"] or found else 0


if __name__ == "__main__":
    sys.exit(main())
