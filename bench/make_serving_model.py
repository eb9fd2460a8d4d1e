#!/usr/bin/env python3
"""Writes a random NVFP4 checkpoint that engines can serve, in ModelOpt's layout. Default: Qwen3-30B-A3B's shape.

    python bench/make_serving_model.py OUT [--device cuda]

Experts have random codes and block scales, which cost the same to run as quantized Gaussian weights. The rest is
Gaussian bfloat16. Scales keep the size of activations from layer to layer. The routers are random, so experts are
selected about evenly. One shard per layer. Needs torch and safetensors; 17 GB at the default sizes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

E2M1_RMS = 2.93  # of the eight magnitudes, equally likely
SCALE_RMS = 1.46  # of block scales drawn evenly from e4m3's 1.0, 1.125 ... 1.875


def expert_tensors(
    name: str, rows: int, cols: int, random: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Draws one projection: codes (rows, cols/2) uint8, block scales (rows, cols/16) e4m3, two float32 scales."""
    codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, device=device, generator=random)
    scales = torch.randint(0x38, 0x40, (rows, cols // 16), dtype=torch.uint8, device=device, generator=random)
    return {
        f"{name}.weight": codes,
        f"{name}.weight_scale": scales.view(torch.float8_e4m3fn),
        f"{name}.weight_scale_2": torch.tensor(1 / (E2M1_RMS * SCALE_RMS * cols**0.5)),
        f"{name}.input_scale": torch.tensor(6.0 / 2688),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--device", default="cpu", help="where the random numbers are drawn")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    random = torch.Generator(device).manual_seed(0)
    asked.out.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    total = 0

    def gaussian(rows: int, cols: int) -> torch.Tensor:
        values = torch.randn(rows, cols, device=device, generator=random, dtype=torch.float32)
        return (values / cols**0.5).bfloat16()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def write(shard: str, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal total
        on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(on_host, asked.out / shard, {"format": "pt"})
        index.update(dict.fromkeys(on_host, shard))
        total += sum(tensor.numel() * tensor.element_size() for tensor in on_host.values())

    for layer in range(asked.layers):
        at = f"model.layers.{layer}"
        queries, keys = asked.heads * asked.head_dim, asked.kv_heads * asked.head_dim
        tensors = {
            f"{at}.input_layernorm.weight": ones(asked.hidden),
            f"{at}.post_attention_layernorm.weight": ones(asked.hidden),
            f"{at}.self_attn.q_proj.weight": gaussian(queries, asked.hidden),
            f"{at}.self_attn.k_proj.weight": gaussian(keys, asked.hidden),
            f"{at}.self_attn.v_proj.weight": gaussian(keys, asked.hidden),
            f"{at}.self_attn.o_proj.weight": gaussian(asked.hidden, queries),
            f"{at}.self_attn.q_norm.weight": ones(asked.head_dim),
            f"{at}.self_attn.k_norm.weight": ones(asked.head_dim),
            f"{at}.mlp.gate.weight": gaussian(asked.experts, asked.hidden),
        }
        for expert in range(asked.experts):
            mlp = f"{at}.mlp.experts.{expert}"
            for projection in ("gate_proj", "up_proj"):
                tensors |= expert_tensors(f"{mlp}.{projection}", asked.intermediate, asked.hidden, random, device)
            tensors |= expert_tensors(f"{mlp}.down_proj", asked.hidden, asked.intermediate, random, device)
        write(f"layer-{layer:03d}.safetensors", tensors)
    ends = {
        "model.embed_tokens.weight": gaussian(asked.vocab, asked.hidden) * asked.hidden**0.5,
        "model.norm.weight": ones(asked.hidden),
        "lm_head.weight": gaussian(asked.vocab, asked.hidden),
    }
    write("ends.safetensors", ends)
    index_json = {"metadata": {"total_size": total}, "weight_map": index}
    (asked.out / "model.safetensors.index.json").write_text(json.dumps(index_json))
    group = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    producer = {"name": "modelopt", "version": "0.39.0"}
    excluded = ["lm_head", "*self_attn*", "*mlp.gate"]
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "vocab_size": asked.vocab, "hidden_size": asked.hidden, "intermediate_size": 3 * asked.hidden,
        "moe_intermediate_size": asked.intermediate, "num_hidden_layers": asked.layers,
        "num_attention_heads": asked.heads, "num_key_value_heads": asked.kv_heads, "head_dim": asked.head_dim,
        "num_experts": asked.experts, "num_experts_per_tok": asked.top_k, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False,
        "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
        "quantization_config": {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "producer": producer, "group_size": 16,
            "config_groups": {"group_0": {"input_activations": group, "weights": group, "targets": ["Linear"]}},
            "ignore": excluded,
        },
    }  # fmt: skip
    (asked.out / "config.json").write_text(json.dumps(config, indent=1))
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": excluded}
    hf_quant_config = {"producer": producer, "quantization": quantization}
    (asked.out / "hf_quant_config.json").write_text(json.dumps(hf_quant_config, indent=1))
    print(f"wrote {asked.out}: {len(index)} tensors, {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
