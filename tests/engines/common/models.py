"""A tiny random Qwen3-MoE with NVFP4 experts as each producer writes it, and its twin in floats of the same numbers.

Tensor scales are powers of two: E2M1 x E4M3 x 2^n has at most six significant bits, so the twin's bfloat16 weights are
exact and only the rounding of activations differs. gate and up have scales of their own, four times apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import nvfp4_moe
import torch
from safetensors.torch import save_file

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER, VOCABULARY, HEAD = 2, 8, 2, 128, 64, 384, 64
QUANTIZED = ("modelopt", "modelopt_w4a16", "modelopt_mixed", "compressed_w4a4", "compressed_w4a16")
FORMS = (*QUANTIZED, "twin")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
EXPONENTS = {"gate_proj": -10, "up_proj": -8, "down_proj": -9}
_IGNORED = ["lm_head", "*self_attn*", "*mlp.gate"]


class Matrix(NamedTuple):
    """codes uint8 (rows, K/2), scales uint8 (rows, K/16) of E4M3 bits, tensor_scale float32 ()."""

    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor

    def floats(self) -> torch.Tensor:
        """Dequantized here, so that the twin shares no code with the library."""
        both = torch.stack([self.codes & 15, self.codes >> 4], -1)
        values = E2M1[(both & 7).long()] * torch.where(both >= 8, -1.0, 1.0)
        scales = self.scales.view(torch.float8_e4m3fn).float() * self.tensor_scale
        return (values.reshape(self.codes.shape[0], -1, 16) * scales[..., None]).reshape(self.codes.shape[0], -1)


class Model(NamedTuple):
    """experts by (layer, expert, projection); dense: every other tensor, bfloat16, by its name in a checkpoint."""

    experts: dict[tuple[int, int, str], Matrix]
    dense: dict[str, torch.Tensor]


def mxfp4_floats(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(..., rows, K) float32 of codes and E8M0 scales."""
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    values = E2M1[(both & 7).long()] * torch.where(both >= 8, -1.0, 1.0)
    return values * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)


def quantized(weight: torch.Tensor, exponent: int) -> Matrix:
    """Quantizes a weight times 2^exponent with that tensor scale."""
    scale = 2.0**exponent
    codes, scales, _ = nvfp4_moe.quantize(weight * scale, tensor_scale=scale)
    return Matrix(codes, scales, torch.tensor(scale))


def make(seed: int) -> Model:
    """Random weights. Routers and head have a wide range, so that most of their decisions are not ties."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, size: float) -> torch.Tensor:
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
        for name in ("q_norm", "k_norm"):
            dense[f"{stem}.self_attn.{name}.weight"] = torch.ones(HEAD)
        sizes = {"q": (2 * HEAD, HIDDEN), "k": (HEAD, HIDDEN), "v": (HEAD, HIDDEN), "o": (HIDDEN, 2 * HEAD)}
        for name, size in sizes.items():
            dense[f"{stem}.self_attn.{name}_proj.weight"] = random(*size, 1)
        dense[f"{stem}.mlp.gate.weight"] = random(EXPERTS, HIDDEN, 4)
        for expert in range(EXPERTS):
            for name, exponent in EXPONENTS.items():
                rows, columns = (HIDDEN, INNER) if name == "down_proj" else (INNER, HIDDEN)
                # The range that suits the tensor scale, so that E4M3 neither saturates nor underflows.
                experts[layer, expert, name] = quantized(random(rows, columns, 1) * 2.0**10, exponent)
    return Model(experts, {name: tensor.bfloat16() for name, tensor in dense.items()})


def with_quantization(quantization: dict | None, fields: dict) -> dict:
    """Returns a config.json with these fields and those that all models here have."""
    common = {
        "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16", "head_dim": HEAD,
        "hidden_size": HIDDEN, "tie_word_embeddings": False, "vocab_size": VOCABULARY,
    }  # fmt: skip
    return common | fields | ({"quantization_config": quantization} if quantization else {})


def config(form: str) -> dict:
    return with_quantization(quantization(form), {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "decoder_sparse_step": 1, "hidden_act": "silu", "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": 512, "mlp_only_layers": [], "moe_intermediate_size": INNER,
        "norm_topk_prob": True, "num_attention_heads": 2, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "num_hidden_layers": LAYERS, "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    })  # fmt: skip


def _modelopt(algorithm: str) -> dict:
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"weights": numbers, "targets": ["Linear"]} | (
        {} if algorithm == "W4A16_NVFP4" else {"input_activations": numbers}
    )
    producer = {"name": "modelopt", "version": "0.39.0"}
    said = {"quant_method": "modelopt", "quant_algo": algorithm, "producer": producer, "ignore": _IGNORED}
    return said | {"config_groups": {"group_0": group}, "group_size": 16}


def mixed_layers(stems: list[str], projections=tuple(EXPONENTS)) -> dict:
    """Returns ModelOpt's quantized_layers: NVFP4 in the first module of experts, W4A16 in the second."""
    return {
        f"{stem}.{expert}.{name}": {"quant_algo": algorithm, "group_size": 16}
        for stem, algorithm in zip(stems, ("NVFP4", "W4A16_NVFP4"), strict=True)
        for expert in range(EXPERTS)
        for name in projections
    }


