"""A tiny Qwen3-MoE in SGLang's real engine, in each form: tokens, log-probabilities and routers beside truth.py's.

On a CPU by ./dev engines sglang. On a GPU by pytest alone, with SGLang and the package on PYTHONPATH: the same engines, and
the twin and the experts in CUDA graphs, of which explain.py judges what is said, since nothing can be recorded in them.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import models
import pytest
import torch
from explain import explain
from truth import Truth, measure

ON_GPU = torch.cuda.is_available()
GPUS = torch.cuda.device_count()

# Graphs of decoding and of prefill, as SGLang serves by default, for the few sizes that occur.
GRAPHS = {
    "record": False,
    "disable_cuda_graph": False,
    "disable_overlap_schedule": False,
    "cuda_graph_bs_decode": [1, 2, 4],
    "cuda_graph_bs_prefill": [4, 8, 16],
}
TWO_RANKS = {"variables": {} if ON_GPU else {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, "tp_size": 2}

# What serve of conftest.py takes, by name: the checkpoint and the rest.
JOBS = {
    "twin": ("twin", {}),
    "modelopt_mixed": ("modelopt_mixed", {}),
    "compressed_w4a4": ("compressed_w4a4", {"moe_runner_backend": "nvfp4_moe"}),
    "compressed_w4a16": ("compressed_w4a16", {}),
    "updated": ("wrong", {"reload": "modelopt"}),
}
if ON_GPU:
    JOBS |= {
        "twin, graphs": ("twin", GRAPHS),
        "modelopt, graphs": ("wrong", GRAPHS | {"reload": "modelopt"}),
        "compressed_w4a4, graphs": ("compressed_w4a4", GRAPHS),
    }
else:
    JOBS["off"] = ("modelopt", {"variables": {"NVFP4_MOE_MODE": "0"}})
if not ON_GPU or GPUS >= 2:
    JOBS |= {"tp": ("modelopt", TWO_RANKS), "ep": ("modelopt", TWO_RANKS | {"ep_size": 2})}

on_gpu_only = pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
on_cpu_only = pytest.mark.skipif(ON_GPU, reason="on a GPU SGLang has kernels of its own")
two_devices = pytest.mark.skipif(ON_GPU and GPUS < 2, reason="two ranks need two GPUs")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    first = models.make(1)
    made = models.write_all(folder, first)
    return made | {"wrong": models.write(folder / "wrong", "modelopt", models.with_one_tensor_scale(first))}


@pytest.fixture(scope="module")
def served(serve, checkpoints):
    """served(job) -> (rounds, log). All jobs start with the first that is asked for; an engine is three processes."""
    pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 3))
    started = {}

    def start(form, options):
        reload = {"reload": checkpoints[options["reload"]]} if "reload" in options else {}
        return pool.submit(serve, checkpoints[form], **(options | reload))

    def result(job, fails=False):
        if not started:
            started.update({name: start(*what) for name, what in JOBS.items()})
        rounds, status, log = started[job].result()
        assert fails or rounds, f"{job} ended with {status}:\n{log[-3000:]}"
        return rounds, log

    yield result
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def truth(checkpoints):
    return Truth(checkpoints["twin"])


@pytest.fixture(scope="module")
def twin(served, truth):
    """What the engine's bfloat16 twin is off."""
    errors = measure(truth, served("twin")[0][0])
    print(f"twin: {errors}")
    assert errors.values > 500 and errors.logprob > 0 and errors.router > 0
    assert errors.faults(errors) == []
    return errors


@pytest.fixture(scope="module")
def judge(truth, twin):
    """judge(round) asserts that it is the truth's but for ties, by what the engine's bfloat16 twin is off."""

    def check(name, run):
        errors = measure(truth, run)
        print(f"{name}: {errors}")
        assert errors.faults(twin) == []

    return check


@pytest.fixture(scope="module")
def judge_without_routers(truth, twin):
    """judge_without_routers(round): what is further off than the twin must follow from a router's tie, decided otherwise."""

    def check(name, run):
        bound, router_tie = 2 * twin.logprob, 2 * twin.router
        explained = explain(truth, run, models.TOP_K, bound, router_tie)
        print(f"{name}: {explained}, bound {bound:.5f}, a router's tie below {router_tie:.5f}")
        assert explained.values > 500 and explained.largest <= bound

    return check


def took(log):
    """Layers whose packing the log reports."""
    return [line for line in log.splitlines() if "<MoeLayer" in line]


@pytest.mark.parametrize("form", ["modelopt_mixed", "compressed_w4a4", "compressed_w4a16"])
def test_what_is_said_is_the_truth_but_for_ties(served, judge, form):
    rounds, log = served(form)
    assert took(log) and ("on cuda" in took(log)[0]) == ON_GPU
    judge(form, rounds[0])


def test_weights_are_updated_from_disk(served, judge):
    rounds, _ = served("updated")
    with pytest.raises(AssertionError):
        judge("one scale for gate and up", rounds[0])
    judge("updated", rounds[1])


@on_gpu_only
@pytest.mark.parametrize("job", ["twin, graphs", "compressed_w4a4, graphs"])
def test_graphs_say_the_truth_but_for_ties(served, judge_without_routers, job):
    rounds, log = served(job)
    assert bool(took(log)) == (job != "twin, graphs")
    assert "cuda graph: True" in log and "cuda graph: False" not in log
    judge_without_routers(job, rounds[0])


@on_gpu_only
def test_graphs_stay_valid_where_weights_are_updated_from_disk(served, judge_without_routers):
    rounds, log = served("modelopt, graphs")
    assert took(log) and "cuda graph: True" in log
    with pytest.raises(AssertionError):
        judge_without_routers("one scale for gate and up, graphs", rounds[0])
    judge_without_routers("updated, graphs", rounds[1])


@two_devices
@pytest.mark.parametrize("how", ["tp", "ep"])
def test_two_ranks(served, judge, how):
    rounds, log = served(how)
    shown = took(log)
    assert len(shown) == 1 and ("experts 0..3 of 8" in shown[0]) == (how == "ep")
    assert ("128x32" in shown[0]) == (how == "tp")
    judge(how, rounds[0])


@on_cpu_only
def test_without_the_plugin_sglang_has_no_kernel_here(served):
    rounds, log = served("off", fails=True)
    assert rounds is None and not took(log)
    assert "Current platform does not support NVFP4" in log
