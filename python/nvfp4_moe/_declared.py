"""The format of a layer's activations, by what its checkpoint declares: what every adapter asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from . import Error, choose_activation_format, explain

NVFP4_ALGORITHMS = frozenset({"NVFP4", "W4A16_NVFP4"})
# The formats that a checkpoint may declare for activations, from the least precise.
_DECLARED = ("nvfp4", "int8_block", "fp8", "bf16")
_OF_MODELOPT = {"NVFP4": "nvfp4", "W4A8_NVFP4_FP8": "fp8", "W4A8_MXFP4_FP8": "fp8"}  # others quantize weights only


@dataclasses.dataclass(frozen=True)
class Declared:
    """The activations that a checkpoint declares for a layer: bf16 (weight-only), nvfp4 or fp8; where: the words in it."""

    format: str
    where: str


def most_precise(declared: Iterable[Declared]) -> Declared:
    """Of a layer's matrices: what runs all of them never less precisely than declared."""
    return max(declared, key=lambda one: _DECLARED.index(one.format))


def declared_by_arguments(inputs: Any, where: str) -> Declared:
    """Of input_activations: compressed-tensors' QuantizationArgs, a dict of the same fields, or None."""

    def field(name: str) -> Any:
        value = inputs.get(name) if isinstance(inputs, Mapping) else getattr(inputs, name, None)
        return getattr(value, "value", value)

    if inputs is None:
        return Declared("bf16", f"{where}: input_activations is null")
    bits, kind = field("num_bits"), field("type") or "float"
    known = {4: "nvfp4", 8: "fp8"} if kind == "float" else {}
    return Declared(known.get(bits, "bf16"), f"{where}: input_activations of {bits} bits, {kind}")


def declared_by_modelopt(algorithm: str, groups: Any = None) -> Declared:
    """Of ModelOpt's quant_algo and, if it is NVFP4, config_groups next to it, of which those of 4-bit weights count."""
    declared = [Declared(_OF_MODELOPT.get(algorithm, "bf16"), f"quant_algo {algorithm}")]
    for name, group in (groups or {}).items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("num_bits") == 4:
            declared.append(declared_by_arguments(group.get("input_activations"), f"config_groups {name}"))
    return most_precise(declared)


def modelopt_algorithms(
    layers: Mapping[str, Mapping[str, Any]], prefixes: Sequence[str], projections: Sequence[str]
) -> dict[str, str]:
    """quant_algo of each of a layer's matrices that ModelOpt's quantized_layers names. Engines read the first of them.

    prefixes: the experts' module, by each name that it may have there. projections: names of gate, up and down.
    """
    algorithms = {name: str(entry.get("quant_algo", "")).upper() for name, entry in layers.items()}
    here = {name: algo for name, algo in algorithms.items() if name in prefixes}
    below = tuple(f"{prefix}." for prefix in prefixes)
    here |= {name: algo for name, algo in algorithms.items() if name.startswith(below)}
    # Some exports name the block's projections and not its experts'.
    beside = {f"{prefix.rpartition('.')[0]}.{name}" for prefix in prefixes for name in projections}
    return here or {name: algo for name, algo in algorithms.items() if name in beside}


def mixture(kinds: Mapping[str, str], known: Collection[str]) -> str | None:
    """Why a layer whose matrices are of these kinds, by name, cannot be run; None if all are known."""
    if all(kind in known for kind in kinds.values()):
        return None
    first: dict[str, str] = {}
    for name, kind in kinds.items():
        first.setdefault(kind, name)
    listed = "; ".join(f"{name}: {kind}" for kind, name in first.items())
    return f"matrices in different formats, expected one: {listed}"


def choose_activations(
    options: Mapping[str, Any], device: str, asked: str, declared: Declared, backend: str = "auto"
) -> tuple[str, str]:
    """(activation_format, why) of a layer with these fields of MoeConfig. asked: "auto" or a format.

    "auto" follows choose_activation_format for the backend that would run the layer. why: a clause for the log.
    """
    if asked != "auto":
        is_less = asked in _DECLARED and _DECLARED.index(asked) < _DECLARED.index(declared.format)
        less = f", less precise than the declared {declared.format} ({declared.where})" if is_less else ""
        return asked, f"it was asked for{less}"
    try:
        backends = explain({**options, "activation_format": declared.format}, backend, device)
    except Error:  # why_refused says it of the same options
        backends = []
    chosen = next((one["backend"] for one in backends if one["chosen"]), None)
    if chosen is None:
        return declared.format, f"it is declared ({declared.where})"
    activation_format, because = choose_activation_format(declared.format, chosen)
    return activation_format, f"{because} ({declared.where})"
