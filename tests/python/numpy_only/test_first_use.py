"""The first minutes with the package: what an import loads, the names that it shows, and `python -m nvfp4_moe`."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import nvfp4_moe as nv
import pytest

PACKAGES = Path(nv.__file__).parents[1]
# All of the standard library that the package's import may load, with what these load themselves in every Python.
LIGHT = {"__future__", "atexit", "collections", "importlib", "os", "sys", "typing", "warnings"}


def python(*arguments: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Runs a new interpreter that finds the package. A variable that is None is not set."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGES), **variables}
    env = {name: value for name, value in env.items() if value is not None}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env)


def loaded_by(statement: str) -> set[str]:
    """Names of the modules that a statement adds to an interpreter that has loaded LIGHT. -S: without site-packages,
    whose .pth files load other modules."""
    ran = python("-S", "-c", f"import sys, {', '.join(LIGHT)}\nold = set(sys.modules)\n{statement}\n"
                 "print(*set(sys.modules) - old, 'cuda' if 'libcuda' in open('/proc/self/maps').read() else '')")  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


def test_an_import_loads_no_numpy_no_torch_no_cuda_and_nothing_heavy():
    heavy = {"json", "inspect", "dataclasses", "numpy"}
    assert loaded_by("import json, dataclasses") >= heavy - {"numpy"}  # this test would see them
    own = {"nvfp4_moe"} | {f"nvfp4_moe.{name}" for name in ("_core", "_build", "_formats")}
    assert loaded_by("import nvfp4_moe") == own
    later = loaded_by("from nvfp4_moe import MoeLayer, RouterConfig, torch_exchange")
    assert later >= {"nvfp4_moe.layer", "nvfp4_moe.router", "nvfp4_moe.exchange", "json"}
    assert not later & {"numpy", "torch", "cuda"}


def test_names_that_are_imported_later_are_the_modules_own():
    code = """
        import nvfp4_moe as nv
        for name in nv.__all__:
            assert getattr(nv, name) is not None, name
        assert nv.layer.MoeLayer is nv.MoeLayer and nv.router.select_experts is nv.select_experts
        assert nv.MoeConfig is nv.config.MoeConfig and nv.exchange.torch_exchange is nv.torch_exchange
        try:
            nv.MoeLayers
        except AttributeError as error:
            print(error)
    """
    ran = python("-c", textwrap.dedent(code))
    assert ran.stdout == "module 'nvfp4_moe' has no attribute 'MoeLayers'\n", ran.stderr


@pytest.mark.parametrize("name", ["", "config", "engines", "exchange", "layer", "linear", "router", "vllm"])
def test_dir_shows_public_names_only(name):
    module: Any = importlib.import_module(f"nvfp4_moe.{name}".rstrip("."))
    assert dir(module) == sorted(module.__all__) and not {"json", "os", "annotations", "Any"} & set(dir(module))
    assert all(getattr(module, one).__doc__ for one in dir(module) if one != "__version__"), name


def test_five_lines_show_the_build_the_backends_a_test_the_engines_and_what_is_missing():
    ran = python("-m", "nvfp4_moe", NVFP4_MOE_BACKEND=None)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    build = "with CUDA [0-9.]+" if nv._core.built_with_cuda else "for CPUs only"
    lines = (rf"version   nvfp4_moe {re.escape(nv.__version__)}, {build}; Python 3\.\d+\.\S+",
             r"backends  .*\bcpu (?:will be used )?on the host \(runs cpu:\w+\).*",
             r"test      (\d+) of \1 tiny layers agree with the reference",
             rf"engines   .* \(in {re.escape(sys.executable)}\)",
             r"missing   .+")  # fmt: skip
    assert re.fullmatch("\n".join(lines) + "\n", ran.stdout), ran.stdout
    more = python("-m", "nvfp4_moe", "--verbose", NVFP4_MOE_BACKEND=None).stdout
    assert re.search(r"^engine    vllm +", more, re.M) and re.search(r"^backend   reference +", more, re.M)
    report = json.loads(python("-m", "nvfp4_moe", "--json", NVFP4_MOE_BACKEND=None).stdout)
    assert report["version"] == nv.__version__ and report["self_test"]["tested"] >= 4
    assert report["self_test"]["failed"] == []


def test_a_variable_that_is_wrong_is_one_line():
    ran = python("-m", "nvfp4_moe", NVFP4_MOE_BACKEND="gpu")
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.startswith("python -m nvfp4_moe: error: environment NVFP4_MOE_BACKEND: expected one of auto")
    assert ran.stderr.count("\n") == 1


def test_a_layer_that_differs_from_the_reference_fails_the_report(monkeypatch, capsys):
    """A run that fails the library's comparison, as a wrong kernel's does."""
    from nvfp4_moe import __main__ as first_use

    def run(self: nv.MoeLayer, *arrays: np.ndarray) -> None:
        if self.config.activation_format == "bf16":
            raise nv.CheckFailed("check failed: token 3")

    monkeypatch.setattr(nv.MoeLayer, "run", run)
    before = dict(os.environ)
    assert first_use.main([]) == 1
    assert dict(os.environ) == before
    out = capsys.readouterr().out
    assert "FAILED    bf16 on cpu: check failed: token 3: do not trust results of this build on this machine" in out
    tested, agree = (int(re.search(rf"test      {part} tiny", out)[1]) for part in (r"\d+ of (\d+)", r"(\d+) of \d+"))
    assert 0 < agree < tested


def test_a_self_check_is_a_line_and_its_failure_fails_the_report(monkeypatch, capsys):
    from nvfp4_moe import __main__ as first_use

    assert nv._core.built_with_cuda or nv._core.self_checks("cpu") == []
    check = {"device": "cuda:0", "scope": "sm100 nvfp4 swiglu", "verdict": "passed", "text": "passed (7 step variants)"}
    monkeypatch.setattr(nv._core, "self_checks", lambda device: [check | {"milliseconds": 12.34}])
    assert first_use.main(["--self-check"]) == 0
    assert "check     cuda:0 sm100 nvfp4 swiglu: passed (7 step variants), 12.3 ms\n" in capsys.readouterr().out
    check["verdict"] = "failed"
    assert first_use.main(["--self-check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["self_check"][0]["verdict"] == "failed"
    assert first_use.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["self_check"] is None
