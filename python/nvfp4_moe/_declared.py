"""Chooses the activation format of a layer from what its checkpoint declares. Shared by all engine adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from . import Error, choose_activation_format, explain

NVFP4_ALGORITHMS = frozenset({"NVFP4", "W4A16_NVFP4"})
# The activation formats that a checkpoint may declare, least precise first.
_DECLARED = ("nvfp4", "int8_block", "fp8", "bf16")
_OF_MODELOPT = {"NVFP4": "nvfp4", "W4A8_NVFP4_FP8": "fp8", "W4A8_MXFP4_FP8": "fp8"}  # others quantize weights only


class Refused(Exception):
    """The reason why the library does not take a layer, in one sentence. The engine runs such a layer."""


@dataclasses.dataclass(frozen=True)
class Declared:
    """The activations that a checkpoint declares for a layer.

    format: bf16 (weight-only), nvfp4 or fp8. `where` quotes the checkpoint.
    """

    format: str
    where: str


# For layers whose checkpoint declares no activation format: the most precise one.
WEIGHT_ONLY = Declared("bf16", "nothing is declared")


def most_precise(declared: Iterable[Declared]) -> Declared:
    """Returns the most precise of the declarations of a layer's matrices, which is precise enough for all of them."""
    return max(declared, key=lambda one: _DECLARED.index(one.format))


def plain(field: Any) -> Any:
    """Returns an enum's value, or the field itself."""
    return getattr(field, "value", field)


def declared_by_arguments(inputs: Any, where: str) -> Declared:
    """Reads input_activations: compressed-tensors' QuantizationArgs, a dict of the same fields, or None."""

    def field(name: str) -> Any:
        return plain(inputs.get(name) if isinstance(inputs, Mapping) else getattr(inputs, name, None))

    if inputs is None:
        return Declared("bf16", f"{where}: input_activations is null")
    bits, kind = field("num_bits"), field("type") or "float"
    known = {4: "nvfp4", 8: "fp8"} if kind == "float" else {}
    return Declared(known.get(bits, "bf16"), f"{where}: input_activations of {bits} bits, {kind}")


def declared_by_modelopt(algorithm: str, groups: Any = None) -> Declared:
    """Reads ModelOpt's quant_algo and, if it is NVFP4, the config_groups next to it that have 4-bit weights."""
    declared = [Declared(_OF_MODELOPT.get(algorithm, "bf16"), f"quant_algo {algorithm}")]
    for name, group in (groups or {}).items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("num_bits") == 4:
            declared.append(declared_by_arguments(group.get("input_activations"), f"config_groups {name}"))
    return most_precise(declared)


def modelopt_algorithms(
    layers: Mapping[str, Mapping[str, Any]], prefixes: Sequence[str], projections: Sequence[str]
) -> dict[str, str]:
    """Returns the quant_algo of each of a layer's matrices that ModelOpt's quantized_layers names.

    Engines read only the first of them.

    Args:
        layers: quantized_layers.
        prefixes: The possible names of the experts' module.
        projections: The names of gate, up and down.
    """
    algorithms = {name: str(entry.get("quant_algo", "")).upper() for name, entry in layers.items()}
    here = {name: algo for name, algo in algorithms.items() if name in prefixes}
    below = tuple(f"{prefix}." for prefix in prefixes)
    here |= {name: algo for name, algo in algorithms.items() if name.startswith(below)}
    # Some exports list projections of the block instead of the experts.
    beside = {f"{prefix.rpartition('.')[0]}.{name}" for prefix in prefixes for name in projections}
    return here or {name: algo for name, algo in algorithms.items() if name in beside}


def mixture(kinds: Mapping[str, str], known: Collection[str]) -> str | None:
    """Returns why a layer whose matrices have these formats, by name, cannot run; None if all are known."""
    if all(kind in known for kind in kinds.values()):
        return None
    first: dict[str, str] = {}
    for name, kind in kinds.items():
        first.setdefault(kind, name)
    listed = "; ".join(f"{name}: {kind}" for kind, name in first.items())
    return f"matrices in different formats, expected one: {listed}"


def declared_by_algorithms(algorithms: Mapping[str, str]) -> Declared | Refused:
    """Reads the result of modelopt_algorithms: what is declared, or why the matrices' formats cannot run."""
    if why := mixture(algorithms, NVFP4_ALGORITHMS):
        return Refused(why)
    return most_precise(declared_by_modelopt(one) for one in algorithms.values())


def declared_by_schemes(
    schemes: Mapping[str, Mapping[str, Any]], is_nvfp4: Callable[[Any], bool]
) -> Declared | Refused | None:
    """Reads compressed-tensors' schemes, by the names of a layer's matrices. Returns None if no matrix is NVFP4.

    Otherwise returns what is declared, or why the matrices' formats cannot run. is_nvfp4 judges a scheme's weights.
    """

    def kind(weights: Any) -> str:
        if weights is None:
            return "not quantized"
        return "NVFP4" if is_nvfp4(weights) else f"{weights.num_bits} bits, {plain(weights.type)}"

    kinds = {name: kind(scheme.get("weights")) for name, scheme in schemes.items()}
    if "NVFP4" not in kinds.values():
        return None
    if why := mixture(kinds, {"NVFP4"}):
        return Refused(why)
    inputs = {name.rpartition(".")[2]: scheme.get("input_activations") for name, scheme in schemes.items()}
    return most_precise(declared_by_arguments(given, name) for name, given in inputs.items())


def choose_activations(
    options: Mapping[str, Any], device: str, asked: str, declared: Declared, backend: str = "auto"
) -> tuple[str, str]:
    """Chooses (activation_format, why) for a layer with these fields of MoeConfig.

    asked is "auto" or a format. "auto" follows choose_activation_format for the first backend that supports the layer,
    also if its self-check fails, so that all layers of a model and all ranks have one format. why is a clause for the
    log.
    """
    if asked != "auto":
        is_less = asked in _DECLARED and _DECLARED.index(asked) < _DECLARED.index(declared.format)
        less = f", less precise than the declared {declared.format} ({declared.where})" if is_less else ""
        return asked, f"it was asked for{less}"
    try:
        backends = explain({**options, "activation_format": declared.format}, backend, device)
    except Error:  # why_refused reports it for the same options
        backends = []
    chosen = next(
        (one["backend"] for one in backends if one["supported"] and backend in ("auto", one["backend"])), None
    )
    if chosen is None:
        return declared.format, f"it is declared ({declared.where})"
    activation_format, because = choose_activation_format(declared.format, chosen)
    return activation_format, f"{because} ({declared.where})"
