"""Registers a layer's parameters for SGLang's loader and packs them into a MoeLayer, again after each reload.

Parameters of E_local experts, with hidden size H and this rank's intermediate size I. Rows of w13 are [gate; up].

    ModelOpt                                   compressed-tensors             shape w13_weight, w2_weight
    w13_weight_packed, ...         uint8 (E_local, 2I, H/2), (E_local, H, I/2) w13_weight_scale, w2_weight_scale
    the same names                 e4m3 (E_local, 2I, H/16), (E_local, H, I/16) w13_weight_scale_2, w2_weight_scale_2
    w13_weight_global_scale, ...   float32 (E_local, 2), (E_local,); reciprocals w13_input_scale, w2_input_scale
    w13_input_global_scale, ...    float32; loaded, since files have them, unused

Without a gate w13 has I rows and its tensor scale is (E_local,).

MXFP4 (gpt-oss) has w13_weight and w2_weight with alternating rows of gate and up; scales of the same names as E8M0
uint8 (E_local, 2I, H/32) and (E_local, H, I/32); no tensor scales; and w13_weight_bias (E_local, 2I) and w2_weight_bias
(E_local, H) in bfloat16. SGLang's loader gives each rank whole blocks of 32 of I, and fewer or none to the last ranks.
It loads w2_weight_bias on the first rank of a tensor parallel group and zeros on the others.

Scales start as NaN, so that an expert that no file provides is an error and not a random matrix. After packing,
parameters are empty. The first write of an update from disk allocates them again. Packing then writes into the existing
layer, so CUDA graphs that captured it stay valid. Updates that SGLang does not end with process_weights_after_loading
are refused, because graphs would silently keep the old weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import InvalidArgument, Unsupported, release_workspaces
from .._fused_experts import FusedExperts, Placement, naming, open_fused, replace_fused
from .._fused_parameters import Form, FusedParameters, empty_parameters, mark_missing
from .._load_log import LoadLog
from . import internals
from .runner import MAX_TOKENS

log = logging.getLogger("nvfp4_moe.sglang")
_load_log = LoadLog(log.info)

_packing_loads = 0  # loads in progress, in all threads, that process_weights_after_loading will follow


@contextlib.contextmanager
def packing_follows() -> Iterator[None]:
    """Allows packed parameters to be loaded again inside the context; process_weights_after_loading must follow."""
    global _packing_loads
    _packing_loads += 1
    try:
        yield
    finally:
        _packing_loads -= 1


def register_loads() -> None:
    """Hooks the loads that end with process_weights_after_loading: a model's first, and update_weights_from_disk."""

    def load(own: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        with packing_follows():
            return own(*inputs, **named)

    target = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"
    internals.HookRegistry.register(target, load, internals.HookType.AROUND)


@dataclasses.dataclass(frozen=True)
class Format(Form):
    """A producer's parameters. input_scale is their name ("" if there are none), input_rows which experts have them."""

    bias: str = "weight_bias"
    input_scale: str = ""
    input_rows: str = ""


MODELOPT = Format(input_scale="input_scale", input_rows="all")
COMPRESSED_W4A16 = Format("weight_packed", "weight_global_scale", reciprocal=True)
COMPRESSED_W4A4 = dataclasses.replace(COMPRESSED_W4A16, input_scale="input_global_scale", input_rows="local")
GPT_OSS = Format(tensor_scale="", mxfp4=True, interleaved=True)


@dataclasses.dataclass(frozen=True)
class _Parameter:
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: float | None  # the initial value; NaN for a scale that a file must provide; None for uninitialized
    kind: str = ""  # a scale's kind, for the loader of compressed-tensors
    global_experts: bool = False

    def make(self, device: torch.device | None = None) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype, device=device)
        if self.start is not None:
            mark_missing(tensor) if math.isnan(self.start) else tensor.fill_(self.start)
        return tensor


