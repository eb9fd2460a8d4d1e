"""SGLang's FusedMoE with the plugin, in this process: its own loader and runner, against the library and a float64 layer.

Ranks run one after the other: SGLang's parallel state is overridden for each, and outputs are added as the all-reduce would.
"""

import dataclasses
import logging

import models
import moe_reference
import nvfp4_moe
import pytest
import torch
from layers import NAME, batch, float64, library, load, make_layer, rank, run, served


@pytest.fixture(scope="module")
def model():
    return models.make(3)


# ---- what is taken, and that it is right


@pytest.mark.parametrize("form", models.FORMS[:-1])
def test_every_form_is_the_librarys_layer_bit_for_bit(sglang, configured, model, form):
    configured()
    inputs = batch()
    out = served(sglang, form, model, inputs)
    assert torch.equal(out, library(model, inputs))
    assert not moe_reference.outside(float64(model, inputs), out).any()


def test_scales_that_are_one_for_gate_and_up_would_be_seen(sglang, configured, model):
    configured()
    inputs = batch()
    experts = dict(model.experts)
    for expert in range(models.EXPERTS):
        gate = model.experts[0, expert, "gate_proj"]
        experts[0, expert, "up_proj"] = model.experts[0, expert, "up_proj"]._replace(tensor_scale=gate.tensor_scale)
    merged = models.Model(experts, {})
    out = served(sglang, "modelopt", model, inputs)
    assert moe_reference.outside(float64(merged, inputs), out).any()


@pytest.mark.parametrize("form", ["modelopt", "compressed_w4a4"])
def test_experts_of_two_ranks_add_up(sglang, configured, model, form):
    configured()
    inputs = batch(1)
    parts = [served(sglang, form, model, inputs, ep=(2, number)) for number in range(2)]
    half = models.EXPERTS // 2
    for number, part in enumerate(parts):
        ids = torch.where(inputs[1] // half == number, inputs[1], -1)
        assert torch.equal(part, library(model, (inputs[0], ids, inputs[2])))
    assert all(part.abs().max() > 0 for part in parts)


@pytest.mark.parametrize("form", ["modelopt", "compressed_w4a16"])
def test_slices_of_two_ranks_are_the_librarys_slices(sglang, configured, model, form):
    configured()
    inputs = batch(2)
    half = models.INNER // 2
    for number in range(2):
        part = served(sglang, form, model, inputs, tp=(2, number))
        cut = {}
        for key, matrix in model.experts.items():
            rows, columns = slice(number * half, (number + 1) * half), slice(None)
            if key[2] == "down_proj":
                codes = matrix.codes[:, number * half // 2 : (number + 1) * half // 2]
                scales = matrix.scales[:, number * half // 16 : (number + 1) * half // 16]
            else:
                codes, scales = matrix.codes[rows, columns], matrix.scales[rows, columns]
            cut[key] = models.Matrix(codes.contiguous(), scales.contiguous(), matrix.tensor_scale)
        assert torch.equal(part, library(models.Model(cut, {}), inputs, intermediate_size=half))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"swiglu_limit": 0.5}, {"activation": "swiglu_clamped", "swiglu_limit": 0.5}),
        ({"gemm1_clamp_limit": 0.5}, {"activation": "swiglu_step", "swiglu_limit": 0.5}),
        (
            {"gemm1_alpha": 1.5, "gemm1_clamp_limit": 0.5},
            {"activation": "swiglu_oai", "swiglu_alpha": 1.5, "swiglu_limit": 0.5},
        ),
    ],
)
def test_limits_and_activations(sglang, configured, model, given, expected):
    configured()
    inputs = batch(4)
    out = served(sglang, "modelopt", model, inputs, **given)
    assert torch.equal(out, library(model, inputs, **expected))
    assert not torch.equal(out, library(model, inputs))


