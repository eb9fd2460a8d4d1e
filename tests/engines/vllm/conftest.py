"""Engines are started once a session, in processes of their own, and their results shared by all tests.

Run by ./dev engines vllm in an environment that has vLLM and torch; without vLLM every test is skipped by name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "common")]  # deepseek_v4, layers; models, truth
sys.path.append(str(HERE.parents[1] / "python"))  # moe_reference: the layer in float64, as intervals


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vllm is not installed in this environment")
        for item in items:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """{seed: {form: directory}} of two models that differ in their weights alone."""
    import models

    root = tmp_path_factory.mktemp("models")
    return {seed: models.write_all(root / str(seed), models.make(seed)) for seed in (0, 1)}


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """serve(jobs, environment) -> {name: result}: one process that runs the jobs one after the other."""

    def run(jobs: list[dict], environment: dict[str, str] | None = None, timeout: float = 600) -> dict[str, dict]:
        root = tmp_path_factory.mktemp("served")
        for number, job in enumerate(jobs):
            job["out"] = str(root / f"{number}.json")
        (root / "jobs.json").write_text(json.dumps(jobs))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NVFP4_MOE")}
        clean |= {"VLLM_CACHE_ROOT": str(root / "cache"), "VLLM_PLUGINS": "nvfp4_moe"} | (environment or {})
        command = [sys.executable, str(HERE / "serve.py"), str(root / "jobs.json")]
        with open(root / "log", "w") as log:
            code = subprocess.run(command, env=clean, stdout=log, stderr=subprocess.STDOUT, timeout=timeout).returncode
        results = {}
        for job in jobs:
            if not Path(job["out"]).exists():
                tail = "\n".join((root / "log").read_text(errors="replace").splitlines()[-40:])
                pytest.fail(f"{job['name']}: the process ended with {code} and no result:\n{tail}")
            results[job["name"]] = json.loads(Path(job["out"]).read_text())
        return results

    return run


# ---- vLLM's classes in this process


@pytest.fixture(scope="module")
def vllm_config():
    """The ranks of one process, and a config that is current, as vLLM's parameters need them."""
    import deepseek_v4
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        deepseek_v4.prepare_process()
        yield config


@pytest.fixture(scope="module")
def methods(vllm_config):
    import nvfp4_moe.vllm as plugin

    plugin.register()
    from nvfp4_moe.vllm import methods

    return methods
