"""Experts whose weights transformers ties, as in DiffusionGemma: one packed module serves encoder and decoder."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import _core
from .._fused_experts import device_name
from .experts import Found
from .packed import PackedModule


def groups(found: Iterable[Found], key: Callable[[Found], Hashable]) -> list[list[Found]]:
    """Groups modules of equal keys, in the order of their first members."""
    by_key: dict[Hashable, list[Found]] = {}
    for one in found:
        by_key.setdefault(key(one), []).append(one)
    return list(by_key.values())


def by_declaration(model: Any) -> Callable[[Found], Hashable]:
    """Returns a key that is equal for modules whose parameters the class ties, before any weight is loaded."""
    ties = model.all_tied_weights_keys

    def key(one: Found) -> Hashable:
        names = [f"{one.name}.{name}" for name, _ in one.module.named_parameters()]
        return tuple(ties.get(name, name) for name in names)

    return key


def in_files(groups: list[list[Found]], gate_of: Callable[[int], str]) -> list[list[Found]]:
    """If several groups have the same layer number, keeps those that the checkpoint's experts are named after.

    gate_of(layer) returns the model's name of the gate of its first expert.
    """
    numbers = collections.Counter(group[0].layer for group in groups)

    def named(group: list[Found]) -> bool:
        return any(gate_of(group[0].layer).startswith(one.name + ".") for one in group)

    return [group for group in groups if numbers[group[0].layer] == 1 or named(group)]


def check_devices(group: list[Found], device_of: Callable[[str], torch.device]) -> None:
    """Raises Unsupported if the device map puts modules of a group on several devices."""
    names = {device_name(device_of(one.name)): one.name for one in group}
    if len(names) > 1:
        raise _core.Unsupported(
            f"device_map: expected one device for {' and '.join(names.values())}, which share their weights, got "
            f"{' and '.join(names)}"
        )


def replace(model: Any, group: list[Found], module: PackedModule) -> None:
    """Puts one packed module in the place of each of a group."""
    for one in group:
        parent, _, child = one.name.rpartition(".")
        block = model.get_submodule(parent)
        setattr(block, child, module)
        # Some classes' blocks initialize their experts themselves. The block's other weights are in the files.
        block._is_hf_initialized = True


def drop_packed(model: Any) -> None:
    """Removes the ties of parameters that were packed. transformers would search for them and fail.

    It reads one mapping while it loads, and makes it again from the classes' patterns in tie_weights(), which resizing
    embeddings calls. Both are attributes of this model; its class is not changed.
    """
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or not hasattr(module, "all_tied_weights_keys"):
            continue  # Inkling's audio part never calls post_init, which makes that mapping
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        names |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        ties = module.all_tied_weights_keys.items()
        module.all_tied_weights_keys = {to: of for to, of in ties if to in names and of in names}
        patterns = (module._tied_weights_keys or {}).items()
        if patterns:
            # transformers' own way to find a pattern's parameters.
            kept = {to: of for to, of in patterns if any(re.search(f"^{of}", name) for name in names)}
            module._tied_weights_keys = kept
