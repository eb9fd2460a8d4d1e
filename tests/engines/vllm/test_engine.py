"""vLLM's real engine over tiny NVFP4 models: what it says is what the dequantized twin says, but for ties.

On a CPU by ./dev engines vllm. On a GPU by pytest alone, with vLLM and the package on PYTHONPATH: the same engines, whose
compiled ones are captured in CUDA graphs there.
"""

from __future__ import annotations

import json

import pytest
from judges import judge, judge_without_routers, ok, on_gpu

FORMS = ("modelopt", "modelopt_w4a16", "modelopt_mixed", "compressed_w4a4", "compressed_w4a16")
METHOD_OF = {
    form: f"NvFp4Moe{'ModelOpt' if form.startswith('modelopt') else 'CompressedTensors'}Method" for form in FORMS
}
TOKENS = 12


@pytest.fixture(scope="session")
def wrong_scale(tmp_path_factory):
    """The model with one tensor scale taken for gate and up: what an engine computes that reads the first of the two."""
    import models

    directory = tmp_path_factory.mktemp("wrong") / "modelopt"
    return models.write(directory, "modelopt", models.with_one_tensor_scale(models.make(0)))


@pytest.fixture(scope="session")
def served(made, wrong_scale, serve):
    """One process, one engine after the other."""
    first = {name: str(path) for name, path in made[0].items()}
    jobs = [{"name": "twin", "model": first["twin"], "routers": True, "tokens": TOKENS}]
    jobs += [{"name": form, "model": first[form], "routers": True, "tokens": TOKENS} for form in FORMS]
    auto = {"additional_config": {"nvfp4_moe": {"activations": "auto"}}}
    jobs[1]["reload"] = [str(made[1]["modelopt"]), str(wrong_scale), first["modelopt"]]
    jobs[4]["reload"] = [str(made[1]["compressed_w4a4"]), first["compressed_w4a4"]]
    jobs += [
        {"name": "other twin", "model": str(made[1]["twin"]), "routers": True, "tokens": TOKENS},
        {"name": "dummy", "model": first["modelopt"], "options": {"load_format": "dummy"}},
        {
            "name": "w4a4",
            "model": first["modelopt"],
            "options": {"additional_config": {"nvfp4_moe": {"activations": "nvfp4"}}},
        },
        {
            "name": "own router",
            "model": first["modelopt"],
            "options": {"additional_config": {"nvfp4_moe": {"router": "own"}}},
            "tokens": TOKENS,
        },
        *({"name": f"auto {form}", "model": first[form], "options": auto} for form in ("modelopt", "modelopt_mixed")),
        {
            "name": "lora",
            "model": first["modelopt"],
            "options": {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"]},
            "tokens": TOKENS,
        },
        {"name": "off", "model": first["modelopt"], "options": {"additional_config": {"nvfp4_moe": {"mode": "0"}}}},
        {"name": "refused", "model": first["modelopt"], "options": {"moe_backend": "emulation"}},
        {
            "name": "insisted",
            "model": first["modelopt"],
            "options": {"moe_backend": "emulation"},
            "environment": {"NVFP4_MOE_MODE": "1"},
        },
        {
            "name": "misspelt",
            "model": first["modelopt"],
            "options": {"additional_config": {"nvfp4_moe": {"activation": "nvfp4"}}},
        },
    ]
    return serve(jobs)


@pytest.fixture(scope="session")
def truth(made):
    import truth

    return {seed: truth.Truth(made[seed]["twin"]) for seed in made}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_says_what_its_twin_says(served, truth, form):
    result = ok(served[form])
    assert result["methods"] == [METHOD_OF[form]] * 2 and all(result["layers"])
    judge(truth[0], ok(served["twin"])["runs"][0], result["runs"][0], form)


def test_the_log_says_that_it_is_on(served):
    lines = ok(served["modelopt"])["log"]
    assert any("model.layers.0.mlp.experts: <MoeLayer 128x64, experts 0..7 of 8, top-2" in line for line in lines)
    assert any("packed 2 of 2 layers" in line for line in lines)


def test_every_form_has_the_same_bits(served):
    """The same numbers in five forms: what the engine says is equal to the last bit."""
    first = ok(served["modelopt"])["runs"][0]
    for form in FORMS[1:]:
        assert ok(served[form])["runs"][0] == first


@pytest.mark.parametrize("form", ["modelopt", "compressed_w4a4"])
def test_weights_are_reloaded_into_the_layers_that_are_there(served, truth, form):
    result = ok(served[form])
    assert all(handles == result["handles"][0] for handles in result["handles"])
    assert result["runs"][-1] == result["runs"][0], "back at the first weights"
    judge(truth[1], ok(served["other twin"])["runs"][0], result["runs"][1], f"{form}, reloaded")


def test_a_wrong_scale_is_seen_by_the_judge(served, truth):
    """What the bounds are worth: the same engine over weights whose up scales are gate's does not pass them."""
    from truth import measure

    twin = measure(truth[0], ok(served["twin"])["runs"][0])
    wrong = measure(truth[0], ok(served["modelopt"])["runs"][2])
    print(f"\nwrong scale: {wrong}\ntwin: {twin}")
    assert wrong.logprob > 2 * twin.logprob or max(wrong.expert_margins, default=0) > 2 * twin.router


def test_dummy_weights_serve(served):
    result = ok(served["dummy"])
    assert result["methods"] == ["NvFp4MoeModelOptMethod"] * 2
    values = [value for said in result["runs"][0] for step in said["logprobs"] for value in step.values()]
    assert values and all(value == value and abs(value) < 1e6 for value in values)


def test_activations_are_configured(served):
    assert all(", bf16, " in layer for layer in ok(served["modelopt"])["layers"])
    assert all(", nvfp4, " in layer for layer in ok(served["w4a4"])["layers"])


def test_activations_follow_what_the_checkpoint_declares(served):
    """W4A4 in the first layer; the second of the mixed model is weight-only."""
    w4a4 = "bf16" if on_gpu() else "int8_block"
    for form, second in (("modelopt", w4a4), ("modelopt_mixed", "bf16")):
        result = ok(served[f"auto {form}"])
        assert [f", {format_}, " in layer for format_, layer in zip((w4a4, second), result["layers"], strict=True)] == [
            True,
            True,
        ]
        said = [line for line in result["log"] if "activations: " in line]
        assert f"activations: {w4a4}, because W4A4 is declared" in said[0]
        assert len(said) == len({w4a4, second}) or "quant_algo W4A16_NVFP4" in said[1]


def test_a_model_without_quantized_experts_is_left_alone_by_the_plugin(served):
    assert [line for line in ok(served["twin"])["log"] if "nvfp4-moe" in line] == []


def test_lora_on_attention_leaves_the_experts_to_the_library(served):
    result = ok(served["lora"])
    assert result["methods"] == ["NvFp4MoeModelOptMethod"] * 2
    assert result["runs"][0][0]["tokens"] == ok(served["modelopt"])["runs"][0][0]["tokens"]


def test_off_leaves_the_model_to_vllm(served):
    """vLLM has no NVFP4 kernel for a CPU, and says so: its own words are what proves that the plugin is off."""
    result = served["off"]
    assert "nvfp4-moe leaves" not in " ".join(result["log"])
    if on_gpu():
        assert ok(result)["methods"] == ["ModelOptNvFp4FusedMoE"] * 2
    else:
        assert "NvFp4 MoE backend" in result["error"]


def test_a_layer_that_is_not_taken_is_left_to_vllm_with_the_reason(served):
    result = served["refused"]
    if not on_gpu():  # where vLLM has no kernel either
        said = "nvfp4-moe left model.layers.0.mlp.experts to vLLM, which has no kernel for it here: --moe-backend emulation"
        assert any(line.startswith("WARNING") and said in line for line in result["log"]) and said in result["error"]
    (line,) = [line for line in result["log"] if "nvfp4-moe leaves" in line]
    assert "layers such as model.layers.*.mlp.experts to vLLM: --moe-backend emulation was asked for" in line
    assert result["error"] is None or "NvFp4" in result["error"]


def test_a_layer_that_is_not_taken_is_an_error_where_the_user_insists(served):
    error = served["insisted"]["error"]
    assert "nvfp4-moe cannot take model.layers.0.mlp.experts: --moe-backend emulation was asked for" in error
    assert "NVFP4_MOE_MODE=auto leaves such layers to vLLM" in error


def test_a_key_of_the_configuration_that_means_nothing_is_an_error(served):
    assert "expected the keys mode, activations, router and exchange, got activation" in served["misspelt"]["error"]


# ---- several ranks, and a compiler


@pytest.fixture(scope="session")
def ranked(made, serve):
    """Two ranks: slices of each expert, experts in two halves, and experts dealt out in turn."""
    import torch

    if on_gpu() and torch.cuda.device_count() < 2:
        pytest.skip("two ranks need two GPUs")
    two = {"tensor_parallel_size": 2}
    jobs = [
        {"name": "slices", "model": str(made[0]["modelopt"]), "options": two, "tokens": TOKENS},
        {
            "name": "experts",
            "model": str(made[0]["modelopt"]),
            "options": two | {"enable_expert_parallel": True},
            "tokens": TOKENS,
        },
    ]
    return serve(jobs, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"})


@pytest.mark.parametrize("how", ["slices", "experts"])
def test_two_ranks_are_as_near_to_the_truth_as_one(ranked, served, truth, how):
    judge_without_routers(truth[0], ok(served["twin"])["runs"][0], ok(ranked[how])["runs"][0], how)


@pytest.fixture(scope="session")
def compiled(made, serve):
    jobs = [
        {"name": form, "model": str(made[0][form]), "options": {"enforce_eager": False}, "tokens": TOKENS}
        for form in ("twin", "modelopt", "compressed_w4a4")
    ]
    own = {"enforce_eager": False, "additional_config": {"nvfp4_moe": {"router": "own"}}}
    jobs.append({"name": "own router", "model": str(made[0]["modelopt"]), "options": own, "tokens": TOKENS})
    return serve(jobs)


def test_a_compiled_engine_runs_layers_of_its_own(compiled):
    """The second engine's graph does not run the first's layers."""
    assert all(all(ok(compiled[form])["layers"]) for form in ("modelopt", "compressed_w4a4"))
    assert compiled["modelopt"]["handles"] != compiled["compressed_w4a4"]["handles"]


@pytest.mark.parametrize("form", ["twin", "modelopt", "compressed_w4a4", "own router"])
def test_a_compiled_model_is_as_near_to_the_truth_as_an_eager_one(compiled, served, truth, form):
    judge_without_routers(truth[0], ok(served["twin"])["runs"][0], ok(compiled[form])["runs"][0], f"{form}, compiled")


def test_the_library_s_router_serves_as_vllm_s_does(served, truth):
    """Where it selects the experts by itself vLLM's routers do not run, and what is said is as near to the truth."""
    own = ok(served["own router"])
    assert own["routes"] == [True, True] and ok(served["modelopt"])["routes"] == [False, False]
    # vLLM's logger writes such a line once a process, for whichever engine comes first.
    said = [line for result in served.values() for line in result["log"]]
    assert any("selects the experts of layers such as model.layers.*.mlp.experts" in line for line in said)
    assert any("computes the gates of few tokens" in line for line in said) == on_gpu()
    judge_without_routers(truth[0], ok(served["twin"])["runs"][0], own["runs"][0], "own router")


def test_results_are_json_of_numbers(served):
    """NaN would compare unequal to everything and pass for nothing: it must not be there."""
    assert "NaN" not in json.dumps([result["runs"] for result in served.values()])
