#!/usr/bin/env python3
"""Small NVFP4 tensors made by the oracles' own code, for tests that have none of them installed (C++, plain NumPy).

    make_format_vectors.py [OUT]     OUT defaults to tests/vectors; writes OUT/formats.safetensors

No element of these inputs lies within the oracles' float32 rounding of a tie, and no block at one of their guards, so
every implementation must give these very bytes; the script asserts it. Metadata: the versions that made them.

  <oracle>.x             F32 (8, 64)     input
  <oracle>.tensor_scale  F32 ()          multiplies
  <oracle>.codes         U8  (8, 32)     low nibble = even element
  <oracle>.scales        U8  (8, 4)      E4M3 bytes
  oracles: modelopt, torchao, compressed_tensors
  modelopt.decoded       F32 (8, 64)     its dequantize, in double (which rounds nothing), rounded once
  blocked.RxC.linear     U8  (R, C), blocked.RxC.swizzled U8 (bytes): torchao's to_blocked
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "torchao", "nvidia-modelopt", "compressed-tensors", "safetensors")


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name).split("+")[0] for name in PACKAGES}


def modelopt(x):
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    s = NVFP4QTensor.get_weights_scaling_factor_2(x)
    tensor, scales, _ = NVFP4QTensor.quantize(x.clone(), 16, None, s, try_tensorrt=False)
    decoded = tensor.dequantize(torch.float64, scale=scales.double(), double_scale=s.double(), block_sizes={-1: 16})
    return {"tensor_scale": s, "codes": tensor._quantized_data, "scales": scales, "decoded": decoded.float()}


def torchao(x):
    from torchao.prototype.mx_formats import nvfp4_tensor

    s = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
    scales, codes = nvfp4_tensor.nvfp4_quantize(x, 16, s)
    return {"tensor_scale": s, "codes": codes, "scales": scales}


def compressed_tensors(x):
    import torch
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization.lifecycle import forward
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = preset_name_to_scheme("NVFP4", ["Linear"]).weights
    blocks = x.unflatten(-1, (-1, 16))
    low, high = blocks.amin(-1), blocks.amax(-1)
    g = generate_gparam(low.min(), high.max())
    scales, _ = calculate_qparams(low, high, args, global_scale=g)
    fp4 = forward.quantize(x, scales, None, args, global_scale=g)
    s = (1 / g.double()).float()
    return {"tensor_scale": s, "codes": pack_fp4_to_uint8(fp4), "scales": scales.to(torch.float8_e4m3fn)}


ORACLES = {"modelopt": modelopt, "torchao": torchao, "compressed_tensors": compressed_tensors}


def make() -> dict:
    import torch
    from torchao.prototype.mx_formats.utils import to_blocked

    sys.path.insert(0, str(ROOT / "tests" / "python"))
    import judge

    tensors = {}
    for seed, (name, oracle) in enumerate(ORACLES.items()):
        generator = torch.Generator().manual_seed(seed)
        spread = torch.exp2(-6 * torch.rand(8, 4, generator=generator)).repeat_interleave(16, dim=1)
        x = torch.randn(8, 64, generator=generator) * spread
        made = {"x": x, **oracle(x)}
        made["scales"] = made["scales"].view(torch.uint8)
        made["tensor_scale"] = made["tensor_scale"].float().reshape(())
        s = float(made["tensor_scale"])
        exact = judge.scale_quotients(x.numpy(), s)
        assert exact.min() > 2**-6 and not judge.near_threshold(exact, judge.E4M3_THRESHOLDS, 4).any()
        step = judge.e4m3(made["scales"].numpy()).repeat(16, axis=-1) * s
        assert not judge.near_threshold(x.numpy() / step, judge.E2M1_THRESHOLDS, 4).any()
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in made.items()}
    for rows, cols in ((1, 1), (130, 5), (33, 8)):
        linear = torch.randint(0, 127, (rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
        tensors[f"blocked.{rows}x{cols}.linear"] = linear
        tensors[f"blocked.{rows}x{cols}.swizzled"] = to_blocked(linear).contiguous()
    return tensors


if __name__ == "__main__":
    from safetensors.torch import save_file

    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests" / "vectors"
    save_file(make(), out / "formats.safetensors", metadata=versions())
    (out / "formats.safetensors").chmod(0o644)
