"""vLLM's real engine over a tiny Nemotron-3 without Mamba layers: experts without a gate, and relu2, in each form.

vLLM's own latent projections, shared expert, sigmoid router and factor surround them. vLLM has no kernel for such
experts on a CPU, neither quantized nor not, and refuses them before it asks the plugin. without_a_gate.py removes that
refusal, and what bfloat16 can hold is measured on transformers' model in it.
"""

from __future__ import annotations

import jobs
import models
import nemotron
import pytest
import torch
from jobs import job, method_of, ok, on_gpu
from judges import faults_beside
from models import QUANTIZED as FORMS
from truth import Truth


@pytest.fixture(scope="session")
def paths(tmp_path_factory):
    """{name: directory}: two models in each form, and the first with its up matrices' tensor scales halved."""
    root, first = tmp_path_factory.mktemp("nemotron"), nemotron.make(0)
    found = nemotron.write_all(root / "first", first)
    found |= {f"other {form}": path for form, path in nemotron.write_all(root / "other", nemotron.make(1)).items()}
    found["wrong"] = nemotron.write(root / "wrong", "modelopt", models.scaled(first, "up_proj", 0.5))
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="session")
def served(paths, serve):
    modelopt = paths["modelopt"]
    reload = {
        "modelopt": [paths["other modelopt"], paths["wrong"], modelopt],
        "compressed_w4a4": [paths["other compressed_w4a4"], paths["compressed_w4a4"]],
    }
    given = [
        *(job(form, paths[form], reload=reload.get(form, [])) for form in FORMS),
        job("other", paths["other modelopt"]),
        job("compiled", modelopt, options={"enforce_eager": False}),
        job("own router", modelopt, {"router": "own"}),
    ]
    return serve([one | {"without_a_gate": True} for one in given])


@pytest.fixture(scope="session")
def faults(paths):
    """faults(run, what): returns those of faults_beside transformers' twin."""
    pair = Truth(paths["twin"]), Truth(paths["twin"], torch.bfloat16)
    return lambda run, what: faults_beside(pair, run, what)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_says_what_transformers_says(served, faults, form):
    result = ok(served[form])
    assert result["methods"] == [method_of(form)] * 2
    assert all("64x64, experts 0..7 of 8, top-8, relu2, bf16" in layer for layer in result["layers"])
    assert faults(result["runs"][0], form) == []
    assert result["runs"][0] == ok(served["modelopt"])["runs"][0], "the same numbers in every form, to the last bit"


@pytest.mark.parametrize("form", ["modelopt", "compressed_w4a4"])
def test_weights_are_reloaded_into_the_layers_that_are_there(served, form):
    jobs.check_reloaded(served[form], served["other"])


def test_a_wrong_scale_is_seen_by_the_judge(served, faults):
    assert faults(ok(served["modelopt"])["runs"][2], "up's scale halved") != []


def test_a_compiled_model_is_as_near_to_the_truth(served, faults):
    assert all(ok(served["compiled"])["layers"])
    assert faults(served["compiled"]["runs"][0], "compiled") == []


def test_the_librarys_selection_serves_as_vllms_does(served, faults):
    """It weighs the experts, and vLLM applies the factor to their sum."""
    result = ok(served["own router"])
    assert result["routes"] == [True, True]
    assert faults(result["runs"][0], "own router") == []
    tokens, theirs = ([one["tokens"] for one in ok(served[name])["runs"][0]] for name in ("own router", "modelopt"))
    assert tokens == theirs


def test_vllm_refuses_such_experts_on_a_cpu_before_the_plugin_is_asked(paths, serve):
    if on_gpu():
        pytest.skip("vLLM has kernels for them on GPUs")
    (result,) = serve([job("as it is", paths["modelopt"])]).values()
    assert "is_act_and_mul=False is supported only for CUDA" in result["error"]


@pytest.fixture(scope="session")
def ranked(paths, serve):
    return jobs.two_ranks(serve, paths["modelopt"], without_a_gate=True)


@pytest.mark.parametrize("how", ["slices", "experts"])
def test_two_ranks_are_as_near_to_the_truth_as_one(ranked, faults, how):
    assert faults(ok(ranked[how])["runs"][0], how) == []
