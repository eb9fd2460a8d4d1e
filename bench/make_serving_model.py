#!/usr/bin/env python3
"""Writes a random quantized checkpoint of a known model's shape that engines can serve, with a tokenizer.

    python bench/make_serving_model.py OUT [--shape qwen3_30b] [--layers N] [--twin] [--device cuda]

Experts have random codes and block scales, which cost the same to run as quantized Gaussian weights: NVFP4 in
ModelOpt's layout, for gpt-oss MXFP4 as it is published. The rest is Gaussian bfloat16. Scales keep the size of
activations from layer to layer. The routers are random, so experts are selected about evenly. Token N is the word "tN".
One shard per layer. Needs torch and safetensors; 17 GB at the default sizes.

--twin writes the same model with its experts as bfloat16. Tensor scales are powers of two, so they are the same
numbers. --layers and the other sizes replace the shape's. Nemotron-3's first layers are those of its pattern.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1_RMS = 2.93  # of the eight magnitudes, equally likely
SCALE_RMS = 1.46  # of block scales drawn evenly from e4m3's 1.0, 1.125 ... 1.875

SHAPES: dict[str, dict[str, int | str]] = {
    "qwen3_30b": {
        "family": "qwen3_moe", "layers": 48, "experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768,
        "heads": 32, "kv_heads": 4, "head_dim": 128, "vocab": 151936,
    },
    # Qwen3-Next's experts and attention heads in a Qwen3-MoE, at half its depth: 22 GB.
    "qwen_next": {
        "family": "qwen3_moe", "layers": 24, "experts": 512, "top_k": 10, "hidden": 2048, "intermediate": 512,
        "heads": 16, "kv_heads": 2, "head_dim": 256, "vocab": 151936,
    },
    "gpt_oss_20b": {
        "family": "gpt_oss", "layers": 24, "experts": 32, "top_k": 4, "hidden": 2880, "intermediate": 2880,
        "heads": 64, "kv_heads": 8, "head_dim": 64, "vocab": 201088,
    },
    "nemotron3_nano": {
        "family": "nemotron_h", "layers": 52, "experts": 128, "top_k": 6, "hidden": 2688, "intermediate": 1856,
        "heads": 32, "kv_heads": 2, "head_dim": 128, "vocab": 131072,
        "pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    },
    # At a reduced depth: 4.1 GB a layer. Every layer has experts, and attention is dense.
    "minimax_m3": {
        "family": "minimax_m3", "layers": 8, "experts": 128, "top_k": 4, "hidden": 6144, "intermediate": 3072,
        "heads": 64, "kv_heads": 4, "head_dim": 128, "vocab": 200064,
    },
}  # fmt: skip
MAMBA_HEADS, MAMBA_HEAD_DIM, MAMBA_STATE, MAMBA_GROUPS = 64, 64, 128, 8  # Nemotron-3-Nano's


def floats(codes: torch.Tensor) -> torch.Tensor:
    """Returns the values of packed E2M1 codes, the lower four bits first: (..., K/2) -> (..., K) float32."""
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return E2M1.to(codes.device)[(both & 7).long()] * torch.where(both >= 8, -1.0, 1.0)


class Maker:
    """Draws tensors and writes shards."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.device = torch.device(asked.device)
        self.random = torch.Generator(self.device).manual_seed(asked.seed)
        self.index: dict[str, str] = {}
        self.total = 0

    def gaussian(self, rows: int, cols: int) -> torch.Tensor:
        values = torch.randn(rows, cols, device=self.device, generator=self.random, dtype=torch.float32)
        return (values / cols**0.5).bfloat16()

    def ones(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def bytes(self, first: int, end: int, *shape: int) -> torch.Tensor:
        return torch.randint(first, end, shape, dtype=torch.uint8, device=self.device, generator=self.random)

    def nvfp4(self, name: str, rows: int, cols: int) -> dict[str, torch.Tensor]:
        """Draws one projection: codes (rows, cols/2) uint8, block scales (rows, cols/16) e4m3, two float32 scales."""
        codes = self.bytes(0, 256, rows, cols // 2)
        scales = self.bytes(0x38, 0x40, rows, cols // 16).view(torch.float8_e4m3fn)
        tensor_scale = 2.0 ** round(math.log2(1 / (E2M1_RMS * SCALE_RMS * cols**0.5)))
        if self.asked.twin:
            values = floats(codes).reshape(rows, -1, 16) * (scales.float() * tensor_scale)[..., None]
            return {f"{name}.weight": values.reshape(rows, cols).bfloat16()}
        return {
            f"{name}.weight": codes,
            f"{name}.weight_scale": scales,
            f"{name}.weight_scale_2": torch.tensor(tensor_scale),
            f"{name}.input_scale": torch.tensor(6.0 / 2688),
        }

    def mxfp4(self, name: str, rows: int, cols: int) -> dict[str, torch.Tensor]:
        """Draws one projection of all experts: blocks (experts, rows, cols/32, 16) and their E8M0 scales."""
        exponent = 127 + round(math.log2(1 / (E2M1_RMS * cols**0.5)))
        codes = self.bytes(0, 256, self.asked.experts, rows, cols // 2)
        scales = self.bytes(exponent - 1, exponent + 2, self.asked.experts, rows, cols // 32)
        if self.asked.twin:
            values = floats(codes).unflatten(-1, (-1, 32)) * torch.exp2(scales.float() - 127)[..., None]
            return {name: values.flatten(-2).bfloat16().transpose(1, 2)}
        return {f"{name}_blocks": codes.unflatten(-1, (-1, 16)), f"{name}_scales": scales}

    def attention(self, at: str, biases: bool = False) -> dict[str, torch.Tensor]:
        asked = self.asked
        queries, keys = asked.heads * asked.head_dim, asked.kv_heads * asked.head_dim
        sizes = {"q": queries, "k": keys, "v": keys}
        tensors = {f"{at}.{name}_proj.weight": self.gaussian(rows, asked.hidden) for name, rows in sizes.items()}
        tensors[f"{at}.o_proj.weight"] = self.gaussian(asked.hidden, queries)
        if biases:
            both = {f"{name}_proj": rows for name, rows in sizes.items()} | {"o_proj": asked.hidden}
            tensors |= {f"{at}.{name}.bias": self.gaussian(1, rows)[0] for name, rows in both.items()}
        return tensors

    def experts(self, at: str, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """NVFP4 experts. The last of names is the projection back to the hidden dimension."""
        asked, tensors = self.asked, {}
        for expert in range(asked.experts):
            for name in names[:-1]:
                tensors |= self.nvfp4(f"{at}.{expert}.{name}", asked.intermediate, asked.hidden)
            tensors |= self.nvfp4(f"{at}.{expert}.{names[-1]}", asked.hidden, asked.intermediate)
        return tensors

    def write(self, shard: str, tensors: dict[str, torch.Tensor]) -> None:
        on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(on_host, self.asked.out / shard, {"format": "pt"})
        self.index.update(dict.fromkeys(on_host, shard))
        self.total += sum(tensor.numel() * tensor.element_size() for tensor in on_host.values())


# ---- one layer of each family, and its fields of config.json


def qwen3_moe_layer(make: Maker, at: str, layer: int) -> dict[str, torch.Tensor]:
    asked = make.asked
    return {
        f"{at}.input_layernorm.weight": make.ones(asked.hidden),
        f"{at}.post_attention_layernorm.weight": make.ones(asked.hidden),
        **make.attention(f"{at}.self_attn"),
        f"{at}.self_attn.q_norm.weight": make.ones(asked.head_dim),
        f"{at}.self_attn.k_norm.weight": make.ones(asked.head_dim),
        f"{at}.mlp.gate.weight": make.gaussian(asked.experts, asked.hidden),
        **make.experts(f"{at}.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    }


def qwen3_moe_config(asked: argparse.Namespace) -> dict:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "intermediate_size": 3 * asked.hidden,
        "moe_intermediate_size": asked.intermediate, "num_experts": asked.experts, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 40960, "attention_bias": False,
    }  # fmt: skip


def gpt_oss_layer(make: Maker, at: str, layer: int) -> dict[str, torch.Tensor]:
    asked = make.asked
    experts = f"{at}.mlp.experts"
    return {
        f"{at}.input_layernorm.weight": make.ones(asked.hidden),
        f"{at}.post_attention_layernorm.weight": make.ones(asked.hidden),
        **make.attention(f"{at}.self_attn", biases=True),
        f"{at}.self_attn.sinks": make.gaussian(1, asked.heads)[0],
        f"{at}.mlp.router.weight": make.gaussian(asked.experts, asked.hidden),
        f"{at}.mlp.router.bias": make.gaussian(1, asked.experts)[0],
        f"{experts}.gate_up_proj_bias": make.gaussian(asked.experts, 2 * asked.intermediate),
        f"{experts}.down_proj_bias": make.gaussian(asked.experts, asked.hidden),
        **make.mxfp4(f"{experts}.gate_up_proj", 2 * asked.intermediate, asked.hidden),
        **make.mxfp4(f"{experts}.down_proj", asked.hidden, asked.intermediate),
    }


def gpt_oss_config(asked: argparse.Namespace) -> dict:
    rope = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    }  # fmt: skip
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "intermediate_size": asked.intermediate,
        "num_local_experts": asked.experts, "hidden_act": "silu", "swiglu_limit": 7.0, "rms_norm_eps": 1e-5,
        "rope_scaling": rope, "rope_theta": 150000, "initial_context_length": 4096, "sliding_window": 128,
        "max_position_embeddings": 131072, "attention_bias": True, "pad_token_id": 0,
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(asked.layers)],
    }  # fmt: skip


def nemotron_h_layer(make: Maker, at: str, layer: int) -> dict[str, torch.Tensor]:
    asked, mixer = make.asked, f"{at}.mixer"
    norm = {f"{at}.norm.weight": make.ones(asked.hidden)}
    kind = asked.pattern[layer]
    if kind == "*":
        return norm | make.attention(mixer)
    if kind == "E":
        shared = 2 * asked.intermediate
        return norm | {
            f"{mixer}.gate.weight": make.gaussian(asked.experts, asked.hidden),
            f"{mixer}.gate.e_score_correction_bias": torch.zeros(asked.experts),
            f"{mixer}.shared_experts.up_proj.weight": make.gaussian(shared, asked.hidden),
            f"{mixer}.shared_experts.down_proj.weight": make.gaussian(asked.hidden, shared),
            **make.experts(f"{mixer}.experts", ("up_proj", "down_proj")),
        }
    inner, states = MAMBA_HEADS * MAMBA_HEAD_DIM, 2 * MAMBA_GROUPS * MAMBA_STATE
    return norm | {
        f"{mixer}.in_proj.weight": make.gaussian(2 * inner + states + MAMBA_HEADS, asked.hidden),
        f"{mixer}.conv1d.weight": make.gaussian(inner + states, 4)[:, None],
        f"{mixer}.conv1d.bias": torch.zeros(inner + states, dtype=torch.bfloat16),
        f"{mixer}.A_log": torch.arange(1.0, MAMBA_HEADS + 1).log().bfloat16(),
        f"{mixer}.D": make.ones(MAMBA_HEADS),
        f"{mixer}.dt_bias": make.ones(MAMBA_HEADS),
        f"{mixer}.norm.weight": make.ones(inner),
        f"{mixer}.out_proj.weight": make.gaussian(asked.hidden, inner),
    }


def nemotron_h_config(asked: argparse.Namespace) -> dict:
    return {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "attention_bias": False,
        "hybrid_override_pattern": asked.pattern, "intermediate_size": asked.intermediate, "mlp_bias": False,
        "moe_intermediate_size": asked.intermediate, "moe_shared_expert_intermediate_size": 2 * asked.intermediate,
        "n_routed_experts": asked.experts, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "mlp_hidden_act": "relu2", "chunk_size": 128,
        "conv_kernel": 4, "n_groups": MAMBA_GROUPS, "mamba_head_dim": MAMBA_HEAD_DIM, "mamba_num_heads": MAMBA_HEADS,
        "ssm_state_size": MAMBA_STATE, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 262144,
    }  # fmt: skip


def minimax_m3_layer(make: Maker, at: str, layer: int) -> dict[str, torch.Tensor]:
    asked, moe = make.asked, f"{at}.block_sparse_moe"
    zeros = torch.zeros(asked.hidden, dtype=torch.bfloat16)  # Gemma's norms add 1
    shared = {"gate_proj": True, "up_proj": True, "down_proj": False}
    sizes = {name: (asked.intermediate, asked.hidden) if wide else (asked.hidden, asked.intermediate)
             for name, wide in shared.items()}  # fmt: skip
    return {
        f"{at}.input_layernorm.weight": zeros,
        f"{at}.post_attention_layernorm.weight": zeros.clone(),
        **make.attention(f"{at}.self_attn"),
        f"{at}.self_attn.q_norm.weight": zeros[: asked.head_dim].clone(),
        f"{at}.self_attn.k_norm.weight": zeros[: asked.head_dim].clone(),
        f"{moe}.gate.weight": make.gaussian(asked.experts, asked.hidden).float(),
        f"{moe}.e_score_correction_bias": torch.zeros(asked.experts),
        **{f"{moe}.shared_experts.{name}.weight": make.gaussian(*size) for name, size in sizes.items()},
        **make.experts(f"{moe}.experts", ("w1", "w3", "w2")),
    }


def minimax_m3_config(asked: argparse.Namespace) -> dict:
    """The text model only. vLLM reads such a config by the class that it has for the model's draft head."""
    sparse = {
        "sparse_attention_freq": [0] * asked.layers, "sparse_num_index_heads": asked.kv_heads, "sparse_index_dim": 128,
        "sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_init_block": 0, "sparse_local_block": 1,
    }  # fmt: skip
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3_mtp",
        "moe_layer_freq": [1] * asked.layers, "sparse_attention_config": sparse,
        "intermediate_size": asked.intermediate, "dense_intermediate_size": 2 * asked.hidden,
        "shared_intermediate_size": asked.intermediate, "num_local_experts": asked.experts, "n_shared_experts": 1,
        "hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0,
        "scoring_func": "sigmoid", "use_routing_bias": True, "routed_scaling_factor": 2.0, "use_gemma_norm": True,
        "use_qk_norm": True, "qk_norm_type": "per_head", "rotary_dim": asked.head_dim // 2,
        "partial_rotary_factor": 0.5, "rope_theta": 5000000, "rms_norm_eps": 1e-6, "max_position_embeddings": 524288,
    }  # fmt: skip


Layer = Callable[[Maker, str, int], dict[str, torch.Tensor]]
# A family's layer, its config, the prefix of its layers, and the names of its embeddings and last norm.
FAMILIES: dict[str, tuple[Layer, Callable[[argparse.Namespace], dict], str, str, str]] = {
    "qwen3_moe": (qwen3_moe_layer, qwen3_moe_config, "model", "embed_tokens", "norm"),
    "gpt_oss": (gpt_oss_layer, gpt_oss_config, "model", "embed_tokens", "norm"),
    "nemotron_h": (nemotron_h_layer, nemotron_h_config, "backbone", "embeddings", "norm_f"),
    "minimax_m3": (minimax_m3_layer, minimax_m3_config, "model", "embed_tokens", "norm"),
}


def quantization(family: str, dense: list[str]) -> dict:
    """Returns config.json's quantization_config. dense: the linear layers that are not quantized."""
    if family == "gpt_oss":
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    group = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.39.0"},
        "group_size": 16, "ignore": dense,
        "config_groups": {"group_0": {"input_activations": group, "weights": group, "targets": ["Linear"]}},
    }  # fmt: skip


def write_tokenizer(out: Path, vocab: int) -> None:
    """Writes a tokenizer with one word per token, so that random prompts have exact lengths."""
    words = {f"t{number}": number for number in range(vocab)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }  # fmt: skip
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "unk_token": "t0"}
    (out / "tokenizer_config.json").write_text(json.dumps(said))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_30b")
    parser.add_argument("--twin", action="store_true", help="experts as bfloat16 instead")
    sizes = {key: type(value) for shape in SHAPES.values() for key, value in shape.items() if key != "family"}
    for name, kind in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="instead of the shape's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="the device that draws the random numbers")
    asked = parser.parse_args()
    for name, value in SHAPES[asked.shape].items():
        if getattr(asked, name, None) is None:
            setattr(asked, name, value)
    if asked.pattern is not None:
        if len(asked.pattern) < asked.layers or not set(asked.pattern) <= set("ME*"):
            parser.error(f"--pattern: expected M, E or * for each of {asked.layers} layers, got {asked.pattern}")
        asked.pattern = asked.pattern[: asked.layers]
    return asked


def main() -> None:
    asked = parsed()
    asked.out.mkdir(parents=True, exist_ok=True)
    make = Maker(asked)
    layer_of, config_of, stem, embeddings, norm = FAMILIES[asked.family]
    for layer in range(asked.layers):
        make.write(f"layer-{layer:03d}.safetensors", layer_of(make, f"{stem}.layers.{layer}", layer))
    last_norm = torch.zeros(asked.hidden).bfloat16() if asked.family == "minimax_m3" else make.ones(asked.hidden)
    ends = {
        f"{stem}.{embeddings}.weight": make.gaussian(asked.vocab, asked.hidden) * asked.hidden**0.5,
        f"{stem}.{norm}.weight": last_norm,
        "lm_head.weight": 2 * make.gaussian(asked.vocab, asked.hidden),
    }
    make.write("ends.safetensors", ends)
    index_json = {"metadata": {"total_size": make.total}, "weight_map": make.index}
    (asked.out / "model.safetensors.index.json").write_text(json.dumps(index_json))
    config = {
        "dtype": "bfloat16", "vocab_size": asked.vocab, "hidden_size": asked.hidden,
        "num_hidden_layers": asked.layers, "num_attention_heads": asked.heads,
        "num_key_value_heads": asked.kv_heads, "head_dim": asked.head_dim, "num_experts_per_tok": asked.top_k,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    } | config_of(asked)  # fmt: skip
    if not asked.twin:
        names = [name.removesuffix(".weight") for name in make.index if name.endswith(".weight")]
        dense = [name for name in names if f"{name}.weight_scale" not in make.index and "norm" not in name]
        config["quantization_config"] = quantization(asked.family, dense)
    (asked.out / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(asked.out, asked.vocab)
    os.sync()  # else the host writes it to the disk while the first server is measured
    print(f"wrote {asked.out}: {len(make.index)} tensors, {make.total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