class Experts:
    """The experts of one FusedMoE layer, from the layer's creation on."""

    def __init__(self, name: str, form: Format, options: Mapping[str, Any], is_first_rank: bool, activations: str = ""):
        """options: fields of MoeConfig.

        is_first_rank: this process logs for all ranks. activations: text for the log.
        """
        self.name = name
        self._format, self._options, self._reports = form, dict(options), is_first_rank
        self._activations = activations
        self._parameters: dict[str, _Parameter] = {}
        self._fused: FusedExperts | None = None
        self._waiting = False  # parameters hold weights that are not packed yet
        self._lock = threading.Lock()  # SGLang loads with several threads

    @property
    def _gated(self) -> bool:
        return bool(self._options["activation"] != "relu2")

    def _list_parameters(self, experts: int, all_experts: int, inner: int) -> dict[str, _Parameter]:
        """Returns the parameters by name. inner is I, padded on the last rank to the size of the others."""
        form, hidden, matrices = self._format, int(self._options["hidden_size"]), 2 if self._gated else 1
        scales = internals.FusedMoeWeightScaleSupported
        group, tensor = scales.GROUP.value, scales.TENSOR.value
        u8, f32, bf16, nan = torch.uint8, torch.float32, torch.bfloat16, float("nan")
        block, scale = (32, u8) if form.mxfp4 else (16, torch.float8_e4m3fn)
        listed = {
            f"w13_{form.weight}": _Parameter((experts, matrices * inner, hidden // 2), u8, None),
            f"w2_{form.weight}": _Parameter((experts, hidden, inner // 2), u8, None),
            "w13_weight_scale": _Parameter((experts, matrices * inner, hidden // block), scale, nan, group),
            "w2_weight_scale": _Parameter((experts, hidden, inner // block), scale, nan, group),
        }
        of_w13 = (2,) if self._gated else ()
        if form.tensor_scale:
            listed[f"w13_{form.tensor_scale}"] = _Parameter((experts, *of_w13), f32, nan, tensor)
            listed[f"w2_{form.tensor_scale}"] = _Parameter((experts,), f32, nan, tensor)
        if form.input_scale:
            of_all = form.input_rows == "all"
            rows = all_experts if of_all else experts
            listed[f"w13_{form.input_scale}"] = _Parameter((rows, *of_w13), f32, 1.0, tensor, of_all)
            listed[f"w2_{form.input_scale}"] = _Parameter((rows,), f32, 1.0, tensor, of_all)
        if self._options.get("expert_biases"):
            listed[f"w13_{form.bias}"] = _Parameter((experts, matrices * inner), bf16, nan)
            listed[f"w2_{form.bias}"] = _Parameter((experts, hidden), bf16, nan)
        return listed

    def create(
        self,
        layer: torch.nn.Module,
        local_experts: int,
        all_experts: int,
        extra: Mapping[str, Any],
        padded_intermediate_size: int | None = None,
    ) -> None:
        """Registers the layer's parameters on torch's default device.

        extra has attributes for each of them, including the loader. padded_intermediate_size is the parameters' size if
        SGLang's loader needs more than the rank's part.
        """
        inner = padded_intermediate_size or int(self._options["intermediate_size"])
        self._parameters = self._list_parameters(local_experts, all_experts, inner)
        attributes = {key: value for key, value in extra.items() if key != "weight_loader"}
        for name, what in self._parameters.items():
            parameter = torch.nn.Parameter(what.make(), requires_grad=False)
            for key, value in attributes.items():
                setattr(parameter, key, value)
            if what.kind:
                parameter.quant_method = what.kind
            if what.global_experts:
                parameter._sglang_require_global_experts = True
            if (loader := extra.get("weight_loader")) is not None:
                parameter.weight_loader = self._loader(layer, loader)
            layer.register_parameter(name, parameter)
        self._waiting = True
        if self._reports:
            _load_log.plan()

    def _loader(self, layer: torch.nn.Module, loader: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps SGLang's loader: packed parameters are allocated again before it writes."""

        def load(*inputs: Any, **named: Any) -> Any:
            if not self._waiting:
                self._restore(layer)
            return loader(*inputs, **named)

        return load

    def _restore(self, layer: torch.nn.Module) -> None:
        with self._lock:
            if self._waiting:
                return
            if not _packing_loads:
                raise Unsupported(
                    f"{self.name}: packed experts cannot be updated by a request that SGLang ends without "
                    "process_weights_after_loading (from tensors, a group or IPC). Use update_weights_from_disk, or NVFP4_MOE_MODE=0"
                )
            for name, what in self._parameters.items():
                parameter = getattr(layer, name)
                parameter.data = what.make(parameter.device)
            self._waiting = True

    def pack(self, layer: torch.nn.Module) -> None:
        """Packs the parameters into a layer, warms it up, and empties them. Does so again after a reload.

        Raises BadInput if a scale is NaN, negative or missing; Unsupported; OutOfMemory. Each error names the layer.
        """
        if not self._waiting:
            return
        start = time.monotonic()
        with naming(self.name):
            self._fused = fused = self._packed(layer)
        if fused.layer.device != "cpu":
            release_workspaces(fused.layer.device)
        empty_parameters(getattr(layer, name) for name in self._parameters)
        self._waiting = False
        if self._reports:
            _load_log.packed(self.name, fused, time.monotonic() - start, self._activations)

    def _packed(self, layer: torch.nn.Module) -> FusedExperts:
        inner = int(self._options["intermediate_size"])
        parameters = FusedParameters.of_layer(layer, self._format, self._options, inner)
        if self._fused is not None:
            return replace_fused(self._fused, parameters)
        load_format = internals.server_argument("load_format")
        if str(getattr(load_format, "value", load_format)) == "dummy":
            parameters.make_scales_legal()
        # Ids are local to the rank, so its experts are the first ones.
        placement = Placement(int(self._options["num_experts"]))
        fused = open_fused(parameters, placement=placement, max_tokens=MAX_TOKENS, **self._options)
        fused.layer.warmup()
        if fused.mxfp4_rounded:
            log.warning("%s: the cast from MXFP4 rounded %d blocks of 16", self.name, fused.mxfp4_rounded)
        return fused

    def ready(self) -> FusedExperts:
        """Returns the packed experts. Raises RuntimeError if weights were loaded and not packed since."""
        fused = self._fused
        if fused is None or self._waiting:
            what = "has no weights yet" if fused is None else "got new weights that were not packed"
            raise InvalidArgument(
                f"{self.name}: {what}: expected process_weights_after_loading before a run. "
                "SGLang calls it when it loads a model and for update_weights_from_disk"
            )
        return fused
