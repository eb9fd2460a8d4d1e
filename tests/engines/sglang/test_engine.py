"""A tiny Qwen3-MoE in SGLang's real engine, in each form: tokens, log-probabilities and routers against truth.py's.

On a CPU run it with ./dev engines sglang. On a GPU run it with pytest, with SGLang and the package on PYTHONPATH. There
the same engines run, and also the twin and the experts in CUDA graphs. Nothing can be recorded in a graph, so
explain.py judges those outputs.
"""

import judges
import models
import pytest
from engines import ON_GPU, OTHER_ROUTER, TWO_RANKS, on_cpu_only, on_gpu_only, selects, two_devices
from truth import Truth

# Graphs of decoding and of prefill, which SGLang uses by default, for the few sizes that occur.
GRAPHS = {
    "record": False, "disable_cuda_graph": False, "disable_overlap_schedule": False,
    "cuda_graph_bs_decode": [1, 2, 4], "cuda_graph_bs_prefill": [4, 8, 16],
}  # fmt: skip
JOBS = {
    "twin": ("twin", {}),
    "modelopt_mixed": ("modelopt_mixed", {}),
    "compressed_w4a4": ("compressed_w4a4", {"moe_runner_backend": "nvfp4_moe"}),
    "compressed_w4a16": ("compressed_w4a16", {}),
    "updated": ("wrong", {"reload": "modelopt"}),
    "other router": ("modelopt_mixed", OTHER_ROUTER),
} | TWO_RANKS
if ON_GPU:
    JOBS |= {
        "twin, graphs": ("twin", GRAPHS),
        "modelopt, graphs": ("wrong", GRAPHS | {"reload": "modelopt"}),
        "compressed_w4a4, graphs": ("compressed_w4a4", GRAPHS),
    }
else:
    JOBS["off"] = ("modelopt", {"variables": {"NVFP4_MOE_MODE": "0"}})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder, first = tmp_path_factory.mktemp("models"), models.make(1)
    wrong = models.write(folder / "wrong", "modelopt", models.scaled(first, "up_proj", 0.25))
    return models.write_all(folder, first) | {"wrong": wrong}


@pytest.fixture(scope="module")
def judged(served, checkpoints):
    """judged(run, what, judge): a run equals the truth, except at ties, within the bfloat16 twin's errors."""
    truth, (twin, _) = Truth(checkpoints["twin"]), served("twin")
    return lambda run, what, judge=judges.judge: judge(truth, twin[0], run, what, 500)


def took(log):
    """Layers whose packing the log reports."""
    return [line for line in log.splitlines() if "<MoeLayer" in line]


@pytest.mark.parametrize("form", ["modelopt_mixed", "compressed_w4a4", "compressed_w4a16"])
def test_what_is_said_is_the_truth_but_for_ties(served, judged, form):
    rounds, log = served(form)
    assert took(log) and ("on cuda" in took(log)[0]) == ON_GPU
    judged(rounds[0], form)


def test_tokens_do_not_depend_on_who_selects_the_experts(served, judged):
    runs = {}
    for job in ("modelopt_mixed", "other router"):
        (run,), log = served(job)
        runs[selects(log)] = run
    judged(runs[True], "the library selects")
    assert [one["tokens"] for one in runs[True]] == [one["tokens"] for one in runs[False]]


def check_updated(judged, rounds, judge):
    with pytest.raises(AssertionError):
        judged(rounds[0], "one scale for gate and up", judge)
    judged(rounds[1], "updated", judge)


def test_weights_are_updated_from_disk(served, judged):
    check_updated(judged, served("updated")[0], judges.judge)


@on_gpu_only
@pytest.mark.parametrize("job", ["twin, graphs", "compressed_w4a4, graphs"])
def test_graphs_say_the_truth_but_for_ties(served, judged, job):
    rounds, log = served(job)
    assert bool(took(log)) == (job != "twin, graphs")
    assert "cuda graph: True" in log and "cuda graph: False" not in log
    judged(rounds[0], job, judges.judge_without_routers)


@on_gpu_only
def test_graphs_stay_valid_where_weights_are_updated_from_disk(served, judged):
    rounds, log = served("modelopt, graphs")
    assert took(log) and "cuda graph: True" in log
    check_updated(judged, rounds, judges.judge_without_routers)


@two_devices
@pytest.mark.parametrize("how", ["tp", "ep"])
def test_two_ranks(served, judged, how):
    rounds, log = served(how)
    shown = took(log)
    assert len(shown) == 1 and ("experts 0..3 of 8" in shown[0]) == (how == "ep")
    assert ("128x32" in shown[0]) == (how == "tp")
    judged(rounds[0], how)


@on_cpu_only
def test_without_the_plugin_sglang_has_no_kernel_here(served):
    rounds, log = served("off", fails=True)
    assert rounds is None and not took(log)
    assert "Current platform does not support NVFP4" in log
