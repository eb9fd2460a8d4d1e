"""MoeLayer and Nvfp4Linear: layers that are complete once they are made, over the compiled module's."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import _core
from ._arrays import cast
from ._build import missing_cuda
from .config import MoeConfig
from .router import RouterConfig

ProgressFn = Callable[[dict[str, Any]], "bool | None"]


def _largest(scale: Any) -> float | None:
    """An activation scale: one number, or the maximum over an array of every expert's."""
    if scale is None or isinstance(scale, (int, float)):
        return scale
    values = cast(scale, "float64")
    return float(values.max()) if values.size else None


def _scale_pair(input_scale: Any) -> tuple[float | None, float | None] | None:
    if input_scale is None:
        return None
    if not isinstance(input_scale, (tuple, list)) or len(input_scale) != 2:
        raise _core.InvalidArgument(
            f"input_scale: expected None or (hidden, intermediate), got {type(input_scale).__name__}"
        )
    return _largest(input_scale[0]), _largest(input_scale[1])


@contextlib.contextmanager
def _sent_to_ranks(exchange: _core.Exchange | None) -> Iterator[None]:
    """What fails within, before a collective opening, is said to the other ranks, who wait; the library's own failures are
    raised as all ranks raise them."""
    try:
        yield
    except BaseException as raised:
        if not isinstance(exchange, _core.Exchange):
            raise
        try:
            _core.report_to_ranks(exchange, raised)
        except _core.Error as of_all:
            if isinstance(raised, _core.Error):
                raise of_all from None
        raise


def _parallel(
    exchange: _core.Exchange | None, combine: str, capacity: int, placement: Sequence[int] | None
) -> tuple[Any, str, int, list[int] | None]:
    return exchange, combine, capacity, None if placement is None else [int(expert) for expert in placement]


def _bias_arrays(biases: Any) -> tuple[Any, Any, Any] | None:
    """(gate, up, down) as row-major float32 arrays of the host; gate stays None in a layer without one.

    Arrays of integers are refused: uint16 might be the bits of bfloat16."""
    if biases is None:
        return None
    if not isinstance(biases, (tuple, list)) or len(biases) != 3:
        raise _core.InvalidArgument(f"biases: expected None or (gate, up, down), got {type(biases).__name__}")
    for name, bias in zip(("gate", "up", "down"), biases, strict=True):
        dtype = str(getattr(bias, "dtype", "float")).removeprefix("torch.")  # a list's numbers are taken as they are
        if "float" not in dtype:
            raise _core.InvalidArgument(f"biases {name}: expected float32, float16, bfloat16 or float64, got {dtype}")
    gate, up, down = (None if bias is None else cast(bias, "float32") for bias in biases)
    return gate, up, down