def test_the_routed_scaling_factor_is_applied_once(sglang, configured, model):
    configured()
    inputs = batch(5)
    with rank(sglang):
        layer = make_layer("modelopt", routed_scaling_factor=2.5)
        assert layer.should_fuse_routed_scaling_factor_in_topk  # the router's weights have it
    assert torch.equal(served(sglang, "modelopt", model, inputs, routed_scaling_factor=2.5), library(model, inputs))
    out = served(sglang, "compressed_w4a4", model, inputs, routed_scaling_factor=2.5)
    assert torch.equal(out, library(model, inputs) * 2.5)


def test_no_tokens_masked_ids_and_more_tokens_than_a_call_takes(sglang, configured, model, monkeypatch):
    configured()
    from nvfp4_moe.sglang import runner

    assert served(sglang, "modelopt", model, batch(tokens=0)).shape == (0, models.HIDDEN)
    hidden, ids, weights = batch(6)
    ids[2] = -1
    ids[4, 1] = -1
    out = served(sglang, "modelopt", model, (hidden, ids, weights))
    assert torch.equal(out, library(model, (hidden, ids, weights))) and not out[2].any()
    monkeypatch.setattr(runner, "MAX_TOKENS", 4)
    assert torch.equal(served(sglang, "modelopt", model, (hidden, ids, weights)), out)


def test_activations_in_nvfp4_where_the_user_asks(sglang, configured, model, monkeypatch):
    from nvfp4_moe.sglang import compressed_tensors, hooks

    configured()
    inputs = batch(7)
    for module in (hooks, compressed_tensors):
        asked = module.layer_options

        def layer_options(layer, hidden, inner, settings, *rest, asked=asked):
            return asked(layer, hidden, inner, dataclasses.replace(settings, activation_format="nvfp4"), *rest)

        monkeypatch.setattr(module, "layer_options", layer_options)
    for form in ("modelopt", "compressed_w4a4"):
        out = served(sglang, form, model, inputs)
        assert torch.equal(out, library(model, inputs, activation_format="nvfp4"))


@pytest.mark.parametrize(
    ("form", "activation_format", "because"),
    [
        (
            "modelopt",
            "int8_block",
            "W4A4 is declared and int8_block is more precise and fast on a host (quant_algo NVFP4)",
        ),
        ("modelopt_w4a16", "bf16", "no quantization of activations is declared (quant_algo W4A16_NVFP4)"),
        ("modelopt_mixed", "int8_block", "(quant_algo NVFP4)"),
        ("compressed_w4a4", "int8_block", "input_activations of 4 bits, float)"),
        ("compressed_w4a16", "bf16", "input_activations is null)"),
    ],
)
def test_auto_follows_what_the_checkpoint_declares(
    sglang, configured, model, monkeypatch, caplog, form, activation_format, because
):
    configured()
    automatic(monkeypatch)
    inputs = batch(11)
    with caplog.at_level("INFO", "nvfp4_moe.sglang"):
        out = served(sglang, form, model, inputs)
    assert torch.equal(out, library(model, inputs, activation_format=activation_format))
    (line,) = [record.message for record in caplog.records if record.message.startswith("activations: ")]
    assert line.startswith(f"activations: {activation_format}, because ") and because in line


def automatic(monkeypatch):
    """Layers whose format of activations is left to the rule."""
    from nvfp4_moe.sglang import compressed_tensors, experts, hooks

    monkeypatch.setattr(experts, "_load_log", experts.LoadLog(experts.log.info))

    def with_auto(own, place):
        def asked(*given):
            settings = dataclasses.replace(given[place], activation_format="auto")
            return own(*given[:place], settings, *given[place + 1 :])

        return asked

    for module in (hooks, compressed_tensors):
        for name, place in (("layer_options", 3), ("activations_of", 1)):
            monkeypatch.setattr(module, name, with_auto(getattr(module, name), place))


