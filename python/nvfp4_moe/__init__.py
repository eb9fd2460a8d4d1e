"""Mixture-of-experts layers with NVFP4 weights: layers, routers, checkpoints and the number format.

    layer = nvfp4_moe.MoeLayer.from_checkpoint("model-nvfp4", 0)       # the model's layer 0, on the CPU
    out = layer.run(hidden, topk_ids, topk_weights)                    # (T, hidden_size), (T, top_k), (T, top_k)

`python -m nvfp4_moe` shows what works on this machine. docs/how-to/python.md is the guide.

An NVFP4 tensor (..., K), with K a multiple of 16, has three parts:

    codes         uint8 (..., K/2)    two E2M1 codes a byte, the even element along K in the low nibble
    scales        uint8 (..., K/16)   one E4M3 byte per 16 elements along K, sign bit 0
    tensor_scale  float               one for the whole tensor, or float32 (...), one per row

    value = e2m1(code) * e4m3(scale) * tensor_scale

Arrays of any framework are accepted through DLPack or the buffer protocol. Torch tensors give torch tensors, and JAX
arrays on a CPU give JAX arrays. Everything else gives NumPy arrays. Non-contiguous arrays are copied.

    bfloat16      a torch or ml_dtypes array, or a NumPy uint16 array of the bits
    E4M3 bytes    uint8, or float8_e4m3fn of ml_dtypes or torch

quantize, dequantize, swiglu_quantize, swizzle_scales, unswizzle_scales, router_gemm and select_experts also take torch
tensors on a GPU. They run in torch's current stream without waiting, so a CUDA graph can capture them, and the results
have the same bits as on the host.

Every error is a subclass of nvfp4_moe.Error. Its message is one line: the argument, what was expected, what it got.
Each class is also a built-in exception:

    InvalidArgument                            ValueError
    BadInput (the content of a file)           ValueError
    Unsupported                                NotImplementedError
    IoError                                    OSError
    OutOfMemory                                MemoryError
    Busy, Cancelled, CheckFailed, Internal     RuntimeError

An argument that is not an array raises TypeError. Every function may be called from several threads.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from . import _core
from ._build import missing_cuda as _missing_cuda
from ._core import (
    BadInput,
    Busy,
    Cancelled,
    CheckFailed,
    Checkpoint,
    Error,
    Exchange,
    Internal,
    InvalidArgument,
    IoError,
    OutOfMemory,
    ThreadGroup,
    Unsupported,
    __version__,
    propose_placement,
)
from ._formats import (
    convert_to_fp8,
    decode_e2m1,
    decode_e4m3,
    dequantize,
    encode_e2m1,
    encode_e4m3,
    expert_scale_row,
    pack_codes,
    quantize,
    swiglu_quantize,
    swizzle_experts,
    swizzle_scales,
    unpack_codes,
    unswizzle_scales,
)

if TYPE_CHECKING:
    from .config import MoeConfig
    from .exchange import callback_exchange, torch_exchange
    from .layer import MoeLayer
    from .linear import Nvfp4Linear
    from .router import RouterConfig, router_gemm, select_experts

__all__ = [
    "BadInput",
    "Busy",
    "Cancelled",
    "CheckFailed",
    "Checkpoint",
    "Error",
    "Exchange",
    "Internal",
    "InvalidArgument",
    "IoError",
    "MoeConfig",
    "MoeLayer",
    "Nvfp4Linear",
    "OutOfMemory",
    "RouterConfig",
    "ThreadGroup",
    "Unsupported",
    "__version__",
    "callback_exchange",
    "choose_activation_format",
    "convert_to_fp8",
    "decode_e2m1",
    "decode_e4m3",
    "dequantize",
    "encode_e2m1",
    "encode_e4m3",
    "expert_scale_row",
    "explain",
    "inspect",
    "load_expert",
    "pack_codes",
    "propose_placement",
    "quantize",
    "quantize_checkpoint",
    "release_workspaces",
    "router_gemm",
    "select_experts",
    "swiglu_quantize",
    "swizzle_scales",
    "swizzle_experts",
    "torch_exchange",
    "unpack_codes",
    "unswizzle_scales",
]

for _public in (Checkpoint, Error, *Error.__subclasses__()):
    _public.__module__ = __name__  # the public name, for tracebacks and pickles

# Names that are imported when they are first used, by their module: dataclasses and json take longer than the rest.
_LATER = {
    "MoeConfig": "config",
    "MoeLayer": "layer",
    "Nvfp4Linear": "linear",
    "RouterConfig": "router",
    "callback_exchange": "exchange",
    "router_gemm": "router",
    "select_experts": "router",
    "torch_exchange": "exchange",
}


if not TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __getattr__(name: str) -> Any:
        if name in _LATER:
            value = getattr(_import_module(f"{__name__}.{_LATER[name]}"), name)
            globals()[name] = value
            return value
        if name in _LATER.values():
            return _import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def inspect(
    path: str | os.PathLike[str],
    layers: Sequence[int] | None = None,
    *,
    gate_up_order: str | None = None,
    accept_tensors: Sequence[str] = (),
    family: str = "",
) -> dict[str, Any]:
    """Describes a checkpoint: its model, statistics of its scales, and everything found wrong with it.

    Args:
        path: A checkpoint directory, or one safetensors or GGUF file.
        layers: The MoE layers whose block scales are read. None reads all, [] reads headers and config only.
        gate_up_order, accept_tensors, family: As in Checkpoint.

    Returns:
        A dict with the model's family, format, options and layers; "statistics" by layer (sizes in bytes, scale
        ranges); and "findings". A finding is a dict with severity ("note", "warning", "error"), id, layer, expert,
        tensor, expected, actual, count (a finding may stand for many tensors), examples (the next three of them) and
        text.

    Raises:
        BadInput: The files cannot be opened as a checkpoint.
        Unsupported: The library does not know the model.
        IoError: A file cannot be read.
    """
    checkpoint = Checkpoint(os.fspath(path), gate_up_order, list(accept_tensors), family)
    return checkpoint.inspect(None if layers is None else list(layers))


def load_expert(
    path: str | os.PathLike[str],
    layer: int,
    expert: int,
    *,
    first: int = 0,
    count: int = 0,
    gate_up_order: str | None = None,
    accept_tensors: Sequence[str] = (),
    family: str = "",
) -> dict[str, Any]:
    """Reads one expert's weights, as a layer would load them.

    Args:
        path: A checkpoint directory, or one safetensors or GGUF file.
        layer: The MoE layer.
        expert: The expert's global id.
        first, count: A slice of the intermediate dimension, multiples of 16. count 0 reads all of it.
        gate_up_order, accept_tensors, family: As in Checkpoint.

    Returns:
        A dict of copies. "gate" and "up" (intermediate, hidden) and "down" (hidden, intermediate) are
        {"codes" uint8 (rows, K/2), "scales" uint8 (rows, K/16), "tensor_scale" float} for every format of the files;
        Experts without a gate have None for "gate".
        "input_scale" is {"hidden", "intermediate"}: the layer's activation scales (amax/2688, the maximum over all
        experts), each None if the files have none. "names" maps each projection to the name of its tensor.
    """
    checkpoint = Checkpoint(os.fspath(path), gate_up_order, list(accept_tensors), family)
    return checkpoint.expert(layer, expert, first, count)


def quantize_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    output_format: str = "modelopt",
    layers: Sequence[int] = (),
    search: str = "max",
    calibration: str | os.PathLike[str] | None = None,
    share_gate_up_scale: bool = True,
    input_scales: Mapping[int, tuple[float | None, float | None]] | None = None,
    max_shard_bytes: int = 5 << 30,
    threads: int = 0,
    progress: Callable[[dict[str, Any]], bool | None] | None = None,
    gate_up_order: str | None = None,
    accept_tensors: Sequence[str] = (),
    family: str = "",
    scale_coding: str = "plain",
) -> dict[str, Any]:
    """Quantizes the routed experts of a bf16, fp16 or fp32 checkpoint to NVFP4 and copies everything else.

    Args:
        source: The checkpoint directory to read.
        out: The directory to write.
        output_format: "modelopt" or "compressed-tensors".
        layers: The MoE layers to quantize; empty for all.
        search: "max", "mse" or "sweep", as in quantize.
        calibration: A file of second moments of the experts' inputs, which weigh the errors of "mse" and "sweep": from
            `nvfp4-moe calibrate --moments`, or an imatrix of llama.cpp.
        share_gate_up_scale: Gate and up share one tensor scale, as vLLM expects.
        input_scales: (hidden, intermediate) activation scales by layer, amax/2688.
        max_shard_bytes: The size limit of a written file.
        threads: 0 for one per core.
        progress: Called with a dict (what, item, done, total, done_bytes, total_bytes, elapsed_s). Return False to
            cancel.
        gate_up_order, accept_tensors, family: As in Checkpoint.
        scale_coding: "plain", or "csf": block scales in a lossless coding that takes fewer bytes, for "modelopt".
            Each expert is quantized twice.

    Returns:
        A dict of what was done: layers with their signal to quantization noise ratio (SQNR), counts, notes.

    Raises:
        ValueError: Wrong options, or `out` holds something else.
        Unsupported, BadInput, IoError, Cancelled: As nvfp4_moe's errors describe.
    """
    if input_scales is not None and not isinstance(input_scales, Mapping):
        raise InvalidArgument(
            f"input_scales: expected a dict {{layer: (hidden, intermediate)}}, got {type(input_scales).__name__}"
        )
    return _core.quantize_checkpoint(
        os.fspath(source),
        os.fspath(out),
        output_format,
        list(layers),
        search,
        "" if calibration is None else os.fspath(calibration),
        share_gate_up_scale,
        dict(input_scales or {}),
        max_shard_bytes,
        threads,
        progress,
        gate_up_order,
        list(accept_tensors),
        family,
        scale_coding,
    )


def explain(options: Mapping[str, Any], backend: str = "auto", device: str = "cpu") -> list[dict[str, Any]]:
    """Reports which backend runs a layer on a device, and why the others do not.

    Args:
        options: Fields of MoeConfig (num_experts, top_k, hidden_size, intermediate_size, activation, ...). Fields left
            out have their defaults.
        backend: "auto", or the name of one backend.
        device: "cpu" or "cuda:N".

    Returns:
        A list of dicts, highest priority first: "backend", its name; "chosen", True for the one that runs; "supported",
        True if it would run when named; and "reason", a sentence.

    Raises:
        ValueError, BadInput: The options are not a legal config.
        Unsupported: There is no such device.
    """
    import json

    from .config import dump_options

    defaults = json.loads(_core.default_options())
    for name in options:
        if name not in defaults:
            raise InvalidArgument(f"options: expected one of {', '.join(defaults)}, got {name}")
    return _core.explain(dump_options({**defaults, **options}), backend, device)


def choose_activation_format(declared: str, backend: str) -> tuple[str, str]:
    """Applies the rule of activation_format="auto": never less precise than what the checkpoint declares.

    docs/explanation/numerics.md, section 2, has the table.

    Args:
        declared: The activations that the checkpoint declares for these experts: "bf16" (weight-only, or experts in
            floats), "nvfp4" (W4A4) or "fp8".
        backend: The backend that will run, as explain() names it. It need not be in this build.

    Returns:
        (format, because): because completes the sentence "activations: bf16, because ...".

    Raises:
        ValueError: Other names.
    """
    return _core.choose_activation_format(declared, backend)


def release_workspaces(device: str | None = None) -> int:
    """Frees the workspaces that no run is using, and returns the number of bytes freed.

    Workspaces in torch's memory return to torch's caching allocator; torch.cuda.empty_cache() passes them on. The next
    run allocates a workspace again. Other threads may run layers during the call, and graphs that torch captured stay
    valid. Do not call it if a graph that another framework captured may still be replayed: its workspace is freed too.
    Closing the last layer frees the same workspaces.

    Args:
        device: "cpu" or "cuda:N"; None for all devices.

    Raises:
        ValueError: Not the name of a device.
        Unsupported: There is no such device.
    """
    return _core.release_workspaces(None if device is None else str(device))


if _note := _missing_cuda():
    warnings.warn(_note, RuntimeWarning, stacklevel=2)

# At exit torch can still take its memory back; later, modules and layers are dropped in no defined order.
atexit.register(release_workspaces)
