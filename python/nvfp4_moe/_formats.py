"""NVFP4 arrays: quantize and dequantize, codes and scales as bytes, scales in the order of tensor cores.

The package exports these functions; its docstring describes the format.
"""

from __future__ import annotations

from typing import Any

from . import _core


def quantize(
    x: Any,
    *,
    mode: str = "weights",
    tensor_scale: float | None = None,
    search: str = "max",
    channel_weights: Any = None,
) -> tuple[Any, Any, Any]:
    """Quantizes x to NVFP4 along its last dimension.

    Args:
        x: (..., K) of float32, float16 or bfloat16; K is a multiple of 16.
        mode: How the tensor scale s and the block scales are chosen.
            "weights": scale = RNE(amax/(6 s)) and code = RNE(x/(scale s)), both from exact quotients. s is
            tensor_scale, or float32(amax/2688) of the whole array.
            "dynamic_token": each row has its own s, the smallest power of two >= amax/2688 (1 for a row of zeros).
            "static": s is tensor_scale rounded up to a power of two.
            "vllm_order": s is tensor_scale as given, with vLLM's order of operations, for byte comparison.
        tensor_scale: s, see mode.
        search: How block scales of mode "weights" are searched. "max" uses amax/6. "mse" chooses among the E4M3
            neighbours of amax/6 and of amax/4 by squared error. "sweep" (host only) chooses among all E4M3 values.
        channel_weights: float32 (K,), at least 0. Weights of the columns' squared errors for "mse" and "sweep" on the
            host, for example the second moments of the inputs that the columns are multiplied by.

    Returns:
        (codes, scales, tensor_scale): uint8 (..., K/2), uint8 (..., K/16), and a float. With "dynamic_token"
        tensor_scale is float32 (...), NaN for a row that holds NaN or Inf. For a tensor on a GPU it is float32 () on
        that GPU, NaN if x holds NaN or Inf.

    Raises:
        ValueError: Wrong shapes, dtypes or options; on the host, also NaN or Inf in x except with "dynamic_token".
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
    situ_gate_limit: float | None = None,
    situ_up_limit: float | None = None,
) -> tuple[Any, Any, Any]:
    """Applies the activation to gemm1's output and quantizes the result for gemm2, in one pass.

    Computes activation(gate, up), multiplies by the router weight, rounds to bfloat16, then quantizes to NVFP4.

    Args:
        gate_up: (..., 2 I) of float32, float16 or bfloat16, I a multiple of 16: all of gate, then all of up.
        activation, swiglu_limit, swiglu_alpha, situ_gate_limit, situ_up_limit: As in MoeConfig.
        interleaved: gate_up alternates instead: g0 u0 g1 u1 and so on.
        row_weights: float32 (...), the router weights for router_weight "before_down". None multiplies by nothing.
        power_of_two: The tensor scale of every row. None gives each row its own, as quantize(mode="dynamic_token")
            does.

    Returns:
        (codes, scales, row_scales): uint8 (..., I/2), uint8 (..., I/16), float32 (...). A row scale is NaN if the row
        holds NaN or Inf.

    Raises:
        ValueError: Wrong shapes, dtypes or options.
    """
    return _core.swiglu_quantize(
        gate_up,
        activation,
        swiglu_limit,
        swiglu_alpha,
        interleaved,
        row_weights,
        power_of_two,
        situ_gate_limit,
        situ_up_limit,
    )


def dequantize(codes: Any, scales: Any, tensor_scale: Any, dtype: str = "float32") -> Any:
    """Converts NVFP4 to floats: the exact product of code, block scale and tensor scale, rounded once.

    Args:
        codes: uint8 (..., K/2).
        scales: uint8 (..., K/16), E4M3 bytes.
        tensor_scale: One number, or float32 (...) with one per row, on the device of codes. A row whose scale is NaN
            becomes NaN.
        dtype: "float32", "bfloat16" or "float16".

    Returns:
        (..., K) of dtype. bfloat16 is uint16 (its bits) in NumPy.

    Raises:
        ValueError: Shapes or dtypes that do not fit together; on the host, also illegal scales (block scales above
            0x7E, a NaN scale). On a GPU these give NaN.
    """
    return _core.dequantize(codes, scales, tensor_scale, dtype)


def pack_codes(codes: Any) -> Any:
    """Packs two codes a byte, the even element in the low nibble.

    Args:
        codes: uint8 (..., K), K even, each 0..15.

    Returns:
        uint8 (..., K/2).

    Raises:
        ValueError: Another dtype, an odd K, or a code above 15.
    """
    return _core.pack_codes(codes)


def unpack_codes(packed: Any) -> Any:
    """Unpacks the two codes of each byte. Inverse of pack_codes.

    Args:
        packed: uint8 (..., K/2).

    Returns:
        uint8 (..., K), each 0..15.

    Raises:
        ValueError: Another dtype.
    """
    return _core.unpack_codes(packed)


def encode_e2m1(x: Any) -> Any:
    """Encodes each element as an E2M1 code 0..15: round to nearest even, saturate at 6. NaN becomes 7 (+6).

    Args:
        x: float64, float32, float16 or bfloat16, any shape. float64 is rounded only once.

    Returns:
        uint8 of x's shape.
    """
    return _core.encode_e2m1(x)


def decode_e2m1(codes: Any) -> Any:
    """Decodes E2M1 codes: 0, 0.5, 1, 1.5, 2, 3, 4, 6 for 0..7, and their negatives for 8..15.

    Args:
        codes: uint8, any shape, one code an element (unpack_codes gives them). Bits above the lowest four are ignored.

    Returns:
        float32 of the codes' shape.

    Raises:
        ValueError: Another dtype.
    """
    return _core.decode_e2m1(codes)


def encode_e4m3(x: Any) -> Any:
    """Encodes each element as an E4M3 byte: round to nearest even, saturate at 448. NaN becomes 0x7F.

    Args:
        x: float64, float32, float16 or bfloat16, any shape. float64 is rounded only once.

    Returns:
        uint8 of x's shape.
    """
    return _core.encode_e4m3(x)


def decode_e4m3(encoded: Any) -> Any:
    """Decodes E4M3 bytes: a sign, four bits of exponent (bias 7), three of mantissa. 0x7F and 0xFF are NaN.

    Args:
        encoded: uint8 or float8_e4m3fn, any shape.

    Returns:
        float32 of the same shape, from -448 to 448.

    Raises:
        ValueError: Another dtype.
    """
    return _core.decode_e4m3(encoded)


def convert_to_fp8(
    codes: Any, scales: Any, tensor_scale: float, block: tuple[int, int] | None = None
) -> tuple[Any, Any]:
    """Converts an NVFP4 matrix to FP8, for kernels without NVFP4: value ~= e4m3(byte) * scale, rounded to nearest.

    Args:
        codes: uint8 (rows, K/2), on the host.
        scales: uint8 (rows, K/16), E4M3 bytes.
        tensor_scale: The matrix's tensor scale.
        block: None for one scale of the whole matrix, or the (rows, columns) that share one, for example (128, 128).

    Returns:
        (bytes, scales): uint8 (rows, K) of E4M3 bytes, and one float, or with block = (r, c) float32
        (ceil(rows/r), ceil(K/c)).

    Raises:
        ValueError: Shapes or dtypes that do not fit together.
        BadInput: A block scale is negative or NaN.
    """
    return _core.convert_to_fp8(codes, scales, float(tensor_scale), block)


def swizzle_scales(scales: Any) -> Any:
    """Rearranges block scales into the 128x4 tile layout of tensor cores.

    Args:
        scales: uint8 (..., rows, K/16). Each matrix of the leading dimensions (experts) is laid out separately.

    Returns:
        uint8 (..., round_up(rows, 128) * round_up(K/16, 4)). Padding bytes are zero.

    Raises:
        ValueError: Another dtype, or fewer than two dimensions.
    """
    return _core.swizzle_scales(scales)


def unswizzle_scales(swizzled: Any, rows: int, cols: int) -> Any:
    """Restores row-major block scales. Inverse of swizzle_scales.

    Args:
        swizzled: uint8 (..., bytes), as swizzle_scales returns them.
        rows: The matrix's rows.
        cols: Block scales per row, K/16.

    Returns:
        uint8 (..., rows, cols).

    Raises:
        ValueError: Another dtype, or not the bytes of such a matrix.
    """
    return _core.unswizzle_scales(swizzled, rows, cols)


def swizzle_experts(scales: Any, row_offsets: Any) -> Any:
    """Rearranges the block scales of activations sorted by expert into 128x4 tiles, with separate tiles per expert.

    Args:
        scales: uint8 (rows, K/16), on the host.
        row_offsets: (experts + 1,) ascending integers, from 0 to rows.

    Returns:
        uint8 (bytes,). Expert e's tiles begin at row expert_scale_row(row_offsets[e], e), a multiple of 128. The size
        depends only on the number of rows and experts: it suffices for any distribution of them.

    Raises:
        ValueError: Wrong shapes or dtypes, or offsets that decrease or do not end at rows.
    """
    return _core.swizzle_experts(scales, row_offsets)


def expert_scale_row(row_offset: int, expert: int) -> int:
    """Returns the row of swizzle_experts' result at which an expert's scale tiles begin.

    Args:
        row_offset: The expert's first row before padding, row_offsets[expert].
        expert: The expert's number, from 0.

    Returns:
        A multiple of 128. The tiles of that row begin at byte row * round_up(K/16, 4).
    """
    return _core.expert_scale_row(row_offset, expert)
