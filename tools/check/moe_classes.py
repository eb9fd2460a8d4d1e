"""Finds transformers' model classes with a mixture of experts, and makes a tiny model of each.

The classes are not listed here: every model type of transformers' auto classes is checked, and counts if its source
mentions experts. Its tiny config is the class's default with the sizes of SIZES. OWN has additional fields for single
classes, whose fields depend on each other. A class that cannot be built is an error; no row is left out.
"""

from __future__ import annotations

import importlib
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

# In order of preference, because checkpoints are published for it: a wrapper around a language model before the
# language model.
_TASKS = (
    "MULTIMODAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "TOKEN_CLASSIFICATION",
)
HIDDEN, INTERMEDIATE, DENSE, EXPERTS, TOP_K, LAYERS = 64, 48, 32, 8, 2, 4

# Fields of any config, by name. Fields that a config lacks, or has as null, are not changed.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), DENSE),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), INTERMEDIATE),
    **dict.fromkeys(
        (
            "shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        80,
    ),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts", "top_k"),
        TOP_K,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "num_key_value_heads",
            "num_heads",
            "n_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("head_dim", "global_head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("index_head_dim", "indexer_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group", "depth", "vision_depth", "num_local_blocks"), 1),
    **dict.fromkeys(
        (
            "out_hidden_size",
            "projection_hidden_size",
            "mm_projector_hidden_size",
            "projector_output_dim",
            "projector_hidden_size",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "linear_num_heads"), 4),
    **dict.fromkeys(
        ("mamba_head_dim", "ssm_state_size", "linear_head_dim", "downsample_hidden_size", "output_dim"), 16
    ),
    **dict.fromkeys(("n_groups",), 1),
    "vocab_size": 160,
    "vocab_size_per_layer_input": 160,
    "hidden_size_per_layer_input": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# Additional fields for single classes, in the language model's part of the config or, by path, anywhere in it. ".x" is
# x of the whole config.
_GEMMA = dict(enable_moe_block=True, num_experts=EXPERTS, top_k_experts=TOP_K, moe_intermediate_size=INTERMEDIATE)
_INKLING: dict[str, Any] = {"unpadded_vocab_size": 160}
_QSA = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=4)
OWN: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": INTERMEDIATE, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K},
    },
    "deepseek_ocr2": {"num_experts_per_tok": TOP_K, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "deepseek_v2": {"num_experts_per_tok": TOP_K},
    # Its encoder and decoder share their experts, which transformers does only for tied embeddings.
    "diffusion_gemma": {
        **_GEMMA, "global_head_dim": 16, "vision_config": {"model_type": "gemma4_vision"},
        ".tie_word_embeddings": True, ".canvas_length": 16,
    },
    "doge": {"is_moe": True, "num_experts": 16},
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": TOP_K, "first_k_dense_replace": 1},
    "dots3_note": {
        "vision_config.adapter_in_dim": HIDDEN, "vision_config.adapter_out_dim": HIDDEN,
        "audio_config.adapter_input_size": HIDDEN, "audio_config.adapter_out_dim": HIDDEN,
    },
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [INTERMEDIATE, INTERMEDIATE],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2]},
    },
    "gemma4": dict(_GEMMA, global_head_dim=16),
    "gemma4_text": dict(_GEMMA, global_head_dim=16),
    "glm4v_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "glm5_next": {"qk_rope_head_dim": 0},
    "granitemoehybrid": {
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "hunyuan_v1_moe": {"head_dim": 16},
    "hy_v4_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}},
    **dict.fromkeys(("inkling2", "inkling2_loop"), {**_INKLING, "vision_config.text_hidden_size": HIDDEN}),
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), _INKLING),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4": {"num_experts_per_tok": 1},
    "llama4_text": {"num_experts_per_tok": 1},
    "longcat_flash": {"zero_expert_num": 0},
    "mimo_v2_flash": {"num_key_value_heads": 2, "head_dim": 48},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64,
        },
    },
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "qwen3_omni_moe": {
        "talker_config.text_config.shared_expert_intermediate_size": 80,
        "talker_config.spatial_merge_size": 2,
    },
    "qwen4_exp": _QSA,
    "qwen4_exp_text": _QSA,
    "step3p7": {
        "sliding_window": 8, "share_expert_dim": 80, "mlp_layer_types": ["dense", *["sparse"] * 3], "swiglu_limits": [0, 0.0, 0.7, 2.0],
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# In a config with one of these, intermediate_size is the size of its dense layers; in others it is that of its experts.
_EXPERT_SIZES = {"moe_intermediate_size", "expert_ffn_hidden_size"}
_DROPPED = {
    "transformers_version",
    "architectures",
    "dtype",
    "per_layer_config",
    "_name_or_path",
    "output_attentions",
    "qk_head_dim",
}


class ModelClass(NamedTuple):
    model_type: str
    config: type
    model: type


def _module(model_type: str) -> str:
    return configuration_auto.model_type_to_module_name(model_type)


def model_classes() -> Iterator[ModelClass]:
    """Returns the model types that transformers can make and whose source mentions experts, sorted by name."""
    root = pathlib.Path(transformers.__file__).parent / "models"
    tables = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in _TASKS]
    for model_type, config in sorted(configuration_auto.CONFIG_MAPPING_NAMES.items()):
        name = next((table[model_type] for table in tables if model_type in table), None)
        if name is None:
            continue
        name = name if isinstance(name, str) else name[0]
        module = _module(model_type)
        if not list((root / module).glob("modeling_*.py")):  # a config of its own for another model's class
            module = getattr(transformers, name).__module__.split(".")[2]
        source = "".join(file.read_text() for file in (root / module).glob("modeling_*.py"))
        if not re.search(r"\bexperts\b", source):
            continue
        modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        yield ModelClass(model_type, getattr(transformers, config), getattr(modeling, name))


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    layers = next((config[key] for key in ("num_hidden_layers", "num_layers", "n_layers") if config.get(key)), None)
    out = {}
    for key, value in config.items():
        if key in _DROPPED:
            continue
        if isinstance(value, dict) and key.endswith("config"):
            out[key] = _shrunk(value)
        elif key in SIZES and isinstance(value, (int, float)):
            own_size = key == "intermediate_size" and not _EXPERT_SIZES & config.keys()
            out[key] = INTERMEDIATE if own_size else SIZES[key]
        else:
            out[key] = value[:LAYERS] if isinstance(value, list) and len(value) == layers else value
    return out


