"""SGLang's FusedMoE made, loaded and run in this process, on any rank, over ../common/expert_layer.py's experts."""

import contextlib
import dataclasses
from unittest import mock

import models
import torch

NAME = "model.layers.0.mlp.experts"


def quantization_config(form):
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptMixedPrecisionConfig

    config = {"modelopt_mixed": ModelOptMixedPrecisionConfig}.get(
        form, ModelOptFp4Config if form.startswith("modelopt") else CompressedTensorsConfig
    )
    return config.from_config(dict(models.quantization(form)))


def make_layer(form, model=None, **options):
    """Makes a layer of SGLang's. model: its experts may have no gate."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    if model is not None and (0, 0, "gate_proj") not in model.experts:
        options = {"activation": "relu2", "is_gated": False} | options
    options = {"layer_id": 0, "params_dtype": torch.bfloat16, "prefix": NAME} | options
    return FusedMoE(
        num_experts=models.EXPERTS,
        hidden_size=models.HIDDEN,
        intermediate_size=models.INNER,
        top_k=models.TOP_K,
        quant_config=quantization_config(form),
        **options,
    )


def load(layer, form, model):
    """Loads the checkpoint's tensors through the names and the loader that SGLang's models use. SGLang's NemotronH
    passes up under the gate's name, and has no third matrix."""
    is_gated = (0, 0, "gate_proj") in model.experts
    names = ("gate_proj", "down_proj", "up_proj") if is_gated else ("up_proj", "down_proj", "")
    mapping = layer.make_expert_params_mapping(*names, models.EXPERTS)
    parameters = {f"experts.{name}": parameter for name, parameter in layer.named_parameters()}
    for (index, expert, projection), matrix in model.experts.items():
        if index != 0:
            continue
        for name, tensor in models.expert_tensors(form, f"experts.{expert}.{projection}", matrix).items():
            targets = ((name.replace(weight, into), row) for into, weight, *row in mapping if weight in name)
            target, (number, shard) = next((target, row) for target, row in targets if target in parameters)
            parameter = parameters[target]
            parameter.weight_loader(parameter, tensor, target, shard_id=shard, expert_id=number)


@contextlib.contextmanager
def rank(sglang, *, ep=(1, 0), tp=(1, 0)):
    """SGLang's parallel state as (size, rank) of expert and tensor parallel, without process groups."""
    from sglang.srt.distributed import parallel_state

    size = ep[0] * tp[0]
    # Releases up to 0.5.20 read the group itself, which a single process does not need.
    no_group = mock.patch.object(parallel_state, "_TP", object(), create=True)
    state = sglang.get_parallel().override(
        tp_size=size, tp_rank=max(ep[1], tp[1]), attn_tp_size=size, moe_ep_size=ep[0], moe_ep_rank=ep[1],
        moe_tp_size=tp[0], moe_tp_rank=tp[1], tp_group=None,
    )  # fmt: skip
    with no_group, state:
        yield


def run(layer, hidden, ids, weights):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    logits = torch.zeros(len(hidden), models.EXPERTS)
    return layer(hidden.clone(), StandardTopKOutput(topk_weights=weights, topk_ids=ids, router_logits=logits))


def pack(layer):
    layer.quant_method.process_weights_after_loading(layer)
    assert sum(parameter.numel() for parameter in layer.parameters()) == 0


def served(sglang, form, model, inputs, *, ep=(1, 0), tp=(1, 0), **options):
    """Makes, loads and runs one rank's layer as SGLang does, and returns its output."""
    with rank(sglang, ep=ep, tp=tp):
        layer = make_layer(form, model, **options)
        load(layer, form, model)
        pack(layer)
        return run(layer, *inputs)


def ask(monkeypatch, activation_format):
    """Sets the format of activations for new layers. The environment would set it for the whole process."""
    from nvfp4_moe.sglang import compressed_tensors, hooks

    def asking(own):
        def asked(layer, hidden_size, intermediate_size, settings, *more):
            settings = dataclasses.replace(settings, activation_format=activation_format)
            return own(layer, hidden_size, intermediate_size, settings, *more)

        return asked

    for module in (hooks, compressed_tensors):
        monkeypatch.setattr(module, "layer_options", asking(module.layer_options))
