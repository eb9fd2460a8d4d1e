"""An engine's fused MoE parameters to a MoeLayer: what every engine's adapter needs and no engine has to be imported for.

Engines keep a rank's E_local experts in four tensors (H hidden_size, I the rank's slice of the intermediate dimension):

    w13        uint8 (E_local, 2I, H/2)    rows [gate; up], or [up; gate] with up_first
    w13_scale  e4m3  (E_local, 2I, H/16)   linear, not swizzled; with mxfp4 E8M0 (E_local, 2I, H/32)
    w2         uint8 (E_local, H, I/2)
    w2_scale   e4m3  (E_local, H, I/16)    with mxfp4 E8M0 (E_local, H, I/32)

and tensor scales float32 (E_local, 2) or (E_local,) of w13 and (E_local,) of w2. Needs torch.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import Error, InvalidArgument, Unsupported, explain
from .config import MoeConfig
from .layer import MoeLayer

MODES = ("0", "auto", "1")
ACTIVATION_FORMATS = ("bf16", "nvfp4", "int8_block")


# ---- what the user asked for


@dataclasses.dataclass(frozen=True)
class Settings:
    """mode: "0" off; "auto" a layer that cannot be taken is the engine's; "1" such a layer is an error.
    activation_format: of every layer, whatever its checkpoint declares."""

    mode: str = "auto"
    activation_format: str = "bf16"

    @property
    def insists(self) -> bool:
        return self.mode == "1"


def read_settings(given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """What `given` (an engine's own configuration: mode, activations) says, else NVFP4_MOE and NVFP4_MOE_ACTIVATIONS.

    ValueError names the key or variable, what is legal and what came; also for a key that is none.
    """
    given, environ = dict(given or {}), os.environ if environ is None else environ

    def one_of(key: str, variable: str, legal: tuple[str, ...], default: str) -> str:
        where, value = (key, given.pop(key)) if key in given else (variable, environ.get(variable, default))
        if isinstance(value, bool) or not isinstance(value, (str, int)) or str(value) not in legal:
            raise InvalidArgument(f"{where}: expected one of {', '.join(legal)}, got {value!r}")
        return str(value)

    settings = Settings(
        one_of("mode", "NVFP4_MOE", MODES, "auto"),
        one_of("activations", "NVFP4_MOE_ACTIVATIONS", ACTIVATION_FORMATS, "bf16"),
    )
    if given:
        raise InvalidArgument(f"nvfp4_moe: expected the keys mode and activations, got {', '.join(map(str, given))}")
    return settings


def why_refused(options: Mapping[str, Any], device: str) -> str | None:
    """Why no backend takes a layer of these options (fields of MoeConfig) on a device, or None where one does."""
    try:
        MoeConfig(**options)
        backends = explain(options, device=device)
    except Error as error:
        return str(error)
    if any(backend["chosen"] for backend in backends):
        return None
    return "; ".join(f"{backend['backend']}: {backend['reason']}" for backend in backends)


# ---- where the experts are


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which of num_experts this rank holds: first_expert and those that follow it; or, with lookup, any.

    lookup: (num_experts + 1,) of the ids' device: the local expert of a global id, -1 for another rank's. Its last
    element is -1, so that an id of -1 finds it.
    """

    num_experts: int
    first_expert: int = 0
    lookup: Tensor | None = None

    @classmethod
    def from_map(cls, expert_map: Tensor | None, num_experts: int, local_experts: int) -> Placement:
        """expert_map: integers (num_experts,), the local index of each global expert or -1; None: all are here.

        ValueError where the map does not have that form, or places an expert beyond the local ones.
        """
        if expert_map is None:
            if num_experts != local_experts:
                raise InvalidArgument(
                    f"expert_map: expected one, since {local_experts} of {num_experts} experts are here"
                )
            return cls(num_experts)
        places = expert_map.detach().to("cpu", torch.int64).flatten()
        if places.numel() != num_experts:
            raise InvalidArgument(f"expert_map: expected ({num_experts},), got {tuple(expert_map.shape)}")
        here = (places >= 0).nonzero().flatten()
        if here.numel() and int(places.max()) >= local_experts:
            raise InvalidArgument(f"expert_map: expected local experts below {local_experts}, got {int(places.max())}")
        first = int(here[0]) if here.numel() else 0
        in_order = torch.arange(local_experts)
        if (
            here.numel() == local_experts
            and torch.equal(here, in_order + first)
            and torch.equal(places[here], in_order)
        ):
            return cls(num_experts, first)
        lookup = torch.cat([torch.where(places >= 0, places, -1), torch.tensor([-1])])
        return cls(num_experts, 0, lookup.to(expert_map.device, torch.int32))

    def local_ids(self, topk_ids: Tensor) -> Tensor:
        """The ids that the layer takes: those given, or found in lookup, where an id that is none becomes -1."""
        if self.lookup is None:
            return topk_ids
        return self.lookup[topk_ids.clamp(-1, self.num_experts).long()].to(topk_ids.dtype)


# ---- scales as engines have them


def reciprocal(global_scale: Tensor) -> Tensor:
    """compressed-tensors' global scales as tensor scales: fl32(1/double(global)), as a checkpoint's are read."""
    return (1.0 / global_scale.double()).float()


def make_legal(scale: Tensor) -> None:
    """In place: scales of random weights (load_format=dummy) to legal ones of the same magnitude, a NaN or 0 to 1.

    For weights that mean nothing. A checkpoint's illegal scale is an error, and stays one.
    """
    if scale.dtype == torch.float8_e4m3fn:
        bits = scale.view(torch.uint8)
        bits.bitwise_and_(0x7F)
        bits.masked_fill_((bits == 0x7F) | (bits == 0), 0x38)  # 1.0
    elif scale.is_floating_point():
        scale.abs_()
        scale.masked_fill_(~torch.isfinite(scale) | (scale == 0), 1.0)
    else:  # E8M0 bytes
        scale.masked_fill_(scale == 0xFF, 127)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


# ---- MXFP4

_TOP, _BOTTOM = 8, -9  # exponents of E4M3's largest and smallest power of two
_E8M0_BIAS = 127
# Between the magnitudes; a value on one goes to the even code.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _power_bytes(exponent: Tensor) -> Tensor:
    """The E4M3 byte of 2^e, e in [-9, 8]."""
    normal = (exponent + 7) << 3
    subnormal = torch.ones_like(exponent) << (exponent + 9).clamp(0, 3)
    return torch.where(exponent >= -6, normal, subnormal).to(torch.uint8)


def _rounded_codes(codes: Tensor, factor: Tensor) -> Tensor:
    """uint8 (n, 8) of packed codes times powers of two below 1, float64 (n, 1): rounded to nearest even, packed."""
    magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.float64, device=codes.device)
    midpoints = torch.tensor(_MIDPOINTS, dtype=torch.float64, device=codes.device)

    def rounded(code: Tensor) -> Tensor:
        value = magnitudes[(code & 7).long()] * factor
        below, above = torch.bucketize(value, midpoints), torch.bucketize(value, midpoints, right=True)
        return torch.where(below % 2 == 0, below, above).to(torch.uint8) | (code & 8)

    packed = rounded(codes & 15) | (rounded(codes >> 4) << 4)
    # A block that is zeros altogether has no signs.
    return torch.where(((packed & 0x77) != 0).any(-1, keepdim=True), packed, torch.zeros_like(packed))


