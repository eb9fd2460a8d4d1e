"""Engines are started once per session, in processes of their own, and all tests share their results.

Run by ./dev engines vllm in an environment that has vLLM and torch. Without vLLM every test is skipped by name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "common")]  # deepseek_v4, layers; models, truth
sys.path.append(str(HERE.parents[1] / "python"))  # moe_reference: the layer in float64, as intervals

import models  # noqa: E402
from processes import Process  # noqa: E402


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vllm is not installed in this environment")
        for item in items:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """{seed: {form: directory}} of two models that differ only in their weights."""
    root = tmp_path_factory.mktemp("models")
    return {seed: models.write_all(root / str(seed), models.make(seed)) for seed in (0, 1)}


def clean_environment(**more: str) -> dict[str, str]:
    """Returns the environment of a vLLM process with the plugin and none of the user's settings of it. In bf16, for
    which the bounds around a twin are made."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NVFP4_MOE")}
    return clean | {"VLLM_PLUGINS": "nvfp4_moe", "HF_HUB_OFFLINE": "1", "NVFP4_MOE_ACTIVATIONS": "bf16"} | more


class Served:
    """A process that runs jobs one after the other (serve.py)."""

    def __init__(self, root: Path, jobs: list[dict], environment: dict[str, str] | None) -> None:
        self.jobs = jobs
        for number, job in enumerate(jobs):
            job["out"] = str(root / f"{number}.json")
        (root / "jobs.json").write_text(json.dumps(jobs))
        env = clean_environment(VLLM_CACHE_ROOT=str(root / "cache"), **(environment or {}))
        self.process = Process(HERE / "serve.py", root / "jobs.json", env=env, folder=root)

    def results(self, timeout: float) -> dict[str, dict]:
        """Returns the results of its jobs by name, once it has ended."""
        code, results = self.process.wait(timeout), {}
        for job in self.jobs:
            if not Path(job["out"]).exists():
                pytest.fail(f"{job['name']}: the process ended with {code} and no result:\n{self.process.log[-4000:]}")
            results[job["name"]] = json.loads(Path(job["out"]).read_text())
        return results


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """serve(jobs, environment) -> {name: result}: one process that runs the jobs one after the other."""

    def run(jobs: list[dict], environment: dict[str, str] | None = None, timeout: float = 600) -> dict[str, dict]:
        return Served(tmp_path_factory.mktemp("served"), jobs, environment).results(timeout)

    return run


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def serve_data_parallel(tmp_path_factory):
    """serve_data_parallel([job of rank 0, job of rank 1]) -> [result of rank 0, result of rank 1]: runs an engine of
    two data parallel ranks, a process each, with expert parallel."""

    def run(jobs: list[dict], environment: dict[str, str] | None = None, timeout: float = 400) -> list[dict]:
        of_all = {
            "VLLM_DP_SIZE": str(len(jobs)),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(free_port()),
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(len(jobs)))),
        } | (environment or {})
        ranks = []
        try:
            for rank, job in enumerate(jobs):
                options = {"distributed_executor_backend": "uni", "enable_expert_parallel": True}
                job["options"] = options | job.get("options", {})
                of_rank = {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)}
                ranks.append(Served(tmp_path_factory.mktemp(f"rank{rank}"), [job], of_all | of_rank))
            return [served.results(timeout)[job["name"]] for served, job in zip(ranks, jobs, strict=True)]
        finally:
            for served in ranks:
                served.process.stop()

    return run


# ---- vLLM's classes in this process


@pytest.fixture(scope="module")
def vllm_config():
    """Sets up the ranks of one process and a current config, which vLLM's parameters need."""
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


@pytest.fixture
def log(monkeypatch):
    """Returns the plugin's log."""
    from layers import Log
    from nvfp4_moe.vllm import internals

    kept = Log()
    monkeypatch.setattr(internals, "logger", lambda: kept)
    return kept
