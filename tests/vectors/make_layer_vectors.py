#!/usr/bin/env python3
"""Whole small layers computed by torch, for tests that have no torch.

    make_layer_vectors.py [OUT]     OUT defaults to tests/vectors; writes OUT/layers.safetensors

ModelOpt's NVFP4QTensor quantizes the weights. Everything else is the contract (docs/explanation/numerics.md) in torch
float64, with torch's own casts as the only roundings: float8_e4m3fn, bfloat16, float32. Metadata: the versions that
made it.

  {gate,up,down}.codes         U8   (E, rows, cols/2)     {gate,up,down}.scales U8 (E, rows, cols/16)
  {gate,up,down}.tensor_scale  F32  (E)
  hidden (T, H) BF16, topk_ids (T, k) I32, topk_weights (T, k) F32, input_scales F32 (2): hidden, intermediate
  out.<layer> (T, H) BF16      one for each entry of LAYERS
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "nvidia-modelopt", "safetensors")
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 4, 2, 128, 80, 12

# name: activation, limit, format, hidden scale, intermediate scale, router weight, row format
LAYERS = {
    "w4a4": ("swiglu", None, "nvfp4", "dynamic", "dynamic", "after", "bf16"),
    "w4a4_clamped_fixed_before_down": ("clamped", 2.0, "nvfp4", "dynamic", 2.0**-9, "before", "bf16"),
    "w4a4_oai_static": ("oai", 1.5, "nvfp4", "static", "dynamic", "after", "bf16"),
    "w4a4_rows_fp32": ("swiglu", None, "nvfp4", "dynamic", "dynamic", "after", "fp32"),
    "w4a16_clamped": ("clamped", 1.5, "bf16", None, None, "after", "bf16"),
    "w4a16_step_before_down": ("step", 1.0, "bf16", None, None, "before", "bf16"),
    "w4a8": ("swiglu", None, "int8_block", None, None, "after", "bf16"),
    "w4a8_clamped_before_down": ("clamped", 2.0, "int8_block", None, None, "before", "bf16"),
    "w4a8_rows_fp32": ("swiglu", None, "int8_block", None, None, "after", "fp32"),
}


def quantize_weights(w):
    """Codes, block scales and tensor scale of one matrix by ModelOpt."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    s = NVFP4QTensor.get_weights_scaling_factor_2(w)
    tensor, scales, _ = NVFP4QTensor.quantize(w.clone(), 16, None, s, try_tensorrt=False)
    return tensor._quantized_data, scales.view(torch.uint8), s.float()


