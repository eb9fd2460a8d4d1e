"""router_gemm against torch's float64, its op, and refused arguments."""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
import nvfp4_moe.torch_op  # noqa: E402, F401


def problem(tokens: int, experts: int, size: int):
    g = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=g).bfloat16() for shape in ((tokens, size), (experts, size)))


@pytest.mark.parametrize("size", [8, 1000, 7168])
def test_stays_within_the_bound_of_its_additions(size: int) -> None:
    hidden, weight = problem(5, 33, size)
    exact = hidden.double() @ weight.double().T
    # The number of additions that a product goes through (docs/explanation/numerics.md, section 12), and 1 % for terms
    # that are not of first order.
    additions = (size + 1023) // 1024 - 1 + 10
    bound = 1.01 * additions * 2.0**-24 * (hidden.double().abs() @ weight.double().abs().T)
    wide = nv.router_gemm(hidden, weight, logits_dtype="float32")
    assert wide.dtype == torch.float32 and ((wide.double() - exact).abs() <= bound).all()
    assert torch.equal(nv.router_gemm(hidden, weight), wide.bfloat16())


def test_arrays_of_every_kind() -> None:
    hidden, weight = problem(4, 6, 64)
    expected = nv.router_gemm(hidden, weight)
    bits = [x.view(torch.uint16).numpy() for x in (hidden, weight)]
    assert np.array_equal(nv.router_gemm(*bits), expected.view(torch.uint16).numpy())
    apart = torch.zeros(4, 80, dtype=torch.bfloat16)
    apart[:, :64] = hidden
    assert torch.equal(nv.router_gemm(apart[:, :64], weight), expected)
    assert nv.router_gemm(hidden[:0], weight).shape == (0, 6)
    out = torch.empty(4, 6)
    assert nv.router_gemm(hidden, weight, out=out) is out
    assert torch.equal(out.bfloat16(), expected)
    # The op gives the same; its out form checks the dtype.
    op = torch.ops.nvfp4_moe.router_gemm
    assert torch.equal(op(hidden, weight), expected)
    assert torch.equal(op(hidden, weight, logits_dtype=torch.float32), out)
    into = torch.zeros_like(out)
    op(hidden, weight, logits_dtype=torch.float32, out=into)
    assert torch.equal(into, out)
    with pytest.raises(ValueError, match="out: expected logits_dtype torch.bfloat16"):
        op(hidden, weight, out=into)


def test_refuses() -> None:
    hidden, weight = problem(4, 6, 64)
    unaligned = torch.zeros(1, 72, dtype=torch.bfloat16)[:, 4:68]
    for message, arguments, options in (
        ("hidden: expected two dimensions of bfloat16", (hidden.float(), weight), {}),
        (r"weight: expected \(E, 64\) on cpu", (hidden, weight[:, :56]), {}),
        ("logits_dtype: expected bfloat16 or float32, got float16", (hidden, weight), {"logits_dtype": "float16"}),
        (r"out: expected \(4, 6\)", (hidden, weight), {"out": torch.empty(4, 5)}),
        ("hidden: expected an address that is a multiple of 16", (unaligned, weight), {}),
    ):
        with pytest.raises(ValueError, match=message):
            nv.router_gemm(*arguments, **options)