class MoeLayer(_core.Layer):
    """One MoE layer's local experts, packed for a backend, ready to run.

    Made by from_tensors, from_checkpoint or from_bf16; run(hidden, topk_ids, topk_weights) computes it. All layers of a
    process share one pool of threads (NVFP4_MOE_THREADS, else one per core) and one workspace per device and stream, of
    the size that the largest run took; release_workspaces() gives them back.
    """

    @classmethod
    def from_tensors(
        cls,
        config: MoeConfig,
        *,
        gate: Any = None,
        up: Any,
        down: Any,
        biases: Any = None,
        input_scale: Any = None,
        first_expert: int = 0,
        max_tokens: int = 8192,
        device: str = "cpu",
        backend: str = "auto",
        exchange: _core.Exchange | None = None,
        combine: str = "all_to_all",
        capacity: int = 0,
        placement: Sequence[int] | None = None,
        progress: ProgressFn | None = None,
    ) -> MoeLayer:
        """From NVFP4 arrays of E_local experts, H hidden_size, I intermediate_size.

        gate, up, down: (codes, scales, tensor_scale): codes uint8 (E_local, rows, K/2), scales uint8 or float8_e4m3fn
          (E_local, rows, K/16), tensor_scale float32 (E_local) or one number; rows, K = I, H for gate and up, H, I for
          down. gate is None with activation "relu2", here and in biases. Experts and rows may lie apart, so that gate and
          up may be halves of one (E, 2I, H/2) tensor. The arrays are copied one expert at a time and not kept: they are
          the caller's again on return. Tensors that all lie on the layer's GPU are packed there, after what their
          framework's current stream holds; those of another device go through the host.
        biases: (gate (E_local, I), up (E_local, I), down (E_local, H)) of float dtypes, taken as float32; needed by
          config.expert_biases, else None. Slices of one (E, 2I) array will do.
        input_scale: (hidden, intermediate) of the checkpoint, each a number, None, or an array over ALL experts of the
          layer, of which the maximum counts. Needed by activation_scale "static" and "compat".
        first_expert: global id of the first local expert. max_tokens: the most that run will get.
        device: "cpu" or "cuda:N". backend: "auto", or a name of explain().
        exchange: this rank's end of several (docs/how-to/expert-parallel.md), on the CPU, or on GPUs behind
          exchange.use_nccl or exchange.use_peers; the arrays then hold all experts, of which a rank reads its own, or
          those of this rank's slots in their order (arrays of num_experts experts are always read by global id, also if
          a rank has as many slots in another order), first_expert is 0, and opening and run are collective. combine:
          "all_to_all" (each rank has tokens of its own; the bits of one rank) or "all_reduce" (all have the same tokens). capacity: under all_to_all the most tokens from one rank to another, 0
          for as many as come. placement: the expert of each slot, rank by rank, redundant ones too; None is contiguous
          ranges.
        progress gets a dict (what, item, done, total, done_bytes, total_bytes, elapsed_s); returning False cancels.

        Raises ValueError (shapes, dtypes, options), BadInput (scales that are NaN or negative), Unsupported (no backend
        takes it), OutOfMemory, Cancelled.
        """
        with _sent_to_ranks(exchange):
            json_text, bias_arrays, scales = config.to_json(), _bias_arrays(biases), _scale_pair(input_scale)
            parallel = _parallel(exchange, combine, capacity, placement)
        return cls(
            _core.open_tensors(
                json_text,
                gate,
                up,
                down,
                bias_arrays,
                scales,
                first_expert,
                max_tokens,
                device,
                backend,
                parallel,
                progress,
            )
        )

    @classmethod
    def from_bf16(
        cls,
        config: MoeConfig,
        *,
        gate: Any = None,
        up: Any,
        down: Any,
        biases: Any = None,
        input_scale: Any = None,
        first_expert: int = 0,
        max_tokens: int = 8192,
        device: str = "cpu",
        backend: str = "auto",
        exchange: _core.Exchange | None = None,
        combine: str = "all_to_all",
        capacity: int = 0,
        placement: Sequence[int] | None = None,
        progress: ProgressFn | None = None,
    ) -> MoeLayer:
        """From bfloat16, float16 or float32 weights, quantized to NVFP4 one expert at a time as they are packed.

        gate (None without one), up: (E_local, I, H), down: (E_local, H, I): all in host memory, of any strides, or all on
        the layer's GPU, contiguous along the last dimension, where they are quantized to the same bytes without a way through the host.
        Each matrix gets a tensor scale of its own, amax/2688. Everything else as in from_tensors; BadInput also if a
        weight is NaN or Inf.
        """
        with _sent_to_ranks(exchange):
            json_text, bias_arrays, scales = config.to_json(), _bias_arrays(biases), _scale_pair(input_scale)
            parallel = _parallel(exchange, combine, capacity, placement)
        return cls(
            _core.open_floats(
                json_text,
                gate,
                up,
                down,
                bias_arrays,
                scales,
                first_expert,
                max_tokens,
                device,
                backend,
                parallel,
                progress,
            )
        )

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | os.PathLike[str] | _core.Checkpoint,
        layer: int,
        first_expert: int = 0,
        expert_count: int = 0,
        *,
        intermediate_slice: tuple[int, int] | None = None,
        max_tokens: int = 8192,
        device: str = "cpu",
        backend: str = "auto",
        activation_format: str = "auto",
        cache_directory: str | os.PathLike[str] | None = None,
        cache_checksum: bool = False,
        cache_trusted: bool = False,
        exchange: _core.Exchange | None = None,
        combine: str = "all_to_all",
        capacity: int = 0,
        placement: Sequence[int] | None = None,
        progress: ProgressFn | None = None,
        gate_up_order: str | None = None,
        accept_tensors: Sequence[str] = (),
        **options: Any,
    ) -> MoeLayer:
        """One MoE layer of a model directory or GGUF file; only its local experts' weights are read.

        checkpoint: a directory or file, or an open nvfp4_moe.Checkpoint (which several layers may share). expert_count 0
        with first_expert 0: all. intermediate_slice: (first, count) of the intermediate dimension, multiples of 16 (tensor
        parallel). activation_format: "auto" is what the checkpoint declares for these experts or a more precise format that
        the backend multiplies as fast (nvfp4_moe.choose_activation_format); describe()["activations"] has why. options:
        other fields of MoeConfig that differ from the checkpoint's, for example batch_invariant=True; not its sizes, except
        shared_intermediate_size=0, which leaves the shared expert out.
        cache_directory: where packed layers are kept and read from on the next start. cache_checksum: the checkpoint is
        known by all its bytes, not by its files' place, times and samples. cache_trusted: packed bytes are read
        without their hash being compared. exchange, combine, capacity, placement: as in from_tensors; beside an exchange
        there is neither a slice nor a cache. gate_up_order, accept_tensors: as nvfp4_moe.Checkpoint takes them, which is
        where they go if the checkpoint is open already.

        Raises what from_tensors raises, BadInput if the files are broken, IoError.
        """
        with _sent_to_ranks(exchange):
            if not isinstance(checkpoint, _core.Checkpoint):
                checkpoint = _core.Checkpoint(os.fspath(checkpoint), gate_up_order, list(accept_tensors))
            elif gate_up_order is not None or accept_tensors:
                raise _core.InvalidArgument(
                    "gate_up_order, accept_tensors: expected neither with an open Checkpoint, which takes them itself"
                )
            config = MoeConfig.from_json(_core.checkpoint_options(checkpoint, layer, intermediate_slice))
            known = [field.name for field in dataclasses.fields(MoeConfig)]
            for name in options:
                if name not in known:
                    raise _core.InvalidArgument(
                        f"options: expected fields of MoeConfig ({', '.join(known)}), got {name}"
                    )
            if activation_format != "auto":
                options["activation_format"] = activation_format
            json_text = dataclasses.replace(config, **options).to_json()
            if activation_format == "auto":
                json_text = _core.with_chosen_format(json_text, device, backend)
            folder = os.fspath(cache_directory) if cache_directory is not None else ""
            parallel = _parallel(exchange, combine, capacity, placement)
        return cls(
            _core.open_checkpoint(
                checkpoint,
                layer,
                json_text,
                first_expert,
                expert_count,
                intermediate_slice,
                max_tokens,
                device,
                backend,
                folder,
                cache_checksum,
                cache_trusted,
                parallel,
                progress,
            )
        )

    def replace_expert(
        self, local_expert: int, gate: Any, up: Any, down: Any, biases: Any = None, *, stream: Any = None
    ) -> None:
        """New weights for one expert, in place: each (codes uint8 (rows, K/2), scales uint8 (rows, K/16), tensor_scale),
        contiguous, all in host memory or all on the layer's device; gate None in a layer without one. biases: (gate (I),
        up (I), down (H)) with expert_biases, else None. local_expert -1 is the shared one, which has no biases.

        stream: of a layer on a GPU, the stream that runs or replays it, an integer or a stream object. What was enqueued
        there before has the old expert, what comes after it the new one, each of them whole. Other streams that run the
        layer are ordered by events, before and after (docs/explanation/cuda.md). The arrays are the caller's again on return.
        None: waits for all work of the device. ValueError then if a graph has captured the layer, since a replay could
        begin meanwhile.
        Raises Busy while a run is in flight; BadInput on illegal scales and biases that are not finite, and the expert is
        as it was. On a GPU it takes 8 MiB while it works, with a stream the packed expert's size more.
        """
        _core.replace_expert(self, local_expert, gate, up, down, _bias_arrays(biases), stream)

    def rearrange_tensors(self, placement: Sequence[int], *, gate: Any, up: Any, down: Any, biases: Any = None) -> None:
        """rearrange(), of arrays of all experts by global id, with from_tensors' shapes and dtypes, of which a rank reads what
        is new to its slots."""
        _core.rearrange_tensors(self, [int(expert) for expert in placement], gate, up, down, _bias_arrays(biases))

    def rearrange_bf16(self, placement: Sequence[int], *, gate: Any, up: Any, down: Any, biases: Any = None) -> None:
        """rearrange(), of arrays of all experts by global id, with from_bf16's shapes and dtypes: what is new to this rank's
        slots is quantized."""
        _core.rearrange_floats(self, [int(expert) for expert in placement], gate, up, down, _bias_arrays(biases))

    def run_logits(
        self,
        hidden: Any,
        logits: Any,
        router: RouterConfig,
        out: Any = None,
        stream: Any = None,
        *,
        correction_bias: Any = None,
        token_ids: Any = None,
        hash_table: Any = None,
        topk: tuple[Any, Any] | None = None,
        shared_weights: Any = None,
        workspace: Any = None,
    ) -> Any:
        """select_experts(logits, router), then run on what it chose, as one call with the same bits; returns out.

        topk: the arrays (topk_ids, topk_weights) to write, else they are made. The router is of the layer's num_experts
        and top_k; the other arrays are as select_experts and run have them, all on the layer's device. Raises what both
        raise.
        """
        if not isinstance(router, RouterConfig):
            raise TypeError(f"router: expected a RouterConfig, got {type(router).__name__}")
        return _core.run_logits(
            self,
            hidden,
            logits,
            correction_bias,
            token_ids,
            hash_table,
            topk,
            out,
            stream,
            shared_weights,
            workspace,
            router._fields(),
        )

    @property
    def config(self) -> MoeConfig:
        """The layer's sizes and options."""
        return MoeConfig.from_json(self.config_json())

    def describe(self) -> dict[str, Any]:
        """Describes the layer: backend, kernels (by step), every option of the config, sizes in bytes, notes.

        "activations" is {"format", "declared" by the checkpoint (None for a layer of arrays), "because"}.
        "activation_scale" is {"hidden": how, "intermediate": how}: "dynamic_token", the number that all rows share, or
        None if nothing is quantized. A note says so if this build has no CUDA and the machine has a GPU.
        """
        described: dict[str, Any] = json.loads(self.describe_json())
        if note := missing_cuda():
            described["notes"].append(note)
        return described

    def describe_run(self, tokens: int) -> dict[str, Any]:
        """Describes a run of that many bfloat16 tokens: {"backend", "tokens", "steps": kernel by step,
        "workspace_bytes"}. On a GPU "steps" is the plan that each run makes: how it routes, the configuration of both
        GEMMs, what is fused. ValueError unless 0 <= tokens <= max_tokens.
        """
        described: dict[str, Any] = json.loads(self.describe_run_json(tokens))
        return described

    def __repr__(self) -> str:
        d = self.describe()
        last = self.first_expert + self.expert_count - 1
        return (
            f"<MoeLayer {d['hidden_size']}x{d['intermediate_size']}, experts {self.first_expert}..{last} of "
            f"{d['num_experts']}, top-{d['top_k']}, {d['activation']}, {d['activation_format']}, "
            f"{d['backend']} on {self.device}>"
        )
