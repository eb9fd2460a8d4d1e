"""NVFP4 for mixture-of-experts layers: the number format, its layouts and checkpoints.

An NVFP4 tensor (..., K), K a multiple of 16, is three things:

    codes         uint8 (..., K/2)    two E2M1 codes a byte, the even element along K in the low nibble
    scales        uint8 (..., K/16)   one E4M3 byte per 16 elements along K, sign bit 0
    tensor_scale  float               of the whole tensor (or float32 (...), one per row)

    value = e2m1(code) * e4m3(scale) * tensor_scale

Arrays come in through DLPack or the buffer protocol from any framework. A torch tensor gives torch tensors back,
everything else NumPy arrays. quantize, dequantize, swiglu_quantize, swizzle_scales, unswizzle_scales, router_gemm and select_experts also
take torch tensors in a GPU's memory: with the host's bits, in torch's current stream, and without waiting, so that a CUDA
graph can hold them. bfloat16 is a torch or ml_dtypes array, or a NumPy uint16 array of its bits; E4M3 bytes are uint8, ml_dtypes or torch
float8_e4m3fn. Non-contiguous arrays are copied.

Errors: subclasses of nvfp4_moe.Error, each with one line that names the thing, what was expected and what came, and each
also the built-in exception that says the same: InvalidArgument and BadInput (a file's content) are ValueErrors,
Unsupported is a NotImplementedError, IoError an OSError, OutOfMemory a MemoryError; Busy, Cancelled, CheckFailed and
Internal are RuntimeErrors. What is no array at all is a TypeError. Any function may be called from several threads.
"""

from __future__ import annotations

import atexit
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from .config import MoeConfig
from .config import dump_options as _dump_options
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
    _public.__module__ = __name__  # tracebacks and pickles name the public place


def quantize(
    x: Any,
    *,
    mode: str = "weights",
    tensor_scale: float | None = None,
    search: str = "max",
    channel_weights: Any = None,
) -> tuple[Any, Any, Any]:
    """Quantizes x (..., K) of float32, float16 or bfloat16 along its last dimension.

    mode "weights": scale = RNE(amax/(6 s)) and code = RNE(x/(scale s)) from exact quotients; s = tensor_scale, or
      float32(amax/2688) of the whole array. search="mse" lets the E4M3 neighbours of amax/6 and of amax/4 compete by
      squared error, "sweep" all E4M3 values (on the host alone). channel_weights: float32 (K,) of at least 0, for these
      two on the host: the errors of a column count that much, as with second moments of what the columns are multiplied by.
    mode "dynamic_token": s per row, the smallest power of two >= amax/2688 (1 for a row of zeros).
    mode "static": s = tensor_scale rounded up to a power of two.
    mode "compat": s = tensor_scale as it is, in vLLM's operation order, for byte comparison.

    Returns (codes uint8 (..., K/2), scales uint8 (..., K/16), tensor_scale): a float, or float32 (...) for
    dynamic_token, NaN for a row that holds NaN or Inf. The other modes raise ValueError on such a row. Of a tensor on a GPU
    tensor_scale is float32 () there, and instead of raising, NaN if x holds NaN or Inf.
    """
    return _core.quantize(x, mode, tensor_scale, search, channel_weights)


def swiglu_quantize(
    gate_up: Any,
    *,
    activation: str = "swiglu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.702,
    interleaved: bool = False,
    row_weights: Any = None,
    power_of_two: float | None = None,
) -> tuple[Any, Any, Any]:
    """gemm1's output to gemm2's input in one pass: activation(gate, up), times a router weight, to bf16, to NVFP4.

    gate_up: (..., 2 I) of float32, float16 or bfloat16, I a multiple of 16: all of gate, then all of up; interleaved:
    g0 u0 g1 u1 and so on. activation, swiglu_limit, swiglu_alpha: as in MoeConfig. row_weights: float32 (...), router
    weights of router_weight "before_down". power_of_two: the tensor scale of every row; None gives each its own, as
    quantize(mode="dynamic_token") does.

    Returns (codes uint8 (..., I/2), scales uint8 (..., I/16), row_scales float32 (...)); a row scale is NaN if the
    row holds NaN or Inf. Raises ValueError on shapes, dtypes and options.
    """
    return _core.swiglu_quantize(
        gate_up, activation, swiglu_limit, swiglu_alpha, interleaved, row_weights, power_of_two
    )


