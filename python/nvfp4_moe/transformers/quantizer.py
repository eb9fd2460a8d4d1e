"""Nvfp4MoeQuantizer: the hooks that from_pretrained calls before and after it loads a checkpoint's other weights."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.base import HfQuantizer

from .. import _core
from .._fused_experts import device_name
from ..layer import MoeLayer
from . import ties
from .config import Nvfp4MoeConfig
from .experts import Found, Nvfp4Experts, check_activation, find_experts
from .linear import Nvfp4LinearModule
from .packed import Opener, PackedModule, turn_off_gradients, warm_up
from .stored import StoredTensor, stored_tensors
from .stored_linear import CODES, SCALE_LEAVES, StoredLinear, find_stored_linears

log = logging.getLogger("nvfp4_moe.transformers")

_EXPERT_KEY = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?experts\.")
# Laguna's selection bias is stored among the experts but belongs to the router.
_IN_EXPERTS = re.compile(r"(?:^|\.)experts\.(?!e_score_correction_bias$)")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


class Nvfp4MoeQuantizer(HfQuantizer):
    """Reads and packs experts and NVFP4 linears with this library, and keeps their weights away from transformers."""

    requires_calibration = False

    def __init__(self, quantization_config: Nvfp4MoeConfig, **kwargs: Any) -> None:
        # Also for a checkpoint whose config.json declares no quantization: its files are read, and floats quantized.
        super().__init__(quantization_config, **{**kwargs, "pre_quantized": True})
        self._device_map: dict[str, Any] = {}
        self._packed: dict[str, PackedModule] = {}
        self._dequantized: list[StoredLinear] = []
        self._dtype: torch.dtype | None = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._wide_buffers: dict[str, StoredTensor] = {}
        self._keep_converters = True
        self._activations: dict[str, str] = {}  # format and reason -> an example module

    # ---- dtype and devices

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = dtype
        return dtype

    def update_device_map(self, device_map: Any) -> Any:
        """Accepts one device, or a dict of GPUs.

        Refuses maps that would put weights on another device than their layer.
        """
        if isinstance(device_map, str) and device_map in _AUTOMATIC:
            gpus = torch.cuda.device_count()
            if gpus > 1:
                raise _core.Unsupported(
                    f"device_map {device_map!r}: expected one device or a dict of modules to GPUs, since the sizes of "
                    f"packed experts are unknown to accelerate, which would balance {gpus} GPUs without them"
                )
            device_map = {"": torch.device("cuda", 0) if gpus else torch.device("cpu")}
        if device_map is not None:
            devices = {torch.device("cuda", d) if isinstance(d, int) else str(d) for d in device_map.values()}
            names = sorted("disk" if d == "disk" else device_name(torch.device(d)) for d in devices)
            if "disk" in names or ("cpu" in names and len(names) > 1):
                raise _core.Unsupported(
                    f"device_map: expected one device or GPUs alone, got {', '.join(names)}; packed weights are not offloaded"
                )
        self._device_map = dict(device_map or {})
        return device_map

    def _device_of(self, path: str) -> torch.device:
        """Returns the device of the longest entry of the device map that is a prefix of a module's path."""
        parts = path.split(".")
        for count in range(len(parts), -1, -1):
            device = self._device_map.get(".".join(parts[:count]))
            if device is not None:
                return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return torch.device("cpu")

    # ---- before loading: modules with quantized weights lose their parameters

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        if getattr(model.config, "distributed_config", None) is not None:
            raise _core.Unsupported(
                "tp_plan, distributed_config: expected none, since nvfp4_moe does not shard a transformers model; "
                "MoeLayer.from_checkpoint opens a rank's experts or slice for an engine of one's own"
            )
        files = [os.path.abspath(file) for file in checkpoint_files or []]
        if not files or not all(file.endswith(".safetensors") for file in files):
            raise _core.Unsupported(f"{model.config.name_or_path}: expected a model's safetensors files")
        directory = os.path.dirname(files[0])
        tensors = stored_tensors(files)
        if self.quantization_config.checkpoint is None and any(tensor.dtype in CODES for tensor in tensors.values()):
            _fetch_declaration(model.config.name_or_path, directory)
        transforms = get_model_conversion_mapping(model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        state = model.state_dict()

        def rename(key: str) -> str:
            prefix = model.base_model_prefix
            renamed: str = rename_source_key(key, renamings, [], prefix, state)[0]
            if renamed not in state and key in state:  # as transformers does: the name is already the model's
                renamed = rename_source_key(key, [], [], prefix, state)[0]
            return renamed

        found = find_experts(model)
        if not found and any(_EXPERT_KEY.search(key) for key in tensors):
            raise _core.Unsupported(
                f"{type(model).__name__}: expected a class of transformers with stacked experts, found none, "
                "while the files have experts"
            )
        taken = self._take_experts(model, found, directory, tensors, rename) if found else []
        self._keep_converters = len(taken) < len(found)
        others = {key: tensor for key, tensor in tensors.items() if not _IN_EXPERTS.search(key)}
        stored = {rename(key): tensor for key, tensor in others.items()}
        self._dtypes = _planned_dtypes(model, state, self._dtype, stored)
        buffers = [name for name, _ in model.named_buffers() if name in stored]
        self._wide_buffers = {name: stored[name] for name in buffers if stored[name].dtype == "F32"}
        linears = find_stored_linears(others, rename, dict(model.named_modules()))
        self._take_linears(model, linears)
        self._ignore(model, [rename(linear.weight.key) for linear in linears])
        sources = tensors if self._keep_converters else others
        self._expect_all(model, {name for key in sources for name in _merged(rename(key), converters)})
        return model

    def _take_experts(
        self,
        model: Any,
        found: list[Found],
        directory: str,
        tensors: dict[str, StoredTensor],
        rename: Callable[[str], str],
    ) -> list[Found]:
        """Replaces experts by Nvfp4Experts.

        Except experts that a quantized checkpoint left in floats, and those of another part of the model (Qwen3-Omni's
        speech).
        """
        reading = self.quantization_config
        checkpoint = _core.Checkpoint(directory, reading.gate_up_order, reading.accept_tensors, reading.family)
        groups = ties.groups(found, ties.by_declaration(model))
        groups = ties.in_files(groups, lambda layer: rename(checkpoint.expert(layer, 0)["names"]["gate"]))
        dtypes: dict[int, set[str]] = {}
        for key, tensor in tensors.items():
            if match := _EXPERT_KEY.search(key):
                dtypes.setdefault(int(match[1]), set()).add(tensor.dtype)
        all_floats = checkpoint.model()["format"] == "float"
        floats = {layer for layer, kinds in dtypes.items() if kinds <= {"BF16", "F16", "F32"}}
        taken = [group for group in groups if all_floats or group[0].layer not in floats]
        numbers = {group[0].layer for group in taken}
        for finding in checkpoint.inspect([])["findings"]:
            if finding["severity"] == "error" and finding["layer"] in numbers | {None}:
                error = _core.BadInput(finding["text"])
                error.finding = finding["id"]
                raise error
        for group in taken:
            ties.check_devices(group, self._device_of)
            path = group[0].name
            self._packed[path] = Nvfp4Experts(path, self._expert_opener(checkpoint, group))
            ties.replace(model, group, self._packed[path])
        ties.drop_packed(model)
        return [one for group in taken for one in group]

    def _expert_opener(self, checkpoint: Any, group: list[Found]) -> Opener:
        """Opens the layer of a group of modules that share their weights."""
        config, found = self.quantization_config, group[0]

        def open_on(device: str, now: Any) -> MoeLayer:
            activation_format, because = config.activations(checkpoint, found.layer, device)
            layer = MoeLayer.from_checkpoint(
                checkpoint,
                found.layer,
                max_tokens=config.max_tokens,
                device=device,
                backend=config.backend,
                cache_directory=config.cache_directory,
                **{
                    "shared_intermediate_size": 0,  # a separate module of the model
                    **config.options,
                    "activation_format": activation_format,
                },
            )
            self._activations[f"{activation_format}, because {because}"] = found.name
            for one in group:
                check_activation(one, layer)
            return layer

        return open_on

    def _take_linears(self, model: Any, linears: list[StoredLinear]) -> None:
        tied = {name.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for name in pair}
        for linear in linears:
            module = model.get_submodule(linear.path)
            if linear.path in tied:
                raise _core.Unsupported(
                    f"{linear.weight.key}: expected a float weight, since the model ties {linear.path}"
                )
            if type(module) is nn.Linear and linear.fits_kernels():
                sizes = (linear.in_features, linear.out_features, module.bias)
                self._replace(model, linear.path, Nvfp4LinearModule(linear.path, self._linear_opener(linear), *sizes))
            else:
                module.register_parameter("weight", None)
                module._is_hf_initialized = True
                self._dequantized.append(linear)

    def _linear_opener(self, linear: StoredLinear) -> Opener:
        config = self.quantization_config
        return lambda device, now: linear.open(
            config.linear_options(), max_tokens=config.max_tokens, device=device, backend=config.backend
        )

    def _replace(self, model: Any, path: str, module: PackedModule) -> None:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
        self._packed[path] = module

    def _expect_all(self, model: Any, stored: set[str]) -> None:
        """Raises BadInput for weights that the files lack; transformers would initialize them at random."""
        optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
        missing = sorted(
            name
            for name in model.state_dict()
            if name not in stored
            and name not in model.all_tied_weights_keys
            and not any(pattern.search(name) for pattern in optional)
        )
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise _core.BadInput(f"{', '.join(missing[:3])}{more}: missing from the checkpoint's files")

    def _ignore(self, model: Any, weights: list[str]) -> None:
        """Removes this library's own keys and scales of KV caches from transformers' report of unexpected keys."""
        ignored = {r"(?:^|\.)experts\.", rf"\.(?:{'|'.join(SCALE_LEAVES)}|[qkv]_scale)$"}
        if weights:
            ignored.add(f"^(?:{'|'.join(sorted({_numbers_open(weight) for weight in weights}))})$")
        model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | ignored

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        """Drops the conversions that merge experts, unless transformers loads some.

        Newer releases pass the model too.
        """
        if self._keep_converters:
            return weight_conversions
        return [
            transform
            for transform in weight_conversions
            if not isinstance(transform, WeightConverter)
            or not all(re.search(r"(?<![a-z_])experts\b", target) for target in transform.target_patterns)
        ]

    # ---- after loading

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from transformers.utils.logging import tqdm

        _restore_dtypes(model, self._dtypes, self._wide_buffers)
        for linear in self._dequantized:
            device = device_name(self._device_of(linear.path))
            weight = linear.dequantized(self._dtypes.get(f"{linear.path}.weight", model.dtype), device)
            model.get_submodule(linear.path).weight = nn.Parameter(weight, requires_grad=False)
        for path, module in tqdm(self._packed.items(), desc="Packing NVFP4 weights"):
            module.place(self._device_of(path))
        warm_up(self._packed.values())
        turn_off_gradients(model)
        self._report(model)
        self._packed, self._dequantized = {}, []  # now only the model holds them, so that dropping it frees them
        return model

    def _report(self, model: Any) -> None:
        experts = [path for path, module in self._packed.items() if isinstance(module, Nvfp4Experts)]
        linears = len(self._packed) - len(experts)
        log.info("%s: %d layers of experts and %d linears in NVFP4", model.config.name_or_path, len(experts), linears)
        for said, name in self._activations.items():
            layers = f", in layers such as {name}" if len(self._activations) > 1 else ""
            log.info("activations: %s%s", said, layers)
        if self._dequantized:
            kinds = sorted({"NVFP4" if linear.is_nvfp4 else "FP8" for linear in self._dequantized})
            log.warning(
                "%s: %d weights in %s outside the experts are dequantized to %s, since no kernel here takes them (%s)",
                model.config.name_or_path,
                len(self._dequantized),
                " and ".join(kinds),
                model.dtype,
                self._dequantized[0].path,
            )

    # ---- capabilities of the model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        log.warning(
            "save_pretrained: packed NVFP4 weights are not written back; keep the checkpoint that was loaded, or write one "
            "with nvfp4_moe.quantize_checkpoint"
        )
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _merged(key: str, converters: list[Any]) -> list[str]:
    """Returns the model's names of a renamed key: from the first converter that takes it, or the key itself."""
    for converter in converters:
        renamed, pattern = converter.rename_source_key(key)
        if pattern is not None:
            first, *rest = converter.target_patterns
            return [renamed, *(renamed.replace(first, other) for other in rest)]
    return [key]


