"""Activation formats from a checkpoint's declarations: the plugin's configs over vLLM's own, for vLLM's layers."""

from __future__ import annotations

import copy
import types

import models
import pytest
from layers import NAME, Layer, moe_config


@pytest.fixture(autouse=True)
def automatic(methods, monkeypatch):
    from nvfp4_moe.vllm import taking

    monkeypatch.delenv("NVFP4_MOE_MODE", raising=False)
    monkeypatch.delenv("NVFP4_MOE_ACTIVATIONS", raising=False)
    monkeypatch.setattr(taking, "_routed_experts", Layer)


class RoutedExperts(Layer):
    """Has the name that compressed-tensors' targets match."""


def layer(**options):
    made = RoutedExperts(moe_config(**options))
    made.ckpt_gate_proj_name, made.ckpt_up_proj_name, made.ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
    return made


@pytest.fixture
def plan_of(monkeypatch, vllm_config):
    """plan_of(quantization, name, **options of the layer): makes the plan from the config that vLLM makes of a
    config.json's quantization_config."""

    from vllm.model_executor.layers.quantization import get_quantization_config

    def plan(quantization, name=NAME, **options):
        method = quantization["quant_method"]
        if method == "modelopt":
            method = "modelopt_mixed" if quantization["quant_algo"] == "MIXED_PRECISION" else "modelopt_fp4"
        said = copy.deepcopy(quantization)
        hf_config = types.SimpleNamespace(quantization_config=said)
        monkeypatch.setattr(vllm_config, "model_config", types.SimpleNamespace(hf_config=hf_config))
        config = get_quantization_config(method).from_config(said)
        return config.get_quant_method(layer(**options), name).plan

    return plan


@pytest.mark.parametrize(
    ("form", "expected", "because"),
    [
        ("modelopt", "int8_block", "int8_block is more precise and fast on a host (quant_algo NVFP4)"),
        ("modelopt_w4a16", "bf16", "no quantization of activations is declared (quant_algo W4A16_NVFP4)"),
        ("modelopt_mixed", "int8_block", "(quant_algo NVFP4)"),
        ("compressed_w4a4", "int8_block", "(gate_proj: input_activations of 4 bits, float)"),
        ("compressed_w4a16", "bf16", "(gate_proj: input_activations is null)"),
    ],
)
def test_auto_follows_the_checkpoint(plan_of, monkeypatch, form, expected, because):
    plan = plan_of(models.quantization(form))
    assert plan.options["activation_format"] == expected
    assert plan.activations.startswith(f"{expected}, because ") and plan.activations.endswith(because)
    monkeypatch.setenv("NVFP4_MOE_ACTIVATIONS", "fp8")
    assert plan_of(models.quantization(form)).options["activation_format"] == "fp8"


def test_a_mixed_model_is_read_layer_by_layer_and_matrix_by_matrix(plan_of, monkeypatch):
    mixed = models.quantization("modelopt_mixed")
    assert plan_of(mixed, NAME.replace(".0.", ".1.")).options["activation_format"] == "bf16"
    mixed["quantized_layers"][f"{NAME}.5.down_proj"]["quant_algo"] = "W4A16_NVFP4"
    assert plan_of(mixed).options["activation_format"] == "bf16"
    mixed["quantized_layers"][f"{NAME}.5.down_proj"]["quant_algo"] = "FP8"
    monkeypatch.setenv("NVFP4_MOE_MODE", "1")
    with pytest.raises(NotImplementedError, match=r"different formats.*gate_proj: NVFP4.*experts\.5\.down_proj: FP8"):
        plan_of(mixed)


@pytest.mark.parametrize("inputs", [{"input_activations": None}, {}], ids=["null", "absent"])
def test_modelopts_weight_only_groups_beside_nvfp4(plan_of, inputs):
    quantization = models.quantization("modelopt")
    group = quantization["config_groups"]["group_0"]
    quantization["config_groups"]["group_1"] = {name: group[name] for name in ("weights", "targets")} | inputs
    assert plan_of(quantization).options["activation_format"] == "bf16"


def with_another_group(targets, rest, **changes):
    """Returns compressed_w4a4 with a first group of these targets and changes, and a second of the `rest`."""
    quantization = models.quantization("compressed_w4a4")
    first = quantization["config_groups"]["group_0"]
    other = dict(first, targets=targets, **changes)
    first["targets"] = [f"re:.*{name}$" for name in rest]
    quantization["config_groups"] = {"group_0": other, "group_1": first}
    return quantization


@pytest.mark.parametrize(
    ("targets", "bits", "expected"),
    [
        (["re:.*down_proj"], None, "bf16"),
        (["re:.*experts.*down_proj$"], 8, "fp8"),
        (["re:^(?!.*experts).*_proj$"], None, "int8_block"),  # every projection except the experts'
    ],
    ids=str,
)
def test_groups_that_differ_by_projection(plan_of, targets, bits, expected):
    """The layer runs in the most precise format that its matrices declare. Patterns match as in their producer."""
    inputs = models.quantization("compressed_w4a4")["config_groups"]["group_0"]["input_activations"]
    inputs = dict(inputs, num_bits=bits, strategy="token", dynamic=True, group_size=None) if bits else None
    quantization = with_another_group(targets, models.EXPONENTS, input_activations=inputs)
    assert plan_of(quantization).options["activation_format"] == expected


def test_a_projection_of_another_format_is_refused_by_name(plan_of, monkeypatch):
    weights = models.quantization("compressed_w4a4")["config_groups"]["group_0"]["weights"]
    changes = {"weights": dict(weights, num_bits=8, strategy="channel", group_size=None), "input_activations": None}
    quantization = with_another_group(["re:.*down_proj"], ("gate_proj", "up_proj"), format="float-quantized", **changes)
    monkeypatch.setenv("NVFP4_MOE_MODE", "1")
    with pytest.raises(NotImplementedError, match=r"different formats.*gate_proj: NVFP4; .*down_proj: 8 bits, float"):
        plan_of(quantization)


def test_gpt_oss_is_weight_only(plan_of):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    plan = plan_of({"quant_method": "gpt_oss_mxfp4"}, activation=MoEActivation.SWIGLUOAI, has_bias=True)
    assert plan.activations == "bf16, because no quantization of activations is declared (quant_method mxfp4)"
