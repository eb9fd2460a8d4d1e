"""A tiny random Nemotron-3, with its experts as each producer writes NVFP4, and its twin in floats of the same numbers.

It has attention and mixtures of experts without a gate: relu2 between latent projections, and a shared expert. Every
token goes to every expert, with its own weights, so there are no ties at which a run may differ. There are no Mamba
layers, because no engine has their kernels for CPUs.
"""

from __future__ import annotations

from pathlib import Path

import models
import torch
from models import EXPERTS, HEAD, HIDDEN, INNER, VOCABULARY, Model, quantized

PATTERN = "*E*E"
LATENT, SHARED, HEADS, KV_HEADS = 64, 96, 4, 2
MOE_LAYERS = tuple(index for index, kind in enumerate(PATTERN) if kind == "E")
EXPONENTS = {"up_proj": -8, "down_proj": -10}


def make(seed: int) -> Model:
    """experts by (layer, expert, projection); dense: every other tensor, by its name as published."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, size: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * size / columns**0.5

    dense = {
        "backbone.embeddings.weight": random(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "backbone.norm_f.weight": torch.ones(HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN, 2),
    }
    experts = {}
    for index, kind in enumerate(PATTERN):
        stem = f"backbone.layers.{index}"
        dense[f"{stem}.norm.weight"] = torch.ones(HIDDEN)
        sizes = {
            "q_proj": (HEADS * HEAD, HIDDEN), "k_proj": (KV_HEADS * HEAD, HIDDEN),
            "v_proj": (KV_HEADS * HEAD, HIDDEN), "o_proj": (HIDDEN, HEADS * HEAD),
        }  # fmt: skip
        if kind == "E":
            sizes = {
                "gate": (EXPERTS, HIDDEN), "fc1_latent_proj": (LATENT, HIDDEN), "fc2_latent_proj": (HIDDEN, LATENT),
                "shared_experts.up_proj": (SHARED, HIDDEN), "shared_experts.down_proj": (HIDDEN, SHARED),
            }  # fmt: skip
            dense[f"{stem}.mixer.gate.e_score_correction_bias"] = torch.randn(EXPERTS, generator=generator) * 0.1
        for name, size in sizes.items():
            dense[f"{stem}.mixer.{name}.weight"] = random(*size, 1)
        for expert in range(EXPERTS if kind == "E" else 0):
            for name, size in (("up_proj", (INNER, LATENT)), ("down_proj", (LATENT, INNER))):
                experts[index, expert, name] = quantized(random(*size, 1) * 2.0**9, EXPONENTS[name])
    return Model(experts, {name: tensor.bfloat16() for name, tensor in dense.items()})


def quantization(form: str) -> dict | None:
    """models.quantization of a form, for this model's modules."""
    said = models.quantization(form)
    if said is None:
        return None
    kept = sorted(name.removesuffix(".weight") for name in make(0).dense if name.endswith("weight"))
    said["ignore"] = [name for name in kept if "norm" not in name]
    if form == "modelopt_mixed":
        stems = [f"backbone.layers.{layer}.mixer.experts" for layer in MOE_LAYERS]
        said["quantized_layers"] = models.mixed_layers(stems, EXPONENTS)
    return said


def config(form: str) -> dict:
    return models.with_quantization(quantization(form), {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "attention_bias": False,
        "chunk_size": 16, "conv_kernel": 4, "hybrid_override_pattern": PATTERN,
        "intermediate_size": INNER, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
        "mamba_num_heads": 4, "max_position_embeddings": 512, "mlp_bias": False,
        "mlp_hidden_act": "relu2", "moe_intermediate_size": INNER, "moe_latent_size": LATENT,
        "moe_shared_expert_intermediate_size": SHARED, "n_group": 1, "n_groups": 2,
        "n_routed_experts": EXPERTS, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": HEADS, "num_experts_per_tok": EXPERTS, "num_hidden_layers": len(PATTERN),
        "num_key_value_heads": KV_HEADS, "routed_scaling_factor": 2.5, "ssm_state_size": 16,
        "topk_group": 1,
    })  # fmt: skip


def write(directory: Path, form: str, model: Model) -> Path:
    return models.write(directory, form, model, config, "backbone.layers.{}.mixer.experts")


def write_all(root: Path, model: Model) -> dict[str, Path]:
    return {form: write(root / form, form, model) for form in models.FORMS}
