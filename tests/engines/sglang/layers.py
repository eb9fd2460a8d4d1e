"""SGLang's FusedMoE made, loaded and run in this process, on any rank; and the same layer by the library and in float64."""

import contextlib
from unittest import mock

import models
import moe_reference
import nvfp4_moe
import torch

NAME = "model.layers.0.mlp.experts"
TOKENS = 9


def quantization_config(form):
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptMixedPrecisionConfig

    config = {
        "modelopt": ModelOptFp4Config,
        "modelopt_w4a16": ModelOptFp4Config,
        "modelopt_mixed": ModelOptMixedPrecisionConfig,
        "compressed_w4a4": CompressedTensorsConfig,
        "compressed_w4a16": CompressedTensorsConfig,
    }[form]
    return config.from_config(dict(models.quantization(form)))


def make_layer(form, **options):
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    options = {"layer_id": 0, "params_dtype": torch.bfloat16, "prefix": NAME} | options
    return FusedMoE(
        num_experts=models.EXPERTS,
        hidden_size=models.HIDDEN,
        intermediate_size=models.INNER,
        top_k=models.TOP_K,
        quant_config=quantization_config(form),
        **options,
    )


def load(layer, form, model, only=None):
    """The checkpoint's tensors through the names and the loader that SGLang's models use."""
    mapping = layer.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", models.EXPERTS)
    parameters = dict(layer.named_parameters())
    for (index, expert, projection), matrix in model.experts.items():
        if index != 0 or (only is not None and expert not in only):
            continue
        for name, tensor in models.expert_tensors(form, f"experts.{expert}.{projection}", matrix).items():
            into, _, number, shard = next(row for row in mapping if name.startswith(row[1]))
            target = name.replace(f"experts.{expert}.{projection}.", into.removeprefix(""))
            parameter = parameters[target.removeprefix("experts.")]
            parameter.weight_loader(parameter, tensor, target, shard_id=shard, expert_id=number)


@contextlib.contextmanager
def rank(sglang, *, ep=(1, 0), tp=(1, 0)):
    """SGLang's parallel state as (size, rank) of expert and tensor parallel, without process groups."""
    from sglang.srt.distributed import parallel_state

    size = ep[0] * tp[0]
    # Releases up to 0.5.20 ask for the group itself, which a single process has no use for.
    no_group = mock.patch.object(parallel_state, "_TP", object(), create=True)
    with (
        no_group,
        sglang.get_parallel().override(
            tp_size=size,
            tp_rank=max(ep[1], tp[1]),
            attn_tp_size=size,
            moe_ep_size=ep[0],
            moe_ep_rank=ep[1],
            moe_tp_size=tp[0],
            moe_tp_rank=tp[1],
            tp_group=None,
        ),
    ):
        yield


def batch(seed=0, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, models.HIDDEN, generator=generator).bfloat16()
    weights, ids = torch.randn(tokens, models.EXPERTS, generator=generator).softmax(-1).topk(models.TOP_K)
    return hidden, ids.to(torch.int32), weights


def run(layer, hidden, ids, weights):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    logits = torch.zeros(len(hidden), models.EXPERTS)
    return layer(hidden.clone(), StandardTopKOutput(topk_weights=weights, topk_ids=ids, router_logits=logits))


def served(sglang, form, model, inputs, *, ep=(1, 0), tp=(1, 0), **options):
    """The output of one rank's layer, made, loaded and run as SGLang does."""
    with rank(sglang, ep=ep, tp=tp):
        layer = make_layer(form, **options)
        load(layer, form, model)
        layer.quant_method.process_weights_after_loading(layer)
        return run(layer, *inputs)


def stacks(model, layer=0):
    """gate, up and down of all experts, as moe_reference and MoeLayer.from_tensors take them."""
    found = {}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        matrices = [model.experts[layer, expert, projection] for expert in range(models.EXPERTS)]
        codes, scales, tensor_scale = (torch.stack(parts) for parts in zip(*matrices, strict=True))
        found[projection.removesuffix("_proj")] = (codes, scales, tensor_scale)
    return found


def sizes(**options):
    return {
        "num_experts": models.EXPERTS,
        "top_k": models.TOP_K,
        "hidden_size": models.HIDDEN,
        "intermediate_size": models.INNER,
        "activation_format": "bf16",
    } | options


def library(model, inputs, **options):
    layer = nvfp4_moe.MoeLayer.from_tensors(nvfp4_moe.MoeConfig(**sizes(**options)), **stacks(model))
    return layer.run(*inputs)


def float64(model, inputs, **options):
    """The layer in float64 with the intervals that docs/numerics.md leaves, of the kernels that run on CPUs."""
    weights = moe_reference.Weights(**stacks(model))
    expected = moe_reference.Options(**{key: value for key, value in sizes(**options).items()})
    return moe_reference.forward(expected, weights, *inputs, accuracy=moe_reference.CONTRACT)
