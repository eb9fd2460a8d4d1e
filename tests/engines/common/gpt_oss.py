"""A tiny random gpt-oss as it is published, MXFP4 experts with biases and rows of gate and up in turn, and its twin in floats.

E2M1 times a power of two has two significant bits: the twin's bfloat16 weights are the same numbers, as are the biases. The
biases are of the size of what they are added to, so that a bias that is lost, or counted twice, is far off.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from models import E2M1, Model
from safetensors.torch import save_file

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER, VOCABULARY, HEAD = 2, 8, 2, 128, 64, 384, 64
HEADS, KV_HEADS = 4, 2  # two ranks get one of the latter each
FORMS = ("gpt_oss", "gpt_oss_twin")


def make(seed: int) -> Model:
    """experts by (layer, "gate_up" or "down"): (codes uint8 (E, rows, K/2), scales E8M0 uint8 (E, rows, K/32))."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, size: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * size

    dense = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN, size=1),
        "lm_head.weight": random(VOCABULARY, HIDDEN, size=2 / HIDDEN**0.5),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    experts = {}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            dense[f"{stem}.{name}.weight"] = torch.ones(HIDDEN)
        kv, all_heads = KV_HEADS * HEAD, HEADS * HEAD
        sizes = {"q": (all_heads, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN), "o": (HIDDEN, all_heads)}
        for name, (rows, columns) in sizes.items():
            dense[f"{stem}.self_attn.{name}_proj.weight"] = random(rows, columns, size=columns**-0.5)
            dense[f"{stem}.self_attn.{name}_proj.bias"] = random(rows, size=0.1)
        dense[f"{stem}.self_attn.sinks"] = random(HEADS, size=1)
        dense[f"{stem}.mlp.router.weight"] = random(EXPERTS, HIDDEN, size=8 / HIDDEN**0.5)
        dense[f"{stem}.mlp.router.bias"] = random(EXPERTS, size=1)
        dense[f"{stem}.mlp.experts.gate_up_proj_bias"] = random(EXPERTS, 2 * INNER, size=1)
        dense[f"{stem}.mlp.experts.down_proj_bias"] = random(EXPERTS, HIDDEN, size=1)
        for name, rows, columns in (("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER)):
            codes = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 124, (EXPERTS, rows, columns // 32), generator=generator, dtype=torch.uint8)
            experts[layer, name] = (codes, scales)
    return Model(experts, {name: tensor.bfloat16() for name, tensor in dense.items()})


def floats(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(..., rows, K) float32, dequantized here, so that the twin shares nothing with the library."""
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    values = E2M1[(both & 7).long()] * torch.where(both >= 8, -1.0, 1.0)
    return values * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)


def config(form: str) -> dict:
    """With gpt-oss' own sizes and fields but for what makes it large."""
    said = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "head_dim": HEAD,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initial_context_length": 4096,
        "intermediate_size": INNER,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
        "num_attention_heads": HEADS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "num_local_experts": EXPERTS,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
    }
    if form == "gpt_oss":
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        said["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    return said


def expert_tensors(form: str, stem: str, name: str, matrix: tuple[torch.Tensor, torch.Tensor]) -> dict:
    """The stacked tensors of a layer's gate_up or down, as a form's checkpoint names them."""
    codes, scales = matrix
    if form == "gpt_oss":
        blocks = codes.reshape(*codes.shape[:2], -1, 16)
        return {f"{stem}.{name}_proj_blocks": blocks, f"{stem}.{name}_proj_scales": scales}
    return {f"{stem}.{name}_proj": floats(codes, scales).transpose(1, 2).contiguous().bfloat16()}


def write(directory: Path, form: str, model: Model) -> Path:
    """A checkpoint of the form."""
    directory.mkdir(parents=True)
    tensors = dict(model.dense)
    for (layer, name), matrix in model.experts.items():
        tensors |= expert_tensors(form, f"model.layers.{layer}.mlp.experts", name, matrix)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    (directory / "config.json").write_text(json.dumps(config(form), indent=1))
    return directory


def write_all(root: Path, model: Model) -> dict[str, Path]:
    return {form: write(root / form, form, model) for form in FORMS}


def with_experts_of(other: Model, model: Model) -> Model:
    """The model with the experts and biases of the other, in a model's attention and routers."""
    mine = {name: tensor for name, tensor in model.dense.items() if ".experts." not in name}
    return Model(other.experts, mine | {name: tensor for name, tensor in other.dense.items() if ".experts." in name})


def with_biases(model: Model, change) -> Model:
    """The model with other biases of experts: change(name, tensor) of each."""
    return Model(
        model.experts,
        {name: change(name, tensor) if ".experts." in name else tensor for name, tensor in model.dense.items()},
    )
