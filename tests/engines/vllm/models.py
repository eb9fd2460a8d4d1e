"""Tiny random models whose experts are NVFP4, in every form that the plugin takes, with a twin of the very same numbers.

Tensor scales are powers of two, so that a dequantized weight, E2M1 times E4M3 times 2^n, has at most six significant bits:
the twin's bfloat16 weights are exact, and what differs between a model and its twin is rounding of activations alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LAYERS, EXPERTS, TOP_K, HIDDEN, INNER, VOCABULARY = 2, 8, 2, 128, 64, 384

Matrix = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def quantize(weight: torch.Tensor, exponent: int) -> Matrix:
    """(rows, K) to codes uint8 (rows, K/2), scales e4m3 (rows, K/16) and the tensor scale 2^exponent."""
    scale = torch.tensor(2.0**exponent)
    blocks = weight.float().reshape(weight.shape[0], -1, 16)
    scales = (blocks.abs().amax(-1) / (6 * scale)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    quotient = blocks / (scales.float() * scale)[..., None]
    codes = torch.bucketize(quotient.abs().clamp(max=6), (E2M1[1:] + E2M1[:-1]) / 2)
    codes = (codes + 8 * (quotient < 0)).to(torch.uint8).reshape(weight.shape)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales, scale


def dequantize(matrix: Matrix) -> torch.Tensor:
    codes, scales, scale = matrix
    both = torch.stack([codes & 15, codes >> 4], -1)
    values = E2M1[(both & 7).long()] * torch.where(both >= 8, -1.0, 1.0)
    return (values.reshape(codes.shape[0], -1, 16) * (scales.float() * scale)[..., None]).reshape(codes.shape[0], -1)


def _original(seed: int) -> tuple[dict, dict[str, torch.Tensor]]:
    """A Qwen3-MoE's config and weights. Routers and head are wide, so that most decisions are no ties."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.08,
        dtype="bfloat16",
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(".mlp.gate.weight"):
            tensor = tensor * 4
        if ".mlp.experts." not in name:
            tensors[name] = tensor.contiguous()
            continue
        stem, _, stacked = name.rpartition(".")
        for expert, weight in enumerate(tensor):
            parts = (
                dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
                if stacked == "gate_up_proj"
                else {"down_proj": weight}
            )
            for projection, part in parts.items():
                tensors[f"{stem}.{expert}.{projection}.weight"] = part.contiguous()
    return json.loads(config.to_json_string()) | {"architectures": ["Qwen3MoeForCausalLM"]}, tensors


def _is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def _exponent(name: str) -> int:
    """gate and up have tensor scales of their own, four times apart: one taken for both is seen at once."""
    return {"gate_proj": -10, "up_proj": -8, "down_proj": -9}[name.rsplit(".", 2)[1]]


def _write(directory: Path, config: dict, tensors: dict[str, torch.Tensor], quantization: dict | None = None) -> Path:
    directory.mkdir(parents=True)
    said = dict(config) | ({"quantization_config": quantization} if quantization else {})
    (directory / "config.json").write_text(json.dumps(said, indent=1))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


_IGNORED = ["lm_head", "*self_attn*", "*mlp.gate"]


def _modelopt(algorithm: str, activations: bool = True) -> dict:
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"weights": weights, "targets": ["Linear"]}
    if activations:
        group["input_activations"] = dict(weights)
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "producer": {"name": "modelopt", "version": "0.39.0"},
        "config_groups": {"group_0": group},
        "ignore": _IGNORED,
        "group_size": 16,
    }


def _mixed() -> dict:
    """MIXED_PRECISION: an algorithm by layer, and half of the layers W4A16."""
    layers = {}
    for layer in range(LAYERS):
        algorithm = "NVFP4" if layer % 2 == 0 else "W4A16_NVFP4"
        for expert in range(EXPERTS):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
                layers[name] = {"quant_algo": algorithm, "group_size": 16}
    said = _modelopt("MIXED_PRECISION") | {"quantized_layers": layers}
    del said["group_size"]
    return said


def _compressed_tensors(activations: bool) -> dict:
    weights = {
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
        "weights": weights,
        "input_activations": dict(weights, dynamic="local") if activations else None,
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


def make(root: Path, seed: int = 0) -> dict[str, Path]:
    """Writes the twin and each quantized form of one model below root; {form: directory}."""
    config, original = _original(seed)
    plain = {name: tensor for name, tensor in original.items() if not _is_expert(name)}
    matrices = {
        name.removesuffix(".weight"): quantize(tensor, _exponent(name))
        for name, tensor in original.items()
        if _is_expert(name)
    }
    twin = plain | {f"{name}.weight": dequantize(matrix).bfloat16() for name, matrix in matrices.items()}
    for name, matrix in matrices.items():
        assert torch.equal(twin[f"{name}.weight"].float(), dequantize(matrix)), "the twin's weights are exact"
    input_scale = torch.tensor(6.0 / 2688)
    modelopt, compressed = dict(plain), dict(plain)
    for name, (codes, scales, scale) in matrices.items():
        modelopt |= {
            f"{name}.weight": codes.contiguous(),
            f"{name}.weight_scale": scales,
            f"{name}.weight_scale_2": scale.clone(),
            f"{name}.input_scale": input_scale.clone(),
        }
        compressed |= {
            f"{name}.weight_packed": codes.contiguous(),
            f"{name}.weight_scale": scales,
            f"{name}.weight_global_scale": (1 / scale).reshape(1),
            f"{name}.input_global_scale": (1 / input_scale).reshape(1),
        }
    weight_only = {name: tensor for name, tensor in modelopt.items() if not name.endswith("input_scale")}
    compressed_weight_only = {n: t for n, t in compressed.items() if not n.endswith("input_global_scale")}
    return {
        "twin": _write(root / "twin", config, twin),
        "modelopt": _write(root / "modelopt", config, modelopt, _modelopt("NVFP4")),
        "modelopt-w4a16": _write(root / "modelopt-w4a16", config, weight_only, _modelopt("W4A16_NVFP4", False)),
        "mixed": _write(root / "mixed", config, modelopt, _mixed()),
        "compressed-tensors": _write(root / "ct", config, compressed, _compressed_tensors(True)),
        "compressed-tensors-w4a16": _write(root / "ct16", config, compressed_weight_only, _compressed_tensors(False)),
    }


def read(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")
