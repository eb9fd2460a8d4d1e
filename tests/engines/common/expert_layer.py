"""The experts of the first layer of models.py, with or without a gate: run by the library, by rank, and in float64."""

import models
import moe_reference
import nvfp4_moe
import torch

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def batch(seed=0, tokens=9):
    """hidden states, ids, router weights"""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, models.HIDDEN, generator=generator).bfloat16()
    weights, ids = torch.randn(tokens, models.EXPERTS, generator=generator).softmax(-1).topk(models.TOP_K)
    return hidden, ids.to(torch.int32), weights


def of_experts(inputs, here):
    """Returns the inputs with all other experts' ids set to -1, so that they add nothing."""
    hidden, ids, weights = inputs
    return hidden, torch.where(torch.isin(ids, torch.tensor(list(here))), ids, -1), weights


def stacks(model):
    """Returns gate, up and down of all experts, as moe_reference and MoeLayer.from_tensors take them. Experts without a
    gate have no "gate"."""
    found = {}
    for projection in PROJECTIONS:
        matrices = [model.experts.get((0, expert, projection)) for expert in range(models.EXPERTS)]
        if matrices[0] is not None:
            found[projection.removesuffix("_proj")] = tuple(torch.stack(parts) for parts in zip(*matrices, strict=True))
    return found


def slice_of(model, number, of=2):
    """Returns the model with a tensor parallel rank's part of the intermediate dimension."""
    inner, cut = models.INNER // of, {}
    for key, (codes, scales, tensor_scale) in model.experts.items():
        if key[2] == "down_proj":
            parts = [array.chunk(of, 1)[number] for array in (codes, scales)]
        else:
            parts = [array[number * inner : (number + 1) * inner] for array in (codes, scales)]
        cut[key] = models.Matrix(*(part.contiguous() for part in parts), tensor_scale)
    return models.Model(cut, {})


def sizes(model, **options):
    without_gate = {} if (0, 0, "gate_proj") in model.experts else {"activation": "relu2"}
    inner = model.experts[0, 0, "up_proj"].codes.shape[0]
    return {
        "num_experts": models.EXPERTS, "top_k": models.TOP_K, "hidden_size": models.HIDDEN,
        "intermediate_size": inner, "activation_format": "bf16",
    } | without_gate | options  # fmt: skip


def library(model, inputs, **options):
    config = nvfp4_moe.MoeConfig(**sizes(model, **options))
    return nvfp4_moe.MoeLayer.from_tensors(config, **stacks(model)).run(*inputs)


def is_outside(model, inputs, out, **options):
    """Returns whether out leaves the float64 layer's intervals that docs/explanation/numerics.md allows on CPUs."""
    found = stacks(model)
    weights = moe_reference.Weights(**({"gate": found["up"]} | found))  # relu2 reads no gate
    options = moe_reference.Options(**sizes(model, **options))
    expected = moe_reference.forward(options, weights, *inputs, accuracy=moe_reference.CONTRACT)
    return bool(moe_reference.outside(expected, out).any()) or not out.abs().max() > 0
