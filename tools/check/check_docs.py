#!/usr/bin/env python3
"""Checks facts in the docs: links resolve, environment variables are documented (five at most), every ./dev verb in the
README exists, and so does every test that docs/contribute/features.md names."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def broken_links(page):
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"[a-z]+:", link) and not (page.parent / link).exists():
            yield f"{page.relative_to(ROOT)}: link to {link}, which does not exist"


TEST = re.compile(r"^(?:ATTACK_)?TEST(_F|_P)?\(\s*(?:k\w+,\s*)?(\w+),\s*(\w+)\)", re.MULTILINE)
# Text that shows that a suite runs for every backend of the registry: a list from the registry, or, if a backend has
# more than its table, the names of all backends.
OVER_BACKENDS = re.compile(
    r"INSTANTIATE_TEST_SUITE_P\(\s*\w+,\s*(\w+),\s*[\w:]*ValuesIn\((?:test::)?(?:step|judged|device)_backends\(\)"
)
NAMES = re.compile(r"constexpr std::array kNames = \{([^}]*)\}")
# Suites for a single backend, or without a backend.
ANY_GPU = ("CApiOnGpu",)


def tests_in(sources):
    """Reads C++ files. Returns {"Suite.Name": kind of macro} and the suites that run for every backend."""
    tests, over_backends = {}, set()
    rooms = {path.name for path in (ROOT / "src/backend").glob("sm*") if path.name != "sm80"} | {"cuda"}
    for text in sources:
        tests.update({f"{suite}.{name}": kind for kind, suite, name in TEST.findall(text)})
        over_backends |= set(OVER_BACKENDS.findall(text))
        for names in NAMES.findall(text):
            if rooms <= set(re.findall(r'"(\w+)"', names)):
                over_backends |= {suite for _, suite, _ in TEST.findall(text)}
    return tests, over_backends


def wrong_tests(page, tests, over_backends, choices):
    """Yields names in a page's tables that are not tests or cases, and tests of its second column that skip a backend."""
    for row in (line for line in page.splitlines() if line.startswith("| ") and "`" in line):
        for column, cell in enumerate(row.strip("|").split("|")):
            for name in re.findall(r"`([A-Z]\w*\.\w+)`", cell):
                if name not in tests:
                    yield f"no test {name}"
                elif column == 1 and name.split(".")[0] not in (*over_backends, *ANY_GPU):
                    yield f"{name} does not run for every backend"
            for name in re.findall(r"`(w4a\w+)`", cell):
                if f'"{name}"' not in choices:
                    yield f"no named choice {name}"


def main():
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in tracked.stdout.split() if (ROOT / name).exists()]
    bad = [problem for file in files if file.suffix == ".md" for problem in broken_links(file)]

    sources = [file for file in files if file.relative_to(ROOT).parts[0] == "src"]
    names = {name for file in sources for name in re.findall(r'"(NVFP4_MOE_[A-Z_]+)"', file.read_text())}
    documented = (ROOT / "docs/reference/environment.md").read_text()
    bad += [
        f"docs/reference/environment.md: {name} is read but not documented"
        for name in sorted(names)
        if name not in documented
    ]
    if len(names) > 5:
        bad.append(f"{len(names)} environment variables are read, five at most: {sorted(names)}")

    dev = (ROOT / "dev").read_text()
    for verb in set(re.findall(r"\./dev ([a-z]+)", (ROOT / "README.md").read_text())):
        if f"verb_{verb}()" not in dev:
            bad.append(f"README.md: ./dev {verb} does not exist")

    texts = [file.read_text() for file in files if file.match("tests/*/*.cpp")]
    features, choices = ROOT / "docs/contribute/features.md", ROOT / "tests/cases/case_table.cpp"
    bad += [
        f"docs/contribute/features.md: {what}"
        for what in wrong_tests(features.read_text(), *tests_in(texts), choices.read_text())
    ]
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
