"""Tiny random models of transformers' classes, as checkpoints in every form that the adapter loads."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nvfp4_moe as nv
import nvfp4_moe.transformers as adapter
import torch
import transformers
from checkpoints import raw
from safetensors.torch import save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

_BASE = dict(
    vocab_size=160,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    initializer_range=0.08,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_FEW = dict(num_experts_per_tok=2, moe_intermediate_size=32)
_LATENT = dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16)
_SHARED = dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1)


_GQA = dict(num_key_value_heads=2, head_dim=16)
_QWEN = dict(_BASE, **_FEW, **_GQA, intermediate_size=64, num_experts=4)
_LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16
)  # fmt: skip
_MIXTRAL = dict(_BASE, **_GQA, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
# Nemotron-3 Nano, or Super if it has a latent width: experts without a gate, of 32 channels after a projection.
_NEMOTRON = dict(
    {name: value for name, value in _BASE.items() if name != "num_hidden_layers"}, **_FEW, **_GQA, intermediate_size=64,
    layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_routed_experts=4, n_shared_experts=1,
    moe_shared_expert_intermediate_size=48, n_group=2, topk_group=1, routed_scaling_factor=2.5,
    mamba_num_heads=16,  # in_proj has a multiple of 16 rows
    mamba_head_dim=4, ssm_state_size=16, n_groups=2, chunk_size=16, expand=1, use_mamba_kernels=False,
)  # fmt: skip
_DEEPSEEK_V4 = dict(
    _BASE, **_FEW, num_key_value_heads=1, head_dim=32, n_routed_experts=4, n_shared_experts=1, q_lora_rank=32,
    swiglu_limit=0.05,  # low enough for these weights to be clamped
    qk_rope_head_dim=16, o_groups=2, o_lora_rank=16, index_n_heads=2, index_head_dim=16, index_topk=16, num_hash_layers=1,
)  # fmt: skip
_GROUPS = dict(_BASE, **_FEW, **_SHARED, intermediate_size=64, topk_group=1)
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", dict(_QWEN, norm_topk_prob=True)),
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(_QWEN, **_LINEAR, shared_expert_intermediate_size=32, layer_types=["linear_attention", "full_attention"]),
    ),
    "mixtral": ("MixtralConfig", _MIXTRAL),
    "deepseek_v3": ("DeepseekV3Config", dict(_GROUPS, **_LATENT, num_key_value_heads=4, n_group=2)),
    "deepseek_v4": ("DeepseekV4Config", _DEEPSEEK_V4),
    "glm4_moe": ("Glm4MoeConfig", dict(_GROUPS, **_GQA, n_group=1)),
    "minimax_m2": ("MiniMaxM2Config", _MIXTRAL),
    "nemotron_h": ("NemotronHConfig", dict(_NEMOTRON, moe_latent_size=None)),
    "nemotron_h_latent": ("NemotronHConfig", dict(_NEMOTRON, moe_latent_size=32)),
}
MODELS: dict[str, Callable[[], Any]] = {
    kind: functools.partial(lambda name, fields: getattr(transformers, name)(**copy.deepcopy(fields)), *made)
    for kind, made in _KINDS.items()
}


def fresh(kind: str, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Any:
    """A random model of a class, the same one at each call. sizes: fields of its config."""
    torch.manual_seed(1)
    config = MODELS[kind]()
    config.update(sizes)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def gpt_oss(dtype: torch.dtype = torch.float32) -> Any:
    """A model of transformers' with biases as large as the sums that they are added to; the same one at each call."""
    torch.manual_seed(3)
    config = transformers.GptOssConfig(
        **{**_BASE, "initializer_range": 0.3},
        intermediate_size=96,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"] * 2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("proj_bias"):
            parameter.data.normal_(0, 2)
    return model.to(dtype).eval()


def write_original(directory: Path, kind: str, **sizes: int) -> None:
    """A bf16 checkpoint whose selection biases are not all zero. sizes: fields of its config."""
    torch.manual_seed(0)
    config = MODELS[kind]()
    config.update(sizes)
    config.dtype = "bfloat16"
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.rand(buffer.shape) * 0.1
        if name.endswith("tid2eid"):
            experts = torch.rand(buffer.shape[0], config.n_routed_experts).argsort(-1)
            buffer.data = experts[:, : buffer.shape[1]].to(buffer.dtype)
    model.save_pretrained(directory)


def rewrite(directory: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    """Writes every tensor again, as the result of change(key, tensor), into one file without an index."""
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in raw(directory).items():
        tensors |= {name: value.contiguous() for name, value in change(key, tensor).items()}
    for file in directory.glob("model*"):
        file.unlink()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def quantize_linears(
    directory: Path, pattern: str, *, output_format: str, input_scale: float | None = 0.01
) -> list[str]:
    """Quantizes weights whose keys (without .weight) match a pattern to the format's NVFP4. Returns their stems."""
    stems = []

    def change(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        stem = key.removesuffix(".weight")
        if stem == key or tensor.dim() != 2 or tensor.dtype != torch.bfloat16 or not re.search(pattern, stem):
            return {key: tensor}
        stems.append(stem)
        codes, scales, tensor_scale = nv.quantize(tensor)
        scales, scale = scales.view(torch.float8_e4m3fn), torch.tensor(tensor_scale, dtype=torch.float32)
        if output_format == "modelopt":
            made = {f"{stem}.weight": codes, f"{stem}.weight_scale": scales, f"{stem}.weight_scale_2": scale}
            if input_scale is not None:
                made[f"{stem}.input_scale"] = torch.tensor(input_scale)
        else:
            made = {f"{stem}.weight_packed": codes, f"{stem}.weight_scale": scales}
            made[f"{stem}.weight_global_scale"] = (1 / scale).reshape(1)
            if input_scale is not None:
                made[f"{stem}.input_global_scale"] = torch.tensor([1 / input_scale])
        return made

    rewrite(directory, change)
    assert stems, f"{pattern} finds no weight"
    return stems


def to_fp8(directory: Path, pattern: str, *, leaf: str = "scale") -> dict[str, torch.Tensor]:
    """Converts the weights that match a pattern to E4M3 with a power of two for each 128 x 128, as in DeepSeek-V4.
    Returns the numbers that they then represent, by stem."""
    values = {}

    def change(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        stem = key.removesuffix(".weight")
        if stem == key or tensor.dim() != 2 or tensor.dtype != torch.bfloat16 or not re.search(pattern, stem):
            return {key: tensor}
        blocks = tuple(-(-size // 128) for size in tensor.shape)
        exponents = torch.arange(blocks[0] * blocks[1]).reshape(blocks) % 3 - 10
        scales = torch.exp2(exponents.float())
        whole = scales.repeat_interleave(128, 0)[: tensor.shape[0]].repeat_interleave(128, 1)[:, : tensor.shape[1]]
        codes = (tensor.float() / whole).to(torch.float8_e4m3fn)
        values[stem] = codes.float() * whole
        return {key: codes, f"{stem}.{leaf}": scales.to(torch.float8_e8m0fnu)}

    rewrite(directory, change)
    assert values, f"{pattern} finds no weight"
    return values


def change_config(directory: Path, **changes: Any) -> None:
    """Fields of config.json; None removes one."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


# ---- loading them


def load(directory: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """As a user does: with the config if transformers does not find the adapter by itself."""
    declared = transformers.AutoConfig.from_pretrained(directory).quantization_config["quant_method"]
    given = {"quantization_config": adapter.Nvfp4MoeConfig(**options)} if options or declared != "modelopt" else {}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **given)


def packed(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, adapter.Nvfp4Experts)]


def logits(model: Any) -> torch.Tensor:
    """Returns the logits of two sequences of 11 tokens."""
    ids = torch.arange(3, 3 + 22).reshape(2, 11) * 7 % 150 + 3
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def paths_of(model: Any, stems: Iterable[str]) -> dict[str, str]:
    """Returns {path of a module: stem in the files}, as transformers renames keys."""
    renamings = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
    known = {f"{path}.weight": 1 for path, _ in model.named_modules()}
    paths = {}
    for stem in stems:
        path = rename_source_key(f"{stem}.weight", renamings, [], model.base_model_prefix, known)[0]
        paths[path.removesuffix(".weight")] = stem
    return paths


def stock_twin(original: Path, model: Any, changed: Iterable[str] = ()) -> Any:
    """transformers' class with the original weights, except for the modules `changed`, which have the model's.

    A tensor that the loaded model has too must be the same number in the twin's dtype. The twin gets the model's own
    tensor, because float32 buffers stay float32 in a pre-quantized model, and transformers casts some weights of a
    float model differently.
    """
    twin = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    own, other = model.state_dict(), {f"{path}.weight" for path in changed}
    for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        if name in own:
            assert name in other or torch.equal(own[name].to(tensor.dtype), tensor), name
            tensor.data = own[name].clone()
    return twin
