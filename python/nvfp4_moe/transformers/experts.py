"""Nvfp4Experts, which replaces a model's module of routed experts, and the search for such modules."""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _core
from .._fused_experts import run_in_parts
from .packed import PackedModule


class Nvfp4Experts(PackedModule):
    """The routed experts of one layer: (T, hidden_size) from hidden (T, hidden_size), ids and weights (T, top_k)."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the layer as one op. Raises Unsupported if an input requires a gradient."""
        self.refuse_gradient(hidden_states, top_k_weights)
        op, handle = torch.ops.nvfp4_moe.moe_layer, self.handle
        hidden, ids = hidden_states.contiguous(), top_k_index.contiguous()
        weights = top_k_weights.to(torch.float32).contiguous()  # routers of bf16 models may return bf16
        return run_in_parts(lambda *rows: op(*rows, handle), self.max_tokens, hidden, ids, weights)


class Found(NamedTuple):
    """A module of experts in a model."""

    name: str  # its path
    layer: int  # the number after "layers." in it
    module: nn.Module

    @property
    def has_gate(self) -> bool:
        return bool(getattr(self.module, "has_gate", True))

    @property
    def first_stack(self) -> Tensor:
        """gemm1's weights: gate_up_proj, or up_proj of experts without a gate."""
        stack: Tensor = self.module.gate_up_proj if self.has_gate else self.module.up_proj
        return stack

    @property
    def is_transposed(self) -> bool:
        """Whether its stacks are (E, K, N)."""
        return bool(getattr(self.module, "is_transposed", False))

    @property
    def is_concatenated(self) -> bool:
        """Whether all of gate comes before up, instead of alternating rows."""
        return bool(getattr(self.module, "is_concatenated", True))

    @property
    def has_biases(self) -> bool:
        """Whether gate, up and down have biases."""
        return bool(getattr(self.module, "has_bias", False))


def _is_called_alike(module: nn.Module) -> bool:
    """Returns whether a class without transformers' experts interface works like one with it (Step).

    It takes (hidden_states, top_k_index, top_k_weights), has the activation in _apply_gate, and two stacks without
    biases.
    """
    called = list(inspect.signature(module.forward).parameters) == ["hidden_states", "top_k_index", "top_k_weights"]
    return (
        called
        and hasattr(module, "_apply_gate")
        and {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}
    )


def find_experts(model: nn.Module) -> list[Found]:
    """Finds every module with stacked routed experts: 3-d gate_up_proj (without a gate up_proj) and down_proj.

    Raises Unsupported, with the path and the class, for a module that is not called like Nvfp4Experts, or that is not
    in a numbered layer.
    """
    found = []
    for name, module in model.named_modules():
        stacks = [getattr(module, stack, None) for stack in ("gate_up_proj", "up_proj", "down_proj")]
        if not any(isinstance(stack, nn.Parameter) and stack.dim() == 3 for stack in stacks):
            continue
        if name.rpartition(".")[2].startswith("shared"):  # Inkling's, each with its own weight for every token
            continue
        kind = f"{name} ({type(module).__name__})"
        alike = not hasattr(module, "has_gate") and _is_called_alike(module)  # use_experts_implementation sets has_gate
        if not alike and not hasattr(module, "has_gate"):
            raise _core.Unsupported(f"{kind}: expected experts of transformers' experts interface, which this is not")
        number = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if number is None:
            raise _core.Unsupported(f"{kind}: expected a path with layers.N, of which this has none")
        found.append(Found(name, int(number[1]), module))
    return found


# ---- activations: identified by running the module's own gate


def _probe(limit: float) -> tuple[Tensor, Tensor]:
    """Returns gate and up values, (S,) each, that reach well beyond a limit on both sides."""
    points = torch.linspace(-1, 1, 33, dtype=torch.float32, device="cpu") * max(24.0, 3 * limit)
    gate, up = torch.meshgrid(points, points, indexing="ij")
    return gate.flatten(), up.flatten()


Situ = tuple[float, float]  # the limits of gate and up


def _activated(gate: Tensor, up: Tensor, activation: str, limit: float, alpha: float, situ: Situ) -> Tensor:
    if activation in ("gelu", "gelu_tanh"):
        return nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
    if activation == "situ":
        of_gate, of_up = situ
        return of_gate * torch.tanh(gate / of_gate) * torch.sigmoid(gate) * of_up * torch.tanh(up / of_up)
    if activation == "swiglu":
        return gate * torch.sigmoid(gate) * up
    if activation == "swiglu_clamped":
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(gate) * up.clamp(-limit, limit)
    if activation == "swiglu_step":
        return (gate * torch.sigmoid(gate)).clamp(max=limit) * up.clamp(-limit, limit)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)


