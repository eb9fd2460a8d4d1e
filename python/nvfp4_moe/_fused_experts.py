"""An engine's fused MoE parameters to a MoeLayer: what every engine's adapter needs and no engine has to be imported for.

The parameters themselves are _fused_parameters.py's. Needs torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import Error, Exchange, InvalidArgument, explain
from ._fused_parameters import FusedParameters
from .config import MoeConfig
from .layer import MoeLayer
from .router import RouterConfig, select_experts

MODES = ("0", "auto", "1")
# Backends that an engine's own kernels go before unless the user insists, and what they would run.
LEFT_TO_ENGINES = {
    "cuda": "the plain kernels",  # of GPUs that have none of their own
    "sm100": "kernels that no GPU of its kind has run yet",  # docs/explanation/blackwell.md
    "sm120": "kernels that no GPU of its kind has run yet",
}
ACTIVATION_FORMATS = ("bf16", "nvfp4", "fp8", "int8_block")
ROUTERS = ("auto", "own", "engine")
EXCHANGES = ("auto", "engine", "host", "nccl", "peers")


def named(error: Error, name: str) -> Error:
    """The same error with a layer's name before its message."""
    renamed = type(error)(f"{name}: {error}")
    renamed.finding = error.finding
    return renamed


# ---- what the user asked for


@dataclasses.dataclass(frozen=True)
class Settings:
    """mode: "0" off; "auto" a layer that cannot be taken is the engine's; "1" such a layer is an error.
    activation_format: "auto" what the checkpoint declares for a layer, or more precise; else of every layer. router: "own" selects experts by this library
    where it knows the router; "engine" never; "auto" on GPUs. exchange: who adds up what expert parallel ranks compute.
    SGLang's adapter does not read the last two."""

    mode: str = "auto"
    activation_format: str = "auto"
    router: str = "auto"
    exchange: str = "auto"

    @property
    def insists(self) -> bool:
        return self.mode == "1"


