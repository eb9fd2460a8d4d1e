"""Opens a MoeLayer from an engine's fused MoE parameters. Shared by all engine adapters; imports no engine.

_fused_parameters.py describes the parameters. Needs torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from . import Error, Exchange, InvalidArgument, Unsupported, explain
from ._declared import Declared, Refused, choose_activations
from ._fused_parameters import FusedParameters
from ._settings import Settings
from .config import MoeConfig
from .layer import MoeLayer
from .router import RouterConfig, select_experts

# Backends that are used only if the user insists, because the engine has its own kernels. The text completes a message.
LEFT_TO_ENGINES = {
    "cuda": "the plain kernels",  # on GPUs without specialized kernels
    "sm100": "kernels that no GPU of its kind has run yet",  # docs/explanation/blackwell.md
    "sm120": "kernels that no GPU of its kind has run yet",
}


def named(error: Error, name: str) -> Error:
    """Returns the same error with a layer's name before its message."""
    renamed = type(error)(f"{name}: {error}")
    renamed.finding = error.finding
    return renamed


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Puts a layer's name before the message of an error that the block raises."""
    try:
        yield
    except Error as error:
        raise named(error, name) from error


def device_name(device: torch.device) -> str:
    """Returns the library's name of a torch device. Raises Unsupported if the library has no kernels for it."""
    if device.type == "cuda":
        return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
    if device.type == "cpu":
        return "cpu"
    raise Unsupported(f"device: expected cpu or cuda, got {device}")


