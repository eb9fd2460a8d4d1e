"""Activations by what a checkpoint declares: the plugin's configs over vLLM's own, for a layer as vLLM makes it."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from layers import Layer, moe_config  # noqa: E402

NAME = "model.layers.0.mlp.experts"


@pytest.fixture(autouse=True)
def automatic(methods, monkeypatch):
    from nvfp4_moe.vllm import taking

    monkeypatch.delenv("NVFP4_MOE_MODE", raising=False)
    monkeypatch.delenv("NVFP4_MOE_ACTIVATIONS", raising=False)
    monkeypatch.setattr(taking, "_routed_experts", Layer)


class RoutedExperts(Layer):
    """By its name, which targets of compressed-tensors are matched with."""


def layer(**options):
    made = RoutedExperts(moe_config(**options))
    made.ckpt_gate_proj_name, made.ckpt_up_proj_name, made.ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
    return made


def config_of(quantization, monkeypatch, vllm_config):
    """The config that vLLM makes of a config.json's quantization_config."""
    import types

    from vllm.model_executor.layers.quantization import get_quantization_config

    name = quantization["quant_method"]
    if name == "modelopt":
        name = "modelopt_mixed" if quantization["quant_algo"] == "MIXED_PRECISION" else "modelopt_fp4"
    said = copy.deepcopy(quantization)
    hf_config = types.SimpleNamespace(quantization_config=said)
    monkeypatch.setattr(vllm_config, "model_config", types.SimpleNamespace(hf_config=hf_config))
    return get_quantization_config(name).from_config(said)


@pytest.mark.parametrize(
    ("form", "expected", "because"),
    [
        (
            "modelopt",
            "int8_block",
            "W4A4 is declared and int8_block is more precise and fast on a host (quant_algo NVFP4)",
        ),
        ("modelopt_w4a16", "bf16", "no quantization of activations is declared (quant_algo W4A16_NVFP4)"),
        ("modelopt_mixed", "int8_block", "(quant_algo NVFP4)"),
        ("compressed_w4a4", "int8_block", "(gate_proj: input_activations of 4 bits, float)"),
        ("compressed_w4a16", "bf16", "(gate_proj: input_activations is null)"),
    ],
)
def test_auto_follows_the_checkpoint(vllm_config, monkeypatch, form, expected, because):
    import models

    config = config_of(models.quantization(form), monkeypatch, vllm_config)
    plan = config.get_quant_method(layer(), NAME).plan
    assert plan.options["activation_format"] == expected
    assert plan.activations.startswith(f"{expected}, because ") and plan.activations.endswith(because)
    monkeypatch.setenv("NVFP4_MOE_ACTIVATIONS", "fp8")
    assert config.get_quant_method(layer(), NAME).plan.options["activation_format"] == "fp8"


def test_a_mixed_model_is_read_layer_by_layer_and_matrix_by_matrix(vllm_config, monkeypatch):
    import models

    mixed = models.quantization("modelopt_mixed")
    config = config_of(mixed, monkeypatch, vllm_config)
    odd = NAME.replace(".0.", ".1.")
    assert config.get_quant_method(layer(), odd).plan.options["activation_format"] == "bf16"
    mixed["quantized_layers"][f"{NAME}.5.down_proj"]["quant_algo"] = "W4A16_NVFP4"
    config = config_of(mixed, monkeypatch, vllm_config)
    assert config.get_quant_method(layer(), NAME).plan.options["activation_format"] == "bf16"
    mixed["quantized_layers"][f"{NAME}.5.down_proj"]["quant_algo"] = "FP8"
    config = config_of(mixed, monkeypatch, vllm_config)
    monkeypatch.setenv("NVFP4_MOE_MODE", "1")
    with pytest.raises(NotImplementedError, match=r"different formats.*gate_proj: NVFP4.*experts\.5\.down_proj: FP8"):
        config.get_quant_method(layer(), NAME)


@pytest.mark.parametrize("inputs", [None, "absent"])
def test_modelopts_weight_only_groups_beside_nvfp4(vllm_config, monkeypatch, inputs):
    import models

    quantization = models.quantization("modelopt")
    group = quantization["config_groups"]["group_0"]
    quantization["config_groups"]["group_1"] = {name: group[name] for name in ("weights", "targets")} | (
        {"input_activations": None} if inputs is None else {}
    )
    config = config_of(quantization, monkeypatch, vllm_config)
    assert config.get_quant_method(layer(), NAME).plan.options["activation_format"] == "bf16"


@pytest.mark.parametrize(
    ("targets", "inputs", "expected"),
    [
        (["re:.*down_proj"], None, "bf16"),
        (["re:.*experts.*down_proj$"], "fp8", "fp8"),
        (["re:^(?!.*experts).*_proj$"], None, "int8_block"),  # every projection but experts'
    ],
    ids=str,
)
def test_groups_that_differ_by_projection(vllm_config, monkeypatch, targets, inputs, expected):
    """The layer runs at the most precise that its matrices declare. Patterns are matched as their producer does."""
    import models

    quantization = models.quantization("compressed_w4a4")
    first = quantization["config_groups"]["group_0"]
    fp8 = dict(first["input_activations"], num_bits=8, strategy="token", dynamic=True, group_size=None)
    other = dict(first, targets=targets, input_activations=fp8 if inputs else None)
    first["targets"] = [f"re:.*{name}$" for name in ("gate_proj", "up_proj", "down_proj")]
    quantization["config_groups"] = {"group_0": other, "group_1": first}
    config = config_of(quantization, monkeypatch, vllm_config)
    assert config.get_quant_method(layer(), NAME).plan.options["activation_format"] == expected


def test_a_projection_of_another_format_is_refused_by_name(vllm_config, monkeypatch):
    import models

    quantization = models.quantization("compressed_w4a4")
    first = quantization["config_groups"]["group_0"]
    eight = dict(first["weights"], num_bits=8, strategy="channel", group_size=None)
    other = dict(first, targets=["re:.*down_proj"], weights=eight, input_activations=None, format="float-quantized")
    first["targets"] = ["re:.*gate_proj", "re:.*up_proj"]
    quantization["config_groups"] = {"group_0": other, "group_1": first}
    config = config_of(quantization, monkeypatch, vllm_config)
    monkeypatch.setenv("NVFP4_MOE_MODE", "1")
    with pytest.raises(NotImplementedError, match=r"different formats.*gate_proj: NVFP4; .*down_proj: 8 bits, float"):
        config.get_quant_method(layer(), NAME)


def test_gpt_oss_is_weight_only(vllm_config, monkeypatch):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    config = config_of({"quant_method": "gpt_oss_mxfp4"}, monkeypatch, vllm_config)
    plan = config.get_quant_method(layer(activation=MoEActivation.SWIGLUOAI, has_bias=True), NAME).plan
    assert plan.activations == "bf16, because no quantization of activations is declared (quant_method mxfp4)"
