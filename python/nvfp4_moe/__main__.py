"""Shows whether this installation works: the build, backends, a self-test, engines, and what is missing.

    python -m nvfp4_moe [--self-check] [--verbose | --json]

`nvfp4-moe doctor` of the command line does the same, and also tests layers on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from . import CheckFailed, Error, MoeConfig, MoeLayer, __version__, _core, engines, explain

_FORMATS = ("nvfp4", "bf16", "int8_block", "fp8")
_OPTIONS: dict[str, Any] = dict(num_experts=8, top_k=2, hidden_size=64, intermediate_size=32)


@contextmanager
def _every_run_checked() -> Iterator[None]:
    """Layers that are opened inside compare each run with the reference."""
    before = os.environ.get("NVFP4_MOE_CHECK")
    os.environ["NVFP4_MOE_CHECK"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["NVFP4_MOE_CHECK"]
        else:
            os.environ["NVFP4_MOE_CHECK"] = before


def _self_test() -> tuple[int, list[str]]:
    """Runs a tiny layer in every format on every backend that takes it on the host. The library compares each run with
    the reference. Returns the number of layers, and one sentence for each that differs."""
    random = np.random.default_rng(1)
    gate, up, down = (random.standard_normal((8, *size), "f4") for size in ((32, 64), (32, 64), (64, 32)))
    hidden, ids = random.standard_normal((5, 64), "f4"), random.permuted(np.tile(np.arange(8), (5, 1)), axis=1)[:, :2]
    tested, failed = 0, []
    with _every_run_checked():
        for activations in _FORMATS:
            config = MoeConfig(**_OPTIONS, activation_format=activations)
            for row in explain({**_OPTIONS, "activation_format": activations}):
                if not row["supported"] or row["backend"] == "reference":
                    continue
                tested += 1
                layer = MoeLayer.from_bf16(config, gate=gate, up=up, down=down, backend=row["backend"], max_tokens=8)
                try:
                    layer.run(hidden, np.ascontiguousarray(ids), np.full((5, 2), 0.5, "f4"))
                except CheckFailed as error:
                    failed.append(f"{activations} on {row['backend']}: {error}")
    return tested, failed


def main(arguments: list[str] | None = None) -> int:
    """Prints the report. Returns 1 if a test or a self-check fails, 2 if an environment variable is wrong, else 0.

    With --json it is {"version", "build", "python", "backends", "self_test": {"tested", "failed"}, "self_check",
    "engines", "missing"}. "self_check" is a list with --self-check, else null.
    """
    parser = argparse.ArgumentParser(prog="python -m nvfp4_moe", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--verbose", action="store_true", help="also show each engine, and why backends do not run here"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--self-check", action="store_true", help="first check the kernels of sm90, sm100 and sm120 on all GPUs"
    )
    asked = parser.parse_args(arguments)
    try:
        checks = _core.self_checks("cpu") if asked.self_check else []
        here, rows = _core.readiness(), engines.report()
        tested, failed = _self_test()
    except Error as error:  # NVFP4_MOE_BACKEND and the like
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    missing = [*here["missing"], *engines.missing(rows)]
    code = 1 if failed or any(one["verdict"] != "passed" for one in checks) else 0
    if asked.json:
        report = {
            "version": __version__,
            "build": here["build"],
            "python": sys.executable,
            "backends": here["backends"],
            "self_test": {"tested": tested, "failed": failed},
            "self_check": checks if asked.self_check else None,
            "engines": engines.summary(rows),
            "missing": missing,
        }
        print(json.dumps(report, indent=1))
        return code
    facts = [
        ("version", f"nvfp4_moe {__version__}, {here['build']}; Python {platform.python_version()}"),
        ("backends", here["backends"]),
        ("test", f"{tested - len(failed)} of {tested} tiny layers agree with the reference"),
        *(("FAILED", f"{one}: do not trust results of this build on this machine") for one in failed),
        *(("check", f"{one['device']} {one['scope']}: {one['text']}, {one['milliseconds']:.1f} ms") for one in checks),
        ("engines", f"{engines.summary(rows)} (in {sys.executable})"),
        *(("missing", one) for one in missing or ["nothing"]),
    ]
    if asked.verbose:
        facts += [("engine", f"{row.name:<13} {row.version or '--':<12} {row.note}") for row in rows]
        facts += [("backend", f"{row['backend']:<14} {row['reason']}") for row in explain(_OPTIONS)]
    for label, text in facts:
        print(f"{label:<8}  {text}")
    return code


if __name__ == "__main__":
    sys.exit(main())
