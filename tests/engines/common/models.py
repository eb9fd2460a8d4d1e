"""A tiny random Qwen3-MoE with NVFP4 experts as each producer writes it, and its twin in floats of the very same numbers.

Tensor scales are powers of two: E2M1 x E4M3 x 2^n has at most six significant bits, so that the twin's bfloat16 weights are
exact and nothing but the rounding of activations differs. gate and up have scales of their own, four times apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import nvfp4_moe
import torch
from safetensors.torch import load_file, save_file

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER, VOCABULARY, HEAD = 2, 8, 2, 128, 64, 384, 64
FORMS = ("modelopt", "modelopt_w4a16", "modelopt_mixed", "compressed_w4a4", "compressed_w4a16", "twin")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
EXPONENTS = {"gate_proj": -10, "up_proj": -8, "down_proj": -9}
_IGNORED = ["lm_head", "*self_attn*", "*mlp.gate"]


class Matrix(NamedTuple):
    """codes uint8 (rows, K/2), scales uint8 (rows, K/16) of E4M3 bits, tensor_scale float32 ()."""

    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor

    def floats(self) -> torch.Tensor:
        """Dequantized here, so that the twin shares nothing with the library."""
        both = torch.stack([self.codes & 15, self.codes >> 4], -1)
        values = E2M1[(both & 7).long()] * torch.where(both >= 8, -1.0, 1.0)
        scales = self.scales.view(torch.float8_e4m3fn).float() * self.tensor_scale
        return (values.reshape(self.codes.shape[0], -1, 16) * scales[..., None]).reshape(self.codes.shape[0], -1)


class Model(NamedTuple):
    """experts by (layer, expert, projection); dense: every other tensor, bfloat16, by its name in a checkpoint."""

    experts: dict[tuple[int, int, str], Matrix]
    dense: dict[str, torch.Tensor]


def make(seed: int) -> Model:
    """Random weights. Routers and head are wide, so that most of their decisions are no ties."""
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
        for name, rows, columns in (
            ("q", 2 * HEAD, HIDDEN),
            ("k", HEAD, HIDDEN),
            ("v", HEAD, HIDDEN),
            ("o", HIDDEN, 2 * HEAD),
        ):
            dense[f"{stem}.self_attn.{name}_proj.weight"] = random(rows, columns, 1)
        dense[f"{stem}.mlp.gate.weight"] = random(EXPERTS, HIDDEN, 4)
        for expert in range(EXPERTS):
            for name, rows, columns in (
                ("gate_proj", INNER, HIDDEN),
                ("up_proj", INNER, HIDDEN),
                ("down_proj", HIDDEN, INNER),
            ):
                scale = 2.0 ** EXPONENTS[name]
                # The range that the tensor scale asks for, so that E4M3 neither saturates nor underflows.
                weight = random(rows, columns, 1) * scale * 2.0**10
                codes, scales, _ = nvfp4_moe.quantize(weight, tensor_scale=scale)
                experts[layer, expert, name] = Matrix(codes, scales, torch.tensor(scale))
    return Model(experts, {name: tensor.bfloat16() for name, tensor in dense.items()})


def _config(quantization: dict | None) -> dict:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "head_dim": HEAD,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": 512,
        "mlp_only_layers": [],
        "moe_intermediate_size": INNER,
        "norm_topk_prob": True,
        "num_attention_heads": 2,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
    }
    return config | ({"quantization_config": quantization} if quantization else {})


def _modelopt(algorithm: str) -> dict:
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"weights": numbers, "targets": ["Linear"]} | (
        {} if algorithm == "W4A16_NVFP4" else {"input_activations": numbers}
    )
    producer = {"name": "modelopt", "version": "0.39.0"}
    said = {"quant_method": "modelopt", "quant_algo": algorithm, "producer": producer, "ignore": _IGNORED}
    return said | {"config_groups": {"group_0": group}, "group_size": 16}


def _mixed() -> dict:
    """NVFP4 in even layers, W4A16 in odd ones."""
    layers = {}
    for layer in range(LAYERS):
        algorithm = "NVFP4" if layer % 2 == 0 else "W4A16_NVFP4"
        for expert in range(EXPERTS):
            for name in EXPONENTS:
                layers[f"model.layers.{layer}.mlp.experts.{expert}.{name}"] = {
                    "quant_algo": algorithm,
                    "group_size": 16,
                }
    said = _modelopt("MIXED_PRECISION") | {"quantized_layers": layers}
    del said["group_size"]
    return said


def _compressed(activations: bool) -> dict:
    numbers = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {
        "targets": ["Linear"],
        "weights": numbers,
        "input_activations": dict(numbers, dynamic="local") if activations else None,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
        "version": "0.17.0",
    }


def quantization(form: str) -> dict | None:
    """quantization_config of a form."""
    return {
        "modelopt": lambda: _modelopt("NVFP4"),
        "modelopt_w4a16": lambda: _modelopt("W4A16_NVFP4"),
        "modelopt_mixed": _mixed,
        "compressed_w4a4": lambda: _compressed(True),
        "compressed_w4a16": lambda: _compressed(False),
        "twin": lambda: None,
    }[form]()


def expert_tensors(form: str, name: str, matrix: Matrix) -> dict[str, torch.Tensor]:
    """One matrix's tensors as a form's checkpoint names them. name ends in the projection."""
    scales = matrix.scales.view(torch.float8_e4m3fn)
    if form == "twin":
        return {f"{name}.weight": matrix.floats().bfloat16()}
    if form.startswith("modelopt"):
        tensors = {
            f"{name}.weight": matrix.codes,
            f"{name}.weight_scale": scales,
            f"{name}.weight_scale_2": matrix.tensor_scale,
        }
        return tensors if form == "modelopt_w4a16" else tensors | {f"{name}.input_scale": torch.tensor(0.01)}
    tensors = {
        f"{name}.weight_packed": matrix.codes,
        f"{name}.weight_scale": scales,
        f"{name}.weight_global_scale": (1 / matrix.tensor_scale).reshape(1),
    }
    return tensors if form == "compressed_w4a16" else tensors | {f"{name}.input_global_scale": torch.tensor([100.0])}


def write(directory: Path, form: str, model: Model) -> Path:
    """A checkpoint of the form."""
    directory.mkdir(parents=True)
    tensors = dict(model.dense)
    for (layer, expert, projection), matrix in model.experts.items():
        tensors |= expert_tensors(form, f"model.layers.{layer}.mlp.experts.{expert}.{projection}", matrix)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    said = quantization(form)
    (directory / "config.json").write_text(json.dumps(_config(said), indent=1))
    if form == "modelopt_mixed":
        write_modelopt_file(directory, said)
    return directory


def write_modelopt_file(directory: Path, said: dict) -> None:
    """ModelOpt's own file, from which alone SGLang reads an algorithm a layer."""
    names = {"quant_algo": "quant_algo", "ignore": "exclude_modules", "quantized_layers": "quantized_layers"}
    (directory / "hf_quant_config.json").write_text(
        json.dumps({"producer": said["producer"], "quantization": {names[key]: said[key] for key in names}})
    )


def write_all(root: Path, model: Model) -> dict[str, Path]:
    """Every form of one model below root: {form: directory}."""
    return {form: write(root / form, form, model) for form in FORMS}


def with_one_tensor_scale(model: Model) -> Model:
    """up's tensor scale is gate's: what an engine computes that reads the first of the two for both."""
    experts = dict(model.experts)
    for layer, expert, projection in model.experts:
        if projection == "up_proj":
            gate = model.experts[layer, expert, "gate_proj"]
            experts[layer, expert, projection] = experts[layer, expert, projection]._replace(
                tensor_scale=gate.tensor_scale
            )
    return Model(experts, model.dense)


def read(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that write made."""
    return load_file(directory / "model.safetensors")
