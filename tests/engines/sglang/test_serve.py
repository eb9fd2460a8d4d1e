"""A tiny Qwen3-MoE in SGLang's real engine on a CPU, in each form: tokens, log-probabilities and routers beside truth.py's."""

import models
import pytest
from truth import Truth, measure


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    first = models.make(1)
    made = models.write_all(folder, first)
    return made | {"wrong": models.write(folder / "wrong", "modelopt", models.with_one_tensor_scale(first))}


@pytest.fixture(scope="module")
def judge(serve, checkpoints):
    """judge(round) asserts that it is the truth's but for ties, by what the engine's bfloat16 twin is off."""
    truth = Truth(checkpoints["twin"])
    rounds, status, log = serve(checkpoints["twin"])
    assert rounds, f"the twin ended with {status}:\n{log[-3000:]}"
    twin = measure(truth, rounds[0])
    print(f"twin: {twin}")
    assert twin.values > 500 and twin.logprob > 0 and twin.router > 0

    def check(name, run):
        errors = measure(truth, run)
        print(f"{name}: {errors}")
        assert errors.faults(twin) == []

    check("twin", rounds[0])
    return check


def took(log):
    """Layers whose packing the log reports."""
    return [line for line in log.splitlines() if "<MoeLayer" in line]


@pytest.mark.parametrize(
    ("form", "arguments"),
    [
        ("modelopt_mixed", {}),
        ("compressed_w4a4", {"moe_runner_backend": "nvfp4_moe"}),
        ("compressed_w4a16", {}),
    ],
)
def test_what_is_said_is_the_truth_but_for_ties(serve, checkpoints, judge, form, arguments):
    rounds, status, log = serve(checkpoints[form], **arguments)
    assert rounds, f"{form} ended with {status}:\n{log[-3000:]}"
    assert took(log)
    judge(form, rounds[0])


def test_weights_are_updated_from_disk(serve, checkpoints, judge):
    rounds, status, log = serve(checkpoints["wrong"], reload=checkpoints["modelopt"])
    assert rounds, f"ended with {status}:\n{log[-3000:]}"
    with pytest.raises(AssertionError):
        judge("one scale for gate and up", rounds[0])
    judge("updated", rounds[1])


@pytest.mark.parametrize("arguments", [{"tp_size": 2}, {"tp_size": 2, "ep_size": 2}])
def test_two_ranks(serve, checkpoints, judge, arguments):
    rounds, status, log = serve(checkpoints["modelopt"], variables={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, **arguments)
    assert rounds, f"ended with {status}:\n{log[-3000:]}"
    shown = took(log)
    assert len(shown) == 1 and ("experts 0..3 of 8" in shown[0]) == ("ep_size" in arguments)
    assert ("128x32" in shown[0]) == ("ep_size" not in arguments)
    judge(f"{arguments}", rounds[0])


def test_without_the_plugin_sglang_has_no_kernel_here(serve, checkpoints):
    rounds, _, log = serve(checkpoints["modelopt"], variables={"NVFP4_MOE": "0"})
    assert rounds is None and not took(log)
    assert "Current platform does not support NVFP4" in log
