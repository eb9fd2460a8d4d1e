"""vLLM's real engine over a tiny Nemotron-3 without Mamba layers: experts without a gate, relu2, in each form, among vLLM's latent
projections, shared expert, sigmoid router and factor.

vLLM has no kernel for such experts on a CPU, neither quantized nor not, and refuses them before the plugin is asked: that
refusal is taken out (without_a_gate.py), and what bfloat16 can hold is measured on transformers' model in it.
"""

from __future__ import annotations

import pytest
from judges import ok, on_gpu

FORMS = ("modelopt", "modelopt_w4a16", "modelopt_mixed", "compressed_w4a4", "compressed_w4a16")
FORMATS = ("nvfp4", "fp8", "int8_block")
TOKENS = 12


@pytest.fixture(scope="session")
def paths(tmp_path_factory):
    """{name: directory}: two models in each form, and the first with its up matrices' tensor scales halved."""
    import models
    import nemotron

    root, first = tmp_path_factory.mktemp("nemotron"), nemotron.make(0)
    halved = {
        key: matrix._replace(tensor_scale=matrix.tensor_scale / (2 if key[2] == "up_proj" else 1))
        for key, matrix in first.experts.items()
    }
    found = nemotron.write_all(root / "first", first)
    found |= {f"other {form}": path for form, path in nemotron.write_all(root / "other", nemotron.make(1)).items()}
    found["wrong"] = nemotron.write(root / "wrong", "modelopt", models.Model(halved, first.dense))
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="session")
def served(paths, serve):
    jobs = [{"name": form, "model": paths[form], "tokens": TOKENS} for form in FORMS]
    jobs[0]["reload"] = [paths["other modelopt"], paths["wrong"], paths["modelopt"]]
    jobs[3]["reload"] = [paths["other compressed_w4a4"], paths["compressed_w4a4"]]
    jobs += [
        {
            "name": name,
            "model": paths["modelopt"],
            "options": {"additional_config": {"nvfp4_moe": {"activations": name}}},
        }
        for name in (FORMATS if not on_gpu() else FORMATS[:2])
    ]
    jobs += [
        {"name": "off", "model": paths["modelopt"], "options": {"additional_config": {"nvfp4_moe": {"mode": "0"}}}},
        {"name": "compiled", "model": paths["modelopt"], "options": {"enforce_eager": False}, "tokens": TOKENS},
    ]
    return serve([job | {"without_a_gate": True} for job in jobs])


@pytest.fixture(scope="session")
def truths(paths):
    """{name: (the model in float32, the same in bfloat16)} by transformers."""
    import torch
    import truth

    return {
        name: (truth.Truth(paths[name]), truth.Truth(paths[name], torch.bfloat16)) for name in ("twin", "other twin")
    }


def judge(pair, run, what: str):
    """No further from float32 than twice what transformers' own model in bfloat16 is, over the same sequences."""
    from truth import measure_beside

    ours, yardstick = measure_beside(*pair, run)
    print(f"\n{what}: {ours}\ntransformers in bfloat16: {yardstick}")
    assert ours.values == yardstick.values > 100
    return [fault for fault in ours.faults(yardstick) if "values compared" not in fault]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_says_what_transformers_says(served, truths, form):
    result = ok(served[form])
    method = f"NvFp4Moe{'ModelOpt' if form.startswith('modelopt') else 'CompressedTensors'}Method"
    assert result["methods"] == [method] * 2
    assert all("64x64, experts 0..7 of 8, top-8, relu2, bf16" in layer for layer in result["layers"])
    assert judge(truths["twin"], result["runs"][0], form) == []
    assert result["runs"][0] == ok(served["modelopt"])["runs"][0], "the same numbers in every form, to the last bit"


@pytest.mark.parametrize("form", ["modelopt", "compressed_w4a4"])
def test_weights_are_reloaded_into_the_layers_that_are_there(served, truths, form):
    result = ok(served[form])
    assert all(handles == result["handles"][0] for handles in result["handles"])
    assert result["runs"][-1] == result["runs"][0], "back at the first weights"
    assert judge(truths["other twin"], result["runs"][1], f"{form}, reloaded") == []


def test_a_wrong_scale_is_seen_by_the_judge(served, truths):
    assert judge(truths["twin"], ok(served["modelopt"])["runs"][2], "up's scale halved") != []


@pytest.mark.parametrize("name", FORMATS)
def test_activations_are_configured(served, name):
    if name not in served:
        pytest.skip(f"{name} runs on CPUs")
    assert all(f"relu2, {name}, " in layer for layer in ok(served[name])["layers"])


def test_a_compiled_model_is_as_near_to_the_truth(served, truths):
    assert all(ok(served["compiled"])["layers"])
    assert judge(truths["twin"], served["compiled"]["runs"][0], "compiled") == []


def test_off_leaves_the_model_to_vllm(served):
    """vLLM has no NVFP4 kernel for a CPU, and says so: its own words are what proves that the plugin is off."""
    if on_gpu():
        assert ok(served["off"])["methods"] == ["ModelOptNvFp4FusedMoE"] * 2
    else:
        assert "NvFp4 MoE backend" in served["off"]["error"]


def test_vllm_refuses_such_experts_on_a_cpu_before_the_plugin_is_asked(paths, serve):
    if on_gpu():
        pytest.skip("vLLM has kernels for them on GPUs")
    (result,) = serve([{"name": "as it is", "model": paths["modelopt"]}]).values()
    assert "is_act_and_mul=False is supported only for CUDA" in result["error"]


@pytest.fixture(scope="session")
def ranked(paths, serve):
    import torch

    if on_gpu() and torch.cuda.device_count() < 2:
        pytest.skip("two ranks need two GPUs")
    jobs = [{"name": name, "model": paths["modelopt"], "tokens": TOKENS, "without_a_gate": True,
             "options": {"tensor_parallel_size": 2} | more}
            for name, more in (("slices", {}), ("experts", {"enable_expert_parallel": True}))]  # fmt: skip
    return serve(jobs, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"})


@pytest.mark.parametrize("how", ["slices", "experts"])
def test_two_ranks_are_as_near_to_the_truth_as_one(ranked, truths, how):
    assert judge(truths["twin"], ok(ranked[how])["runs"][0], how) == []
