"""Arrays of other frameworks: what the compiled module (python/src/tensor.h) cannot do through DLPack alone.

NumPy has no bfloat16 and no FP8 of its own, and its DLPack export refuses those of ml_dtypes: they cross as their bits.
torch is never imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

_NUMPY_BITS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float4_e2m1fn": np.uint8}


def _torch_of(array: Any) -> Any:
    """The torch module if the array is a tensor, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else None


def view(array: Any) -> Any:
    """What the compiled module can read in place of an array whose own export it cannot; None where there is nothing.

    Never a copy: same memory, same strides."""
    if isinstance(array, np.ndarray):
        bits = _NUMPY_BITS.get(array.dtype.name)
        return None if bits is None else array.view(bits)
    torch = _torch_of(array)
    if torch is None:
        return None
    byte_like = [getattr(torch, name, None) for name in ("float8_e4m3fn", "float4_e2m1fn_x2")]
    return array.detach().view(torch.uint8) if array.dtype in byte_like else array.detach()


def as_array(value: Any) -> Any:
    """Arrays as they are; numbers and lists as NumPy arrays."""
    return value if isinstance(value, np.ndarray) or hasattr(value, "__dlpack__") else np.asarray(value)


def contiguous(array: Any) -> Any:
    """A row-major, aligned copy of an array that is not, or is lazily negated: a tensor of a tensor, else a NumPy array."""
    torch = _torch_of(array)
    if torch is not None:
        return array.detach().clone(memory_format=torch.contiguous_format).resolve_neg()
    return np.array(array if isinstance(array, np.ndarray) else np.from_dlpack(array), order="C")


def empty_like(array: Any, shape: Sequence[int], dtype: str) -> Any:
    """A tensor like a tensor, on its device; a NumPy array, with uint16 for bfloat16, like everything else."""
    torch = _torch_of(array)
    if torch is not None:
        return array.new_empty(tuple(shape), dtype=getattr(torch, dtype))
    return np.empty(tuple(shape), dtype="uint16" if dtype == "bfloat16" else dtype)


def cast(array: Any, dtype: str) -> np.ndarray[Any, Any]:
    """The numbers of an array, or a list of them, as a row-major NumPy array of another dtype."""
    torch = _torch_of(array)
    if torch is not None:
        array = array.detach().to("cpu", getattr(torch, dtype)).resolve_neg().numpy()
    elif not isinstance(array, np.ndarray) and hasattr(array, "__dlpack__"):
        array = np.from_dlpack(array)
    return np.array(array, dtype=dtype, order="C")
