"""torch operators over nvfp4_moe's layers and formats. Importing this module registers them under torch.ops.nvfp4_moe.

    moe_layer(Tensor hidden, Tensor topk_ids, Tensor topk_weights, SymInt handle) -> Tensor
    moe_layer.out(Tensor hidden, Tensor topk_ids, Tensor topk_weights, SymInt handle, *, Tensor(a!) out) -> ()
    linear(Tensor x, SymInt handle, SymInt out_features) -> Tensor
    linear.out(Tensor x, SymInt handle, SymInt out_features, *, Tensor(a!) out) -> ()
    quantize(Tensor x, str mode="weights", float? tensor_scale=None, str search="max") -> (Tensor, Tensor, Tensor)
    dequantize(Tensor codes, Tensor scales, Tensor tensor_scale, ScalarType dtype=float32) -> Tensor
    swiglu_quantize(Tensor gate_up, str activation="swiglu", float? swiglu_limit=None, float swiglu_alpha=1.702,
                      bool interleaved=False, Tensor? row_weights=None, float? power_of_two=None,
                      float? situ_gate_limit=None, float? situ_up_limit=None) -> (Tensor, Tensor, Tensor)
    swizzle_scales(Tensor scales) -> Tensor
    unswizzle_scales(Tensor swizzled, SymInt rows, SymInt cols) -> Tensor
    router_gemm(Tensor hidden, Tensor weight, *, ScalarType logits_dtype=bfloat16) -> Tensor
    router_gemm.out(the same, Tensor(a!) out) -> ()
    select_experts(Tensor logits, int top_k, str scoring="softmax", bool renormalize=False,
                   float renormalize_epsilon=0.0, float routed_scaling_factor=1.0, int num_expert_group=1,
                   int topk_group=1, str group_score="max", Tensor? correction_bias=None, Tensor? token_ids=None,
                   Tensor? hash_table=None, *, ScalarType ids_dtype=int32) -> (Tensor topk_ids, Tensor topk_weights)
    select_experts.out(the same, Tensor(a!) topk_ids, Tensor(b!) topk_weights) -> ()

handle is MoeLayer.handle or Nvfp4Linear.handle. It is an integer, so that only tensors and numbers cross the
dispatcher, and symbolic, so that a graph compiled with dynamic=True serves every layer. It does not keep the layer
alive. An unknown handle, or one whose layer is gone, raises ValueError. Arguments are checked when the op runs, with
the messages of MoeLayer.run.

torch.ops.nvfp4.moe_gemm and its out form are moe_layer under the predecessor's name.

Every op has a fake implementation, works with torch.compile(fullgraph=True), takes symbolic token counts, and has no
gradient. Inputs must be contiguous.

The out forms return nothing. Older torch releases cannot compile a custom op that returns the tensor it writes. torch
2.13 can, with torch.Tag.out, but its inductor then replaces the default form by the out form, which fails if the token
count is symbolic.

No op takes a workspace: an argument that is written would make the op impure in every graph. In torch's graphs a
workspace comes from the graph's own pool. MoeLayer.run takes one.

The ops are registered with define and impl of torch.library, which cost about half as much as its custom_op decorator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _core
from . import dequantize as _dequantize
from . import quantize as _quantize
from . import router_gemm as _router_gemm
from . import select_experts as _select_experts
from . import swiglu_quantize as _silu_mul_quantize
from . import swizzle_scales as _swizzle_scales
from . import unswizzle_scales as _unswizzle_scales
from .router import RouterConfig as _RouterConfig

__all__ = ["library"]


def __dir__() -> list[str]:
    return __all__


# Inputs keep the strides of eager mode in compiled graphs, so the same inputs are refused in both: non-contiguous ones.
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
_DEVICES = ("CPU", "CUDA")

library = torch.library.Library("nvfp4_moe", "DEF")


def _op(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], into: torch.library.Library = library
) -> None:
    """Defines an op with one kernel for all devices, and its fake implementation."""
    name = schema.partition("(")[0]  # includes the overload, which define()'s result lacks
    into.define(schema, tags=_TAGS)
    for device in _DEVICES:
        into.impl(name, kernel, device)
    torch.library.register_fake(f"{into.ns}::{name}", fake, lib=into)


# ---- layers by handle


def _out_fake(*inputs: Any, out: Tensor) -> None:
    return None


def _out_kernel(run: Callable[..., Tensor]) -> Callable[..., None]:
    """Makes the out form of an op."""

    def run_into(*inputs: Any, out: Tensor) -> None:
        run(*inputs, out=out)

    return run_into


_op(
    "moe_layer(Tensor hidden, Tensor topk_ids, Tensor topk_weights, SymInt handle) -> Tensor",
    _core.moe_layer,
    lambda hidden, topk_ids, topk_weights, handle: hidden.new_empty(hidden.shape),
)
_op(
    "moe_layer.out(Tensor hidden, Tensor topk_ids, Tensor topk_weights, SymInt handle, *, Tensor(a!) out) -> ()",
    _out_kernel(_core.moe_layer),
    _out_fake,
)
# The predecessor's name for the op, for models that still call it.
predecessor = torch.library.Library("nvfp4", "FRAGMENT")
_op(
    "moe_gemm(Tensor hidden, Tensor topk_ids, Tensor topk_weights, SymInt handle) -> Tensor",
    _core.moe_layer,
    lambda hidden, topk_ids, topk_weights, handle: hidden.new_empty(hidden.shape),
    predecessor,
)
_op(
    "moe_gemm.out(Tensor hidden, Tensor topk_ids, Tensor topk_weights, SymInt handle, *, Tensor(a!) out) -> ()",
    _out_kernel(_core.moe_layer),
    _out_fake,
    predecessor,
)
_op(
    "linear(Tensor x, SymInt handle, SymInt out_features) -> Tensor",
    _core.linear,
    lambda x, handle, out_features: x.new_empty((x.shape[0], out_features)),
)
_op(
    "linear.out(Tensor x, SymInt handle, SymInt out_features, *, Tensor(a!) out) -> ()",
    _out_kernel(_core.linear),
    _out_fake,
)


# ---- formats

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def _quantize_kernel(
    x: Tensor, mode: str = "weights", tensor_scale: float | None = None, search: str = "max"
) -> tuple[Tensor, Tensor, Tensor]:
    codes, block_scales, scale = _quantize(x, mode=mode, tensor_scale=tensor_scale, search=search)
    return codes, block_scales, torch.as_tensor(scale, dtype=torch.float32, device=x.device)


def _quantize_fake(
    x: Tensor, mode: str = "weights", tensor_scale: float | None = None, search: str = "max"
) -> tuple[Tensor, Tensor, Tensor]:
    *leading, k = x.shape
    return (
        x.new_empty((*leading, k // 2), dtype=torch.uint8),
        x.new_empty((*leading, k // 16), dtype=torch.uint8),
        x.new_empty(leading if mode == "dynamic_token" else (), dtype=torch.float32),
    )


_op(
    'quantize(Tensor x, str mode="weights", float? tensor_scale=None, str search="max") -> (Tensor, Tensor, Tensor)',
    _quantize_kernel,
    _quantize_fake,
)


def _dequantize_kernel(
    codes: Tensor, scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    if dtype not in _NAMES:
        raise ValueError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    return _dequantize(codes, scales, tensor_scale, _NAMES[dtype])


_op(
    "dequantize(Tensor codes, Tensor scales, Tensor tensor_scale, ScalarType dtype=float32) -> Tensor",
    _dequantize_kernel,
    lambda codes, scales, tensor_scale, dtype=torch.float32: codes.new_empty(
        (*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype
    ),
)


def _silu_mul_kernel(
    gate_up: Tensor,
    activation: str = "swiglu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.702,
    interleaved: bool = False,
    row_weights: Tensor | None = None,
    power_of_two: float | None = None,
    situ_gate_limit: float | None = None,
    situ_up_limit: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _silu_mul_quantize(
        gate_up,
        activation=activation,
        swiglu_limit=swiglu_limit,
        swiglu_alpha=swiglu_alpha,
        interleaved=interleaved,
        row_weights=row_weights,
        power_of_two=power_of_two,
        situ_gate_limit=situ_gate_limit,
        situ_up_limit=situ_up_limit,
    )


def _silu_mul_fake(
    gate_up: Tensor,
    activation: str = "swiglu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.702,
    interleaved: bool = False,
    row_weights: Tensor | None = None,
    power_of_two: float | None = None,
    situ_gate_limit: float | None = None,
    situ_up_limit: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, both = gate_up.shape
    return (
        gate_up.new_empty((rows, both // 4), dtype=torch.uint8),
        gate_up.new_empty((rows, both // 32), dtype=torch.uint8),
        gate_up.new_empty((rows,), dtype=torch.float32),
    )


_op(
    'swiglu_quantize(Tensor gate_up, str activation="swiglu", float? swiglu_limit=None, float swiglu_alpha=1.702, '
    "bool interleaved=False, Tensor? row_weights=None, float? power_of_two=None, float? situ_gate_limit=None, "
    "float? situ_up_limit=None) -> (Tensor, Tensor, Tensor)",
    _silu_mul_kernel,
    _silu_mul_fake,
)


def _swizzled_bytes(rows: int, cols: int) -> int:
    return (rows + 127) // 128 * 128 * ((cols + 3) // 4 * 4)


_op(
    "swizzle_scales(Tensor scales) -> Tensor",
    _swizzle_scales,
    lambda scales: scales.new_empty(
        (*scales.shape[:-2], _swizzled_bytes(scales.shape[-2], scales.shape[-1])), dtype=torch.uint8
    ),
)
_op(
    "unswizzle_scales(Tensor swizzled, SymInt rows, SymInt cols) -> Tensor",
    _unswizzle_scales,
    lambda swizzled, rows, cols: swizzled.new_empty((*swizzled.shape[:-1], rows, cols), dtype=torch.uint8),
)


# ---- routers

_LOGITS_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def _router_gemm_kernel(
    hidden: Tensor, weight: Tensor, *, logits_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    logits: Tensor = _router_gemm(
        hidden, weight, logits_dtype=_LOGITS_NAMES.get(logits_dtype, str(logits_dtype)), out=out
    )
    return logits


def _router_gemm_fake(hidden: Tensor, weight: Tensor, *, logits_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return hidden.new_empty((hidden.shape[0], weight.shape[0]), dtype=logits_dtype)


def _router_gemm_out_kernel(
    hidden: Tensor, weight: Tensor, *, logits_dtype: torch.dtype = torch.bfloat16, out: Tensor
) -> None:
    if out.dtype != logits_dtype:
        raise _core.InvalidArgument(f"out: expected logits_dtype {logits_dtype}, got {out.dtype}")
    _router_gemm_kernel(hidden, weight, logits_dtype=logits_dtype, out=out)


def _router_gemm_out_fake(
    hidden: Tensor, weight: Tensor, *, logits_dtype: torch.dtype = torch.bfloat16, out: Tensor
) -> None:
    return None


_op(
    "router_gemm(Tensor hidden, Tensor weight, *, ScalarType logits_dtype=bfloat16) -> Tensor",
    _router_gemm_kernel,
    _router_gemm_fake,
)
_op(
    "router_gemm.out(Tensor hidden, Tensor weight, *, ScalarType logits_dtype=bfloat16, Tensor(a!) out) -> ()",
    _router_gemm_out_kernel,
    _router_gemm_out_fake,
)

_ROUTER_ARGUMENTS = (
    'Tensor logits, int top_k, str scoring="softmax", bool renormalize=False, float renormalize_epsilon=0.0, '
    'float routed_scaling_factor=1.0, int num_expert_group=1, int topk_group=1, str group_score="max", '
    "Tensor? correction_bias=None, Tensor? token_ids=None, Tensor? hash_table=None, *, ScalarType ids_dtype=int32"
)
_IDS_NAMES = {torch.int32: "int32", torch.int64: "int64"}


def _router_kernel(
    logits: Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = False,
    renormalize_epsilon: float = 0.0,
    routed_scaling_factor: float = 1.0,
    num_expert_group: int = 1,
    topk_group: int = 1,
    group_score: str = "max",
    correction_bias: Tensor | None = None,
    token_ids: Tensor | None = None,
    hash_table: Tensor | None = None,
    *,
    ids_dtype: torch.dtype = torch.int32,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    config = _RouterConfig(
        num_experts=logits.shape[-1],
        top_k=top_k,
        scoring=scoring,
        renormalize=renormalize,
        renormalize_epsilon=renormalize_epsilon,
        routed_scaling_factor=routed_scaling_factor,
        num_expert_group=num_expert_group,
        topk_group=topk_group,
        group_score=group_score,
        correction_bias=correction_bias is not None,
        hash_routing=hash_table is not None,
    )
    ids, weights = _select_experts(
        logits,
        config,
        correction_bias=correction_bias,
        token_ids=token_ids,
        hash_table=hash_table,
        ids_dtype=_IDS_NAMES.get(ids_dtype, str(ids_dtype)),
        out=out,
    )
    return ids, weights


def _router_fake(
    logits: Tensor, top_k: int, *options: Any, ids_dtype: torch.dtype = torch.int32, **named: Any
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=ids_dtype), logits.new_empty(shape, dtype=torch.float32)


def _router_out_kernel(
    *arguments: Any, topk_ids: Tensor, topk_weights: Tensor, ids_dtype: torch.dtype = torch.int32, **named: Any
) -> None:
    if topk_ids.dtype != ids_dtype:
        raise _core.InvalidArgument(f"topk_ids: expected ids_dtype {ids_dtype}, got {topk_ids.dtype}")
    _router_kernel(*arguments, **named, ids_dtype=ids_dtype, out=(topk_ids, topk_weights))


def _router_out_fake(*arguments: Any, topk_ids: Tensor, topk_weights: Tensor, **named: Any) -> None:
    return None


_op(
    f"select_experts({_ROUTER_ARGUMENTS}) -> (Tensor topk_ids, Tensor topk_weights)",
    _router_kernel,
    _router_fake,
)
_op(
    f"select_experts.out({_ROUTER_ARGUMENTS}, Tensor(a!) topk_ids, Tensor(b!) topk_weights) -> ()",
    _router_out_kernel,
    _router_out_fake,
)