def dequantize(codes: Any, scales: Any, tensor_scale: Any, dtype: str = "float32") -> Any:
    """(..., K) of dtype "float32", "bfloat16" or "float16": the exact product, rounded once.

    tensor_scale: one number, or one per row (...); a row whose scale is NaN is NaN. A NumPy result of bfloat16 is
    uint16, its bits. Raises ValueError on shapes that do not belong together. On a GPU a tensor_scale of several numbers lies
    there too, and what a host refuses (block scales above 0x7E, a scale that is NaN) gives NaN.
    """
    return _core.dequantize(codes, scales, tensor_scale, dtype)


def pack_codes(codes: Any) -> Any:
    """uint8 (..., K) of codes 0..15 to uint8 (..., K/2), the even element in the low nibble. K even."""
    return _core.pack_codes(codes)


def unpack_codes(packed: Any) -> Any:
    """uint8 (..., K/2) to uint8 (..., K) of codes 0..15: the inverse of pack_codes."""
    return _core.unpack_codes(packed)


def encode_e2m1(x: Any) -> Any:
    """Elementwise to E2M1 codes 0..15, uint8, x's shape: nearest even, saturating at 6; NaN gives 7 (+6).

    float64 is rounded once, from the float64."""
    return _core.encode_e2m1(x)


def decode_e2m1(codes: Any) -> Any:
    """Elementwise: float32 values of codes 0..15 (higher bits are ignored)."""
    return _core.decode_e2m1(codes)


def encode_e4m3(x: Any) -> Any:
    """Elementwise to E4M3 bytes, uint8, x's shape: nearest even, saturating at 448; NaN gives 0x7F.

    float64 is rounded once, from the float64."""
    return _core.encode_e4m3(x)


def decode_e4m3(encoded: Any) -> Any:
    """Elementwise: float32 values of all 256 bytes; 0x7F and 0xFF are NaN."""
    return _core.decode_e4m3(encoded)


def convert_to_fp8(
    codes: Any, scales: Any, tensor_scale: float, block: tuple[int, int] | None = None
) -> tuple[Any, Any]:
    """A matrix (rows, K) as FP8: (E4M3 bytes uint8 (rows, K), scales), value ~= e4m3(byte) * scale.

    block=None: one float for the whole matrix. block=(128, 128): float32 (ceil(rows/128), ceil(K/128)).
    """
    return _core.convert_to_fp8(codes, scales, float(tensor_scale), block)


def swizzle_scales(scales: Any) -> Any:
    """uint8 (..., rows, K/16) to the 128x4 tile layout, uint8 (..., round_up(rows, 128) * round_up(K/16, 4)).

    Padding bytes are zero. Leading dimensions (experts) stay: each matrix is laid out by itself.
    """
    return _core.swizzle_scales(scales)


def unswizzle_scales(swizzled: Any, rows: int, cols: int) -> Any:
    """The inverse of swizzle_scales: uint8 (..., bytes) to (..., rows, cols), cols = K/16."""
    return _core.unswizzle_scales(swizzled, rows, cols)


def swizzle_experts(scales: Any, row_offsets: Any) -> Any:
    """Scales (rows, K/16) of activations sorted by expert to 128x4 tiles with a base per expert, uint8 (bytes,).

    row_offsets: (experts + 1) ascending, from 0 to rows. Expert e's tiles begin at row
    expert_scale_row(row_offsets[e], e), a multiple of 128; the bytes hold any distribution of as many rows.
    """
    return _core.swizzle_experts(scales, row_offsets)


def expert_scale_row(row_offset: int, expert: int) -> int:
    """The padded row where the scale tiles of an expert begin whose first row is row_offset."""
    return _core.expert_scale_row(row_offset, expert)


