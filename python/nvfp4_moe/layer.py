# Long because the docstring of every method is its reference.
"""MoeLayer: opens, runs and changes one MoE layer. Built on the compiled module's Layer."""

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

__all__ = ["MoeLayer"]


def __dir__() -> list[str]:
    return __all__


ProgressFn = Callable[[dict[str, Any]], "bool | None"]


def _largest(scale: Any) -> float | None:
    """One activation scale for the layer: the number given, or the maximum of an array over all experts."""
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
    """Broadcasts an exception raised before a collective open, so that waiting ranks fail too.

    An error of the library is then raised as the error that all ranks raise.
    """
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
    """Converts (gate, up, down) to row-major float32 arrays on the host. gate stays None in a layer without one.

    Integer arrays are refused: uint16 might be the bits of bfloat16.
    """
    if biases is None:
        return None
    if not isinstance(biases, (tuple, list)) or len(biases) != 3:
        raise _core.InvalidArgument(f"biases: expected None or (gate, up, down), got {type(biases).__name__}")
    for name, bias in zip(("gate", "up", "down"), biases, strict=True):
        dtype = str(getattr(bias, "dtype", "float")).removeprefix("torch.")  # lists of numbers are accepted
        if "float" not in dtype:
            raise _core.InvalidArgument(f"biases {name}: expected float32, float16, bfloat16 or float64, got {dtype}")
    gate, up, down = (None if bias is None else cast(bias, "float32") for bias in biases)
    return gate, up, down


