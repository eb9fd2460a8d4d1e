"""A Qwen3-MoE checkpoint in bfloat16, written byte by byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, TOP_K = 64, 48, 4, 2, 2
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, towards zero: any bfloat16 values will do."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """uint16 arrays as BF16."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *(t.tobytes() for t in tensors.values())]))


def write_model(directory: Path, intermediate: int = INTERMEDIATE) -> dict[str, np.ndarray]:
    """Writes it to an existing directory. Returns its tensors as bfloat16 bits."""
    random = np.random.default_rng(7)
    tensors = {}
    for layer in range(LAYERS):
        mlp = f"model.layers.{layer}.mlp"
        tensors[f"{mlp}.gate.weight"] = bf16_bits(random.standard_normal((EXPERTS, HIDDEN)))
        for expert in range(EXPERTS):
            for name, shape in SHAPES.items():
                rows, cols = (intermediate if size == INTERMEDIATE else size for size in shape)
                weight = random.standard_normal((rows, cols)) * 0.05
                tensors[f"{mlp}.experts.{expert}.{name}.weight"] = bf16_bits(weight)
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps({**CONFIG, "moe_intermediate_size": intermediate}))
    return tensors
