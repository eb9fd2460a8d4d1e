"""SGLang's FusedMoE with the plugin, in this process: its own loader and runner, against the library and a float64
layer.

The experts have a gate, or none, as Nemotron-3's. Ranks run one after the other: SGLang's parallel state is overridden
for each, and outputs are added as the all-reduce would.
"""

import copy
import logging

import models
import nvfp4_moe
import pytest
import torch
from expert_layer import batch, is_outside, library, of_experts, slice_of
from layers import NAME, ask, load, make_layer, pack, rank, run, served


@pytest.fixture(scope="module")
def model():
    return models.make(3)


@pytest.fixture(scope="module", params=["gated", "without a gate"])
def any_model(request, model):
    return model if request.param == "gated" else models.without_gates(models.make(7))


# ---- layers that are taken compute the right values


@pytest.mark.parametrize("form", models.QUANTIZED)
def test_every_form_is_the_librarys_layer_bit_for_bit(sglang, configured, any_model, form):
    configured()
    inputs = batch()
    out = served(sglang, form, any_model, inputs)
    assert torch.equal(out, library(any_model, inputs))
    assert not is_outside(any_model, inputs, out)


def test_scales_that_are_one_for_gate_and_up_would_be_seen(sglang, configured, model):
    configured()
    inputs = batch()
    assert is_outside(models.scaled(model, "up_proj", 0.25), inputs, served(sglang, "modelopt", model, inputs))


@pytest.mark.parametrize("form", ["modelopt", "compressed_w4a4", "compressed_w4a16"])
def test_ranks_have_experts_or_slices_of_the_library(sglang, configured, any_model, form):
    configured()
    inputs, half = batch(1), models.EXPERTS // 2
    for number in range(2):
        part = served(sglang, form, any_model, inputs, ep=(2, number))
        here = of_experts(inputs, range(number * half, (number + 1) * half))
        assert torch.equal(part, library(any_model, here)) and part.abs().max() > 0
        part = served(sglang, form, any_model, inputs, tp=(2, number))
        assert torch.equal(part, library(slice_of(any_model, number), inputs))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"swiglu_limit": 0.5}, {"activation": "swiglu_clamped", "swiglu_limit": 0.5}),
        ({"gemm1_clamp_limit": 0.5}, {"activation": "swiglu_step", "swiglu_limit": 0.5}),
        (
            {"gemm1_alpha": 1.5, "gemm1_clamp_limit": 0.5},
            {"activation": "swiglu_oai", "swiglu_alpha": 1.5, "swiglu_limit": 0.5},
        ),
        (
            {"activation": "situ", "gemm1_alpha": 1.5, "gemm1_clamp_limit": 0.5},
            {"activation": "situ", "situ_gate_limit": 1.5, "situ_up_limit": 0.5},
        ),
    ],
)
def test_limits_and_activations(sglang, configured, model, given, expected):
    configured()
    inputs = batch(4)
    out = served(sglang, "modelopt", model, inputs, **given)
    assert torch.equal(out, library(model, inputs, **expected))
    assert not torch.equal(out, library(model, inputs))


def test_the_routed_scaling_factor_is_applied_once(sglang, configured, any_model):
    configured()
    inputs = batch(5)
    expected = library(any_model, inputs)
    with rank(sglang):
        layer = make_layer("modelopt", any_model, routed_scaling_factor=2.5)
        assert layer.should_fuse_routed_scaling_factor_in_topk  # the router's weights include it
    assert torch.equal(served(sglang, "modelopt", any_model, inputs, routed_scaling_factor=2.5), expected)
    assert torch.equal(served(sglang, "compressed_w4a4", any_model, inputs, routed_scaling_factor=2.5), expected * 2.5)


def test_no_tokens_masked_ids_and_more_tokens_than_a_call_takes(sglang, configured, model, monkeypatch):
    configured()
    from nvfp4_moe.sglang import runner

    assert served(sglang, "modelopt", model, batch(tokens=0)).shape == (0, models.HIDDEN)
    hidden, ids, weights = batch(6)
    ids[2] = -1
    ids[4, 1] = -1
    # First in several calls: memory left by a run of all tokens would hide values that a call does not write.
    with monkeypatch.context() as several:
        several.setattr(runner, "MAX_TOKENS", 4)
        parts = served(sglang, "modelopt", model, (hidden, ids, weights))
    out = served(sglang, "modelopt", model, (hidden, ids, weights))
    assert torch.equal(parts, out)
    assert torch.equal(out, library(model, (hidden, ids, weights))) and not out[2].any()


@pytest.mark.parametrize("activation_format", ["nvfp4", "fp8", "int8_block"])
def test_activations_in_the_format_that_the_user_asks_for(
    sglang, configured, any_model, monkeypatch, activation_format
):
    configured()
    ask(monkeypatch, activation_format)
    inputs = batch(7)
    expected = library(any_model, inputs, activation_format=activation_format)
    for form in ("modelopt", "compressed_w4a4"):
        assert torch.equal(served(sglang, form, any_model, inputs), expected)


