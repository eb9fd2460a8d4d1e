"""gpt-oss' experts, and experts without a gate, through vLLM's own parameters, loader and methods, a layer at a time."""

from __future__ import annotations

import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from layers import Layer, moe_config  # noqa: E402


def gpt_oss_layer(methods, model, tp=(1, 0), here=None):
    """A method and its layer, filled by vLLM's own loader of gpt-oss an expert at a time, and packed. here: of EP, the rank's."""
    import gpt_oss
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
    method = methods.gpt_oss_method()(moe, plan_of(layer, "model.layers.0.mlp.experts", GPT_OSS))
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
    # GptOssRoutedExperts' own loader, over what it reads of a layer.
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
    """An expert at a time, as gpt-oss' own load_weights does. absent: experts that the files lack."""
    import gpt_oss

    for shard, part in (("w13", "gate_up"), ("w2", "down")):
        codes, scales = model.experts[0, part]
        tensors = {"weight": codes, "weight_scale": scales}
        tensors["bias"] = model.dense[f"model.layers.0.mlp.experts.{part}_proj_bias"]
        for name, stack in tensors.items():
            parameter = getattr(layer, f"{shard}_{name}")
            for number in [number for number in range(gpt_oss.EXPERTS) if number not in absent]:
                done = parameter.weight_loader(
                    parameter, stack[number], f"{shard}_{name}", f"gpt_oss_{shard}", number, return_success=True
                )
                assert done == (number in experts)


def reload_gpt_oss(layer, model, absent=()):
    """What vLLM's reload_weights does with a layer."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(layer)
    load_gpt_oss(layer, model, range(len(model.experts[0, "down"][0])), absent)
    finalize_layerwise_reload(layer, None)


def run(method, layer, hidden, ids, weights):
    return method.apply(layer, hidden, weights, ids, None, None)


@pytest.fixture(scope="module")
def model():
    import gpt_oss

    return gpt_oss.make(5)


def test_gpt_oss_is_the_librarys_layer_and_transformers_own(methods, model):
    import gpt_oss

    inputs = gpt_oss.batch()
    out = run(*gpt_oss_layer(methods, model), *inputs)
    assert torch.equal(out, gpt_oss.library(model, inputs))
    expected, off = gpt_oss.exact(model, *inputs)
    error = (out.double() - expected).abs()
    print(f"\nlargest error {float(error.max()):.4f}, of what is allowed {float((error / off).max()):.2f}")
    assert (error <= off).all()
    for change in (lambda name, bias: bias * 0, lambda name, bias: bias * (2 if "down" in name else 1)):
        wrong = run(*gpt_oss_layer(methods, gpt_oss.with_biases(model, change)), *inputs)
        assert ((wrong.double() - expected).abs() > off).float().mean() > 0.5


def test_slices_count_down_s_bias_once(methods, model):
    import gpt_oss

    inputs, half = gpt_oss.batch(1), gpt_oss.INNER // 2
    for number in range(2):
        part = run(*gpt_oss_layer(methods, model, tp=(2, number)), *inputs)
        columns = slice(number * half, (number + 1) * half)
        assert torch.equal(part, gpt_oss.library(model, inputs, columns, down_bias=1 - number))


def test_ranks_get_whole_blocks_and_the_last_what_is_left(methods, model):
    """3 blocks of 32 on two ranks: the second's parameters are padded with zeros, which add nothing."""
    import gpt_oss

    inputs, wider = gpt_oss.batch(2), of_three_blocks(9)
    for number, columns in enumerate((slice(0, 64), slice(64, 96))):
        part = run(*gpt_oss_layer(methods, wider, tp=(2, number)), *inputs)
        assert torch.equal(part, gpt_oss.library(wider, inputs, columns, down_bias=1 - number))


