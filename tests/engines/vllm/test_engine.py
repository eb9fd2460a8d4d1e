"""vLLM's real engine over tiny NVFP4 models: its output equals the dequantized twin's, except at ties.

On a CPU run it with ./dev engines vllm. On a GPU run it with pytest, with vLLM and the package on PYTHONPATH: the same
engines run, and the compiled ones are captured in CUDA graphs there.
"""

from __future__ import annotations

import json

import jobs
import models
import pytest
from jobs import job, method_of, ok, on_gpu
from judges import is_seen, judge, judge_without_routers
from models import QUANTIZED as FORMS
from truth import Truth


@pytest.fixture(scope="session")
def wrong_scale(tmp_path_factory):
    """Writes the model with one tensor scale for gate and up, as an engine that reads only the first of the two
    computes it."""
    return models.write(
        tmp_path_factory.mktemp("wrong") / "one", "modelopt", models.scaled(models.make(0), "up_proj", 0.25)
    )


@pytest.fixture(scope="session")
def served(made, wrong_scale, serve):
    """One process, one engine after the other."""
    first, other = made[0], made[1]
    modelopt, other_backend = first["modelopt"], {"moe_backend": "emulation"}
    reload = {
        "modelopt": [str(path) for path in (other["modelopt"], wrong_scale, modelopt)],
        "compressed_w4a4": [str(path) for path in (other["compressed_w4a4"], first["compressed_w4a4"])],
    }
    lora = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"]}
    return serve([
        *(job(form, first[form], routers=True, reload=reload.get(form, [])) for form in ("twin", *FORMS)),
        job("other", other["modelopt"], routers=True),
        job("dummy", modelopt, options={"load_format": "dummy"}),
        job("w4a4", modelopt, {"activations": "nvfp4"}),
        job("own router", modelopt, {"router": "own"}),
        *(job(f"auto {form}", first[form], {"activations": "auto"}) for form in ("modelopt", "modelopt_mixed")),
        job("lora", modelopt, options=lora),
        job("off", modelopt, {"mode": "0"}),
        job("refused", modelopt, options=other_backend),
        job("insisted", modelopt, options=other_backend, environment={"NVFP4_MOE_MODE": "1"}),
        job("misspelt", modelopt, {"activation": "nvfp4"}),
    ])  # fmt: skip


@pytest.fixture(scope="session")
def judged(made, served):
    """judged(judge, run, what): judges a run of the first model with one of ../common/judges.py."""
    truth = Truth(made[0]["twin"])
    return lambda judge, run, what: judge(truth, ok(served["twin"])["runs"][0], run, what)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_says_what_its_twin_says(served, judged, form):
    result = ok(served[form])
    assert result["methods"] == [method_of(form)] * 2 and all(result["layers"])
    judged(judge, result["runs"][0], form)
    assert result["runs"][0] == ok(served["modelopt"])["runs"][0], "the same numbers in every form, to the last bit"


def test_the_log_says_that_it_is_on(served):
    lines = ok(served["modelopt"])["log"]
    assert any("model.layers.0.mlp.experts: <MoeLayer 128x64, experts 0..7 of 8, top-2" in line for line in lines)
    assert any("packed 2 of 2 layers" in line for line in lines)


@pytest.mark.parametrize("form", ["modelopt", "compressed_w4a4"])
def test_weights_are_reloaded_into_the_layers_that_are_there(served, form):
    """Every form gives the same bits, so one engine with the other weights serves for both forms."""
    jobs.check_reloaded(served[form], served["other"])


def test_a_wrong_scale_is_seen_by_the_judge(served, judged):
    assert judged(is_seen, ok(served["modelopt"])["runs"][2], "wrong scale")


def test_dummy_weights_serve(served):
    jobs.check_dummy(served["dummy"], "NvFp4MoeModelOptMethod")


def test_activations_are_configured(served):
    assert all(", bf16, " in layer for layer in ok(served["modelopt"])["layers"])
    assert all(", nvfp4, " in layer for layer in ok(served["w4a4"])["layers"])


def test_activations_follow_what_the_checkpoint_declares(served):
    """W4A4 in the first layer; the second of the mixed model is weight-only."""
    w4a4 = "bf16" if on_gpu() else "int8_block"
    for form, second in (("modelopt", w4a4), ("modelopt_mixed", "bf16")):
        result = ok(served[f"auto {form}"])
        formats = [repr_of_layer.split(", ")[-2] for repr_of_layer in result["layers"]]
        assert formats == [w4a4, second]
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
    """vLLM has no NVFP4 kernel for a CPU. Its own error message proves that the plugin is off."""
    result = served["off"]
    assert "nvfp4-moe leaves" not in " ".join(result["log"])
    if on_gpu():
        assert ok(result)["methods"] == ["ModelOptNvFp4FusedMoE"] * 2
    else:
        assert "NvFp4 MoE backend" in result["error"]


def test_a_layer_that_is_not_taken_is_left_to_vllm_with_the_reason(served):
    result = served["refused"]
    if not on_gpu():  # vLLM has no kernel there either
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
    return jobs.two_ranks(serve, made[0]["modelopt"])


@pytest.mark.parametrize("how", ["slices", "experts"])
def test_two_ranks_are_as_near_to_the_truth_as_one(ranked, judged, how):
    judged(judge_without_routers, ok(ranked[how])["runs"][0], how)


@pytest.fixture(scope="session")
def compiled(made, serve):
    options = {"enforce_eager": False}
    forms = [job(form, made[0][form], options=options) for form in ("twin", "modelopt", "compressed_w4a4")]
    return serve([*forms, job("own router", made[0]["modelopt"], {"router": "own"}, options=options)])


def test_a_compiled_engine_runs_layers_of_its_own(compiled):
    """The second engine's graph does not run the first's layers."""
    assert all(all(ok(compiled[form])["layers"]) for form in ("modelopt", "compressed_w4a4"))
    assert compiled["modelopt"]["handles"] != compiled["compressed_w4a4"]["handles"]


@pytest.mark.parametrize("form", ["twin", "modelopt", "compressed_w4a4", "own router"])
def test_a_compiled_model_is_as_near_to_the_truth_as_an_eager_one(compiled, judged, form):
    judged(judge_without_routers, ok(compiled[form])["runs"][0], f"{form}, compiled")


def test_the_library_s_router_serves_as_vllm_s_does(served, judged):
    """If it selects the experts itself, vLLM's routers do not run, and the output is as near to the truth."""
    own = ok(served["own router"])
    assert own["routes"] == [True, True] and ok(served["modelopt"])["routes"] == [False, False]
    # vLLM's logger writes such a line once per process, for the first engine.
    said = [line for result in served.values() for line in result["log"]]
    assert any("selects the experts of layers such as model.layers.*.mlp.experts" in line for line in said)
    assert any("computes the gates of few tokens" in line for line in said) == on_gpu()
    judged(judge_without_routers, own["runs"][0], "own router")


def test_results_are_json_of_numbers(served):
    """A NaN compares unequal to everything, so it would pass comparisons unnoticed. It must not occur."""
    assert "NaN" not in json.dumps([result["runs"] for result in served.values()])
