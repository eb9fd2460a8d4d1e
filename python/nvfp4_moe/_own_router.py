"""Selects experts in place of an engine's router. Shared by the engines' adapters; imports no engine. Needs torch.

An adapter translates an engine's router to a RouterConfig. If the adapter or the library does not know the router,
LeftToEngine gives the reason, and the engine selects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import torch_op  # noqa: F401  defines the operators
from .router import RouterConfig

_SCORING = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}  # engines' name -> ours
# As in the engines' code for groups. Some of their kernels divide by 1 instead if the sum is 0.
_EPSILON = 1e-20


class LeftToEngine(Exception):
    """The reason why the engine selects a layer's experts."""


@contextlib.contextmanager
def naming_router(name: str) -> Iterator[None]:
    """Turns an error that odd values of a router cause into LeftToEngine, with the router's name."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        raise LeftToEngine(f"{name}: {error}") from None


def score_options(name: str, scoring_func: Any, renormalize: Any) -> dict[str, Any]:
    """Returns the fields of RouterConfig for an engine's scores. name is the router's, for messages."""
    scoring = _SCORING.get(scoring_func)
    if scoring is None:
        raise LeftToEngine(f"{name} has scores by {scoring_func}")
    options: dict[str, Any] = {"scoring": scoring, "renormalize": bool(renormalize)}
    if renormalize and scoring != "softmax":
        options["renormalize_epsilon"] = _EPSILON
    return options


def group_options(name: str, experts: Any, groups: Any, kept: Any, biased: bool) -> dict[str, Any]:
    """Returns the fields of RouterConfig for an engine's groups. A bias also changes how engines score groups."""
    experts, groups = int(experts), int(groups)
    # For other groups some engines ignore them, and some options too.
    if groups < 1 or experts <= groups or experts % groups != 0:
        raise LeftToEngine(f"{name} has {groups} groups of {experts} experts")
    score = "top2_sum" if biased else "max"
    return {"num_expert_group": groups, "topk_group": int(kept), "group_score": score}


def check_bias(name: str, bias: Any, num_experts: int, device_type: str) -> None:
    """Checks that the operator takes a router's bias. name is the bias', for messages."""
    if not (
        isinstance(bias, Tensor)
        and bias.dtype == torch.float32
        and tuple(bias.shape) == (num_experts,)
        and bias.is_contiguous()
        and bias.device.type == device_type
    ):
        raise LeftToEngine(f"{name}: expected contiguous float32 ({num_experts},) on {device_type}")


def select(logits: Tensor, router: RouterConfig, correction_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes topk_ids int32 and topk_weights float32, both (T, top_k), from logits (T, num_experts).

    correction_bias: float32 (num_experts,), if the router has one.
    """
    ids, weights = torch.ops.nvfp4_moe.select_experts(
        logits.contiguous(),
        router.top_k,
        router.scoring,
        router.renormalize,
        router.renormalize_epsilon,
        router.routed_scaling_factor,
        router.num_expert_group,
        router.topk_group,
        router.group_score,
        correction_bias,
    )
    return ids, weights