def decode(codes, scales):
    """e2m1 * e4m3 in float64, without the tensor scale."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    values = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).flatten(-2)
    return values * scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, -1)


def quantize_line(x, scale):
    """The decoded codes of float64 x (K,) and the line scale; the scale is dynamic_token or a power of two."""
    if scale == "dynamic":
        scale = torch.exp2(torch.ceil(torch.log2(x.abs().max() / 2688))) if x.abs().max() > 0 else torch.tensor(1.0)
    blocks = (x / scale).view(-1, 16)
    sixth = torch.tensor(1 / 6, dtype=torch.float32)
    block_scale = (blocks.abs().amax(1, keepdim=True).float() * sixth).clamp(max=448).to(torch.float8_e4m3fn).double()
    y = torch.where(block_scale > 0, blocks / block_scale.clamp(min=2.0**-10), torch.zeros_like(blocks)).clamp(-6, 6)
    m = y.abs()
    step = torch.where(m < 2, 0.5, torch.where(m < 4, 1.0, 2.0))
    return (torch.sign(y) * torch.round(m / step) * step * block_scale).flatten(), float(scale)


def quantize_int8(x):
    """float64 x (K,) as code * scale: scale = amax/127, code = the nearest integer, each rounded once to float32."""
    blocks = x.view(-1, 16)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).float().clamp(min=2.0**-116).double()
    return (torch.round((blocks / scale).float()).double() * scale).flatten()


def to_format(x, fmt, scale):
    """The operands that a GEMM multiplies for float64 x (K,): its decoded values and the line scale."""
    if fmt == "nvfp4":
        return quantize_line(x, scale)
    return (quantize_int8(x) if fmt == "int8_block" else x), 1.0


def activation(kind, limit, g, u):
    if kind == "swiglu":
        return torch.nn.functional.silu(g) * u
    if kind == "clamped":
        return torch.nn.functional.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)
    if kind == "step":
        return torch.nn.functional.silu(g).clamp(max=limit) * u.clamp(-limit, limit)
    g = g.clamp(max=limit)
    a = torch.tensor(1.702, dtype=torch.float32).double()
    return g * torch.sigmoid(a * g) * (u.clamp(-limit, limit) + 1)


def product(line, line_scale, weight):
    """alpha * (weight @ line) in float64, alpha rounded to float32."""
    values, tensor_scale = weight
    return (values @ line) * (torch.tensor(line_scale).double() * tensor_scale.double()).float().double()


def run(layer, experts, hidden, ids, weights, input_scales):
    kind, limit, fmt, hidden_scale, intermediate_scale, router, rows = layer
    if hidden_scale == "static":
        hidden_scale = float(torch.exp2(torch.ceil(torch.log2(input_scales[0].double()))))
    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float32)
    for t in range(TOKENS):
        x = hidden[t].double()
        line, s = to_format(x, fmt, hidden_scale)
        for k in range(TOP_K):
            if ids[t, k] < 0:
                continue
            e = experts[int(ids[t, k])]
            g = product(line, s, e["gate"]).float().double()
            u = product(line, s, e["up"]).float().double()
            h = activation(kind, limit, g, u)
            if router == "before":
                h = h * weights[t, k].double()
            h = h.bfloat16().double()
            h_line, h_s = to_format(h, fmt, intermediate_scale)
            row = product(h_line, h_s, e["down"])
            row = row.bfloat16().double() if rows == "bf16" else row.float().double()
            weighted = row if router == "before" else weights[t, k].double() * row
            out[t] = (weighted + out[t].double()).float()
    return out.bfloat16()


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name).split("+")[0] for name in PACKAGES}


def make() -> dict[str, torch.Tensor]:
    torch.manual_seed(20)
    shapes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    tensors, experts = {}, [{} for _ in range(EXPERTS)]
    for name, shape in shapes.items():
        packed = []
        for e in range(EXPERTS):
            w = torch.randn(shape) / shape[1] ** 0.5 * (1.5 if name == "gate" else 1.0) * (1 + 0.2 * e)
            w[torch.rand(shape) < 0.004] *= 8
            packed.append(quantize_weights(w))
            experts[e][name] = (decode(*packed[-1][:2]), packed[-1][2])
        for i, part in enumerate(("codes", "scales", "tensor_scale")):
            tensors[f"{name}.{part}"] = torch.stack([p[i] for p in packed]).contiguous()
    hidden = torch.randn(TOKENS, HIDDEN)
    hidden[:, 5::32] *= 12
    hidden[3] *= 1e-3
    hidden[4] = 0
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    ids[6] = -1
    ids[7, 0] = -1
    ids[8] = 2
    tensors["hidden"] = hidden.bfloat16()
    tensors["topk_ids"] = ids
    tensors["topk_weights"] = torch.rand(TOKENS, TOP_K) * 0.9 + 0.05
    tensors["input_scales"] = torch.tensor([40 / 2688, 15 / 2688])
    for name, layer in LAYERS.items():
        tensors[f"out.{name}"] = run(
            layer, experts, tensors["hidden"], ids, tensors["topk_weights"], tensors["input_scales"]
        )
    return tensors


def main():
    from safetensors.torch import save_file

    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests/vectors"
    save_file(make(), target / "layers.safetensors", metadata=versions())


if __name__ == "__main__":
    main()
