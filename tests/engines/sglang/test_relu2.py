"""Experts without a gate, as Nemotron-3's, in SGLang: its own layer, loader and runner, on any rank, in each form.

The model around them is test_nemotron.py's.
"""

import dataclasses

import models
import moe_reference
import nvfp4_moe
import pytest
import torch
from layers import NAME, batch, rank, run, sizes, stacks

FORMS = ("modelopt", "modelopt_w4a16", "modelopt_mixed", "compressed_w4a4", "compressed_w4a16")


@pytest.fixture(scope="module")
def model():
    """Without gates, and otherwise of models.make."""
    made = models.make(7)
    return models.Model({key: matrix for key, matrix in made.experts.items() if key[2] != "gate_proj"}, {})


def make_layer(form, **options):
    import layers

    return layers.make_layer(form, **({"activation": "relu2", "is_gated": False} | options))


def load(layer, form, model):
    """As SGLang's NemotronH loads them: what it calls a gate is up, and there is no third matrix."""
    mapping = layer.make_expert_params_mapping("up_proj", "down_proj", "", models.EXPERTS)
    parameters = dict(layer.named_parameters())
    for (index, expert, projection), matrix in model.experts.items():
        if index != 0:
            continue
        for name, tensor in models.expert_tensors(form, f"experts.{expert}.{projection}", matrix).items():
            for into, weight, number, shard in mapping:
                if weight in name and name.replace(weight, into).removeprefix("experts.") in parameters:
                    target = name.replace(weight, into)
                    parameter = parameters[target.removeprefix("experts.")]
                    parameter.weight_loader(parameter, tensor, target, shard_id=shard, expert_id=number)
                    break
            else:
                raise AssertionError(f"{name} has no parameter")


def served(sglang, form, model, inputs, *, ep=(1, 0), tp=(1, 0), **options):
    with rank(sglang, ep=ep, tp=tp):
        layer = make_layer(form, **options)
        load(layer, form, model)
        layer.quant_method.process_weights_after_loading(layer)
        assert sum(parameter.numel() for parameter in layer.parameters()) == 0
        return run(layer, *inputs)


def weights_of(model):
    """up and down stacks; moe_reference reads no gate under relu2, and takes up's for one."""
    gateless = {key: matrix for key, matrix in model.experts.items()}
    gateless |= {
        (layer, expert, "gate_proj"): matrix
        for (layer, expert, name), matrix in model.experts.items()
        if name == "up_proj"
    }
    return stacks(models.Model(gateless, {}))


def library(model, inputs, **options):
    found = weights_of(model)
    del found["gate"]
    config = nvfp4_moe.MoeConfig(**sizes(activation="relu2", **options))
    return nvfp4_moe.MoeLayer.from_tensors(config, **found).run(*inputs)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_librarys_layer_within_float64s_interval(sglang, configured, model, form):
    configured()
    inputs = batch()
    out = served(sglang, form, model, inputs)
    assert torch.equal(out, library(model, inputs))
    expected = moe_reference.forward(
        moe_reference.Options(**sizes(activation="relu2")),
        moe_reference.Weights(**weights_of(model)),
        *inputs,
        accuracy=moe_reference.CONTRACT,
    )
    assert not moe_reference.outside(expected, out).any() and out.abs().max() > 0


@pytest.mark.parametrize("form", ["modelopt", "compressed_w4a4"])
def test_ranks(sglang, configured, model, form):
    configured()
    inputs, half = batch(1), models.EXPERTS // 2
    for number in range(2):
        part = served(sglang, form, model, inputs, ep=(2, number))
        ids = torch.where(inputs[1] // half == number, inputs[1], -1)
        assert part.abs().max() > 0 and torch.equal(part, library(model, (inputs[0], ids, inputs[2])))
    half = models.INNER // 2
    for number in range(2):
        part = served(sglang, form, model, inputs, tp=(2, number))
        cut = {}
        for key, matrix in model.experts.items():
            rows = slice(number * half, (number + 1) * half)
            if key[2] == "down_proj":
                codes = matrix.codes[:, rows.start // 2 : rows.stop // 2]
                scales = matrix.scales[:, rows.start // 16 : rows.stop // 16]
            else:
                codes, scales = matrix.codes[rows], matrix.scales[rows]
            cut[key] = models.Matrix(codes.contiguous(), scales.contiguous(), matrix.tensor_scale)
        assert torch.equal(part, library(models.Model(cut, {}), inputs, intermediate_size=half))


@pytest.mark.parametrize("activation_format", ["nvfp4", "fp8", "int8_block"])
def test_activations_in_the_format_that_the_user_asks_for(sglang, configured, model, monkeypatch, activation_format):
    from nvfp4_moe.sglang import compressed_tensors, hooks

    configured()
    inputs = batch(2)
    for module in (hooks, compressed_tensors):

        def layer_options(layer, hidden, inner, settings, *rest, asked=module.layer_options):
            return asked(
                layer, hidden, inner, dataclasses.replace(settings, activation_format=activation_format), *rest
            )

        monkeypatch.setattr(module, "layer_options", layer_options)
    for form in ("modelopt", "compressed_w4a4"):
        out = served(sglang, form, model, inputs)
        assert torch.equal(out, library(model, inputs, activation_format=activation_format))


def test_the_routed_scaling_factor_is_applied_once(sglang, configured, model):
    configured()
    inputs = batch(3)
    with rank(sglang):
        # The router's weights have it, as NemotronHMoE tells its TopK.
        assert make_layer("modelopt", routed_scaling_factor=2.5).should_fuse_routed_scaling_factor_in_topk
    assert torch.equal(served(sglang, "modelopt", model, inputs, routed_scaling_factor=2.5), library(model, inputs))
    out = served(sglang, "compressed_w4a4", model, inputs, routed_scaling_factor=2.5)
    assert torch.equal(out, library(model, inputs) * 2.5)


@pytest.mark.parametrize("form", ["modelopt", "compressed_w4a16"])
def test_an_expert_that_no_file_brings_is_an_error(sglang, configured, model, form):
    configured()
    some = models.Model({key: matrix for key, matrix in model.experts.items() if key[1:] != (5, "up_proj")}, {})
    with rank(sglang):
        layer = make_layer(form)
        load(layer, form, some)
        with pytest.raises(nvfp4_moe.BadInput, match=f"{NAME}: .*expert 5"):
            layer.quant_method.process_weights_after_loading(layer)
