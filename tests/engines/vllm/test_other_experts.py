"""gpt-oss' experts, and experts without a gate, one layer at a time, with vLLM's own parameters and loader."""

from __future__ import annotations

import types

import expert_layer
import gpt_oss
import layers
import models
import nvfp4_moe
import pytest
import torch
from layers import NAME, Layer, moe_config


def gpt_oss_layer(methods, model, tp=(1, 0), here=None):
    """Returns a method and its layer, filled by vLLM's own loader of gpt-oss one expert at a time, and packed. here:
    the rank's experts under EP."""
    from nvfp4_moe.vllm.plan import GPT_OSS, plan_of
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

    sizes = {"hidden_dim": gpt_oss.HIDDEN, "intermediate_size": model.experts[0, "down"][0].shape[2] * 2}
    experts = list(range(gpt_oss.EXPERTS)) if here is None else here
    moe = moe_config(len(experts), activation=MoEActivation.SWIGLUOAI, has_bias=True, tp=tp, **sizes)
    expert_map = None
    if here is not None:
        expert_map = torch.full((gpt_oss.EXPERTS,), -1, dtype=torch.int32)
        expert_map[experts] = torch.arange(len(experts), dtype=torch.int32)
    layer = Layer(moe, expert_map)
    method = methods.gpt_oss_method()(moe, plan_of(layer, NAME, GPT_OSS))
    hidden, inner = method.maybe_roundup_sizes(
        moe.hidden_dim, moe.intermediate_size_per_partition, torch.bfloat16, moe.moe_parallel_config
    )
    assert hidden == moe.hidden_dim and inner % 32 == 0 and inner - moe.intermediate_size_per_partition < 32
    method.create_weights(
        layer,
        num_experts=len(experts),
        hidden_size=hidden,
        intermediate_size_per_partition=inner,
        params_dtype=torch.bfloat16,
        weight_loader=types.MethodType(GptOssRoutedExperts.weight_loader, layer),
    )
    record_metadata_for_reloading(layer)
    # GptOssRoutedExperts' own loader, with the attributes that it reads of a layer.
    layer.quant_method = method
    layer._map_global_expert_id_to_local_expert_id = lambda number: experts.index(number) if number in experts else -1
    for name in ("_load_expert_bias", "_load_packed_expert", "_narrow_for_rank", "_copy_to_expert"):
        found = GptOssRoutedExperts.__dict__[name]
        setattr(layer, name, found.__func__ if isinstance(found, staticmethod) else found.__get__(layer))
    load_gpt_oss(layer, model, experts)
    method.process_weights_after_loading(layer)
    assert all(parameter.numel() == 0 for parameter in layer.parameters())
    return method, layer


def load_gpt_oss(layer, model, experts, absent=()):
    """Loads one expert at a time, as gpt-oss' own load_weights does. absent: experts missing in the files."""
    for shard, part in (("w13", "gate_up"), ("w2", "down")):
        codes, scales = model.experts[0, part]
        tensors = {"weight": codes, "weight_scale": scales}
        tensors["bias"] = model.dense[f"{NAME}.{part}_proj_bias"]
        for name, stack in tensors.items():
            parameter = getattr(layer, f"{shard}_{name}")
            for number in [number for number in range(gpt_oss.EXPERTS) if number not in absent]:
                done = parameter.weight_loader(
                    parameter, stack[number], f"{shard}_{name}", f"gpt_oss_{shard}", number, return_success=True
                )
                assert done == (number in experts)


