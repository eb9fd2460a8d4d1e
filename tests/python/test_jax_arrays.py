"""JAX arrays in and out, read-only arrays, and the framework and dtype of results (docs/how-to/python.md)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import nvfp4_moe as nv
import pytest

sys.path.insert(0, str(Path(__file__).parent / "numpy_only"))
from layers import EXPERTS, TOP_K, batch, layer  # noqa: E402


def tiny_batch() -> tuple[np.ndarray[Any, Any], ...]:
    hidden, ids, router_weights = batch(5)
    return hidden, ids.astype(np.int32), router_weights


class Lent:
    """An array that NumPy does not know. It has only versioned DLPack, with a flag for read-only memory."""

    def __init__(self, array: np.ndarray[Any, Any], read_only: bool) -> None:
        self._array = array.view()
        self._array.flags.writeable = not read_only
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack__(self, *, max_version: Any = None, **options: Any) -> Any:
        return self._array.__dlpack__(max_version=max_version, **options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_what_must_not_be_written_is_not() -> None:
    """Read-only memory, as NumPy arrays and as DLPack exports, and tensors that require gradients or are expanded."""
    moe, (hidden, ids, weights) = layer(), tiny_batch()
    expected = moe.run(hidden, ids, weights)
    out = np.zeros_like(hidden)
    frozen = [np.zeros_like(hidden), np.zeros(moe.workspace_bytes(5) + 256, np.uint8), np.zeros_like(weights)]
    for array in frozen:
        array.flags.writeable = False
    router, logits = nv.RouterConfig(EXPERTS, TOP_K), np.zeros((5, EXPERTS), np.float32)
    for name, call in (
        ("out", lambda: moe.run(hidden, ids, weights, out=Lent(out, read_only=True))),
        ("out", lambda: moe.run(hidden, ids, weights, out=frozen[0])),
        ("workspace", lambda: moe.run(hidden, ids, weights, workspace=frozen[1])),
        ("topk_weights", lambda: nv.select_experts(logits, router, out=(ids.copy(), frozen[2]))),
    ):
        with pytest.raises(nv.InvalidArgument, match=f"{name}: expected an array that can be written, got a read-only"):
            call()
    assert not out.any()
    moe.run(Lent(hidden, read_only=True), ids, weights, out=Lent(out, read_only=False))
    assert (out == expected).all()

    torch = pytest.importorskip("torch")
    leaf = torch.zeros(hidden.shape, requires_grad=True)
    for wrong, words in (
        (leaf, "out: expected an array that can be written, got a tensor that requires"),
        (torch.zeros(1, hidden.shape[1]).expand(hidden.shape), "out: expected .* contiguous, got .* not contiguous"),
    ):
        with pytest.raises(nv.InvalidArgument, match=words):
            moe.run(*map(torch.from_numpy, (hidden, ids, weights)), out=wrong)
    with torch.no_grad():
        moe.run(*map(torch.from_numpy, (hidden, ids, weights)), out=leaf)
    assert (leaf.detach().numpy() == expected).all()


def test_ml_dtypes_bfloat16_comes_back() -> None:
    moe, (hidden, ids, weights) = layer(), tiny_batch()
    bfloat16 = hidden.astype(ml_dtypes.bfloat16)
    out = moe.run(bfloat16, ids, weights)
    assert out.dtype == ml_dtypes.bfloat16
    assert (out.view(np.uint16) == moe.run(bfloat16.view(np.uint16), ids, weights)).all()
    assert nv.router_gemm(bfloat16, bfloat16).dtype == ml_dtypes.bfloat16


# ---- with JAX


@pytest.fixture
def jnp() -> Any:
    return pytest.importorskip("jax.numpy")


def test_jax_arrays_are_never_written(jnp: Any) -> None:
    moe, (hidden, ids, weights) = layer(), tiny_batch()
    for dtype in ("float32", "bfloat16"):
        out = jnp.zeros(hidden.shape, dtype)
        with pytest.raises(nv.InvalidArgument, match="out: expected an array .* written, got an immutable JAX"):
            moe.run(jnp.asarray(hidden), jnp.asarray(ids), jnp.asarray(weights), out=out)
        assert not np.asarray(out).any()
    outs = jnp.zeros(ids.shape, "int32"), jnp.zeros(ids.shape, "float32")
    with pytest.raises(nv.InvalidArgument, match="topk_ids: expected an array that can be written"):
        nv.select_experts(jnp.zeros((len(hidden), EXPERTS)), nv.RouterConfig(EXPERTS, TOP_K), out=outs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_jax_arrays_come_back(jnp: Any, dtype: str) -> None:
    import jax

    moe, (hidden, ids, weights) = layer(), tiny_batch()
    x = jnp.asarray(hidden).astype(dtype)
    out = moe.run(x, jnp.asarray(ids), jnp.asarray(weights))
    assert isinstance(out, jax.Array) and out.dtype == x.dtype and out.devices() == x.devices()
    expected = moe.run(np.asarray(x), ids, weights)
    assert (np.asarray(out) == expected).all()
    router = nv.RouterConfig(EXPERTS, TOP_K)
    logits = jnp.arange(len(hidden) * EXPERTS, dtype="float32").reshape(len(hidden), -1)
    of_router = [*nv.select_experts(logits, router), moe.run_logits(x, logits, router)]
    codes = [*nv.quantize(x, mode="dynamic_token"), *nv.swiglu_quantize(x)]
    of_formats = [nv.dequantize(*codes[:3]), nv.swizzle_scales(codes[1]), nv.pack_codes(nv.unpack_codes(codes[0]))]
    for array in [*of_router, *codes, *of_formats]:
        assert isinstance(array, jax.Array)
    assert (np.asarray(codes[0]) == nv.quantize(np.asarray(x), mode="dynamic_token")[0]).all()
    assert (np.asarray(of_router[2]) == moe.run(np.asarray(x), *(np.asarray(a) for a in of_router[:2]))).all()
