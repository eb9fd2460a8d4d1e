"""A tiny Nemotron-3 without Mamba layers in SGLang's real engine: experts without a gate, and relu2.

SGLang's own latent projections, shared expert, sigmoid router and factor surround them. It runs in each form, on two
ranks, and updated from disk. SGLang has no kernel for NVFP4 on a CPU, and none for unquantized experts without a gate,
so what bfloat16 can hold is measured on transformers' model in it. SGLang replaces the runner backend `auto` by one of
its own for this model.
"""

import models
import nemotron
import pytest
import torch
from engines import OTHER_ROUTER, TWO_RANKS, selects, two_devices
from judges import faults_beside
from truth import Truth

FORMS = ("modelopt", "modelopt_mixed", "compressed_w4a4", "compressed_w4a16")
JOBS = {form: (form, {}) for form in FORMS} | {"updated": ("wrong", {"reload": "modelopt"})} | TWO_RANKS
JOBS["other router"] = "modelopt", OTHER_ROUTER
JOBS = {name: (form, options | {"record": False}) for name, (form, options) in JOBS.items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{name: directory}: a model in each form, and with its up matrices' tensor scales halved."""
    folder, model = tmp_path_factory.mktemp("nemotron"), nemotron.make(2)
    wrong = nemotron.write(folder / "wrong", "modelopt", models.scaled(model, "up_proj", 0.5))
    return nemotron.write_all(folder, model) | {"wrong": wrong}


@pytest.fixture(scope="module")
def faults(checkpoints):
    pair = Truth(checkpoints["twin"]), Truth(checkpoints["twin"], torch.bfloat16)
    return lambda run, what: faults_beside(pair, run, what)


def rounds_of(served, job):
    rounds, log = served(job)
    assert "relu2, bf16" in log
    return rounds


@pytest.mark.parametrize("job", FORMS)
def test_each_form_says_what_transformers_says(served, faults, job):
    (run,) = rounds_of(served, job)
    assert faults(run, job) == []
    # The factor of the routed experts is in the router's weights for ModelOpt, and in the runner for
    # compressed-tensors.
    producer = "modelopt" if job.startswith("modelopt") else "compressed_w4a4"
    assert run == served(producer)[0][0], "the same numbers in each form of a producer, to the last bit"


def test_tokens_do_not_depend_on_who_selects_the_experts(served, faults):
    """With the factor in the router's weights, a bias, and SGLang's shared expert."""
    runs = {}
    for job in ("modelopt", "other router"):
        (run,), log = served(job)
        runs[selects(log)] = run
    assert faults(runs[True], "the library selects") == []
    assert [one["tokens"] for one in runs[True]] == [one["tokens"] for one in runs[False]]


@two_devices
@pytest.mark.parametrize("job", ["tp", "ep"])
def test_two_ranks_are_as_near_to_the_truth_as_one(served, faults, job):
    assert faults(rounds_of(served, job)[0], job) == []


def test_weights_updated_from_disk_are_the_new_ones_and_wrong_ones_are_seen(served, faults):
    wrong, right = rounds_of(served, "updated")
    assert right == rounds_of(served, "modelopt")[0]
    assert faults(wrong, "up's scale halved") != []