def of_three_blocks(seed):
    """Experts of 96 channels, 3 blocks of 32."""
    import gpt_oss

    inner, random, model = 96, torch.Generator().manual_seed(seed), gpt_oss.make(5)
    experts = {
        (0, name): (
            torch.randint(0, 256, (gpt_oss.EXPERTS, rows, columns // 2), generator=random, dtype=torch.uint8),
            torch.randint(120, 124, (gpt_oss.EXPERTS, rows, columns // 32), generator=random, dtype=torch.uint8),
        )
        for name, rows, columns in (("gate_up", 2 * inner, gpt_oss.HIDDEN), ("down", gpt_oss.HIDDEN, inner))
    }
    name = "model.layers.0.mlp.experts.gate_up_proj_bias"
    bias = torch.randn(gpt_oss.EXPERTS, 2 * inner, generator=random).bfloat16()
    return gpt_oss.Model(experts, model.dense | {name: bias})


@pytest.fixture(params=[0x00, 0x3C, 0x7F, 0xFF], ids=hex)
def poisoned_memory(request, monkeypatch):
    """What vLLM's reload finds in fresh memory: finite numbers, or what is none."""
    stock = torch.empty_strided

    def empty_strided(*sizes, **options):
        made = stock(*sizes, **options)
        if made.device.type == "cpu":
            made.untyped_storage().fill_(request.param)
        return made

    monkeypatch.setattr(torch, "empty_strided", empty_strided)


@pytest.mark.parametrize("number", [0, 1])
def test_a_reload_into_padded_slices_does_not_read_the_padding(methods, poisoned_memory, number):
    import gpt_oss

    inputs, columns = gpt_oss.batch(2), (slice(0, 64), slice(64, 96))[number]
    first, second = of_three_blocks(9), of_three_blocks(10)
    method, layer = gpt_oss_layer(methods, first, tp=(2, number))
    before, handle = run(method, layer, *inputs), method.fused.layer.handle
    for model in (second, first):
        reload_gpt_oss(layer, model)
        out = run(method, layer, *inputs)
        assert torch.equal(out, gpt_oss.library(model, inputs, columns, down_bias=1 - number))
    assert torch.equal(out, before) and method.fused.layer.handle == handle


def test_an_expert_that_a_reload_lacks_is_an_error_that_names_it(methods, model, poisoned_memory):
    import gpt_oss
    import nvfp4_moe

    method, layer = gpt_oss_layer(methods, model)
    with pytest.raises(nvfp4_moe.Error, match=r"^model.layers.0.mlp.experts: .*expert 3.*NaN"):
        reload_gpt_oss(layer, model, absent=[3])
    inputs = gpt_oss.batch()
    with pytest.raises(
        RuntimeError, match=r"model.layers.0.mlp.experts does not run after its last reload: .*expert 3"
    ):
        run(method, layer, *inputs)


def test_an_expert_that_a_checkpoint_lacks_is_an_error_that_names_it(methods, model, monkeypatch):
    import nvfp4_moe

    whole = load_gpt_oss
    monkeypatch.setitem(globals(), "load_gpt_oss", lambda *given: whole(*given, absent=[6]))
    with pytest.raises(nvfp4_moe.Error, match=r"^model.layers.0.mlp.experts: .*expert 6.*NaN"):
        gpt_oss_layer(methods, model)


@pytest.mark.parametrize("here", [[0, 1, 2, 3], [4, 5, 6, 7], [1, 3, 5, 7]], ids=str)
def test_experts_of_a_rank_have_their_own_biases(methods, model, here):
    import gpt_oss

    hidden, ids, weights = gpt_oss.batch(3)
    part = run(*gpt_oss_layer(methods, model, here=here), hidden, ids, weights)
    masked = torch.where(torch.isin(ids, torch.tensor(here)), ids, -1)
    assert torch.equal(part, gpt_oss.library(model, (hidden, masked, weights))) and part.abs().max() > 0


@pytest.mark.parametrize("activation_format", ["bf16", "nvfp4", "fp8", "int8_block"])
def test_formats_of_activations(methods, model, monkeypatch, activation_format):
    import gpt_oss

    monkeypatch.setenv("NVFP4_MOE_ACTIVATIONS", activation_format)
    inputs = gpt_oss.batch(4)
    out = run(*gpt_oss_layer(methods, model), *inputs)
    assert torch.equal(out, gpt_oss.library(model, inputs, activation_format=activation_format))


# ---- without a gate


@pytest.fixture
def without_refusal():
    """vLLM describes such layers on GPUs alone."""
    import without_a_gate  # noqa: F401


@pytest.mark.parametrize("activation_format", ["bf16", "nvfp4", "fp8", "int8_block"])
@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors"])
def test_experts_without_a_gate_are_the_librarys_layer_within_float64s_interval(
    methods, without_refusal, monkeypatch, kind, activation_format
):
    import moe_reference
    import nemotron
    import nvfp4_moe
    from nvfp4_moe.vllm.plan import plan_of
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    monkeypatch.setenv("NVFP4_MOE_ACTIVATIONS", activation_format)
    model, first = nemotron.make(3), nemotron.MOE_LAYERS[0]
    sizes = {"hidden_dim": nemotron.LATENT, "intermediate_size": nemotron.INNER}
    moe = moe_config(nemotron.EXPERTS, activation=MoEActivation.RELU2_NO_MUL, **sizes)
    layer = Layer(moe)
    plan = plan_of(layer, "model.layers.1.mixer.experts")
    if kind == "modelopt":
        config = ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True, exclude_modules=[])
        method = methods.modelopt_method()(config, moe, plan)
    else:
        method = methods.compressed_tensors_method()(moe, plan)
    method.create_weights(
        layer,
        num_experts=nemotron.EXPERTS,
        hidden_size=nemotron.LATENT,
        intermediate_size_per_partition=nemotron.INNER,
        params_dtype=torch.bfloat16,
        weight_loader=lambda *args: None,
        global_num_experts=nemotron.EXPERTS,
    )
    stacks = {}
    for name, shard in (("up", "w13"), ("down", "w2")):
        matrices = [model.experts[first, expert, f"{name}_proj"] for expert in range(nemotron.EXPERTS)]
        stacks[name] = tuple(torch.stack(parts) for parts in zip(*matrices, strict=True))
        codes, scales, scale = stacks[name]
        packed = "" if kind == "modelopt" else "_packed"
        getattr(layer, f"{shard}_weight{packed}").data.copy_(codes)
        getattr(layer, f"{shard}_weight_scale").data.view(torch.uint8).copy_(scales)
        tensor_scale = getattr(
            layer, f"{shard}_weight_scale_2" if kind == "modelopt" else f"{shard}_weight_global_scale"
        )
        assert tensor_scale.numel() == nemotron.EXPERTS
        tensor_scale.data.copy_((scale if kind == "modelopt" else 1 / scale).reshape(tensor_scale.shape))
    method.process_weights_after_loading(layer)
    assert method.moe_kernel.fused_experts.rows == nemotron.INNER
    hidden = torch.randn(9, nemotron.LATENT, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights, ids = torch.rand(9, nemotron.EXPERTS, generator=torch.Generator().manual_seed(2)).topk(2)
    inputs = hidden, ids.int(), weights
    out = run(method, layer, *inputs)
    options = {"activation": "relu2", "activation_format": activation_format}
    config = nvfp4_moe.MoeConfig(nemotron.EXPERTS, 2, nemotron.LATENT, nemotron.INNER, **options)
    assert torch.equal(out, nvfp4_moe.MoeLayer.from_tensors(config, **stacks).run(*inputs))
    expected = moe_reference.forward(
        moe_reference.Options(nemotron.EXPERTS, 2, nemotron.LATENT, nemotron.INNER, **options),
        moe_reference.Weights(gate=stacks["up"], **stacks),
        *inputs,
        accuracy=moe_reference.CONTRACT,
    )
    assert not moe_reference.outside(expected, out).any() and out.abs().max() > 0
