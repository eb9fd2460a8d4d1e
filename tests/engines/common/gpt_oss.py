"""A tiny random gpt-oss as it is published, and its twin in floats.

The published form has MXFP4 experts with biases, and rows of gate and up alternate. E2M1 times a power of two has two
significant bits, so the twin's bfloat16 weights and biases are the same numbers. The biases are as large as the sums
they are added to: one that is lost, or counted twice, is far off.
"""

from __future__ import annotations

from pathlib import Path

import expert_layer
import models
import nvfp4_moe
import torch
from models import EXPERTS, HEAD, HIDDEN, INNER, LAYERS, TOP_K, VOCABULARY, Model, mxfp4_floats

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
        experts |= {(layer, name): matrix for name, matrix in _matrices(generator, INNER).items()}
    return Model(experts, {name: tensor.bfloat16() for name, tensor in dense.items()})


def config(form: str) -> dict:
    """Returns gpt-oss' own config, except for the sizes that make it large."""
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept} if form == "gpt_oss" else None
    rope = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    }  # fmt: skip
    return models.with_quantization(quantization, {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "pad_token_id": 0, "hidden_act": "silu", "initial_context_length": 4096,
        "intermediate_size": INNER, "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072, "num_attention_heads": HEADS, "num_experts_per_tok": TOP_K,
        "num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS, "num_local_experts": EXPERTS,
        "rms_norm_eps": 1e-05, "rope_scaling": rope, "rope_theta": 150000, "sliding_window": 128,
        "swiglu_limit": 7.0,
    })  # fmt: skip


def expert_tensors(form: str, stem: str, name: str, matrix: tuple[torch.Tensor, torch.Tensor]) -> dict:
    """The stacked tensors of a layer's gate_up or down, as a form's checkpoint names them."""
    codes, scales = matrix
    if form == "gpt_oss":
        blocks = codes.reshape(*codes.shape[:2], -1, 16)
        return {f"{stem}.{name}_proj_blocks": blocks, f"{stem}.{name}_proj_scales": scales}
    return {f"{stem}.{name}_proj": mxfp4_floats(codes, scales).transpose(1, 2).contiguous().bfloat16()}


def write(directory: Path, form: str, model: Model) -> Path:
    """Writes a checkpoint of the form."""
    tensors = dict(model.dense)
    for (layer, name), matrix in model.experts.items():
        tensors |= expert_tensors(form, f"model.layers.{layer}.mlp.experts", name, matrix)
    return models.save(directory, tensors, config(form))


def write_all(root: Path, model: Model) -> dict[str, Path]:
    return {form: write(root / form, form, model) for form in FORMS}


def with_experts_of(other: Model, model: Model) -> Model:
    """Returns the model with the experts and biases of the other; attention and routers stay."""
    return Model(other.experts, model.dense | {name: t for name, t in other.dense.items() if ".experts." in name})


def with_biases(model: Model, change) -> Model:
    """Returns the model with changed biases of experts: change(name, tensor) for each."""
    return Model(
        model.experts,
        {name: change(name, tensor) if ".experts." in name else tensor for name, tensor in model.dense.items()},
    )


# Mistakes a loader may make with biases.
WRONG_BIASES = {
    "no biases": lambda name, bias: bias * 0,
    "down's twice": lambda name, bias: bias * (2 if "down" in name else 1),
    "halves": lambda name, bias: bias if "down" in name else bias.reshape(*bias.shape[:-1], 2, -1).mT.flatten(-2),
}


# ---- only the first layer's experts

NAME = "model.layers.0.mlp.experts"


