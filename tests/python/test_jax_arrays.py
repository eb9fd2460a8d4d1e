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


def test_a_read_only_dlpack_export_is_not_written() -> None:
    moe, (hidden, ids, weights) = layer(), tiny_batch()
    out = np.zeros_like(hidden)
    expected = moe.run(hidden, ids, weights)
    with pytest.raises(nv.InvalidArgument, match="out: expected an array that can be written, got a read-only one"):
        moe.run(hidden, ids, weights, out=Lent(out, read_only=True))
    assert not out.any()
    moe.run(Lent(hidden, read_only=True), ids, weights, out=Lent(out, read_only=False))
    assert (out == expected).all()


def test_a_read_only_buffer_is_not_written() -> None:
    moe, (hidden, ids, weights) = layer(), tiny_batch()
    out = np.zeros_like(hidden)
    out.flags.writeable = False
    workspace = np.zeros(moe.workspace_bytes(5) + 256, np.uint8)
    workspace.flags.writeable = False
    frozen = np.zeros(weights.shape, np.float32)
    frozen.flags.writeable = False
    router, logits = nv.RouterConfig(EXPERTS, TOP_K), np.zeros((5, EXPERTS), np.float32)
    calls = {
        "out": lambda: moe.run(hidden, ids, weights, out=out),
        "workspace": lambda: moe.run(hidden, ids, weights, workspace=workspace),
        "topk_weights": lambda: nv.select_experts(logits, router, out=(ids.copy(), frozen)),
    }
    for name, call in calls.items():
        with pytest.raises(nv.InvalidArgument, match=f"{name}: expected an array that can be written, got a read-only"):
            call()


def test_tensors_that_require_grad_or_are_expanded_are_not_written() -> None:
    torch = pytest.importorskip("torch")
    moe, arrays = layer(), tiny_batch()
    batch_of = tuple(torch.from_numpy(array) for array in arrays)
    out = torch.zeros_like(batch_of[0], requires_grad=True)
    expanded = torch.zeros(1, out.shape[1]).expand_as(out)
    for wrong, words in (
        (out, "out: expected an array that can be written, got a tensor that requires"),
        (expanded, "out: expected .* contiguous, got .* not contiguous"),
    ):
        with pytest.raises(nv.InvalidArgument, match=words):
            moe.run(*batch_of, out=wrong)
    with torch.no_grad():
        moe.run(*batch_of, out=out)
    assert (out.detach().numpy() == moe.run(*arrays)).all()


def test_ml_dtypes_bfloat16_comes_back() -> None:
    moe, (hidden, ids, weights) = layer(), tiny_batch()
    bfloat16 = hidden.astype(ml_dtypes.bfloat16)
    out = moe.run(bfloat16, ids, weights)
    assert out.dtype == ml_dtypes.bfloat16
    assert (out.view(np.uint16) == moe.run(bfloat16.view(np.uint16), ids, weights)).all()
    assert nv.router_gemm(bfloat16, bfloat16).dtype == ml_dtypes.bfloat16
    assert nv.router_gemm(bfloat16.view(np.uint16), bfloat16.view(np.uint16)).dtype == np.uint16


# ---- with JAX


@pytest.fixture
def jnp() -> Any:
    return pytest.importorskip("jax.numpy")


def test_jax_arrays_are_never_written(jnp: Any) -> None:
    moe, (hidden, ids, weights) = layer(), tiny_batch()
    for dtype in ("float32", "bfloat16", "float16"):
        out = jnp.zeros(hidden.shape, dtype)
        alias = out
        with pytest.raises(
            nv.InvalidArgument, match="out: expected an array that can be written, got an immutable JAX"
        ):
            moe.run(jnp.asarray(hidden), jnp.asarray(ids), jnp.asarray(weights), out=out)
        assert not np.asarray(alias).any()
    workspace = jnp.zeros(moe.workspace_bytes(len(hidden)) + 256, "uint8")
    with pytest.raises(nv.InvalidArgument, match="workspace: expected"):
        moe.run(hidden, ids, weights, workspace=workspace)
    router = nv.RouterConfig(EXPERTS, TOP_K)
    outs = jnp.zeros(ids.shape, "int32"), jnp.zeros(ids.shape, "float32")
    with pytest.raises(nv.InvalidArgument, match="topk_ids: expected an array that can be written"):
        nv.select_experts(jnp.zeros((len(hidden), EXPERTS)), router, out=outs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_jax_arrays_come_back(jnp: Any, dtype: str) -> None:
    import jax

    moe, (hidden, ids, weights) = layer(), tiny_batch()
    x = jnp.asarray(hidden).astype(dtype)
    out = moe.run(x, jnp.asarray(ids), jnp.asarray(weights))
    assert isinstance(out, jax.Array) and out.dtype == x.dtype and out.devices() == x.devices()
    expected = moe.run(np.asarray(x), ids, weights)
    assert (np.asarray(out) == expected).all()
    assert (np.asarray(moe.run(np.asarray(x), ids, weights, out=np.empty_like(expected))) == expected).all()

    router = nv.RouterConfig(EXPERTS, TOP_K)
    logits = jnp.arange(len(hidden) * EXPERTS, dtype="float32").reshape(len(hidden), -1)
    of_router = [*nv.select_experts(logits, router), moe.run_logits(x, logits, router)]
    codes = [*nv.quantize(x, mode="dynamic_token"), *nv.swiglu_quantize(x)]
    of_formats = [nv.dequantize(*codes[:3]), nv.swizzle_scales(codes[1]), nv.pack_codes(nv.unpack_codes(codes[0]))]
    for array in [*of_router, *codes, *of_formats]:
        assert isinstance(array, jax.Array)
    assert (np.asarray(codes[0]) == nv.quantize(np.asarray(x), mode="dynamic_token")[0]).all()
    assert (np.asarray(of_router[2]) == moe.run(np.asarray(x), *(np.asarray(a) for a in of_router[:2]))).all()
