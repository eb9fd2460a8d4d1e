"""vLLM's real engine over a tiny DeepSeek-V3 whose experts the library selects, compared with vLLM's selection.

vLLM's own gate, shared expert and attention (without MLA, which has no kernel for all CPUs) surround the experts.
"""

from __future__ import annotations

import deepseek_v3
import jobs
import pytest
import torch
from jobs import job, ok
from models import Model

WITHIN = 0.1  # log-probabilities: twice the largest difference that roundings to bfloat16 made here


@pytest.fixture(scope="session")
def paths(tmp_path_factory):
    """{name: directory}: a model and its twin, another model, and the first with a bias or a factor that is wrong."""
    root, first = tmp_path_factory.mktemp("deepseek_v3"), deepseek_v3.make(0)
    dense = {
        name: torch.zeros_like(tensor) if name.endswith("e_score_correction_bias") else tensor
        for name, tensor in first.dense.items()
    }
    unbiased = Model(first.experts, dense)
    found = {form: deepseek_v3.write(root / form, form, first) for form in ("twin", "modelopt")}
    found["other"] = deepseek_v3.write(root / "other", "modelopt", deepseek_v3.make(1))
    found["no bias"] = deepseek_v3.write(root / "unbiased", "modelopt", unbiased)
    found["no factor"] = deepseek_v3.write(root / "unscaled", "modelopt", first, routed_scaling_factor=1.0)
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="session")
def served(paths, serve):
    own, modelopt = {"router": "own"}, paths["modelopt"]
    return serve(
        [
            job("twin", paths["twin"]),
            job("engine", modelopt, {"router": "engine"}),
            job("own", modelopt, own, reload=[paths["other"], modelopt]),
            job("compiled engine", modelopt, {"router": "engine"}, options={"enforce_eager": False}),
            job("compiled own", modelopt, own, options={"enforce_eager": False}),
            *(job(name, paths[name], own) for name in ("other", "no bias", "no factor")),
        ],
        {"VLLM_MLA_DISABLE": "1"},
    )


def count_same(run, other) -> int:
    """Counts the prompts with the same tokens and with log-probabilities that differ by roundings."""

    def are(ours, theirs) -> bool:
        pairs = zip(ours["logprobs"], theirs["logprobs"], strict=True)
        return ours["tokens"] == theirs["tokens"] and all(
            abs(step[token] - expected[token]) <= WITHIN for step, expected in pairs for token in step.keys() & expected
        )

    return sum(are(*pair) for pair in zip(run, other, strict=True))


@pytest.mark.parametrize("how", ["", "compiled "])
def test_the_librarys_selection_serves_as_vllms_does(served, how):
    """Compiled, vLLM gives other tokens than eager in this model without MLA, and for the twin too."""
    result, engine = ok(served[f"{how}own"]), ok(served[f"{how}engine"])
    run, theirs = result["runs"][0], engine["runs"][0]
    assert result["routes"] == [True, True] and engine["routes"] == [False, False]
    said = [line for one in served.values() for line in one["log"]]  # vLLM's logger writes such a line once
    assert any("selects the experts of layers such as model.layers.*.mlp.experts" in line for line in said)
    assert not any("leaves the selection" in line for line in said)
    assert count_same(run, theirs) == len(theirs)


def test_most_prompts_say_what_the_twin_says(served):
    """The others choose another expert at a tie: the twin's kernels round at other places."""
    run, twin = ok(served["own"])["runs"][0], ok(served["twin"])["runs"][0]
    print(f"\n{count_same(run, twin)} of {len(twin)} prompts")
    assert count_same(run, twin) > len(twin) // 2


@pytest.mark.parametrize("wrong", ["no bias", "no factor"])
def test_a_wrong_router_is_seen(served, wrong):
    run, right = ok(served[wrong])["runs"][0], ok(served["engine"])["runs"][0]
    print(f"\n{count_same(run, right)} of {len(right)} prompts")
    assert served[wrong]["routes"] == [True, True] and count_same(run, right) < len(right) // 4


def test_a_reload_brings_its_bias(served):
    jobs.check_reloaded(served["own"], served["other"])
