"""Linears outside the experts that a checkpoint stores in NVFP4 or FP8, found by the files' content, not by names."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _core, dequantize
from ..linear import Nvfp4Linear
from .stored import StoredTensor

CODES = ("U8", "I8", "F4")
_FP8_SCALES = ("weight_scale_inv", "scale", "weight_scale")
# Name suffixes that belong to a quantized weight, other than the weight itself.
SCALE_LEAVES = (
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "scale",
)
# Other suffixes that do not affect y = x W^T + bias: scales of KV caches and of outputs.
_OTHER_LEAVES = ("weight", "weight_packed", "bias", "k_scale", "v_scale", "q_scale", "output_scale")


class StoredLinear(NamedTuple):
    """The quantized weight of one linear.

    Attributes:
        path: The module's path in the model.
        weight: NVFP4 codes (out, in/2), or FP8 (out, in).
        scales: For NVFP4 (out, in/16), one per 16 elements; for FP8 of the whole weight, of its rows, or of blocks.
        tensor_scale, input_scale: NVFP4 only.
        reciprocal: Both are stored as 1/s.
    """

    path: str
    weight: StoredTensor
    scales: StoredTensor
    tensor_scale: StoredTensor | None
    input_scale: StoredTensor | None
    reciprocal: bool
    out_features: int
    in_features: int

    @property
    def is_nvfp4(self) -> bool:
        return self.tensor_scale is not None

    def fits_kernels(self) -> bool:
        """Whether Nvfp4Linear supports its sizes."""
        return self.is_nvfp4 and self.out_features % 16 == 0 and self.in_features % 16 == 0

    def _number(self, stored: StoredTensor) -> float:
        value = float(stored.read("cpu").reshape(()))
        if not self.reciprocal:
            return value
        if value == 0:
            raise _core.BadInput(f"{stored.key}: expected a reciprocal of a scale, got 0")
        return float(torch.tensor(1.0 / value, dtype=torch.float32))

    def open(self, options: Mapping[str, Any], *, max_tokens: int, device: str, backend: str) -> Nvfp4Linear:
        """Opens the linear on a device. Without an input scale in the files, activations are not quantized (W4A16)."""
        assert self.tensor_scale is not None
        input_scale = None if self.input_scale is None else self._number(self.input_scale)
        chosen = {"activation_format": "bf16" if input_scale is None else "nvfp4", **options}
        scaled = chosen["activation_format"] in ("nvfp4", "fp8")
        if chosen.get("activation_scale", "dynamic_token") == "dynamic_token" or not scaled:
            input_scale = None
        # The library packs a linear on the host and copies the packed bytes to the device.
        weight = (
            self.weight.read("cpu").view(torch.uint8),
            self.scales.read("cpu").view(torch.uint8),
            self._number(self.tensor_scale),
        )
        return Nvfp4Linear.from_tensors(
            weight, input_scale=input_scale, max_tokens=max_tokens, device=device, backend=backend, **chosen
        )

    def dequantized(self, dtype: torch.dtype, device: str) -> Tensor:
        """Dequantizes the weight (out, in) to a float dtype, for modules and formats without a kernel."""
        if self.tensor_scale is None:
            return _dequantized_fp8(self.weight.read(device), self.scales.read(device)).to(dtype)
        codes, scales = self.weight.read(device), self.scales.read(device)
        values = dequantize(codes.view(torch.uint8), scales.view(torch.uint8), self._number(self.tensor_scale))
        return torch.as_tensor(values).to(dtype)


def _dequantized_fp8(weight: Tensor, scales: Tensor) -> Tensor:
    """Multiplies E4M3 values by their scales; returns float32 (out, in)."""
    if scales.dtype == torch.uint8:  # E8M0 exponents
        scales = torch.exp2(scales.float() - 127)
    scales = scales.float()
    if scales.dim() == 2 and scales.shape[1] > 1 or scales.dim() == 2 and 1 < scales.shape[0] < weight.shape[0]:
        rows, columns = _block(weight.shape[0], scales.shape[0]), _block(weight.shape[1], scales.shape[1])
        scales = scales.repeat_interleave(rows, 0)[: weight.shape[0]]
        scales = scales.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    elif scales.numel() == weight.shape[0]:
        scales = scales.reshape(-1, 1)
    return weight.float() * scales


def _block(size: int, blocks: int) -> int:
    """Returns how many rows or columns share a scale: 128, as all producers use, or an equal share."""
    return 128 if math.ceil(size / 128) == blocks else math.ceil(size / blocks)


def _expect(stored: StoredTensor | None, stem: str, leaf: str, dtypes: tuple[str, ...], shapes: Any) -> StoredTensor:
    wanted = f"{' or '.join(dtypes)} {' or '.join(map(str, shapes))}"
    if stored is None:
        raise _core.BadInput(f"{stem}.{leaf}: missing from the files, expected {wanted}")
    if stored.dtype not in dtypes or (shapes and stored.shape not in shapes):
        raise _core.BadInput(f"{stored.key}: expected {wanted}, got {stored.dtype} {stored.shape}")
    return stored


def _nvfp4(path: str, stem: str, weight: StoredTensor, module: nn.Linear, get: Callable[[str], Any]) -> StoredLinear:
    out_features, in_features = module.out_features, module.in_features
    reciprocal = weight.key.endswith(".weight_packed")
    scales = get("weight_scale")
    if scales is not None and scales.dtype in ("U8", "F8_E8M0") and scales.shape[-1:] == (in_features // 32,):
        raise _core.Unsupported(f"{weight.key}: expected NVFP4, got MXFP4 (a scale of each 32), outside the experts")
    _expect(weight, stem, "weight", CODES, ((out_features, in_features // 2),))
    scales = _expect(scales, stem, "weight_scale", ("F8_E4M3",), ((out_features, in_features // 16),))
    leaf = "weight_global_scale" if reciprocal else "weight_scale_2"
    tensor_scale = _expect(get(leaf), stem, leaf, ("F32",), ((), (1,)))
    leaf = "input_global_scale" if reciprocal else "input_scale"
    input_scale = get(leaf)
    if input_scale is not None:
        _expect(input_scale, stem, leaf, ("F32",), ((), (1,)))
    return StoredLinear(path, weight, scales, tensor_scale, input_scale, reciprocal, out_features, in_features)


def _fp8(path: str, stem: str, weight: StoredTensor, module: nn.Linear, get: Callable[[str], Any]) -> StoredLinear:
    rows, columns = module.out_features, module.in_features
    _expect(weight, stem, "weight", ("F8_E4M3",), ((rows, columns),))
    leaf = next((leaf for leaf in _FP8_SCALES if get(leaf) is not None), _FP8_SCALES[0])
    blocks = (math.ceil(rows / 128), math.ceil(columns / 128))
    scales = _expect(get(leaf), stem, leaf, ("F32", "BF16", "F8_E8M0", "U8"), ((), (1,), (rows,), (rows, 1), blocks))
    return StoredLinear(path, weight, scales, None, None, False, rows, columns)


def find_stored_linears(
    tensors: Mapping[str, StoredTensor], rename: Callable[[str], str], modules: Mapping[str, nn.Module]
) -> list[StoredLinear]:
    """Finds every linear of the model whose weight the files store in NVFP4 or FP8.

    Args:
        tensors: The tensors outside the experts, by key.
        rename: Maps a key to the model's name.

    Raises:
        BadInput: A part is missing or its size differs from the model's. Names the key, what was expected and what it
        got. Unsupported: The format cannot be loaded, or a module with a quantized weight is not a linear.
    """
    found = []
    leaves: dict[str, set[str]] = {}
    for key in tensors:
        stem, _, leaf = key.rpartition(".")
        leaves.setdefault(stem, set()).add(leaf)
    for key, weight in tensors.items():
        stem, _, leaf = key.rpartition(".")
        packed = leaf == "weight_packed" or (leaf == "weight" and weight.dtype in CODES)
        if not packed and not (leaf == "weight" and weight.dtype.startswith("F8_")):
            continue
        path = rename(f"{stem}.weight").removesuffix(".weight")
        module = modules.get(path)
        if module is None:
            continue  # belongs to a part that this class omits, such as multi-token prediction
        if not isinstance(module, nn.Linear):
            raise _core.Unsupported(f"{weight}: expected a linear, and {path} is {type(module).__name__}")
        for other in sorted(leaves[stem].difference(SCALE_LEAVES, _OTHER_LEAVES)):
            raise _core.Unsupported(
                f"{stem}.{other}: expected codes and scales alone, which it would change (AWQ and others)"
            )
        make = _nvfp4 if packed else _fp8
        found.append(make(path, stem, weight, module, functools.partial(_leaf, tensors, stem)))
    return found


def _leaf(tensors: Mapping[str, StoredTensor], stem: str, leaf: str) -> StoredTensor | None:
    return tensors.get(f"{stem}.{leaf}")
