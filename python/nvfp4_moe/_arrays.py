"""Arrays of other frameworks in and out: what the compiled module cannot see through DLPack alone.

NumPy has no bfloat16 and no FP8 of its own, and its DLPack export refuses those of ml_dtypes: they cross as their bits.
A torch input gives torch outputs; everything else gives NumPy arrays. torch is never imported here.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_NUMPY_BITS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float4_e2m1fn": np.uint8}


def torch_of(*arrays: Any) -> Any:
    """The torch module if one of the arrays is a tensor, else None."""
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(array, torch.Tensor) for array in arrays):
        return torch
    return None


def on_gpu(array: Any) -> bool:
    """Whether the array is a torch tensor in a GPU's memory."""
    torch = torch_of(array)
    return torch is not None and array.is_cuda


def view(array: Any) -> Any:
    """What the compiled module can read in place of an array whose own export it cannot; None where there is nothing.

    Never a copy: same memory, same strides."""
    if isinstance(array, np.ndarray):
        bits = _NUMPY_BITS.get(array.dtype.name)
        return None if bits is None else array.view(bits)
    torch = torch_of(array)
    if torch is None:
        return None
    byte_like = [getattr(torch, name, None) for name in ("float8_e4m3fn", "float4_e2m1fn_x2")]
    return array.detach().view(torch.uint8) if array.dtype in byte_like else array.detach()


def borrow(array: Any) -> Any:
    """The array as something the compiled module reads without a copy, where its memory is contiguous."""
    if isinstance(array, np.ndarray):
        bits = view(array)
        return array if bits is None else np.ascontiguousarray(bits).reshape(array.shape)
    if torch_of(array) is not None:
        return view(array).contiguous()
    return array if hasattr(array, "__dlpack__") else np.asarray(array)


def lend(array: Any, torch: Any, bits_of: str | None = None) -> Any:
    """A NumPy result as the caller's framework has it; bits_of names the 16-bit float that uint16 stands for."""
    if bits_of == "float16":
        array = array.view(np.float16)
    if torch is None or not isinstance(array, np.ndarray):
        return array
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if bits_of == "bfloat16" else tensor
