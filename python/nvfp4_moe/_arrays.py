"""Helpers for other frameworks' arrays that the compiled module (python/src/tensor.h) cannot handle through DLPack.

NumPy has no bfloat16 or FP8, and its DLPack export refuses those of ml_dtypes, so they are passed as their bits. torch
is never imported here, and NumPy only to make an array: its import takes longer than the package's own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

_NUMPY_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float4_e2m1fn": "uint8"}


def _is_numpy(array: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(array, numpy.ndarray)


def _torch_of(array: Any) -> Any:
    """Returns the torch module if the array is a torch tensor, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else None


def view(array: Any) -> Any:
    """Returns a view that the compiled module can read if it cannot read the array itself, or None.

    The view has the same memory and strides.
    """
    if _is_numpy(array):
        bits = _NUMPY_BITS.get(array.dtype.name)
        return None if bits is None else array.view(bits)
    torch = _torch_of(array)
    if torch is None:
        return None
    byte_like = [getattr(torch, name, None) for name in ("float8_e4m3fn", "float4_e2m1fn_x2")]
    return array.detach().view(torch.uint8) if array.dtype in byte_like else array.detach()


def as_array(value: Any) -> Any:
    """Returns arrays unchanged, and numbers and lists as NumPy arrays."""
    if _is_numpy(value) or hasattr(value, "__dlpack__"):
        return value
    import numpy

    return numpy.asarray(value)


def contiguous(array: Any) -> Any:
    """Copies an array to row-major, aligned memory and resolves a lazy negation.

    A tensor gives a tensor, everything else a NumPy array.
    """
    torch = _torch_of(array)
    if torch is not None:
        return array.detach().clone(memory_format=torch.contiguous_format).resolve_neg()
    import numpy

    return numpy.array(array if _is_numpy(array) else numpy.from_dlpack(array), order="C")


def empty_like(array: Any, shape: Sequence[int], dtype: str) -> Any:
    """Makes a tensor on the device of a tensor, and a NumPy array for everything else.

    bfloat16 in NumPy is ml_dtypes' if the array has that dtype, else uint16 bits.
    """
    torch = _torch_of(array)
    if torch is not None:
        return array.new_empty(tuple(shape), dtype=getattr(torch, dtype))
    import numpy

    if dtype != "bfloat16":
        return numpy.empty(tuple(shape), dtype=dtype)
    own = _is_numpy(array) and array.dtype.name == "bfloat16"
    return numpy.empty(tuple(shape), dtype=array.dtype if own else numpy.uint16)


def _is_jax(array: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


def in_framework(made: Any, like: Any) -> Any:
    """Converts a NumPy result to a JAX array on the input's device if the input is one, else returns it unchanged."""
    if not _is_jax(like):
        return made
    jax = sys.modules["jax"]
    ml_dtypes = importlib.import_module("ml_dtypes")  # JAX needs it

    bits_of_bfloat16 = made.dtype == "uint16"
    return jax.device_put(made.view(ml_dtypes.bfloat16) if bits_of_bfloat16 else made, next(iter(like.devices())))


def immutable(array: Any) -> str | None:
    """Returns why an array must not be written, or None if it may be.

    For arrays whose DLPack export does not show it.
    """
    if _is_jax(array):
        return "an immutable JAX array"
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(array, tensorflow.Tensor):
        return "an immutable TensorFlow tensor"
    for protocol in ("__array_interface__", "__cuda_array_interface__"):
        interface = getattr(array, protocol, None)
        if isinstance(interface, dict) and isinstance(interface.get("data"), tuple) and interface["data"][1]:
            return "a read-only one"
    try:
        return "a read-only one" if memoryview(array).readonly else None
    except (TypeError, ValueError, BufferError):  # no buffer, or a dtype that buffers cannot describe
        return None


def cast(array: Any, dtype: str) -> numpy.ndarray[Any, Any]:
    """Converts an array or a list of numbers to a row-major NumPy array of the dtype."""
    import numpy

    torch = _torch_of(array)
    if torch is not None:
        array = array.detach().to("cpu", getattr(torch, dtype)).resolve_neg().numpy()
    elif not _is_numpy(array) and hasattr(array, "__dlpack__"):
        array = numpy.from_dlpack(array)
    return numpy.array(array, dtype=dtype, order="C")
