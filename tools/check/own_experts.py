"""Checks this library's layers against a model's own experts in float64, with equal router decisions.

twin_of: the model's experts with the weights that the library loaded, after checking them against the original weights.
bound: how far an output of W4A16 may be from theirs, element by element.
batches: the inputs that a model's own routers send to its experts.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import moe_classes
import torch
from moe_classes import Experts
from torch import Tensor, nn

TOKENS = 22


class Judged(AssertionError):
    """Raised for a class whose results differ from the model's. It never becomes a row of the table."""


class Batch(NamedTuple):
    hidden: Tensor  # (T, hidden), numbers of bf16
    ids: Tensor  # (T, top_k)
    weights: Tensor  # (T, top_k) fp32


# ---- the model's own experts


def _standard(module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return module(hidden, ids, weights).reshape(hidden.shape)


def _llama4(module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Calls a module in which every expert computes every token, times its router weight (0 if it is not selected)."""
    scores = torch.zeros(len(hidden), module.num_experts, dtype=hidden.dtype).scatter(1, ids.long(), weights)
    return module((scores.T.unsqueeze(-1) * hidden).reshape(-1, hidden.shape[1])).reshape(-1, *hidden.shape).sum(0)


def _aria(module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Calls a module with router logits; their softmax over the selected experts gives the weights."""
    logits = torch.full((len(hidden), module.config.moe_num_experts), -1e9, dtype=hidden.dtype)
    module.config.moe_topk = ids.shape[1]
    return module(hidden, logits.scatter(1, ids.long(), weights.log()))


CALLS: dict[str, Callable[..., Tensor]] = {"Llama4TextExperts": _llama4, "AriaExperts": _aria}


def own_call(module: nn.Module) -> Callable[..., Tensor] | None:
    """Returns the call of a class with another interface than the usual one, which a newer transformers may give it."""
    usual = "top_k_weights" in inspect.signature(module.forward).parameters
    return None if usual else CALLS.get(type(module).__name__)


def call(module: nn.Module, batch: Batch) -> Tensor:
    """Computes the routed experts' sum in the module's dtype."""
    dtype = next(module.parameters()).dtype
    run = own_call(module) or _standard
    with torch.no_grad():
        return run(module, batch.hidden.to(dtype), batch.ids, batch.weights.to(dtype))


def stacks(module: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns views of a module's parameters: gate (E, I, H), or (E, 0, H) without one, up (E, I, H), down (E, H, I),
    and
    down's bias (E, H) or None."""
    named = dict(module.named_parameters())
    gate_up = next(named[name] for name in ("gate_up_proj", "fc1.weight", "up_proj") if name in named)
    down = named["down_proj"] if "down_proj" in named else named["fc2.weight"]
    gate_up = gate_up.data[: len(down)]
    down = down.data
    if gate_up.shape[2] != moe_classes.HIDDEN:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if "up_proj" in named:
        return gate_up[:, :0], gate_up, down, named.get("down_proj_bias")
    alternate = not getattr(module, "is_concatenated", True)
    gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if alternate else gate_up.chunk(2, 1)
    return gate, up, down, named.get("down_proj_bias")


def decoded(matrix: dict[str, Any]) -> Tensor:
    """Dequantizes a matrix, as the library loads it, to (rows, K) float64, by the format's definition."""
    import moe_reference as oracle

    codes, scales = (torch.as_tensor(matrix[part])[None] for part in ("codes", "scales"))
    return oracle.decode((codes, scales), 0) * float(matrix["tensor_scale"])


def check_weights(original: Tensor, found: Tensor, what: str) -> None:
    """Checks the error of nearest codes with a block scale that E4M3 rounds by at most 1/16: (1 + 1/16) / 6 of the
    block's
    largest value."""
    error = (found - original.double()).abs().unflatten(-1, (-1, 16))
    largest = original.double().abs().unflatten(-1, (-1, 16)).amax(-1, keepdim=True)
    if not bool((error <= largest * (17 / 96) * (1 + 2.0**-20)).all()):
        raise Judged(f"{what}: not the model's own weights")


def twin_of(module: nn.Module, expert: Callable[[int], dict[str, Any]], what: str) -> nn.Module:
    """Copies the module to float64 with the library's weights, after checking each of them against the original."""
    twin = copy.deepcopy(module).double()
    if hasattr(twin, "config"):
        twin.config = copy.deepcopy(module.config)
        twin.config._experts_implementation = "eager"
    for e, (originals, places) in enumerate(
        zip(zip(*stacks(module)[:3], strict=True), zip(*stacks(twin)[:3], strict=True), strict=True)
    ):
        loaded = expert(e)
        for name, original, place in zip(("gate", "up", "down"), originals, places, strict=True):
            if original.numel() == 0:
                continue
            weights = decoded(loaded[name])
            check_weights(original, weights, f"{what} expert {e} {name}")
            place.copy_(weights)
    return twin


# ---- the bound


def bound(twin: nn.Module, batch: Batch) -> Tensor:
    """Returns (T, hidden): how far an output may be from float64 if h is rounded to bf16 and sums are fp32.

    Let f = (K/16 + 1) 2^-22 for one GEMM element (docs/explanation/numerics.md, section 7), and S the sum of
    |x| |W| of gate or up. Then g and u are off by f S. silu, the clamped variants and situ have a slope of at
    most 1.1, gelu one of 1.13, and all are below their argument in magnitude. OAI adds 1 to u. So h is off by
    at most 2.2 f S_gate (S_up + 1); relu(u)^2 without a gate by 2 sqrt(h) f S_up + (f S_up)^2. Rounding to 8
    bits adds 2^-8 of |h|, the activation 2^-20. Row n of down then multiplies each error of |h| by |D|, and its
    own sum adds f. h is computed by the module, with the identity as the down projection.
    """
    gate, up, down, _ = stacks(twin)
    hidden, inter = down.shape[1:]
    probe = copy.deepcopy(twin)
    stacks(probe)[2].copy_(torch.eye(hidden, inter, dtype=torch.float64).expand_as(down))
    for name, parameter in probe.named_parameters():
        if name == "down_proj_bias":
            parameter.data.zero_()
    one, two = ((k / 16 + 1) * 2.0**-22 for k in (hidden, inter))
    x = batch.hidden.double()
    on_input = type(twin).__name__ == "Llama4TextExperts"
    total = torch.zeros_like(x)
    for k in range(batch.ids.shape[1]):
        ids, weights = batch.ids[:, k], batch.weights[:, k : k + 1].double().abs()
        single = Batch(
            batch.hidden,
            ids[:, None],
            batch.weights[:, k : k + 1] if on_input else torch.ones_like(batch.weights[:, :1]),
        )
        if (
            own_call(twin) is None
        ):  # for a single expert some classes return a vector; a second expert of weight 0 adds nothing
            single = Batch(batch.hidden, ids[:, None].expand(-1, 2), torch.tensor([1.0, 0.0]).expand(len(ids), 2))
        h = call(probe, single)[:, :inter].abs()
        biases = dict(twin.named_parameters()).get("gate_up_proj_bias")
        largest = 0.0 if biases is None else float(biases.detach().abs().max())
        sums = [(x.abs().unsqueeze(1) * w[ids].abs()).sum(-1) + largest for w in (gate, up)]
        d = down[ids].abs()
        gated = (
            2.2 * one * sums[0] * (sums[1] + 1)
            if gate.shape[1]
            else 2 * h.sqrt() * one * sums[1] + (one * sums[1]) ** 2
        )
        off = h * (2.0**-8 + 2.0**-20) + gated
        row = (d * off.unsqueeze(1)).sum(-1) + (two + 2.0**-22) * ((d * h.unsqueeze(1)).sum(-1) + largest)
        total += row if on_input else row * weights
    return total * (1 + 2.0**-8) + 2.0**-100


def check_output(got: Tensor, twin: nn.Module, batch: Batch, what: str) -> None:
    want, allowed = call(twin, batch), bound(twin, batch)
    wrong = ~((got.double() - want).abs() <= allowed)
    if wrong.any() or not float(want.std()) > 0:
        raise Judged(f"{what}: {int(wrong.sum())} of {wrong.numel()} outputs are not the model's own")


# ---- inputs that a model's routers sent to its experts


def batches(model: nn.Module, found: list[Experts]) -> dict[str, Batch]:
    """Records the batches, by path, of one run of the model. For a module with its own call: random batches whose
    products
    are bf16 numbers."""
    seen: dict[str, Batch] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            given = [*inputs, *kwargs.values()]
            hidden = given[0].reshape(-1, given[0].shape[-1]).to(torch.bfloat16).float()
            if own_call(module) is None:
                seen[path] = Batch(hidden, given[1], given[2].float())
                return
            generator = torch.Generator().manual_seed(3)
            scores = torch.rand(TOKENS, moe_classes.EXPERTS, generator=generator)
            top_k = 1 if own_call(module) is _llama4 else moe_classes.TOP_K
            ids = scores.topk(top_k).indices
            weights = torch.full((TOKENS, top_k), 1 / 2 if top_k > 1 else 1 / 4)
            seen[path] = Batch(hidden[:TOKENS], ids, weights)

        return hook

    hooks = [one.module.register_forward_pre_hook(keep(one.path), with_kwargs=True) for one in found]
    tokens = torch.arange(3, 3 + TOKENS).reshape(2, TOKENS // 2) * 7 % 150 + 3
    try:
        with torch.no_grad():
            # 5.24's Llama-4 with images fails without them
            part = "language_model" if type(model).__name__ == "Llama4ForConditionalGeneration" else "thinker"
            getattr(model, part, model)(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def routed(batch: Batch, experts: int) -> Batch:
    """Replaces assignments to identity experts, which the model computes itself, by weight 0 in any expert."""
    mine = batch.ids < experts
    return Batch(batch.hidden, batch.ids.where(mine, 0), batch.weights.where(mine, 0))
