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
from ._mxfp4 import as_bytes, cast_mxfp4
from .config import MoeConfig
from .layer import MoeLayer
from .router import RouterConfig, select_experts

MODES = ("0", "auto", "1")
# Backends that an engine's own kernels go before unless the user insists, and what they would run.
LEFT_TO_ENGINES = {
    "cuda": "the plain kernels",  # of GPUs that have none of their own
    "sm100": "kernels that no GPU of its kind has run yet",  # docs/blackwell.md
    "sm120": "kernels that no GPU of its kind has run yet",
}
ACTIVATION_FORMATS = ("bf16", "nvfp4", "fp8", "int8_block")
ROUTERS = ("auto", "own", "engine")


# ---- what the user asked for


@dataclasses.dataclass(frozen=True)
class Settings:
    """mode: "0" off; "auto" a layer that cannot be taken is the engine's; "1" such a layer is an error.
    activation_format: of every layer, whatever its checkpoint declares. router: "own" selects experts by this library
    where it knows the router; "engine" never; "auto" on GPUs. SGLang's adapter does not read it."""

    mode: str = "auto"
    activation_format: str = "bf16"
    router: str = "auto"

    @property
    def insists(self) -> bool:
        return self.mode == "1"


def read_settings(given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """What `given` (an engine's own configuration: mode, activations, router) says, else NVFP4_MOE, NVFP4_MOE_ACTIVATIONS and
    NVFP4_MOE_ROUTER.

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
        one_of("router", "NVFP4_MOE_ROUTER", ROUTERS, "auto"),
    )
    if given:
        raise InvalidArgument(
            f"nvfp4_moe: expected the keys mode, activations and router, got {', '.join(map(str, given))}"
        )
    return settings


def why_refused(options: Mapping[str, Any], device: str, settings: Settings) -> str | None:
    """Why a layer of these options (fields of MoeConfig) is not taken on a device, or None where it is.

    That no backend takes it; or, unless the user insists, that one of LEFT_TO_ENGINES would.
    """
    try:
        MoeConfig(**options)
        backends = explain(options, device=device)
    except Error as error:
        return str(error)
    chosen = next((backend["backend"] for backend in backends if backend["chosen"]), None)
    if chosen is None:
        return "; ".join(f"{backend['backend']}: {backend['reason']}" for backend in backends)
    if chosen in LEFT_TO_ENGINES and not settings.insists:
        kernels = LEFT_TO_ENGINES[chosen]
        return f"{device} would run {kernels}, and the engine has its own; NVFP4_MOE=1 takes the layer"
    return None


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


# ---- the layer


@dataclasses.dataclass(frozen=True)
class FusedExperts:
    """A rank's experts, ready to run. mxfp4_rounded: 16-blocks that the cast from MXFP4 changed."""

    layer: MoeLayer
    placement: Placement
    mxfp4_rounded: int = 0

    def run(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor, workspace: Tensor | None = None
    ) -> None:
        """out (T, H) = the weighted sum of each token's local experts; ids are global, -1 adds nothing.

        Only enqueues, on a GPU in torch's current stream, and may be captured. workspace and ValueError as MoeLayer.run
        has them.
        """
        self.layer.run(hidden, self.placement.local_ids(topk_ids), topk_weights, out, workspace=workspace)

    def run_logits(
        self, hidden: Tensor, logits: Tensor, router: RouterConfig, out: Tensor, workspace: Tensor | None = None
    ) -> None:
        """The same of the experts that the router selects by its logits (T, E). Where an engine's map names the experts
        that are here, the selection is a kernel of its own."""
        if self.placement.lookup is None:
            self.layer.run_logits(hidden, logits, router, out, workspace=workspace)
        else:
            ids, weights = select_experts(logits, router)
            self.run(hidden, ids, weights, out, workspace)

    @property
    def packed_bytes(self) -> int:
        return int(self.layer.describe()["packed_bytes"])


def layer_device(tensor: Tensor) -> str:
    """A tensor's device by the library's name."""
    return "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index or 0}"


def clamped(activation: str, swiglu_limit: float | None) -> str:
    """The library's name of a plain SwiGLU that an engine gives a limit."""
    return "swiglu_clamped" if activation == "swiglu" and swiglu_limit is not None else activation


@dataclasses.dataclass(frozen=True)
class FusedParameters:
    """A rank's fused parameters as the head of this file has them, which stay the caller's.

    w13_tensor_scale: (E_local, 2) in the order of the rows, or (E_local,) or (E_local, 1) for both; it and
    w2_tensor_scale are None with mxfp4, where the cast makes tensor scales. intermediate_size: where the engine pads I,
    what of it is real: the first rows of gate and of up, the first columns of w2; what is padded is not read.
    """

    w13: Tensor
    w13_scale: Tensor
    w13_tensor_scale: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_tensor_scale: Tensor | None
    intermediate_size: int | None = None
    up_first: bool = False
    mxfp4: bool = False

    def inner_size(self) -> int:
        """The intermediate dimension that is real. ValueError where the shapes do not belong together."""
        experts, rows, _ = self.w13.shape
        if rows % 2 != 0 or self.w2.ndim != 3 or self.w2.shape[0] != experts:
            raise InvalidArgument(
                f"w13, w2: expected (E, 2I, H/2) and (E, H, I/2), got {tuple(self.w13.shape)} and {tuple(self.w2.shape)}"
            )
        inner = rows // 2 if self.intermediate_size is None else self.intermediate_size
        if not 0 < inner <= rows // 2 or inner % 16 != 0:
            raise InvalidArgument(f"intermediate_size: expected a multiple of 16 from 16 to {rows // 2}, got {inner}")
        if self.w2.shape[2] < inner // 2:
            raise InvalidArgument(f"w2: expected at least {inner // 2} bytes a row, got {self.w2.shape[2]}")
        if self.mxfp4 and inner % 32 != 0:
            raise Unsupported(
                "MXFP4 experts: expected a rank's slice of the intermediate dimension in whole blocks of 32, "
                f"got {inner}"
            )
        return inner

    def stacks(self) -> tuple[dict[str, tuple[Tensor, Tensor, Tensor]], int]:
        """gate, up and down as MoeLayer.from_tensors takes them, views where nothing is cast; and the blocks that the
        cast from MXFP4 rounded. Raises ValueError, Unsupported."""
        experts, padded, inner = self.w13.shape[0], self.w13.shape[1] // 2, self.inner_size()

        def half(tensor: Tensor, second: bool) -> Tensor:
            first = padded if second else 0
            return as_bytes(tensor)[:, first : first + inner]

        up_first = self.up_first
        columns = inner // (32 if self.mxfp4 else 16)
        matrices = {
            "gate": (half(self.w13, up_first), half(self.w13_scale, up_first)),
            "up": (half(self.w13, not up_first), half(self.w13_scale, not up_first)),
            "down": (as_bytes(self.w2)[:, :, : inner // 2], as_bytes(self.w2_scale)[:, :, :columns]),
        }
        if self.mxfp4:
            cast = {name: cast_mxfp4(*matrix) for name, matrix in matrices.items()}
            return {name: stack[:3] for name, stack in cast.items()}, sum(stack[3] for stack in cast.values())
        if self.w13_tensor_scale is None or self.w2_tensor_scale is None:
            raise InvalidArgument("w13_tensor_scale, w2_tensor_scale: expected tensors, got None")
        pair = self.w13_tensor_scale.detach().reshape(experts, -1)
        if pair.shape[1] not in (1, 2):
            raise InvalidArgument(
                f"w13_tensor_scale: expected ({experts},) or ({experts}, 2), got {tuple(self.w13_tensor_scale.shape)}"
            )
        of_rows = {
            "gate": pair[:, -1 if up_first else 0],
            "up": pair[:, 0 if up_first else -1],
            "down": self.w2_tensor_scale.detach().reshape(experts),
        }
        return {name: (*matrices[name], of_rows[name].float()) for name in matrices}, 0


def open_fused(
    parameters: FusedParameters,
    *,
    placement: Placement,
    top_k: int,
    max_tokens: int,
    activation: str = "swiglu",
    swiglu_limit: float | None = None,
    input_scale: Any = None,
    **options: Any,
) -> FusedExperts:
    """A MoeLayer from fused parameters, which may be freed on return; it is not warmed up yet.

    activation, swiglu_limit and options: fields of MoeConfig; a limit turns "swiglu" into "swiglu_clamped".
    Raises what MoeLayer.from_tensors raises.
    """
    stacks, rounded = parameters.stacks()
    config = MoeConfig(
        num_experts=placement.num_experts,
        top_k=top_k,
        hidden_size=2 * parameters.w13.shape[2],
        intermediate_size=parameters.inner_size(),
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
        device=layer_device(parameters.w13),
    )
    return FusedExperts(layer, placement, rounded)


def replace_fused(experts: FusedExperts, parameters: FusedParameters) -> FusedExperts:
    """New weights into the layer that is there: its memory, its handle and the graphs that captured it stay as they are.

    Waits for the device. On BadInput experts before the one that is named are the new ones; Busy while a run is in
    flight. ValueError where the sizes are others.
    """
    stacks, rounded = parameters.stacks()
    count = parameters.w13.shape[0]
    if count != experts.layer.num_local_experts:
        raise InvalidArgument(f"experts: expected {experts.layer.num_local_experts}, as they were, got {count}")
    # Tensor scales come to the host once, not an element at a time.
    scalars = {name: (codes, scales, scale.tolist()) for name, (codes, scales, scale) in stacks.items()}
    for expert in range(count):
        matrices = {
            name: (codes[expert].contiguous(), scales[expert].contiguous(), scale[expert])
            for name, (codes, scales, scale) in scalars.items()
        }
        experts.layer.replace_expert(expert, matrices["gate"], matrices["up"], matrices["down"])
    return dataclasses.replace(experts, mxfp4_rounded=rounded)


# ---- what a load tells


class LoadLog:
    """Reports the first layer, every `every` layers or 30 seconds, and the last that was planned: seconds and bytes.

    A reload goes through the planned layers again, and is reported like the load.
    """

    def __init__(self, write: Callable[[str], None], every: int = 16, clock: Callable[[], float] = time.monotonic):
        self._write, self._every, self._clock = write, every, clock
        self._planned, self._written, self._is_complete = 0, 0.0, False
        self._start()

    def _start(self) -> None:
        self.layers, self.seconds, self.bytes = 0, 0.0, 0

    def plan(self) -> None:
        """One more layer will be packed. After all that were planned are, it is the first of another model."""
        if self._is_complete:
            self._planned, self._is_complete = 0, False
        self._planned += 1

    def packed(self, name: str, experts: FusedExperts, seconds: float) -> None:
        """One more layer is packed and warmed up, in so many seconds."""
        self.layers += 1
        self.seconds += seconds
        self.bytes += experts.packed_bytes
        now = self._clock()
        if self.layers == 1:
            self._write(f"{name}: {experts.layer!r}")
            self._written = now
        elif self.layers % self._every == 0 or now - self._written >= 30 or self.layers == self._planned:
            self._write(f"packed {self.layers} of {self._planned} layers, {self.bytes:,} bytes, {self.seconds:.1f} s")
            self._written = now
        if self.layers == self._planned:
            self._is_complete = True
            self._start()
