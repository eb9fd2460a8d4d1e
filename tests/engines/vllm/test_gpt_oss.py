"""vLLM's real engine over a tiny gpt-oss as it is published: MXFP4 experts with biases, rows of gate and up in turn.

The stock engine serves the twin in bfloat16; its own kernel for MXFP4 needs AMX on a CPU.
"""

from __future__ import annotations

import pytest
from judges import judge, judge_without_routers, ok, on_gpu

TOKENS = 12
FORMATS = ("nvfp4", "fp8", "int8_block")


@pytest.fixture(scope="session")
def paths(tmp_path_factory):
    """{name: directory}: two models and their twins, and the first with what a loader may do wrong to its biases.

    They differ in their experts alone: vLLM 0.32 seems to go on with the first model's attention sinks when it reloads a gpt-oss.
    """
    import gpt_oss

    root, first = tmp_path_factory.mktemp("gpt_oss"), gpt_oss.make(0)
    other = gpt_oss.with_experts_of(gpt_oss.make(1), first)
    found = gpt_oss.write_all(root / "first", first)
    found |= {f"other {form}": path for form, path in gpt_oss.write_all(root / "other", other).items()}
    for name, change in {
        "no biases": lambda name, bias: bias * 0,
        "down's twice": lambda name, bias: bias * (2 if "down" in name else 1),
        "halves": lambda name, bias: bias if "down" in name else bias.reshape(*bias.shape[:-1], 2, -1).mT.flatten(-2),
    }.items():
        found[name] = gpt_oss.write(root / name, "gpt_oss", gpt_oss.with_biases(first, change))
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="session")
def served(paths, serve):
    first = paths["gpt_oss"]
    jobs = [{"name": name, "model": paths[name], "routers": True, "tokens": TOKENS}
            for name in ("gpt_oss_twin", "other gpt_oss_twin", "gpt_oss")]  # fmt: skip
    jobs[-1]["reload"] = [paths[name] for name in ("other gpt_oss", "no biases", "down's twice", "halves", "gpt_oss")]
    jobs += [
        {"name": name, "model": first, "options": {"additional_config": {"nvfp4_moe": {"activations": name}}}}
        for name in (FORMATS if not on_gpu() else FORMATS[:2])
    ]
    jobs += [
        {
            "name": "own router",
            "model": first,
            "options": {"additional_config": {"nvfp4_moe": {"router": "own"}}},
            "tokens": TOKENS,
        },
        {"name": "dummy", "model": first, "options": {"load_format": "dummy"}},
        {"name": "off", "model": first, "options": {"additional_config": {"nvfp4_moe": {"mode": "0"}}}},
    ]
    return serve(jobs)


@pytest.fixture(scope="session")
def truths(paths):
    import truth

    return {name: truth.Truth(paths[name]) for name in ("gpt_oss_twin", "other gpt_oss_twin")}


def test_it_says_what_its_twin_says(served, truths):
    result = ok(served["gpt_oss"])
    assert result["methods"] == ["NvFp4MoeGptOssMethod"] * 2
    assert all("128x64, experts 0..7 of 8, top-2, swiglu_oai, bf16" in layer for layer in result["layers"])
    assert ok(served["gpt_oss_twin"])["methods"] == ["UnquantizedFusedMoEMethod"] * 2
    judge(truths["gpt_oss_twin"], served["gpt_oss_twin"]["runs"][0], result["runs"][0], "gpt-oss")


def test_weights_and_biases_are_reloaded_into_the_layers_that_are_there(served, truths):
    result = ok(served["gpt_oss"])
    assert all(handles == result["handles"][0] for handles in result["handles"])
    assert result["runs"][-1] == result["runs"][0], "back at the first weights"
    twin = ok(served["other gpt_oss_twin"])["runs"][0]
    judge(truths["other gpt_oss_twin"], twin, result["runs"][1], "gpt-oss, reloaded")


@pytest.mark.parametrize(("number", "what"), [(2, "no biases"), (3, "down's twice"), (4, "halves")])
def test_biases_that_are_wrong_are_seen_by_the_judge(served, truths, number, what):
    """What the bounds are worth: biases that are lost, counted by two ranks or taken in halves do not pass them."""
    from truth import measure

    twin = measure(truths["gpt_oss_twin"], ok(served["gpt_oss_twin"])["runs"][0])
    wrong = measure(truths["gpt_oss_twin"], ok(served["gpt_oss"])["runs"][number])
    print(f"\n{what}: {wrong}\ntwin: {twin}")
    assert wrong.logprob > 2 * twin.logprob or max(wrong.expert_margins, default=0) > 2 * twin.router


@pytest.mark.parametrize("name", FORMATS)
def test_activations_are_configured(served, name):
    if name not in served:
        pytest.skip(f"{name} runs on CPUs")
    assert all(f", {name}, " in layer for layer in ok(served[name])["layers"])


def test_the_library_s_router_takes_logits_with_a_bias(served, truths):
    own = ok(served["own router"])
    assert own["routes"] == [True, True] and ok(served["gpt_oss"])["routes"] == [False, False]
    judge_without_routers(truths["gpt_oss_twin"], served["gpt_oss_twin"]["runs"][0], own["runs"][0], "own router")


def test_dummy_weights_serve(served):
    result = ok(served["dummy"])
    assert result["methods"] == ["NvFp4MoeGptOssMethod"] * 2
    values = [value for said in result["runs"][0] for step in said["logprobs"] for value in step.values()]
    assert values and all(value == value and abs(value) < 1e6 for value in values)


def test_off_leaves_the_model_to_vllm(served):
    """On a CPU without AMX vLLM has no kernel for MXFP4: its own words are what proves that the plugin is off."""
    import torch

    result = served["off"]
    if on_gpu() or torch.cpu._is_amx_tile_supported():
        assert ok(result)["methods"] == ["GptOssMxfp4MoEMethod"] * 2
    else:
        assert "No MXFP4 MoE backend supports" in result["error"]


@pytest.fixture(scope="session")
def ranked(paths, serve):
    import torch

    if on_gpu() and torch.cuda.device_count() < 2:
        pytest.skip("two ranks need two GPUs")
    two = {"tensor_parallel_size": 2}
    jobs = [{"name": name, "model": paths["gpt_oss"], "options": two | more, "tokens": TOKENS}
            for name, more in (("slices", {}), ("experts", {"enable_expert_parallel": True}))]  # fmt: skip
    return serve(jobs, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"})


@pytest.mark.parametrize("how", ["slices", "experts"])
def test_two_ranks_count_each_bias_once(ranked, served, truths, how):
    """Twice down's bias is beyond the bound that this run keeps: a test above."""
    twin = ok(served["gpt_oss_twin"])["runs"][0]
    judge_without_routers(truths["gpt_oss_twin"], twin, ok(ranked[how])["runs"][0], how)


@pytest.fixture(scope="session")
def compiled(paths, serve):
    options = {"enforce_eager": False}
    return serve(
        [
            {"name": name, "model": paths[name], "options": options, "tokens": TOKENS}
            for name in ("gpt_oss_twin", "gpt_oss")
        ]
    )


@pytest.mark.parametrize("form", ["gpt_oss_twin", "gpt_oss"])
def test_a_compiled_model_is_as_near_to_the_truth_as_an_eager_one(compiled, served, truths, form):
    twin = ok(served["gpt_oss_twin"])["runs"][0]
    judge_without_routers(truths["gpt_oss_twin"], twin, ok(compiled[form])["runs"][0], f"{form}, compiled")
