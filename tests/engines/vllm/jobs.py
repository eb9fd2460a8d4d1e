"""Jobs of serve.py, and checks of their results that every model's tests share."""

from __future__ import annotations

import pytest
import torch

TOKENS = 12


def on_gpu() -> bool:
    return torch.cuda.is_available()


def job(name: str, model, settings: dict | None = None, **fields) -> dict:
    """settings: the plugin's, as in additional_config."""
    options = fields.pop("options", {}) | ({"additional_config": {"nvfp4_moe": settings}} if settings else {})
    return {"name": name, "model": str(model), "tokens": TOKENS, "options": options} | fields


def two_ranks(serve, model, **fields) -> dict[str, dict]:
    """Two ranks: slices of each expert, and experts in two halves."""
    if on_gpu() and torch.cuda.device_count() < 2:
        pytest.skip("two ranks need two GPUs")
    jobs = [
        job(name, model, options={"tensor_parallel_size": 2} | more, **fields)
        for name, more in (("slices", {}), ("experts", {"enable_expert_parallel": True}))
    ]
    return serve(jobs, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"})


def ok(result: dict) -> dict:
    assert result["error"] is None, result["error"]
    return result


def method_of(form: str) -> str:
    return f"NvFp4Moe{'ModelOpt' if form.startswith('modelopt') else 'CompressedTensors'}Method"


def check_reloaded(result: dict, other: dict) -> None:
    """Checks that reloads filled the same layers, that the first reload gives the run of `other`, an engine that
    started with those weights, and that the first weights, loaded last, give the first run again. To the last bit."""
    ok(result)
    assert all(handles == result["handles"][0] for handles in result["handles"])
    assert ok(other)["runs"][0] != result["runs"][0], "other weights say something else"
    assert result["runs"][1] == other["runs"][0], "the reloaded weights say what they say in an engine of their own"
    assert result["runs"][-1] == result["runs"][0], "back at the first weights"


def check_dummy(result: dict, method: str) -> None:
    assert ok(result)["methods"] == [method] * 2
    values = [value for said in result["runs"][0] for step in said["logprobs"] for value in step.values()]
    assert values and all(value == value and abs(value) < 1e6 for value in values)