def computes(module: nn.Module, activation: str, limit: float | None, alpha: float, situ: Situ | None = None) -> bool:
    """Returns whether the module's gate, or act_fn without a gate, computes this activation, up to three times its
    limit.

    situ: Required by that activation. Two float32 implementations differ by at most 8 roundings of 2^-24: sigmoid 4, products and sum 4. swiglu_oai adds 1
    to up, which may cancel, so its error is relative to |gate| (|up| + 1). relu2 is one product.
    """
    gate, up = _probe(max(limit or 0.0, *(situ or (0.0,))))
    if getattr(module, "has_gate", True) == (activation == "relu2"):
        return False
    if activation == "relu2":
        with torch.no_grad():
            return bool(torch.allclose(module.act_fn(up), up.clamp(min=0) ** 2, rtol=2.0**-21, atol=0))
    with torch.no_grad():
        theirs = module._apply_gate(torch.stack([gate, up], -1)).flatten()
    ours = _activated(gate.double(), up.double(), activation, limit or 0.0, alpha, situ or (0.0, 0.0))
    scale = gate.abs() * (up.abs() + 1) + 2.0**-60
    return bool(((theirs.double() - ours).abs() <= 2.0**-21 * scale.double()).all())


def _number(names: tuple[str, ...], *holders: Any) -> float | None:
    """Returns the first attribute of these names that is a number."""
    values = [getattr(holder, name, None) for holder in holders for name in names]
    return next((float(value) for value in values if isinstance(value, (int, float))), None)


def _softcaps(module: nn.Module) -> Situ | None:
    """Returns the limits of an act_fn with a cap for gate and one for up, as Inkling-2 has them."""
    act_fn = getattr(module, "act_fn", None)
    caps = [_number(("softcap",), getattr(act_fn, f"{name}_softcap", None)) for name in ("gate", "up")]
    return None if caps[0] is None or caps[1] is None else (caps[0], caps[1])


def find_activation(found: Found, config: Any) -> dict[str, Any]:
    """Returns activation and its numbers for a module. Raises Unsupported with the class's name."""
    limit = _number(("limit", "swiglu_limit"), found.module, config)
    alpha = _number(("alpha", "swiglu_alpha"), found.module, config) or 1.702
    for activation in ("swiglu", "relu2", "gelu", "gelu_tanh"):
        if computes(found.module, activation, None, alpha):
            return {"activation": activation}
    if limit is not None:
        for activation in ("swiglu_clamped", "swiglu_step", "swiglu_oai"):
            if computes(found.module, activation, limit, alpha):
                slope = {"swiglu_alpha": alpha} if activation == "swiglu_oai" else {}
                return {"activation": activation, "swiglu_limit": limit} | slope
    situ = _softcaps(found.module)
    if situ is not None and computes(found.module, "situ", None, alpha, situ):
        return {"activation": "situ", "situ_gate_limit": situ[0], "situ_up_limit": situ[1]}
    gate = type(getattr(found.module, "act_fn", None)).__name__
    raise _core.Unsupported(
        f"{found.name} ({type(found.module).__name__}): expected SwiGLU plain, clamped, step or OAI, gelu, situ, or "
        f"relu2 without a gate, got another activation (act_fn {gate}, limit {limit})"
    )


def check_activation(found: Found, layer: Any) -> None:
    """Raises Unsupported if the model's class computes something other than the checkpoint's layer."""
    config = layer.config
    if config.expert_biases != found.has_biases:
        have, has = ("biases" if biased else "no biases" for biased in (config.expert_biases, found.has_biases))
        raise _core.Unsupported(
            f"{found.name} ({type(found.module).__name__}): the checkpoint's experts have {have}, and this class of "
            f"transformers has {has}"
        )
    situ = None if config.activation != "situ" else (config.situ_gate_limit, config.situ_up_limit)
    if not computes(found.module, config.activation, config.swiglu_limit, config.swiglu_alpha, situ):
        raise _core.Unsupported(
            f"{found.name} ({type(found.module).__name__}): the checkpoint's layer is {config.activation} (limit "
            f"{config.swiglu_limit}), which is not what this class of transformers computes"
        )
