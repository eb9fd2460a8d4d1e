"""torch tensors in, torch tensors out: what the format functions add to NumPy arrays."""

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
    fp8 = scales.view(torch.float8_e4m3fn)
    assert torch.equal(nv.dequantize(codes, fp8, torch.tensor(s)), nv.dequantize(codes, scales, s))
    rows = nv.quantize(x, mode="dynamic_token")[2]
    assert isinstance(rows, torch.Tensor) and rows.shape == (6,)
    transposed = torch.from_numpy(X[:, :16].copy()).T.contiguous().T
    assert torch.equal(nv.quantize(transposed)[0], nv.quantize(transposed.contiguous())[0])
