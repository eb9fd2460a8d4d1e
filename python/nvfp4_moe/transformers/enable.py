"""enable(): quantizes the experts of a model in memory and replaces them one layer at a time."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch

from .. import _core
from .._fused_experts import device_name, naming
from .._fused_parameters import gate_and_up
from ..config import MoeConfig
from ..layer import MoeLayer
from . import ties
from .config import Nvfp4MoeConfig
from .experts import Found, Nvfp4Experts, find_activation, find_experts
from .packed import turn_off_gradients, warm_up
from .quantizer import Nvfp4MoeQuantizer

log = logging.getLogger("nvfp4_moe.transformers")

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "top_k")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class EnabledLayer:
    """One layer whose experts were replaced, with the bytes of its weights before and after.

    shared_with: Other modules of the model that had the same weights, and now have the same packed layer.
    """

    name: str
    experts: int
    activation: str
    device: str
    bytes_before: int
    bytes_after: int
    shared_with: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Enabled:
    """The report of enable(). str() of it is a table."""

    layers: tuple[EnabledLayer, ...]
    activation_format: str

    def __str__(self) -> str:
        before, after = (sum(getattr(one, name) for one in self.layers) for name in ("bytes_before", "bytes_after"))
        rows = [
            f"{' and '.join((one.name, *one.shared_with))}: {one.experts} experts, {one.activation}, {one.device}, "
            f"{one.bytes_before} to {one.bytes_after} bytes"
            for one in self.layers
        ]
        head = f"nvfp4_moe: {len(self.layers)} layers of experts in NVFP4, activations {self.activation_format}"
        return "\n".join([f"{head}, {before} to {after} bytes", *rows])


def enable(
    model: Any,
    *,
    activation_format: str = "bf16",
    max_tokens: int = 8192,
    backend: str = "auto",
    **options: Any,
) -> Enabled:
    """Quantizes the experts of a loaded bfloat16, float16 or float32 model and replaces them by packed layers.

    Each layer's weights are freed before the next layer is quantized, so at most one layer is in memory twice. Layers
    run on the device of their weights. The rest of the model is unchanged, except that gradients are turned off. Every
    module is checked before the first is replaced. If a later layer fails, the layers replaced so far stay, and the
    model runs.

    Args:
        model: The model.
        max_tokens, backend: As in Nvfp4MoeConfig.
        activation_format, options: Fields of MoeConfig.

    Returns:
        A report of what was done. A second call finds nothing left to do and reports that.

    Raises:
        Unsupported: Experts with another activation, with other dtypes, or offloaded. Names the module's path and
        class. BadInput: Weights or biases are NaN or Inf.
    """
    if activation_format == "auto":
        activation_format = "bf16"  # float weights declare no other format
    config = Nvfp4MoeConfig(max_tokens=max_tokens, backend=backend, activation_format=activation_format, **options)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not isinstance(quantizer, Nvfp4MoeQuantizer):
        raise _core.Unsupported(f"model: expected weights in floats, got a model of {type(quantizer).__name__}")
    found = find_experts(model)
    if not found and not any(isinstance(module, Nvfp4Experts) for module in model.modules()):
        raise _core.Unsupported(f"{type(model).__name__}: expected modules with stacked experts, found none")
    configs = {one.name: _layer_config(model, one, config) for one in found}
    groups = ties.groups(found, lambda one: (id(one.first_stack), id(one.module.down_proj), configs[one.name]))
    layers = []
    try:
        for group in groups:
            layers.append(_swap(model, group, configs[group[0].name], config))
            if quantizer is None:  # from the first replaced layer on, the model cannot be saved
                model.hf_quantizer = quantizer = Nvfp4MoeQuantizer(config)
                model.is_quantized = True
    finally:
        ties.drop_packed(model)
    warm_up(module for module in model.modules() if isinstance(module, Nvfp4Experts))
    turn_off_gradients(model)
    done = Enabled(tuple(layers), activation_format)
    log.info("%s", done)
    return done


def _layer_config(model: Any, found: Found, config: Nvfp4MoeConfig) -> MoeConfig:
    """Returns sizes and options of a module's layer. Raises Unsupported if it cannot be replaced."""
    module, kind = found.module, f"{found.name} ({type(found.module).__name__})"
    first, down = found.first_stack, module.down_proj
    for name, weight in (("gate_up_proj" if found.has_gate else "up_proj", first), ("down_proj", down)):
        if weight.dtype not in _FLOATS:
            raise _core.Unsupported(f"{kind} {name}: expected bfloat16, float16 or float32, got {weight.dtype}")
        if weight.device.type not in ("cpu", "cuda"):
            raise _core.Unsupported(f"{kind} {name}: expected weights on cpu or cuda, got {weight.device} (offloaded)")
    text = model.config.get_text_config()
    top_k = next((getattr(text, name) for name in _TOP_K if isinstance(getattr(text, name, None), int)), None)
    if top_k is None:
        raise _core.Unsupported(f"{kind}: expected one of {', '.join(_TOP_K)} in {type(text).__name__}, found none")
    experts, rows, columns = first.shape
    inner, hidden = (columns, rows) if found.is_transposed else (rows, columns)
    options = {**find_activation(found, text), **config.options}
    with naming(kind):
        return MoeConfig(
            num_experts=experts,
            top_k=top_k,
            hidden_size=hidden,
            intermediate_size=inner // 2 if found.has_gate else inner,
            expert_biases=found.has_biases,
            **options,
        )