def cast_mxfp4(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """MXFP4 matrices to NVFP4, as docs/checkpoints.md defines the cast: one matrix an expert.

    codes: uint8 (E, rows, K/2). scales: E8M0 bytes (E, rows, K/32).
    Returns (codes, scales uint8 (E, rows, K/16), tensor_scale float32 (E,), rounded): the codes given where every block
    is exact, else a copy in which `rounded` 16-blocks have other values. ValueError where a scale is NaN.
    """
    codes, scales = _bytes(codes), _bytes(scales)
    experts, rows, half = codes.shape
    if scales.shape != (experts, rows, half // 16) or half % 16 != 0:
        raise InvalidArgument(
            f"MXFP4 scales: expected {(experts, rows, half // 16)} for codes {tuple(codes.shape)}, got {tuple(scales.shape)}"
        )
    out_scales = torch.empty((experts, rows, half // 8), dtype=torch.uint8, device=codes.device)
    tensor_scale = torch.empty(experts, dtype=torch.float32)
    out_codes, rounded = codes, 0
    for expert in range(experts):
        exponent = scales[expert].to(torch.int32).repeat_interleave(2, -1)  # (rows, K/16)
        low, high = int(exponent.min()), int(exponent.max())
        if high == 0xFF:
            raise InvalidArgument(f"MXFP4 scales of local expert {expert}: expected bytes below 0xFF, got NaN")
        exact = high - low <= _TOP - _BOTTOM
        nonzero = None
        if not exact:
            nonzero = ((codes[expert] & 0x77) != 0).reshape(rows, half // 8, 8).any(-1)
            high = int(exponent.masked_fill(~nonzero, 0).max())
        power = max(high - _E8M0_BIAS - _TOP, -126)
        exponent -= _E8M0_BIAS + power
        tensor_scale[expert] = 2.0**power
        block_scales = _power_bytes(exponent.clamp(_BOTTOM, _TOP))
        outside = (exponent > _TOP) | (exponent < _BOTTOM)
        if bool(outside.any()):
            if out_codes is codes:
                out_codes = codes.clone()
            if nonzero is None:
                nonzero = ((codes[expert] & 0x77) != 0).reshape(rows, half // 8, 8).any(-1)
            below = outside & nonzero  # above the top only zeros are left
            rounded += int(below.sum())
            blocks = out_codes[expert].view(rows, half // 8, 8)
            factor = torch.exp2((exponent[below] - _BOTTOM).double())[:, None]
            replaced = torch.zeros_like(blocks[outside])
            replaced[nonzero[outside]] = _rounded_codes(blocks[below], factor)
            blocks[outside] = replaced
            block_scales[outside] = torch.where((replaced != 0).any(-1), 1, 0).to(torch.uint8)  # 2^-9 is byte 1
        out_scales[expert] = block_scales
    return out_codes, out_scales, tensor_scale.to(codes.device), rounded


# ---- the layer


@dataclasses.dataclass(frozen=True)
class FusedExperts:
    """A rank's experts, ready to run. mxfp4_rounded: 16-blocks that the cast from MXFP4 changed."""

    layer: MoeLayer
    placement: Placement
    mxfp4_rounded: int = 0

    def run(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> None:
        """out (T, H) = the weighted sum of each token's local experts; ids are global, -1 adds nothing.

        Only enqueues, on a GPU in torch's current stream, and may be captured. ValueError as MoeLayer.run has it.
        """
        self.layer.run(hidden, self.placement.local_ids(topk_ids), topk_weights, out)

    @property
    def packed_bytes(self) -> int:
        return int(self.layer.describe()["packed_bytes"])


def layer_device(tensor: Tensor) -> str:
    """A tensor's device by the library's name."""
    return "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index or 0}"


def clamped(activation: str, swiglu_limit: float | None) -> str:
    """The library's name of a plain SwiGLU that an engine gives a limit."""
    return "swiglu_clamped" if activation == "swiglu" and swiglu_limit is not None else activation


def open_fused(
    *,
    w13: Tensor,
    w13_scale: Tensor,
    w13_tensor_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor,
    w2_tensor_scale: Tensor | None,
    placement: Placement,
    top_k: int,
    max_tokens: int,
    intermediate_size: int | None = None,
    up_first: bool = False,
    mxfp4: bool = False,
    swiglu_limit: float | None = None,
    activation: str = "swiglu",
    input_scale: Any = None,
    **options: Any,
) -> FusedExperts:
    """A MoeLayer from fused parameters, which are the caller's again on return and may be freed; and not warmed up yet.

    w13, w13_scale, w2, w2_scale: shapes and dtypes as the head of this file has them. w13_tensor_scale: (E_local, 2) in
    the order of the rows, or (E_local,) or (E_local, 1) for both; None with mxfp4, where the cast makes tensor scales.
    intermediate_size: where the engine pads I, what of it is real: the first rows of gate and of up, the first columns
    of w2; what is padded is not read. activation, swiglu_limit and options: fields of MoeConfig; a limit turns "swiglu"
    into "swiglu_clamped".

    Raises what MoeLayer.from_tensors raises.
    """
    experts, rows, half_hidden = w13.shape
    if rows % 2 != 0 or w2.ndim != 3 or w2.shape[0] != experts:
        raise InvalidArgument(
            f"w13, w2: expected (E, 2I, H/2) and (E, H, I/2), got {tuple(w13.shape)} and {tuple(w2.shape)}"
        )
    padded = rows // 2
    inner = padded if intermediate_size is None else intermediate_size
    if not 0 < inner <= padded or inner % 16 != 0:
        raise InvalidArgument(f"intermediate_size: expected a multiple of 16 from 16 to {padded}, got {inner}")
    if w2.shape[2] < inner // 2:
        raise InvalidArgument(f"w2: expected at least {inner // 2} bytes a row, got {w2.shape[2]}")
    group = 32 if mxfp4 else 16
    if mxfp4 and inner % group != 0:
        raise Unsupported(
            f"MXFP4 experts: expected a rank's slice of the intermediate dimension in whole blocks of {group}, got {inner}"
        )

    def half(tensor: Tensor, second: bool) -> Tensor:
        first = padded if second else 0
        return _bytes(tensor)[:, first : first + inner]

    matrices = {
        "gate": (half(w13, up_first), half(w13_scale, up_first)),
        "up": (half(w13, not up_first), half(w13_scale, not up_first)),
        "down": (_bytes(w2)[:, :, : inner // 2], _bytes(w2_scale)[:, :, : inner // group]),
    }
    rounded = 0
    if mxfp4:
        stacks = {}
        for name, (codes, scales) in matrices.items():
            *stack, changed = cast_mxfp4(codes, scales)
            stacks[name] = tuple(stack)
            rounded += changed
    else:
        if w13_tensor_scale is None or w2_tensor_scale is None:
            raise InvalidArgument("w13_tensor_scale, w2_tensor_scale: expected tensors, got None")
        pair = w13_tensor_scale.detach().reshape(experts, -1)
        if pair.shape[1] not in (1, 2):
            raise InvalidArgument(
                f"w13_tensor_scale: expected ({experts},) or ({experts}, 2), got {tuple(w13_tensor_scale.shape)}"
            )
        of_rows = {"gate": pair[:, -1 if up_first else 0], "up": pair[:, 0 if up_first else -1]}
        of_rows["down"] = w2_tensor_scale.detach().reshape(experts)
        stacks = {name: (*matrices[name], of_rows[name].float()) for name in matrices}
    config = MoeConfig(
        num_experts=placement.num_experts,
        top_k=top_k,
        hidden_size=2 * half_hidden,
        intermediate_size=inner,
        activation=clamped(activation, swiglu_limit),
        swiglu_limit=swiglu_limit,
        **options,
    )
    layer = MoeLayer.from_tensors(
        config,
        gate=stacks["gate"],
        up=stacks["up"],
        down=stacks["down"],
        input_scale=input_scale,
        first_expert=placement.first_expert,
        max_tokens=max_tokens,
        device=layer_device(w13),
    )
    return FusedExperts(layer, placement, rounded)


# ---- what a load tells


class LoadLog:
    """Reports the first layer, then every `every` layers or 30 seconds: layers, seconds and bytes so far."""

    def __init__(self, write: Callable[[str], None], every: int = 16, clock: Callable[[], float] = time.monotonic):
        self._write, self._every, self._clock = write, every, clock
        self.layers, self.seconds, self.bytes = 0, 0.0, 0
        self._written = 0.0

    def packed(self, name: str, experts: FusedExperts, seconds: float) -> None:
        """One more layer, packed and warmed up in so many seconds."""
        self.layers += 1
        self.seconds += seconds
        self.bytes += experts.packed_bytes
        now = self._clock()
        if self.layers == 1:
            self._write(f"{name}: {experts.layer!r}")
        elif self.layers % self._every != 0 and now - self._written < 30:
            return
        self._written = now
        self._write(f"packed {self.layers} layers so far, {self.bytes:,} bytes, {self.seconds:.1f} s; last: {name}")