@pytest.fixture
def automatic(monkeypatch):
    """Layers that use the default format of activations, and a log that has not reported it yet."""
    from nvfp4_moe.sglang import experts

    ask(monkeypatch, "auto")
    monkeypatch.setattr(experts, "_load_log", experts.LoadLog(experts.log.info))


@pytest.mark.parametrize(
    ("form", "activation_format", "because"),
    [
        ("modelopt", "int8_block", "int8_block is more precise and fast on a host (quant_algo NVFP4)"),
        ("modelopt_w4a16", "bf16", "no quantization of activations is declared (quant_algo W4A16_NVFP4)"),
        ("modelopt_mixed", "int8_block", "(quant_algo NVFP4)"),
        ("compressed_w4a4", "int8_block", "input_activations of 4 bits, float)"),
        ("compressed_w4a16", "bf16", "input_activations is null)"),
    ],
)
def test_auto_follows_what_the_checkpoint_declares(
    sglang, configured, model, automatic, caplog, form, activation_format, because
):
    configured()
    inputs = batch(11)
    with caplog.at_level("INFO", "nvfp4_moe.sglang"):
        out = served(sglang, form, model, inputs)
    assert torch.equal(out, library(model, inputs, activation_format=activation_format))
    (line,) = [record.message for record in caplog.records if record.message.startswith("activations: ")]
    assert line.startswith(f"activations: {activation_format}, because ") and because in line


def test_modelopts_groups_and_each_matrix_of_a_mixed_model_are_read(sglang, configured, model, automatic, monkeypatch):
    """input_activations that are null next to quant_algo NVFP4, and an algorithm for only one projection."""
    from nvfp4_moe.sglang import internals

    configured()
    group = dict(models.quantization("modelopt")["config_groups"]["group_0"], input_activations=None)
    monkeypatch.setattr(internals, "config_groups", lambda: {"group_0": group})
    inputs = batch(12)
    assert torch.equal(served(sglang, "modelopt", model, inputs), library(model, inputs))
    mixed = models.quantization("modelopt_mixed")
    changed = mixed["quantized_layers"][f"{NAME}.5.down_proj"]
    monkeypatch.setattr(models, "quantization", lambda form: copy.deepcopy(mixed))
    changed["quant_algo"] = "W4A16_NVFP4"
    assert torch.equal(served(sglang, "modelopt_mixed", model, inputs), library(model, inputs))
    changed["quant_algo"] = "FP8"
    monkeypatch.setenv("NVFP4_MOE_MODE", "1")
    configured(moe_runner_backend="nvfp4_moe")
    with pytest.raises(nvfp4_moe.Unsupported, match=r"different formats.*gate_proj: NVFP4.*experts\.5\.down_proj: FP8"):
        served(sglang, "modelopt_mixed", model, inputs)


# ---- weights: freed, missing, updated


def test_parameters_are_freed_and_can_be_loaded_again_in_place(sglang, configured, model):
    configured()
    from nvfp4_moe.sglang.experts import packing_follows

    inputs, other = batch(8), models.make(4)
    for form in ("modelopt", "compressed_w4a4"):
        with rank(sglang):
            layer = make_layer(form)
            load(layer, form, model)
            with pytest.raises(ValueError, match=f"{NAME}: has no weights yet"):
                run(layer, *inputs)
            pack(layer)
            first = run(layer, *inputs)
            layer.quant_method.process_weights_after_loading(layer)  # a second call does nothing
            assert torch.equal(run(layer, *inputs), first)
            state = layer.scheme._experts if layer.scheme is not None else layer.quant_method.nvfp4_moe_state
            handle = state.ready().layer.handle
            with pytest.raises(nvfp4_moe.Unsupported, match=f"{NAME}: packed experts cannot be updated"):
                load(layer, form, other)
            assert torch.equal(run(layer, *inputs), first)
            with packing_follows():
                load(layer, form, other)
            with pytest.raises(ValueError, match="got new weights that were not packed"):
                run(layer, *inputs)
            pack(layer)
            assert torch.equal(run(layer, *inputs), library(other, inputs))
            assert state.ready().layer.handle == handle  # captured graphs contain it


def test_an_expert_that_no_file_brings_is_an_error(sglang, configured, any_model):
    configured()
    some = models.Model({key: matrix for key, matrix in any_model.experts.items() if key[1:] != (5, "up_proj")}, {})
    for form in ("modelopt", "compressed_w4a16"):
        with rank(sglang):
            layer = make_layer(form, any_model)
            load(layer, form, some)
            with pytest.raises(nvfp4_moe.BadInput, match=f"{NAME}: .*expert 5"):
                pack(layer)