def test_modelopts_groups_and_each_matrix_of_a_mixed_model_are_read(sglang, configured, model, monkeypatch):
    """input_activations that are null beside quant_algo NVFP4; and an algorithm of one projection."""
    from nvfp4_moe.sglang import internals

    automatic(monkeypatch)
    configured()
    group = dict(models.quantization("modelopt")["config_groups"]["group_0"], input_activations=None)
    monkeypatch.setattr(internals, "config_groups", lambda: {"group_0": group})
    inputs = batch(12)
    assert torch.equal(served(sglang, "modelopt", model, inputs), library(model, inputs))
    mixed = models.quantization("modelopt_mixed")
    changed = {"quant_algo": "W4A16_NVFP4"}

    def quantization(form):
        layers = {name: dict(entry) for name, entry in mixed["quantized_layers"].items()}
        layers["model.layers.0.mlp.experts.5.down_proj"] |= changed
        return mixed | {"quantized_layers": layers}

    monkeypatch.setattr(models, "quantization", quantization)
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
            layer.quant_method.process_weights_after_loading(layer)
            assert sum(parameter.numel() for parameter in layer.parameters()) == 0
            first = run(layer, *inputs)
            layer.quant_method.process_weights_after_loading(layer)  # a second call has nothing to do
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
            layer.quant_method.process_weights_after_loading(layer)
            assert torch.equal(run(layer, *inputs), library(other, inputs))
            assert state.ready().layer.handle == handle  # captured graphs hold it
            assert sum(parameter.numel() for parameter in layer.parameters()) == 0


def test_an_expert_that_no_file_brings_is_an_error(sglang, configured, model):
    configured()
    for form in ("modelopt", "compressed_w4a16"):
        with rank(sglang):
            layer = make_layer(form)
            load(layer, form, model, only=[0, 1, 2, 3, 4, 6, 7])
            with pytest.raises(nvfp4_moe.BadInput, match=f"{NAME}: .*expert 5"):
                layer.quant_method.process_weights_after_loading(layer)


def test_random_weights_of_a_dummy_load_are_made_legal(sglang, configured):
    configured(load_format="dummy")
    from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

    for form in ("modelopt", "compressed_w4a4"):
        with rank(sglang):
            layer = make_layer(form)
            initialize_dummy_weights(layer)
            assert (layer.w13_weight_scale.float() < 0).any()
            layer.quant_method.process_weights_after_loading(layer)
            assert run(layer, *batch()).isfinite().all()


# ---- what is left to SGLang

REFUSED = [
    ({"enable_eplb": True}, {}, "--enable-eplb: packed experts cannot be moved between ranks"),
    ({"enable_lora": True}, {}, "--enable-lora: LoRA on experts is not supported"),
    ({"moe_a2a_backend": "deepep"}, {}, "--moe-a2a-backend deepep"),
    ({"moe_runner_backend": "triton"}, {}, "--moe-runner-backend is triton"),
    ({}, {"activation": "gelu"}, "activation gelu"),
    ({}, {"is_gated": False}, "not gated"),
    ({}, {"with_bias": True}, "experts with biases in a format for which SGLang has no parameters"),
    ({}, {"no_combine": True}, "no_combine"),
    ({}, {"gemm1_alpha": 1.702}, "expected a clamp limit"),
    ({}, {"use_weight_loader_fused": True}, "loads gate and up as one tensor"),
    ({}, {"apply_router_weight_on_input": True}, "router_weight"),
]


@pytest.mark.parametrize(("arguments", "options", "words"), REFUSED)
def test_what_is_not_taken_is_sglangs_with_one_line_that_says_why(
    sglang, configured, caplog, arguments, options, words
):
    from nvfp4_moe.sglang import refusals

    configured(**arguments)
    refusals._said.clear()
    with rank(sglang), caplog.at_level(logging.WARNING, "nvfp4_moe.sglang"):
        for number in range(2):
            # SGLang's own method, which says of this machine that it has no kernel for NVFP4.
            with pytest.raises(ValueError, match="Current platform does not support NVFP4"):
                make_layer("modelopt", prefix=f"model.layers.{number}.mlp.experts", **options)
    said = [record.getMessage() for record in caplog.records if record.name == "nvfp4_moe.sglang"]
    assert len(said) == 1 and words in said[0] and "left to SGLang" in said[0]


def test_a_gpu_without_kernels_of_its_own_is_sglangs_unless_the_user_insists(
    sglang, configured, model, monkeypatch, caplog
):
    from nvfp4_moe.sglang import refusals

    refusals._said.clear()
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
