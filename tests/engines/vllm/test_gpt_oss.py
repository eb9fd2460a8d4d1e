"""vLLM's real engine over a tiny gpt-oss as it is published: MXFP4 experts with biases, and alternate rows of gate and
up.

The stock engine serves the twin in bfloat16, because its own kernel for MXFP4 needs AMX on a CPU.
"""

from __future__ import annotations

import gpt_oss
import jobs
import pytest
from jobs import job, ok
from judges import is_seen, judge, judge_without_routers
from truth import Truth


@pytest.fixture(scope="session")
def paths(tmp_path_factory):
    """{name: directory}: two models and their twins, and the first with a loader's possible mistakes in its biases.

    They differ only in their experts: vLLM 0.32 seems to keep the first model's attention sinks when it reloads a
    gpt-oss.
    """
    root, first = tmp_path_factory.mktemp("gpt_oss"), gpt_oss.make(0)
    other = gpt_oss.with_experts_of(gpt_oss.make(1), first)
    found = gpt_oss.write_all(root / "first", first)
    found |= {f"other {form}": path for form, path in gpt_oss.write_all(root / "other", other).items()}
    for name, change in gpt_oss.WRONG_BIASES.items():
        found[name] = gpt_oss.write(root / name, "gpt_oss", gpt_oss.with_biases(first, change))
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="session")
def served(paths, serve):
    first = paths["gpt_oss"]
    reload = [paths[name] for name in ("other gpt_oss", *gpt_oss.WRONG_BIASES, "gpt_oss")]
    return serve([
        *(job(name, paths[name], routers=True) for name in ("gpt_oss_twin", "other gpt_oss")),
        job("gpt_oss", first, routers=True, reload=reload),
        job("own router", first, {"router": "own"}),
        job("dummy", first, options={"load_format": "dummy"}),
    ])  # fmt: skip


@pytest.fixture(scope="session")
def judged(paths, served):
    """judged(judge, run, what): judges a run of the first model with one of ../common/judges.py."""
    truth = Truth(paths["gpt_oss_twin"])
    return lambda judge, run, what: judge(truth, ok(served["gpt_oss_twin"])["runs"][0], run, what)


def test_it_says_what_its_twin_says(served, judged):
    result = ok(served["gpt_oss"])
    assert result["methods"] == ["NvFp4MoeGptOssMethod"] * 2
    assert all("128x64, experts 0..7 of 8, top-2, swiglu_oai, bf16" in layer for layer in result["layers"])
    assert ok(served["gpt_oss_twin"])["methods"] == ["UnquantizedFusedMoEMethod"] * 2
    judged(judge, result["runs"][0], "gpt-oss")


def test_weights_and_biases_are_reloaded_into_the_layers_that_are_there(served):
    jobs.check_reloaded(served["gpt_oss"], served["other gpt_oss"])


@pytest.mark.parametrize(("number", "what"), list(enumerate(gpt_oss.WRONG_BIASES, 2)))
def test_biases_that_are_wrong_are_seen_by_the_judge(served, judged, number, what):
    """Tests the bounds: biases that are lost, counted by two ranks or taken in halves exceed them."""
    assert judged(is_seen, ok(served["gpt_oss"])["runs"][number], what)


def test_the_library_s_router_takes_logits_with_a_bias(served, judged):
    own = ok(served["own router"])
    assert own["routes"] == [True, True] and ok(served["gpt_oss"])["routes"] == [False, False]
    judged(judge_without_routers, own["runs"][0], "own router")


def test_dummy_weights_serve(served):
    jobs.check_dummy(served["dummy"], "NvFp4MoeGptOssMethod")


@pytest.fixture(scope="session")
def ranked(paths, serve):
    return jobs.two_ranks(serve, paths["gpt_oss"])


@pytest.mark.parametrize("how", ["slices", "experts"])
def test_two_ranks_count_each_bias_once(ranked, judged, how):
    """Down's bias counted twice exceeds the bound of this run: a test above shows it."""
    judged(judge_without_routers, ok(ranked[how])["runs"][0], how)


@pytest.fixture(scope="session")
def compiled(paths, serve):
    return serve([job(name, paths[name], options={"enforce_eager": False}) for name in gpt_oss.FORMS])


@pytest.mark.parametrize("form", gpt_oss.FORMS)
def test_a_compiled_model_is_as_near_to_the_truth_as_an_eager_one(compiled, judged, form):
    judged(judge_without_routers, ok(compiled[form])["runs"][0], f"{form}, compiled")