def test_random_weights_of_a_dummy_load_are_made_legal(sglang, configured, model):
    configured(load_format="dummy")
    from nvfp4_moe.sglang.experts import packing_follows
    from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

    for form in ("modelopt", "compressed_w4a4"):
        with rank(sglang):
            layer = make_layer(form)
            initialize_dummy_weights(layer)
            assert (layer.w13_weight_scale.float() < 0).any()
            layer.quant_method.process_weights_after_loading(layer)
            assert run(layer, *batch()).isfinite().all()
            with packing_follows():
                load(layer, form, model)
            layer.w13_weight_scale.data[2, 5, 1] = float("nan")
            with pytest.raises(nvfp4_moe.BadInput):  # weights loaded later must be a checkpoint's
                layer.quant_method.process_weights_after_loading(layer)


# ---- layers that are left to SGLang

REFUSED = [
    ({"enable_eplb": True}, {}, "--enable-eplb: packed experts cannot be moved between ranks"),
    ({"enable_lora": True}, {}, "--enable-lora: LoRA on experts is not supported"),
    ({"moe_a2a_backend": "deepep"}, {}, "--moe-a2a-backend deepep: expected none"),
    ({"moe_runner_backend": "triton"}, {}, "--moe-runner-backend is triton: expected auto or nvfp4_moe"),
    ({}, {"activation": "gelu"}, "activation gelu"),
    ({}, {"activation": "situ", "gemm1_alpha": 4.0}, "expected both limits"),
    ({}, {"is_gated": False}, "not gated"),
    ({}, {"with_bias": True}, "experts with biases in a format for which SGLang has no parameters"),
    ({}, {"no_combine": True}, "no_combine"),
    ({}, {"gemm1_alpha": 1.702}, "expected a clamp limit"),
    ({}, {"use_weight_loader_fused": True}, "loads gate and up as one tensor"),
    ({}, {"apply_router_weight_on_input": True}, "router_weight"),
]


@pytest.mark.parametrize(("arguments", "options", "words"), REFUSED)
def test_what_is_not_taken_is_sglangs_with_one_line_that_says_why(
    sglang, configured, refusals, caplog, arguments, options, words
):
    configured(**arguments)
    with rank(sglang), caplog.at_level(logging.WARNING, "nvfp4_moe.sglang"):
        for number in range(2):
            # SGLang's own method, which reports that it has no kernel for NVFP4 on this machine.
            with pytest.raises(ValueError, match="Current platform does not support NVFP4"):
                make_layer("modelopt", prefix=f"model.layers.{number}.mlp.experts", **options)
    said = [record.getMessage() for record in caplog.records if record.name == "nvfp4_moe.sglang"]
    assert len(said) == 1 and words in said[0] and "left to SGLang" in said[0]


def test_a_gpu_without_kernels_of_its_own_is_sglangs_unless_the_user_insists(
    sglang, configured, refusals, model, monkeypatch, caplog
):
    monkeypatch.setattr(
        "nvfp4_moe._fused_experts.explain", lambda options, device: [{"chosen": True, "backend": "cuda"}]
    )
    configured()
    with rank(sglang), pytest.raises(ValueError, match="Current platform does not support NVFP4"):
        make_layer("modelopt")
    assert "would run the plain kernels" in caplog.text
    configured(moe_runner_backend="nvfp4_moe")
    inputs = batch(10)
    assert torch.equal(served(sglang, "modelopt", model, inputs), library(model, inputs))


def test_a_user_who_names_the_backend_insists_on_it(sglang, configured, model):
    from sglang.srt.server_args import MOE_RUNNER_BACKEND_CHOICES

    assert MOE_RUNNER_BACKEND_CHOICES.count("nvfp4_moe") == 1
    configured(moe_runner_backend="nvfp4_moe")
    inputs = batch(9)
    assert torch.equal(served(sglang, "modelopt", model, inputs), library(model, inputs))
    for form in ("modelopt", "compressed_w4a4"):
        with rank(sglang), pytest.raises(nvfp4_moe.Unsupported, match=f"{NAME}: activation gelu"):
            make_layer(form, activation="gelu")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"with_bias": True}, "biases"), ({"use_weight_loader_fused": True}, "gate and up as one tensor")],
)
def test_what_a_scheme_learns_too_late_is_an_error(sglang, configured, options, words):
    configured()
    with rank(sglang), pytest.raises(nvfp4_moe.Unsupported, match=f"{NAME}: .*{words}.*NVFP4_MOE_MODE=0"):
        make_layer("compressed_w4a4", **options)


def test_a_layer_of_another_format_is_named_where_the_backend_is_chosen(sglang, configured):
    configured(moe_runner_backend="nvfp4_moe")
    from nvfp4_moe.sglang.runner import make_runner
    from sglang.srt.layers.moe.moe_runner.base import MoeQuantInfo, MoeRunnerConfig

    runner = make_runner(MoeRunnerConfig())
    with pytest.raises(nvfp4_moe.Unsupported, match="expected a layer of NVFP4 experts, got MoeQuantInfo"):
        runner.run(None, MoeQuantInfo())
