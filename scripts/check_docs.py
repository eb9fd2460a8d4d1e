#!/usr/bin/env python3
"""Checks that the docs are true where a machine can tell: links resolve, environment variables are documented (five at
most), and every ./dev verb that the README names exists."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def broken_links(page):
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"[a-z]+:", link) and not (page.parent / link).exists():
            yield f"{page.relative_to(ROOT)}: link to {link}, which does not exist"


def main():
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in tracked.stdout.split() if (ROOT / name).exists()]
    bad = [problem for file in files if file.suffix == ".md" for problem in broken_links(file)]

    sources = [file for file in files if file.relative_to(ROOT).parts[0] == "src"]
    names = {name for file in sources for name in re.findall(r'"(NVFP4_MOE_[A-Z_]+)"', file.read_text())}
    documented = (ROOT / "docs/environment.md").read_text()
    bad += [
        f"docs/environment.md: {name} is read but not documented" for name in sorted(names) if name not in documented
    ]
    if len(names) > 5:
        bad.append(f"{len(names)} environment variables are read, five at most: {sorted(names)}")

    dev = (ROOT / "dev").read_text()
    for verb in set(re.findall(r"\./dev ([a-z]+)", (ROOT / "README.md").read_text())):
        if f"verb_{verb}()" not in dev:
            bad.append(f"README.md: ./dev {verb} does not exist")
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
