"""The format functions with torch tensors in and out."""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv
import pytest

X = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)


def test_torch_in_torch_out():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X).to(torch.bfloat16).requires_grad_()
    codes, scales, s = nv.quantize(x)
    assert codes.dtype == torch.uint8 and isinstance(s, float)
    for dtype in ("float32", "float16", "bfloat16"):
        assert nv.dequantize(codes, scales, s, dtype).dtype == getattr(torch, dtype)
    as_numpy = nv.quantize(x.detach().view(torch.uint16).numpy())
    assert (codes.numpy() == as_numpy[0]).all() and s == as_numpy[2]
    transposed = torch.from_numpy(X[:, :16].copy()).T.contiguous().T
    assert torch.equal(nv.quantize(transposed)[0], nv.quantize(transposed.contiguous())[0])
    rows = nv.quantize(x, mode="dynamic_token")
    back = nv.dequantize(*rows)
    for scale in (rows[2].double(), rows[2].to(torch.bfloat16), rows[2].numpy(), rows[2].tolist()):  # powers of two
        assert torch.equal(nv.dequantize(rows[0], rows[1], scale), back)
    assert torch.equal(nv.dequantize(rows[0], rows[1].view(torch.float8_e4m3fn), rows[2]), back)
    if hasattr(torch, "float4_e2m1fn_x2"):
        assert torch.equal(nv.dequantize(rows[0].view(torch.float4_e2m1fn_x2), rows[1], rows[2]), back)
    assert torch.equal(nv.unswizzle_scales(nv.swizzle_scales(rows[1]), 6, 4), rows[1])
    made = nv.swiglu_quantize(x, row_weights=torch.ones(6)), nv.convert_to_fp8(codes, scales, s, (16, 16))
    assert all(isinstance(part, torch.Tensor) for parts in made for part in parts)
    assert nv.quantize(x.new_empty((0, 16)))[0].shape == (0, 8)
    with pytest.raises(ValueError, match=r"row_weights: expected \(6,\) float32 on cpu, got \(5,\)"):
        nv.swiglu_quantize(x, row_weights=torch.ones(5))
    with pytest.raises(ValueError, match="meta"):
        nv.quantize(torch.empty((2, 16), device="meta"))


def lazily_negated(torch, x):
    """Returns x as tensors whose memory holds -x: a strided one, by conj().imag, and a contiguous one."""
    strided = torch.complex(torch.zeros_like(x), -x).conj().imag
    contiguous = torch.view_as_real(torch._neg_view(torch.view_as_complex(-x.reshape(-1, 2)))).reshape(x.shape)
    for tensor in (strided, contiguous):
        assert tensor.is_neg() and torch.equal(tensor, x)
    assert contiguous.is_contiguous() and not strided.is_contiguous()
    return strided, contiguous


def test_formats_see_the_numbers_of_lazily_negated_tensors():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X)
    expected, rows = nv.quantize(x), nv.quantize(x, mode="dynamic_token")
    for negated in lazily_negated(torch, x):
        assert torch.equal(nv.quantize(negated)[0], expected[0])
        assert torch.equal(nv.encode_e4m3(negated), nv.encode_e4m3(x))
        assert torch.equal(nv.swiglu_quantize(negated)[0], nv.swiglu_quantize(x)[0])
    for scale in lazily_negated(torch, rows[2]):
        assert torch.equal(nv.dequantize(rows[0], rows[1], scale), nv.dequantize(*rows))


def test_layers_refuse_lazily_negated_tensors():
    torch = pytest.importorskip("torch")
    from nvfp4_moe import torch_op  # noqa: F401 registers the operators, for which torch resolves

    stack = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32))
    config, weights = nv.MoeConfig(2, 1, 64, 64), {"gate": stack, "up": stack, "down": stack}
    layer = nv.MoeLayer.from_bf16(config, **weights, max_tokens=4)
    with pytest.raises(ValueError, match=r"up: expected a tensor whose memory holds its numbers.*resolve_neg"):
        nv.MoeLayer.from_bf16(config, **(weights | {"up": lazily_negated(torch, stack)[0]}), max_tokens=4)
    hidden, ids, weights = torch.ones(1, 64), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    one = torch.complex(torch.zeros(1, 1), -weights).conj().imag
    assert one.is_neg() and one.is_contiguous() and torch.equal(one, weights)
    with pytest.raises(ValueError, match="topk_weights: expected a tensor whose memory holds its numbers"):
        layer.run(hidden, ids, one)
    assert torch.equal(torch.ops.nvfp4_moe.moe_layer(hidden, ids, one, layer.handle), layer.run(hidden, ids, weights))