def inspect(
    path: str | os.PathLike[str],
    layers: Sequence[int] | None = None,
    *,
    gate_up_order: str | None = None,
    accept_tensors: Sequence[str] = (),
) -> dict[str, Any]:
    """Contents of a checkpoint directory, or of one safetensors or GGUF file.

    Returns the model's family, format, options and layers; "statistics" by layer (sizes in bytes, scale ranges); and
    "findings", each a dict with severity ("note", "warning", "error"), id, layer, expert, tensor, expected, actual,
    count, examples (tensors of the next three that it stands for) and text. layers=None reads the block scales of every MoE layer, [] reads headers and config only.
    gate_up_order, accept_tensors: as Checkpoint takes them, here and in the functions below.

    Raises BadInput if the files cannot be opened as a checkpoint, Unsupported if the library does not know the model, IoError.
    """
    checkpoint = Checkpoint(os.fspath(path), gate_up_order, list(accept_tensors))
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
) -> dict[str, Any]:
    """One expert as the layer would load it: "gate", "up" (intermediate, hidden) and "down" (hidden, intermediate).

    Each is {"codes" uint8 (rows, K/2), "scales" uint8 (rows, K/16), "tensor_scale" float}, whatever the files' format;
    copies. "input_scale" is {"hidden", "intermediate"}: the layer's activation scales (amax/2688), maximum over all
    experts, or None. "names" tells the tensors. first, count: a slice of the intermediate dimension, multiples of 16.
    """
    checkpoint = Checkpoint(os.fspath(path), gate_up_order, list(accept_tensors))
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
) -> dict[str, Any]:
    """Writes the bf16, fp16 or fp32 checkpoint `source` as NVFP4 to `out`.

    output_format: "modelopt" or "compressed-tensors".
    layers: the MoE layers to quantize, all if empty. search: "max", "mse" or "sweep". calibration: a file
    of second moments of the experts' inputs (`nvfp4-moe calibrate --moments`, or an imatrix of llama.cpp) that weigh the
    errors of "mse" and "sweep". share_gate_up_scale: one tensor scale
    for gate and up, as vLLM expects. input_scales: by layer (hidden, intermediate), amax/2688. threads=0: one per core.
    progress gets a dict (what, item, done, total, done_bytes, total_bytes, elapsed_s); returning False cancels.

    Returns what was done: layers with their SQNR, counts, notes. Raises ValueError on options or an `out` that holds
    something else, Unsupported, BadInput, IoError, Cancelled.
    """
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
    )


def explain(options: Mapping[str, Any], backend: str = "auto", device: str = "cpu") -> list[dict[str, Any]]:
    """Which backend takes a layer on a device, and why each other does not: dicts with backend, chosen, reason.

    options: fields of the layer's config (num_experts, top_k, hidden_size, intermediate_size, activation, ...); those
    left out have their defaults. device: "cpu" or "cuda:N". Raises ValueError or BadInput if they make no config,
    Unsupported if there is no such device.
    """
    defaults = json.loads(_core.default_options())
    for name in options:
        if name not in defaults:
            raise InvalidArgument(f"options: expected one of {', '.join(defaults)}, got {name}")
    return _core.explain(_dump_options({**defaults, **options}), backend, device)


def choose_activation_format(declared: str, backend: str) -> tuple[str, str]:
    """The rule of activation_format="auto" (docs/explanation/numerics.md, section 2): (format, because).

    declared: the activations that the checkpoint declares for these experts: "bf16" (weight-only, or experts in floats),
    "nvfp4" (W4A4) or "fp8". backend: the name of the backend that will run, as in explain()'s dicts; it need not be in
    this build. The format is never less precise than the declared one. because: a clause that follows "because" in
    "activations: bf16, because ...". Raises ValueError for other names.
    """
    return _core.choose_activation_format(declared, backend)


def release_workspaces(device: str | None = None) -> int:
    """Gives back every workspace that no run holds, on one device ("cpu", "cuda:N") or on all; returns their bytes.

    What lay in torch's memory goes back to torch's caching allocator (torch.cuda.empty_cache() hands it on). The next
    run takes a workspace again. Runs may go on meanwhile, as may graphs that torch captured. Not while a graph may still
    be replayed that another framework than torch captured: its workspace goes too. Closing the last layer gives back
    the same. Raises ValueError for a name that is no device's, Unsupported if there is no such device.
    """
    return _core.release_workspaces(None if device is None else str(device))


if _note := _missing_cuda():
    warnings.warn(_note, RuntimeWarning, stacklevel=2)

# While torch can still take its memory back, whatever order the interpreter drops modules and layers in.
atexit.register(release_workspaces)