def _matrices(found: Found) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Returns gate (E, I, H) or None, up (E, I, H), down (E, H, I); on a GPU contiguous along the last dimension."""
    first, down = found.first_stack.detach(), found.module.down_proj.detach()
    if found.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
        if first.is_cuda:
            first, down = first.contiguous(), down.contiguous()
    return *gate_and_up(first, found.has_gate, not found.is_concatenated), down


def _biases(found: Found) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor] | None:
    """Returns the biases gate (E, I) or None, up (E, I), down (E, H); None without biases."""
    if not found.has_biases:
        return None
    name = "gate_up_proj_bias" if found.has_gate else "up_proj_bias"
    first, down = getattr(found.module, name).detach(), found.module.down_proj_bias.detach()
    return *gate_and_up(first, found.has_gate, not found.is_concatenated), down


def _swap(model: Any, group: list[Found], layer_config: MoeConfig, config: Nvfp4MoeConfig) -> EnabledLayer:
    """Packs the weights that a group of modules shares."""
    found = group[0]
    module = found.module
    before = sum(weight.numel() * weight.element_size() for weight in (found.first_stack, module.down_proj))
    device = device_name(module.down_proj.device)
    gate, up, down = _matrices(found)
    kept: dict[str, Any] = {"max_tokens": config.max_tokens, "backend": config.backend}
    arrays = {"gate": gate, "up": up, "down": down, "biases": _biases(found)}
    with naming(found.name):
        layer = MoeLayer.from_bf16(layer_config, **arrays, device=device, **kept)
    swapped = Nvfp4Experts(found.name, lambda where, now: _moved(now, where, kept))
    swapped.adopt(layer)
    ties.replace(model, group, swapped)
    # Other references to the modules, such as hooks or lists of layers, must not keep the weights alive.
    del gate, up, down, arrays
    for one in group:
        for name in [name for name, _ in one.module.named_parameters(recurse=False)]:
            setattr(one.module, name, None)
    if device != "cpu":
        torch.cuda.empty_cache()  # the library packs into its own memory and cannot use what torch caches
    described = layer.describe()
    return EnabledLayer(
        found.name,
        layer_config.num_experts,
        layer_config.activation,
        device,
        before,
        described["packed_bytes"],
        tuple(one.name for one in group[1:]),
    )


def _moved(layer: MoeLayer, device: str, kept: dict[str, Any]) -> MoeLayer:
    """Opens the same weights, bit for bit, on another device, through the host."""
    experts = [layer.expert(index) for index in range(layer.expert_count)]

    def stacked(matrix: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes, scales = (
            torch.stack([torch.as_tensor(one[matrix][part]) for one in experts]) for part in ("codes", "scales")
        )
        return codes, scales, torch.tensor([one[matrix]["tensor_scale"] for one in experts], dtype=torch.float32)

    matrices = ("gate", "up", "down")
    biases = None
    if layer.config.expert_biases:
        biases = tuple(
            torch.stack([torch.as_tensor(one[matrix]["bias"]) for one in experts]) if experts[0][matrix] else None
            for matrix in matrices
        )
    gate, up, down = (stacked(matrix) if experts[0][matrix] else None for matrix in matrices)
    return MoeLayer.from_tensors(layer.config, gate=gate, up=up, down=down, biases=biases, device=device, **kept)