def _matrices(generator: torch.Generator, inner: int) -> dict:
    """Returns {"gate_up", "down"}: (codes, scales) of all experts, with `inner` channels."""
    made = {}
    for name, rows, columns in (("gate_up", 2 * inner, HIDDEN), ("down", HIDDEN, inner)):
        codes = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 124, (EXPERTS, rows, columns // 32), generator=generator, dtype=torch.uint8)
        made[name] = codes, scales
    return made


def of_three_blocks(seed: int) -> Model:
    """Makes experts of 96 channels, 3 blocks of 32: two ranks get two blocks and one. gpt-oss on four ranks is similar:
    of its 90 blocks three ranks have 23 each and the last has 21."""
    generator, inner = torch.Generator().manual_seed(seed), 96
    experts = {(0, name): matrix for name, matrix in _matrices(generator, inner).items()}
    bias = torch.randn(EXPERTS, 2 * inner, generator=generator).bfloat16()
    return Model(experts, make(5).dense | {f"{NAME}.gate_up_proj_bias": bias})


def batch(seed: int = 0):
    return expert_layer.batch(seed, 13)


def library(model, inputs, columns=slice(None), down_bias=1, **options):
    """Runs the library's layer over the same numbers, or over a slice of the intermediate dimension."""
    from nvfp4_moe._mxfp4 import cast_mxfp4

    (codes, scales), down = (model.experts[0, name] for name in ("gate_up", "down"))
    part = range(down[0].shape[2] * 2)[columns]
    parts = {
        "gate": (codes[:, ::2][:, columns], scales[:, ::2][:, columns]),
        "up": (codes[:, 1::2][:, columns], scales[:, 1::2][:, columns]),
        "down": [array[..., part.start // n : part.stop // n] for array, n in zip(down, (2, 32), strict=True)],
    }
    stacks = {name: cast_mxfp4(*(array.contiguous() for array in arrays)) for name, arrays in parts.items()}
    assert all(stack[3] == 0 for stack in stacks.values()), "the cast is exact"
    bias, down_biases = (model.dense[f"{NAME}.{name}_proj_bias"] for name in ("gate_up", "down"))
    config = {"activation": "swiglu_oai", "swiglu_limit": 7.0, "activation_format": "bf16", "expert_biases": True}
    layer = nvfp4_moe.MoeLayer.from_tensors(
        nvfp4_moe.MoeConfig(EXPERTS, TOP_K, HIDDEN, len(part), **(config | options)),
        **{name: stack[:3] for name, stack in stacks.items()},
        biases=(bias[:, ::2][:, columns], bias[:, 1::2][:, columns], down_biases * down_bias),
        max_tokens=32,
    )
    return layer.run(*inputs)


def check_slices(model, inputs, run_rank):
    """Runs two tensor parallel ranks and returns both outputs. run_rank(number) returns a rank's output. Each rank gets
    whole blocks, the last one the remainder, and down's bias counts once."""
    inner = model.experts[0, "down"][0].shape[2] * 2
    first = -(-inner // 2 // 32) * 32
    parts = [run_rank(number) for number in range(2)]
    for number, columns in enumerate((slice(0, first), slice(first, inner))):
        assert torch.equal(parts[number], library(model, inputs, columns, down_bias=1 - number))
    return parts


def exact(model, hidden, ids, weights):
    """Runs transformers' own experts in float64. Also returns how far bfloat16's roundings of the intermediate, of each
    row and of the sum may move each element: half an ulp each, up to 2^-8 of the value, and 2^-16 for sums and
    functions in float32."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    inner = model.experts[0, "down"][0].shape[2] * 2
    sizes = {"hidden_size": HIDDEN, "intermediate_size": inner, "num_local_experts": EXPERTS}
    experts = GptOssExperts(GptOssConfig(**sizes)).double()
    with torch.no_grad():
        for name in ("gate_up", "down"):
            getattr(experts, f"{name}_proj").copy_(mxfp4_floats(*model.experts[0, name]).transpose(1, 2))
            getattr(experts, f"{name}_proj_bias").copy_(model.dense[f"{NAME}.{name}_proj_bias"])
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


def check_exact(model, inputs, run_model):
    """Checks run_model(model), an engine's output for these inputs. It equals the library's layer bit for bit, and
    transformers' up to roundings. Biases that are lost or counted twice are far beyond those."""
    out = run_model(model)
    assert torch.equal(out, library(model, inputs))
    expected, off = exact(model, *inputs)
    error = (out.double() - expected).abs()
    print(f"\nlargest error {float(error.max()):.4f}, of what is allowed {float((error / off).max()):.2f}")
    assert (error <= off).all()
    for what in ("no biases", "down's twice"):
        wrong = run_model(with_biases(model, WRONG_BIASES[what]))
        assert ((wrong.double() - expected).abs() > off).float().mean() > 0.5, what