def _mixed() -> dict:
    said = _modelopt("MIXED_PRECISION")
    del said["group_size"]
    return said | {"quantized_layers": mixed_layers([f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)])}


def _compressed(activations: bool) -> dict:
    numbers = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
        "symmetric": True, "dynamic": False, "observer": "minmax", "scale_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    group = {
        "targets": ["Linear"], "weights": numbers, "format": "nvfp4-pack-quantized",
        "input_activations": dict(numbers, dynamic="local") if activations else None,
        "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "version": "0.17.0",
        "quantization_status": "compressed", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    }  # fmt: skip


def quantization(form: str) -> dict | None:
    """Returns the quantization_config of a form."""
    return {
        "modelopt": lambda: _modelopt("NVFP4"),
        "modelopt_w4a16": lambda: _modelopt("W4A16_NVFP4"),
        "modelopt_mixed": _mixed,
        "compressed_w4a4": lambda: _compressed(True),
        "compressed_w4a16": lambda: _compressed(False),
        "twin": lambda: None,
    }[form]()


def expert_tensors(form: str, name: str, matrix: Matrix) -> dict[str, torch.Tensor]:
    """Names one matrix's tensors as a form's checkpoint does. name ends in the projection."""
    scales = matrix.scales.view(torch.float8_e4m3fn)
    if form == "twin":
        return {f"{name}.weight": matrix.floats().bfloat16()}
    if form.startswith("modelopt"):
        tensors = {"weight": matrix.codes, "weight_scale": scales, "weight_scale_2": matrix.tensor_scale}
        more = {"input_scale": torch.tensor(0.01)}
    else:
        tensors = {"weight_packed": matrix.codes, "weight_scale": scales}
        tensors["weight_global_scale"] = (1 / matrix.tensor_scale).reshape(1)
        more = {"input_global_scale": torch.tensor([100.0])}
    return {f"{name}.{key}": tensor for key, tensor in (tensors | ({} if "w4a16" in form else more)).items()}


def save(directory: Path, tensors: dict[str, torch.Tensor], config: dict) -> Path:
    """Writes a checkpoint, with ModelOpt's own file: SGLang reads the algorithm of each layer only from there."""
    directory.mkdir(parents=True)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(copies, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    said = config.get("quantization_config", {})
    if "quantized_layers" in said:
        names = {"quant_algo": "quant_algo", "ignore": "exclude_modules", "quantized_layers": "quantized_layers"}
        own = {"producer": said["producer"], "quantization": {names[key]: said[key] for key in names}}
        (directory / "hf_quant_config.json").write_text(json.dumps(own))
    return directory


def write(directory: Path, form: str, model: Model, config=config, stem="model.layers.{}.mlp.experts") -> Path:
    """Writes a checkpoint of the form. config, stem: another model's config and module of experts."""
    tensors = dict(model.dense)
    for (layer, expert, projection), matrix in model.experts.items():
        tensors |= expert_tensors(form, f"{stem.format(layer)}.{expert}.{projection}", matrix)
    return save(directory, tensors, config(form))


def write_all(root: Path, model: Model) -> dict[str, Path]:
    """Writes every form of one model below root: {form: directory}."""
    return {form: write(root / form, form, model) for form in FORMS}


def scaled(model: Model, projection: str, factor: float) -> Model:
    """Multiplies the tensor scales of one projection: a wrong model, which a judge must detect.

    up's scales are four times gate's. A factor of a quarter gives what an engine computes that reads only the first of
    the two scales.
    """
    experts = {
        key: matrix._replace(tensor_scale=matrix.tensor_scale * factor) if key[2] == projection else matrix
        for key, matrix in model.experts.items()
    }
    return Model(experts, model.dense)


def without_gates(model: Model) -> Model:
    return Model({key: matrix for key, matrix in model.experts.items() if key[2] != "gate_proj"}, model.dense)