class MoeLayer(_core.Layer):
    """One MoE layer: this rank's experts, packed for a backend and ready to run.

    Open one with from_checkpoint, from_bf16 or from_tensors, then call run for each batch of tokens:

        layer = MoeLayer.from_checkpoint("model-nvfp4", 0, device="cuda:0")
        out = layer.run(hidden, topk_ids, topk_weights)  # out: (T, hidden_size) of hidden's dtype, on the GPU

    docs/how-to/python.md has an example without a checkpoint.

    All layers of a process share one pool of threads (NVFP4_MOE_THREADS, else one per core) and one workspace per
    device and stream, as large as the largest run needed. release_workspaces() frees the workspaces.
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
        """Opens a layer from NVFP4 arrays of E_local experts.

        Shapes below use H = hidden_size and I = intermediate_size.

        Args:
            config: The layer's sizes and options.
            gate, up, down: (codes, scales, tensor_scale) each: uint8 (E_local, rows, K/2); uint8 or float8_e4m3fn
                (E_local, rows, K/16); float32 (E_local,) or one number. (rows, K) is (I, H) for gate and up and (H, I)
                for down. Activation "relu2" takes gate=None. Experts and rows may have strides, so gate and up may
                be halves of one (E, 2I, H/2) tensor. The arrays are copied one expert at a time and not kept. If all
                are on the layer's GPU they are packed there, after the work in their framework's current stream;
                arrays on another device go through the host.
            biases: (gate (E_local, I), up (E_local, I), down (E_local, H)) of float dtypes, converted to float32. Give
                them if config.expert_biases is set, else None. Slices of one (E, 2I) array are fine.
            input_scale: The checkpoint's activation scales (hidden, intermediate). Each is a number, None, or an array
                over ALL experts of the layer, whose maximum is used. Required by activation_scale "static" and
                "vllm_order".
            first_expert: Global id of the first local expert.
            max_tokens: The most tokens a run may have.
            device: "cpu" or "cuda:N".
            backend: "auto", or a name from explain().
            exchange: This rank's connection to the other ranks (docs/how-to/expert-parallel.md), on the CPU, or on GPUs
                after exchange.use_nccl or exchange.use_peers. Opening and run are then collective and first_expert is
                0. The arrays hold all experts by global id, or only the experts of this rank's slots in slot order.
                Arrays of num_experts experts are always read by global id.
            combine: "all_to_all" (each rank has its own tokens; the result has the bits of one rank) or "all_reduce"
                (all ranks have the same tokens).
            capacity: With all_to_all, the most tokens from one rank to another; 0 for no limit.
            placement: The expert of each slot, rank by rank, including redundant copies. None is contiguous ranges.
            progress: Called with a dict (what, item, done, total, done_bytes, total_bytes, elapsed_s). Return False to
                cancel.

        Raises:
            ValueError: Wrong shapes, dtypes or options.
            BadInput: A scale is NaN or negative.
            Unsupported: No backend takes the layer.
            OutOfMemory, Cancelled: Memory ran out, or progress returned False.
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
        """Opens a layer from float weights, which are quantized to NVFP4 one expert at a time.

        Shapes use E_local, the experts of this layer (all num_experts unless it holds a part of them),
        H = hidden_size and I = intermediate_size.

        Args:
            config: The layer's sizes and options.
            gate, up, down: bfloat16, float16 or float32 (E_local, I, H), (E_local, I, H) and (E_local, H, I).
                Activation "relu2" takes gate=None. All are in host memory, with any strides, or all on the layer's GPU,
                contiguous along the last dimension. On the GPU they are quantized to the same bytes without passing
                through the host. Each matrix gets its own tensor scale, amax/2688.

        The other arguments are those of from_tensors.

        Raises:
            BadInput: A weight is NaN or Inf. Otherwise as from_tensors.
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
        family: str = "",
        **options: Any,
    ) -> MoeLayer:
        """Opens one MoE layer of a checkpoint. Only the weights of the local experts are read.

        Args:
            checkpoint: A model directory, a safetensors or GGUF file, or an open nvfp4_moe.Checkpoint, which several
                layers may share.
            layer: The layer's number in the model.
            first_expert, expert_count: The local experts, by global id. 0, 0 means all.
            intermediate_slice: (first, count) of the intermediate dimension, multiples of 16, for tensor parallel.
            activation_format: "auto" takes the format that the checkpoint declares for these experts, or a more precise
                one that the backend multiplies as fast (nvfp4_moe.choose_activation_format).
                describe()["activations"] gives the reason.
            cache_directory: Keeps packed layers here and reads them on the next start.
            cache_checksum: Identifies the checkpoint by all its bytes, instead of its files' paths, times and samples.
            cache_trusted: Reads packed bytes without comparing their hash.
            exchange, combine, capacity, placement: As in from_tensors. An exchange excludes a slice and a cache.
            gate_up_order, accept_tensors, family: As in nvfp4_moe.Checkpoint. Give them there if the checkpoint is
                already open.
            options: Other fields of MoeConfig that replace the checkpoint's, for example batch_invariant=True. Not the
                sizes, except shared_intermediate_size=0, which leaves the shared expert out.

        The other arguments are those of from_tensors.

        Raises:
            BadInput: The files are broken. Otherwise as from_tensors.
            IoError: A file cannot be read.
        """
        with _sent_to_ranks(exchange):
            if not isinstance(checkpoint, _core.Checkpoint):
                checkpoint = _core.Checkpoint(os.fspath(checkpoint), gate_up_order, list(accept_tensors), family)
            elif gate_up_order is not None or accept_tensors or family:
                raise _core.InvalidArgument(
                    "gate_up_order, accept_tensors, family: expected none with an open Checkpoint, "
                    "which takes them itself"
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
        """Replaces the weights of one expert in place.

        Args:
            local_expert: Index among the local experts; -1 is the shared expert, which has no biases.
            gate, up, down: (codes uint8 (rows, K/2), scales uint8 (rows, K/16), tensor_scale) each, contiguous, all in
                host memory or all on the layer's device. A layer without a gate takes gate=None. The arrays are free
                for reuse on return.
            biases: (gate (I,), up (I,), down (H,)) if config.expert_biases is set, else None.
            stream: For a layer on a GPU, the stream that runs or replays it: an integer or a stream object. Work
                enqueued there before the call uses the old expert, work after it the new one, never a mixture. Order
                other streams that run the layer with events, before and after (docs/explanation/cuda.md). None waits
                for all work of the device.

        On a GPU the call uses 8 MiB of memory while it works, and with a stream also the packed expert's size.

        Raises:
            Busy: A run is in flight.
            BadInput: A scale is illegal or a bias is not finite. The old expert stays.
            ValueError: Wrong shapes or dtypes, or no stream although a graph has captured the layer, since a replay
                could begin during the call.
        """
        _core.replace_expert(self, local_expert, gate, up, down, _bias_arrays(biases), stream)

    def rearrange_tensors(self, placement: Sequence[int], *, gate: Any, up: Any, down: Any, biases: Any = None) -> None:
        """Does what rearrange() does, with weights from NVFP4 arrays.

        The arrays hold all experts by global id, in the shapes and dtypes of from_tensors. A rank reads only the
        experts that are new to its slots.
        """
        _core.rearrange_tensors(self, [int(expert) for expert in placement], gate, up, down, _bias_arrays(biases))

    def rearrange_bf16(self, placement: Sequence[int], *, gate: Any, up: Any, down: Any, biases: Any = None) -> None:
        """Does what rearrange() does, with float weights.

        The arrays hold all experts by global id, in the shapes and dtypes of from_bf16. A rank quantizes only the
        experts that are new to its slots.
        """
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
        expert_scale: Any = None,
        token_ids: Any = None,
        hash_table: Any = None,
        topk: tuple[Any, Any] | None = None,
        shared_weights: Any = None,
        workspace: Any = None,
    ) -> Any:
        """Selects experts from router logits and runs the layer on them, in one call.

        The result has the same bits as select_experts(logits, router) followed by run.

        Args:
            hidden, out, stream, shared_weights, workspace: As in run.
            logits, correction_bias, expert_scale, token_ids, hash_table: As in select_experts, on the layer's device.
            router: The router; its num_experts and top_k are the layer's.
            topk: Arrays (topk_ids, topk_weights) to write. None makes them.

        Returns:
            out.

        Raises what select_experts and run raise.
        """
        if not isinstance(router, RouterConfig):
            raise TypeError(f"router: expected a RouterConfig, got {type(router).__name__}")
        return _core.run_logits(
            self,
            hidden,
            logits,
            correction_bias,
            expert_scale,
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
        """Describes the layer: backend, kernels by step, every option of the config, sizes in bytes, notes.

        "activations" is {"format", "declared", "because"}. A layer opened from arrays has None for "declared".
        "activation_scale" is {"hidden", "intermediate"}. Each is "dynamic_token", the number that all rows share, or
        None if nothing is quantized. The notes include a warning if the machine has a GPU but this build has no CUDA.
        """
        described: dict[str, Any] = json.loads(self.describe_json())
        if note := missing_cuda():
            described["notes"].append(note)
        return described

    def describe_run(self, tokens: int) -> dict[str, Any]:
        """Describes how a run of `tokens` bfloat16 tokens would be computed.

        Returns:
            {"backend", "tokens", "steps", "workspace_bytes"}. "steps" maps each step to its kernel. On a GPU it is the
            run's plan: how it routes, the configuration of both GEMMs, what is fused.

        Raises:
            ValueError: tokens is not in 0..max_tokens.
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