def _fetch_declaration(name: str, directory: str) -> None:
    """Downloads hf_quant_config.json into the snapshot folder: transformers fetches only config.json and weights.

    If that fails, opening the checkpoint reports what is missing.
    """
    from transformers.utils.hub import cached_file

    snapshots, revision = os.path.split(directory)
    if os.path.isdir(name) or os.path.basename(snapshots) != "snapshots":
        return
    cached_file(
        name,
        "hf_quant_config.json",
        cache_dir=os.path.dirname(os.path.dirname(snapshots)),
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def _numbers_open(path: str) -> str:
    """Returns a pattern that matches the path in all layers, with any numbers."""
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in path.split("."))


def _planned_dtypes(
    model: Any, state: dict[str, Any], dtype: Any, stored: dict[str, StoredTensor]
) -> dict[str, torch.dtype]:
    """Returns the dtype, by name, of each floating parameter and persistent buffer: the model's dtype.

    Leaves out those that the class excepts from the model's dtype, unless the files have them in that very dtype:
    DeepSeek-V4 runs in bfloat16 only if its norms keep the files' bfloat16.
    """
    plan = {} if dtype is None else model._get_dtype_plan(dtype)
    exceptions = [re.compile(glob.replace("*", ".*")) for glob in plan]

    def excepted(name: str, own: torch.dtype) -> bool:
        in_files = _DTYPES.get(stored[name].dtype) if name in stored else None
        return in_files != own and any(glob.search(name) for glob in exceptions)

    floats = {name: tensor.dtype for name, tensor in state.items() if tensor.is_floating_point()}
    return {name: own for name, own in floats.items() if not excepted(name, own)}


def _restore_dtypes(model: Any, planned: dict[str, torch.dtype], wide_buffers: dict[str, StoredTensor]) -> None:
    """Casts parameters to the requested dtype; transformers leaves renamed keys of a pre-quantized model in the files'
    dtype.

    Buffers that are float32 in the files stay float32. Some transformers versions round them to the model's dtype, and
    with a router's selection bias in bfloat16 other experts would be selected.
    """
    for name, parameter in model.named_parameters():
        if name in planned and parameter.dtype != planned[name]:
            parameter.data = parameter.data.to(planned[name])
    for name, buffer in model.named_buffers():
        if name in wide_buffers:
            if buffer.dtype != torch.float32:
                buffer.data = wide_buffers[name].read(device_name(buffer.device)).reshape(buffer.shape)
        elif name in planned and buffer.dtype != planned[name]:
            buffer.data = buffer.data.to(planned[name])