def tiny_config(model_class: ModelClass) -> Any:
    config = _shrunk(model_class.config().to_dict())
    config.pop("model_type", None)
    language = config
    while inner := next(
        (language[k] for k in ("thinker_config", "text_config") if isinstance(language.get(k), dict)), None
    ):
        language = inner
    for key, value in OWN.get(model_class.model_type, {}).items():
        *path, last = key.split(".")
        part = config if path or last.endswith("_config") else language
        for name in filter(None, path):
            part = part[name]
        part[last] = value
    return model_class.config(**config)


def tiny_model(model_class: ModelClass) -> nn.Module:
    """Fills in random float32 weights, spread so that each step matters, and selection biases that differ."""
    torch.manual_seed(0)
    model = model_class.model(tiny_config(model_class)).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
            elif not parameter.isfinite().all():
                parameter.fill_(0.5)
            if path.endswith("e_score_correction_bias"):
                parameter.uniform_(0, 0.1)
    return model


class Experts(NamedTuple):
    path: str
    layer: int | None
    module: nn.Module


def experts_of(model: nn.Module) -> list[Experts]:
    """Finds the modules with the experts of a layer: the outermost named `experts`, or one with stacked weights."""
    found: list[Experts] = []
    for path, module in model.named_modules():
        if "shared" in path or any(path.startswith(outer.path + ".") for outer in found):
            continue
        stacked = any(p is not None and p.dim() == 3 for p in module._parameters.values())
        of_experts = re.search("Expert|MoE", type(module).__name__) is not None
        listed = path.endswith("experts") and isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if (
            re.search(r"(?:^|\.)experts$", path)
            or (stacked and of_experts)
            or listed
            or type(module).__name__.endswith("CDMoE")
        ):
            number = re.search(r"(?:^|\.)(?:layers|blocks?)\.(\d+)\.", path)
            found.append(Experts(path, int(number[1]) if number else None, module))
    return found