def reload_gpt_oss(layer, model, absent=()):
    """Does to a layer what vLLM's reload_weights does."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(layer)
    load_gpt_oss(layer, model, range(len(model.experts[0, "down"][0])), absent)
    finalize_layerwise_reload(layer, None)


def run(method, layer, hidden, ids, weights):
    return method.apply(layer, hidden, weights, ids, None, None)


@pytest.fixture(scope="module")
def model():
    return gpt_oss.make(5)


def test_gpt_oss_is_the_librarys_layer_and_transformers_own(methods, model):
    inputs = gpt_oss.batch()
    gpt_oss.check_exact(model, inputs, lambda model: run(*gpt_oss_layer(methods, model), *inputs))


@pytest.mark.parametrize("model", [gpt_oss.make(5), gpt_oss.of_three_blocks(9)], ids=["halves", "three blocks"])
def test_ranks_get_whole_blocks_and_the_last_what_is_left_and_count_down_s_bias_once(methods, model):
    """A rank with fewer channels pads its parameters with zeros, which add nothing."""
    inputs = gpt_oss.batch(1)
    gpt_oss.check_slices(model, inputs, lambda n: run(*gpt_oss_layer(methods, model, tp=(2, n)), *inputs))


@pytest.fixture(params=[0x00, 0x3C, 0x7F, 0xFF], ids=hex)
def poisoned_memory(request, monkeypatch):
    """Fills memory as a reload may find it: with finite numbers, or with NaNs."""
    stock = torch.empty_strided

    def empty_strided(*sizes, **options):
        made = stock(*sizes, **options)
        if made.device.type == "cpu":
            made.untyped_storage().fill_(request.param)
        return made

    monkeypatch.setattr(torch, "empty_strided", empty_strided)


@pytest.mark.parametrize("number", [0, 1])
def test_a_reload_into_padded_slices_does_not_read_the_padding(methods, poisoned_memory, number):
    inputs, columns = gpt_oss.batch(2), (slice(0, 64), slice(64, 96))[number]
    first, second = gpt_oss.of_three_blocks(9), gpt_oss.of_three_blocks(10)
    method, layer = gpt_oss_layer(methods, first, tp=(2, number))
    before, handle = run(method, layer, *inputs), method.fused.layer.handle
    for model in (second, first):
        reload_gpt_oss(layer, model)
        out = run(method, layer, *inputs)
        assert torch.equal(out, gpt_oss.library(model, inputs, columns, down_bias=1 - number))
    assert torch.equal(out, before) and method.fused.layer.handle == handle


def test_an_expert_that_a_reload_lacks_is_an_error_that_names_it(methods, model, poisoned_memory):
    method, layer = gpt_oss_layer(methods, model)
    with pytest.raises(nvfp4_moe.Error, match=f"^{NAME}: .*expert 3.*NaN"):
        reload_gpt_oss(layer, model, absent=[3])
    with pytest.raises(RuntimeError, match=f"{NAME} does not run after its last reload: .*expert 3"):
        run(method, layer, *gpt_oss.batch())


def test_an_expert_that_a_checkpoint_lacks_is_an_error_that_names_it(methods, model, monkeypatch):
    whole = load_gpt_oss
    monkeypatch.setitem(globals(), "load_gpt_oss", lambda *given: whole(*given, absent=[6]))
    with pytest.raises(nvfp4_moe.Error, match=f"^{NAME}: .*expert 6.*NaN"):
        gpt_oss_layer(methods, model)


@pytest.mark.parametrize("here", [[0, 1, 2, 3], [4, 5, 6, 7], [1, 3, 5, 7]], ids=str)
def test_experts_of_a_rank_have_their_own_biases(methods, model, here):
    inputs = gpt_oss.batch(3)
    part = run(*gpt_oss_layer(methods, model, here=here), *inputs)
    assert torch.equal(part, gpt_oss.library(model, expert_layer.of_experts(inputs, here))) and part.abs().max() > 0


@pytest.mark.parametrize("activation_format", ["bf16", "nvfp4", "fp8", "int8_block"])
def test_formats_of_activations(methods, model, monkeypatch, activation_format):
    monkeypatch.setenv("NVFP4_MOE_ACTIVATIONS", activation_format)
    inputs = gpt_oss.batch(4)
    out = run(*gpt_oss_layer(methods, model), *inputs)
    assert torch.equal(out, gpt_oss.library(model, inputs, activation_format=activation_format))


# ---- without a gate


@pytest.fixture
def without_refusal():
    """vLLM describes such layers only on GPUs."""
    import without_a_gate  # noqa: F401


@pytest.mark.parametrize("activation_format", ["bf16", "nvfp4", "fp8", "int8_block"])
@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors"])
def test_experts_without_a_gate_are_the_librarys_layer_within_float64s_interval(
    methods, without_refusal, monkeypatch, kind, activation_format
):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    monkeypatch.setenv("NVFP4_MOE_ACTIVATIONS", activation_format)
    model, inputs = models.without_gates(models.make(3)), expert_layer.batch(1)
    sizes = {"hidden_dim": models.HIDDEN, "intermediate_size": models.INNER}
    layer = Layer(moe_config(models.EXPERTS, activation=MoEActivation.RELU2_NO_MUL, **sizes))
    method = layers.with_parameters(methods, kind, layer)
    is_modelopt = kind == "modelopt"
    for name, shard in (("up", "w13"), ("down", "w2")):
        codes, scales, scale = expert_layer.stacks(model)[name]
        getattr(layer, f"{shard}_weight" + ("" if is_modelopt else "_packed")).data.copy_(codes)
        getattr(layer, f"{shard}_weight_scale").data.view(torch.uint8).copy_(scales)
        tensor_scale = getattr(layer, f"{shard}_weight_{'scale_2' if is_modelopt else 'global_scale'}")
        assert tensor_scale.numel() == models.EXPERTS
        tensor_scale.data.copy_((scale if is_modelopt else 1 / scale).reshape(tensor_scale.shape))
    method.process_weights_after_loading(layer)
    assert method.moe_kernel.fused_experts.rows == models.INNER
    out = run(method, layer, *inputs)
    assert torch.equal(out, expert_layer.library(model, inputs, activation_format=activation_format))
    assert not expert_layer.is_outside(model, inputs, out, activation_format=activation_format)