def read_settings(given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """What `given` (an engine's own configuration: mode, activations, router, exchange) says, else NVFP4_MOE_MODE,
    NVFP4_MOE_ACTIVATIONS, NVFP4_MOE_ROUTER and NVFP4_MOE_EXCHANGE.

    ValueError names the key or variable, what is legal and what came; also for a key that is none.
    """
    given, environ = dict(given or {}), os.environ if environ is None else environ
    if "NVFP4_MOE" in environ:  # the name before 0.2: ignored, it would leave on what the user turned off
        raise InvalidArgument(f"NVFP4_MOE: expected NVFP4_MOE_MODE, its new name, got NVFP4_MOE={environ['NVFP4_MOE']}")

    def one_of(key: str, variable: str, legal: tuple[str, ...], default: str) -> str:
        where, value = (key, given.pop(key)) if key in given else (variable, environ.get(variable, default))
        if isinstance(value, bool) or not isinstance(value, (str, int)) or str(value) not in legal:
            raise InvalidArgument(f"{where}: expected one of {', '.join(legal)}, got {value!r}")
        return str(value)

    settings = Settings(
        one_of("mode", "NVFP4_MOE_MODE", MODES, "auto"),
        one_of("activations", "NVFP4_MOE_ACTIVATIONS", ("auto", *ACTIVATION_FORMATS), "auto"),
        one_of("router", "NVFP4_MOE_ROUTER", ROUTERS, "auto"),
        one_of("exchange", "NVFP4_MOE_EXCHANGE", EXCHANGES, "auto"),
    )
    if given:
        raise InvalidArgument(
            f"nvfp4_moe: expected the keys mode, activations, router and exchange, got {', '.join(map(str, given))}"
        )
    return settings


def why_refused(options: Mapping[str, Any], device: str, settings: Settings) -> str | None:
    """Why a layer of these options (fields of MoeConfig) is not taken on a device, or None if it is.

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
        return f"{device} would run {kernels}, and the engine has its own; NVFP4_MOE_MODE=1 takes the layer"
    return None


def why_slice_refused(slice_size: int, ranks: int, multiple: int, option: str) -> str | None:
    """Why a tensor parallel rank's slice of the intermediate dimension cannot be packed, and what the user can do, or None.

    option: the engine's for expert parallel, which gives ranks whole experts.
    """
    if ranks == 1 or slice_size % multiple == 0:
        return None
    return (
        f"intermediate_size: a rank's slice is {slice_size} of {slice_size * ranks}, expected a multiple of {multiple}; use "
        f"expert parallel ({option}), which does not slice experts, or fewer tensor parallel ranks"
    )


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

        ValueError if the map does not have that form, or places an expert beyond the local ones.
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

    def name_of(self, local_expert: int) -> str:
        """Name of an expert of this rank in messages."""
        if self.lookup is None:
            return f"expert {self.first_expert + local_expert}"
        return f"expert {int((self.lookup == local_expert).nonzero()[0])}"

    def local_ids(self, topk_ids: Tensor) -> Tensor:
        """The ids that the layer takes: those given, or found in lookup, where an id that is none becomes -1."""
        if self.lookup is None:
            return topk_ids
        return self.lookup[topk_ids.clamp(-1, self.num_experts).long()].to(topk_ids.dtype)


# ---- scales as engines have them


def reciprocal(global_scale: Tensor) -> Tensor:
    """compressed-tensors' global scales as tensor scales: fl32(1/double(global)), as a checkpoint's are read."""
    return (1.0 / global_scale.double()).float()


def mark_missing(tensor: Tensor) -> None:
    """In place: scales and biases to NaN, so that what no file writes later is an error and not whatever was in memory."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.dtype == torch.uint8:  # E8M0
        tensor.fill_(0xFF)
    else:
        tensor.fill_(float("nan"))


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
class OverRanks:
    """An exchange, and how a layer uses it: combine, capacity and max_tokens as MoeLayer.from_tensors has them. experts:
    the global id of each slot, rank by rank, of which the parameters have this rank's in their order."""

    exchange: Exchange
    combine: str
    capacity: int
    max_tokens: int
    experts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FusedExperts:
    """A rank's experts, ready to run. mxfp4_rounded: 16-blocks that the cast from MXFP4 changed. over_ranks: whether a run is
    collective, and its out that of all ranks' experts."""

    layer: MoeLayer
    placement: Placement
    mxfp4_rounded: int = 0
    over_ranks: bool = False

    def run(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor, workspace: Tensor | None = None
    ) -> None:
        """out (T, H) = the weighted sum of each token's experts, over_ranks of all, else of the local ones; ids are global,
        -1 adds nothing.

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


def open_fused(
    parameters: FusedParameters,
    *,
    placement: Placement,
    top_k: int,
    max_tokens: int,
    activation: str = "swiglu",
    swiglu_limit: float | None = None,
    input_scale: Any = None,
    over_ranks: OverRanks | None = None,
    **options: Any,
) -> FusedExperts:
    """A MoeLayer from fused parameters, which may be freed on return; it is not warmed up yet.

    over_ranks: opening is collective; its max_tokens and experts then count, and placement's and max_tokens do not.
    activation, swiglu_limit and options: fields of MoeConfig, of which expert_biases goes with the parameters' biases; a
    limit turns "swiglu" into "swiglu_clamped".
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
    where: dict[str, Any] = {"first_expert": placement.first_expert, "max_tokens": max_tokens}
    if over_ranks is not None:
        placement = Placement(placement.num_experts)
        where = {
            "exchange": over_ranks.exchange,
            "combine": over_ranks.combine,
            "capacity": over_ranks.capacity,
            "max_tokens": over_ranks.max_tokens,
            "placement": over_ranks.experts,
        }
    layer = MoeLayer.from_tensors(
        config,
        gate=stacks.get("gate"),
        up=stacks["up"],
        down=stacks["down"],
        biases=parameters.biases(),
        input_scale=input_scale,
        device=layer_device(parameters.w13),
        **where,
    )
    return FusedExperts(layer, placement, rounded, over_ranks is not None)


def replace_fused(experts: FusedExperts, parameters: FusedParameters) -> FusedExperts:
    """New weights into the layer that is there: its memory, its handle and the graphs that captured it stay as they are.

    In torch's current stream, after all other work of the device; they are there for every stream on return. On BadInput
    experts before the one that is named are the new ones; Busy while a run is in flight. ValueError if the sizes differ.
    """
    stacks, rounded = parameters.stacks()
    count = parameters.w13.shape[0]
    if count != experts.layer.expert_count:
        raise InvalidArgument(f"experts: expected {experts.layer.expert_count}, as they were, got {count}")
    # Tensor scales come to the host once, not an element at a time.
    scalars = {name: (codes, scales, scale.tolist()) for name, (codes, scales, scale) in stacks.items()}
    biases = parameters.biases()
    stream = None
    if parameters.w13.is_cuda:
        torch.cuda.synchronize(parameters.w13.device)
        stream = torch.cuda.current_stream(parameters.w13.device)
    for expert in range(count):
        matrices = {
            name: (codes[expert].contiguous(), scales[expert].contiguous(), scale[expert])
            for name, (codes, scales, scale) in scalars.items()
        }
        of_expert = None if biases is None else tuple(None if bias is None else bias[expert] for bias in biases)
        try:
            experts.layer.replace_expert(
                expert, matrices.get("gate"), matrices["up"], matrices["down"], of_expert, stream=stream
            )
        except Error as error:
            here = f"local expert {expert}" if experts.over_ranks else experts.placement.name_of(expert)
            raise named(error, here) from error
    if stream is not None:
        stream.synchronize()
    return dataclasses.replace(experts, mxfp4_rounded=rounded)