def why_refused(options: Mapping[str, Any], device: str, settings: Settings) -> str | None:
    """Returns why a layer with these options (fields of MoeConfig) is not taken on a device, or None if it is.

    A layer is refused if no backend takes it or, unless the user insists, if the backend is in LEFT_TO_ENGINES.
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


def with_activations(
    options: Mapping[str, Any], device: torch.device, settings: Settings, declared: Declared
) -> tuple[dict[str, Any], str]:
    """Returns a layer's options with their activation_format, and that format and its reason for the log.

    Raises Refused if the layer is not taken.
    """
    try:
        where = device_name(device)
    except Unsupported as error:
        raise Refused(str(error)) from None
    chosen, because = choose_activations(options, where, settings.activation_format, declared)
    options = {**options, "activation_format": chosen}
    if why := why_refused(options, where, settings):
        raise Refused(why)
    return options, f"{chosen}, because {because}"


def why_slice_refused(slice_size: int, ranks: int, multiple: int, option: str) -> str | None:
    """Returns why a tensor parallel rank's slice cannot be packed and what the user can do about it, or None.

    option is the engine's option for expert parallel, which gives ranks whole experts.
    """
    if ranks == 1 or slice_size % multiple == 0:
        return None
    return (
        f"intermediate_size: a rank's slice is {slice_size} of {slice_size * ranks}, expected a multiple of {multiple}; use "
        f"expert parallel ({option}), which does not slice experts, or fewer tensor parallel ranks"
    )


# ---- placement of experts


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which of num_experts this rank holds: a contiguous range from first_expert or, with lookup, any set.

    lookup is (num_experts + 1,) on the ids' device. It maps a global id to the local expert, or to -1 if another rank
    holds it. The last element is -1, so that an id of -1 maps to -1.
    """

    num_experts: int
    first_expert: int = 0
    lookup: Tensor | None = None

    @classmethod
    def from_map(cls, expert_map: Tensor | None, num_experts: int, local_experts: int) -> Placement:
        """Makes a placement from an engine's map.

        expert_map has integers (num_experts,): the local index of each global expert, or -1. None means that this rank
        holds all experts. Raises ValueError if the map has another form or an index beyond the local experts.
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
        """Names an expert of this rank in messages."""
        if self.lookup is None:
            return f"expert {self.first_expert + local_expert}"
        return f"expert {int((self.lookup == local_expert).nonzero()[0])}"

    def local_ids(self, topk_ids: Tensor) -> Tensor:
        """Converts global ids to the ids that the layer takes. With lookup, illegal ids become -1."""
        if self.lookup is None:
            return topk_ids
        return self.lookup[topk_ids.clamp(-1, self.num_experts).long()].to(topk_ids.dtype)


# ---- the layer


@dataclasses.dataclass(frozen=True)
class OverRanks:
    """An exchange, and how a layer uses it.

    combine, capacity and max_tokens are as in MoeLayer.from_tensors. experts has the global id of each slot, rank by
    rank; the parameters hold this rank's slots in that order.
    """

    exchange: Exchange
    combine: str
    capacity: int
    max_tokens: int
    experts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FusedExperts:
    """A rank's experts, ready to run.

    mxfp4_rounded is the number of 16-blocks that the cast from MXFP4 changed. With over_ranks a run is collective and
    its output includes the experts of all ranks.
    """

    layer: MoeLayer
    placement: Placement
    mxfp4_rounded: int = 0
    over_ranks: bool = False

    def run(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor, workspace: Tensor | None = None
    ) -> None:
        """Computes out (T, H), the weighted sum of each token's experts: all of them with over_ranks, else the local
        ones.

        ids are global; -1 adds nothing. On a GPU it enqueues in torch's current stream and may be captured. workspace
        and errors are as in MoeLayer.run.
        """
        self.layer.run(hidden, self.placement.local_ids(topk_ids), topk_weights, out, workspace=workspace)

    def run_logits(
        self,
        hidden: Tensor,
        logits: Tensor,
        router: RouterConfig,
        out: Tensor,
        workspace: Tensor | None = None,
        correction_bias: Tensor | None = None,
    ) -> None:
        """Like run(), for the experts that the router selects from logits (T, E) and its bias, float32 (E,).

        With placement.lookup the selection is a separate kernel.
        """
        if self.placement.lookup is None:
            self.layer.run_logits(hidden, logits, router, out, correction_bias=correction_bias, workspace=workspace)
        else:
            ids, weights = select_experts(logits, router, correction_bias=correction_bias)
            self.run(hidden, ids, weights, out, workspace)

    @property
    def packed_bytes(self) -> int:
        return int(self.layer.describe()["packed_bytes"])


def clamped(activation: str, swiglu_limit: float | None) -> str:
    """Returns "swiglu_clamped" for a plain SwiGLU with a limit, else the activation."""
    return "swiglu_clamped" if activation == "swiglu" and swiglu_limit is not None else activation


def open_fused(
    parameters: FusedParameters,
    *,
    placement: Placement,
    max_tokens: int,
    input_scale: Any = None,
    over_ranks: OverRanks | None = None,
    **options: Any,
) -> FusedExperts:
    """Opens a MoeLayer from fused parameters, which may be freed on return. The layer is not warmed up.

    With over_ranks, opening is collective, and its max_tokens and experts replace max_tokens and placement's experts.
    options are fields of MoeConfig; a limit turns "swiglu" into "swiglu_clamped". The sizes among them are replaced by
    the parameters', which an engine may have padded. Set expert_biases if the parameters have biases. Raises what
    MoeLayer.from_tensors raises.
    """
    stacks, rounded = parameters.stacks()
    options["num_experts"] = placement.num_experts
    options["hidden_size"] = 2 * parameters.w13.shape[2]
    options["intermediate_size"] = parameters.inner_size()
    options["activation"] = clamped(options.get("activation", "swiglu"), options.get("swiglu_limit"))
    config = MoeConfig(**options)
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
        device=device_name(parameters.w13.device),
        **where,
    )
    return FusedExperts(layer, placement, rounded, over_ranks is not None)


def run_in_parts(run: Callable[..., Tensor], most: int, *rows: Tensor) -> Tensor:
    """Returns run(*rows). More than `most` rows run in parts, with the same bits as batches of those sizes."""
    count = rows[0].shape[0]
    if count <= most:
        return run(*rows)
    first = run(*(tensor[:most] for tensor in rows))
    out = first.new_empty((count, *first.shape[1:]))
    out[:most] = first
    for begin in range(most, count, most):
        end = min(begin + most, count)
        out[begin:end] = run(*(tensor[begin:end] for tensor in rows))
    return out


def replace_fused(experts: FusedExperts, parameters: FusedParameters) -> FusedExperts:
    """Writes new weights into an open layer. Its memory, its handle and the graphs that captured it stay valid.

    The copy runs in torch's current stream after all other work of the device, and is visible to every stream on
    return.

    Raises:
        BadInput: Names the bad expert. The experts before it are already replaced.
        Busy: A run is in flight.
        ValueError: The sizes differ.
    """
    stacks, rounded = parameters.stacks()
    count = parameters.w13.shape[0]
    if count != experts.layer.expert_count:
        raise InvalidArgument(f"experts: expected {experts.layer.expert_count}, as they were, got {count}")
    # Copies the tensor scales to the host once, not one element at a time.
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
