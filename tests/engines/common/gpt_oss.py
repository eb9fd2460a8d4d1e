"""A tiny random gpt-oss as it is published, MXFP4 experts with biases and rows of gate and up in turn, and its twin in floats.

E2M1 times a power of two has two significant bits: the twin's bfloat16 weights are the same numbers, as are the biases. The
biases are of the size of what they are added to, so that a bias that is lost, or counted twice, is far off.
"""

from __future__ import annotations

import json
from pathlib import Path

import nvfp4_moe
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


# ---- the first layer's experts alone

_FIRST = "model.layers.0.mlp.experts"


def batch(seed=0):
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(13, HIDDEN, generator=random).bfloat16()
    weights, ids = torch.randn(13, EXPERTS, generator=random).softmax(-1).topk(TOP_K)
    return hidden, ids.to(torch.int32), weights


def library(model, inputs, columns=slice(None), down_bias=1, **options):
    """The library's layer over the same numbers, or over a slice of the intermediate dimension."""
    from nvfp4_moe._mxfp4 import cast_mxfp4

    codes, scales = model.experts[0, "gate_up"]
    down = model.experts[0, "down"]
    inner = down[0].shape[2] * 2
    part = range(inner)[columns]
    stacks = {
        "gate": cast_mxfp4(codes[:, ::2][:, columns].contiguous(), scales[:, ::2][:, columns].contiguous()),
        "up": cast_mxfp4(codes[:, 1::2][:, columns].contiguous(), scales[:, 1::2][:, columns].contiguous()),
        "down": cast_mxfp4(
            down[0][..., part.start // 2 : part.stop // 2].contiguous(),
            down[1][..., part.start // 32 : part.stop // 32].contiguous(),
        ),
    }
    assert all(stack[3] == 0 for stack in stacks.values()), "the cast is exact"
    bias, down_biases = (model.dense[f"{_FIRST}.{name}_proj_bias"] for name in ("gate_up", "down"))
    config = {
        "activation": "swiglu_oai",
        "swiglu_limit": 7.0,
        "activation_format": "bf16",
        "expert_biases": True,
    } | options
    layer = nvfp4_moe.MoeLayer.from_tensors(
        nvfp4_moe.MoeConfig(EXPERTS, TOP_K, HIDDEN, len(part), **config),
        **{name: stack[:3] for name, stack in stacks.items()},
        biases=(bias[:, ::2][:, columns], bias[:, 1::2][:, columns], down_biases * down_bias),
        max_tokens=32,
    )
    return layer.run(*inputs)


def exact(model, hidden, ids, weights):
    """transformers' own experts in float64, and how far bfloat16's roundings of the intermediate, of each row and of the sum
    may move each element: half an ulp each, up to 2^-8 of the value, and 2^-16 for sums and functions in float32."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
    experts = GptOssExperts(GptOssConfig(**sizes)).double()
    with torch.no_grad():
        for name in ("gate_up", "down"):
            getattr(experts, f"{name}_proj").copy_(floats(*model.experts[0, name]).transpose(1, 2))
            getattr(experts, f"{name}_proj_bias").copy_(model.dense[f"{_FIRST}.{name}_proj_bias"])
        out = experts(hidden.double(), ids.long(), weights.double())
        off = 2.0**-8 * out.abs()
        for number in range(ids.shape[1]):
            chosen, weight = ids[:, number].long(), weights[:, number, None].double()
            up = (
                torch.einsum("th,thi->ti", hidden.double(), experts.gate_up_proj[chosen])
                + experts.gate_up_proj_bias[chosen]
            )
            inner = experts._apply_gate(up)
            row = torch.einsum("ti,tih->th", inner, experts.down_proj[chosen]) + experts.down_proj_bias[chosen]
            through = torch.einsum("ti,tih->th", inner.abs(), experts.down_proj[chosen].abs())
            off += weight * ((2.0**-8 + 2.0**-16) * through + 2.0**-8 * row.abs())
    return out, off * (1 + 2.0**-6)
