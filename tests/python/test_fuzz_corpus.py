"""The committed seeds of the fuzz targets are what tests/fuzz/make_fuzz_corpus.py writes."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def files(under: Path) -> list[Path]:
    written = [path.relative_to(under) for path in (under / "corpus").rglob("*") if path.is_file()]
    return sorted([*written, Path("json.dict")])


def test_the_committed_seeds_are_what_the_script_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tests/fuzz/make_fuzz_corpus.py", tmp_path], check=True, timeout=60)
    committed = ROOT / "tests/fuzz"
    assert files(tmp_path) == files(committed)
    _, differing, missing = filecmp.cmpfiles(tmp_path, committed, files(committed), shallow=False)
    assert not differing + missing
