"""A tiny random DeepSeek-V3, with its experts as ModelOpt writes NVFP4, and its twin in floats of the same numbers.

A dense layer and two mixtures of experts: scores by sigmoid with a correction bias, groups, a factor, and a shared
expert. The router's logits, and so the margins between experts, are large compared with bfloat16's roundings.
"""

from __future__ import annotations

from pathlib import Path

import models
import torch
from models import EXPONENTS, HIDDEN, INNER, VOCABULARY, Model, quantized

EXPERTS, TOP_K, GROUPS, KEPT_GROUPS, FACTOR = 16, 4, 4, 2, 2.5
HEADS, NOPE, ROPE, VALUE, LATENT, LAYERS = 2, 32, 32, 32, 32, 3
MOE_LAYERS = (1, 2)


def make(seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, size: float = 1) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * size / columns**0.5

    dense = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "lm_head.weight": random(VOCABULARY, HIDDEN, 2),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    experts = {}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            dense[f"{stem}.{name}.weight"] = torch.ones(HIDDEN)
        dense[f"{stem}.self_attn.kv_a_layernorm.weight"] = torch.ones(LATENT)
        sizes = {
            "q_proj": (HEADS * (NOPE + ROPE), HIDDEN), "kv_a_proj_with_mqa": (LATENT + ROPE, HIDDEN),
            "kv_b_proj": (HEADS * (NOPE + VALUE), LATENT), "o_proj": (HIDDEN, HEADS * VALUE),
        }  # fmt: skip
        for name, size in sizes.items():
            dense[f"{stem}.self_attn.{name}.weight"] = random(*size)
        is_moe = layer in MOE_LAYERS
        for name in ("gate_proj", "up_proj", "down_proj"):
            size = (HIDDEN, INNER) if name == "down_proj" else (INNER, HIDDEN)
            dense[f"{stem}.mlp.{'shared_experts.' if is_moe else ''}{name}.weight"] = random(*size)
            for expert in range(EXPERTS if is_moe else 0):
                experts[layer, expert, name] = quantized(random(*size) * 2.0**10, EXPONENTS[name])
        if is_moe:
            dense[f"{stem}.mlp.gate.weight"] = random(EXPERTS, HIDDEN, 2)
            dense[f"{stem}.mlp.gate.e_score_correction_bias"] = torch.randn(EXPERTS, generator=generator) * 0.3
    return Model(experts, {name: tensor.bfloat16() for name, tensor in dense.items()})


def config(form: str) -> dict:
    said = models.quantization(form)
    if said is not None:
        said["ignore"] = ["lm_head", "*self_attn*", "*mlp.gate", "*shared_experts*", "model.layers.0.*"]
    return models.with_quantization(said, {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
        "first_k_dense_replace": 1, "head_dim": ROPE, "hidden_act": "silu", "intermediate_size": INNER,
        "kv_lora_rank": LATENT, "max_position_embeddings": 512, "moe_intermediate_size": INNER, "moe_layer_freq": 1,
        "n_group": GROUPS, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": HEADS, "num_experts_per_tok": TOP_K, "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS, "num_nextn_predict_layers": 0, "q_lora_rank": None, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE, "rms_norm_eps": 1e-06, "rope_interleave": True, "rope_theta": 10000.0,
        "routed_scaling_factor": FACTOR, "scoring_func": "sigmoid", "topk_group": KEPT_GROUPS,
        "topk_method": "noaux_tc", "v_head_dim": VALUE,
    })  # fmt: skip


def write(directory: Path, form: str, model: Model, **fields) -> Path:
    """fields: of config.json, instead of the model's."""
    return models.write(directory, form, model, lambda form: config(form) | fields)
