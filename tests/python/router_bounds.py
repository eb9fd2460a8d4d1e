"""Bounds of a router's scores and weights in float64 (docs/explanation/numerics.md, section 12), and test logits."""

from __future__ import annotations

import math

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")

E24 = 2.0**-24


def selection_scores(config: nv.RouterConfig, logits, bias):
    """Selection scores in float64, and the possible error of float32's (docs/explanation/numerics.md, section 12)."""
    x = logits.double()
    groups_by_sum = config.num_expert_group > 1 and config.group_score == "top2_sum"
    if not (config.correction_bias or groups_by_sum):
        return x, torch.zeros_like(x)
    score = {
        "softmax": lambda: x.softmax(-1),
        "sigmoid": lambda: x.sigmoid(),
        "sqrt_softplus": lambda: torch.nn.functional.softplus(x, threshold=700).sqrt(),
    }[config.scoring]()
    biased = score + (bias.double() if config.correction_bias else 0.0)
    return biased, (relative_error(config, x) + 1) * E24 * score + E24 * biased.abs()


def relative_error(config: nv.RouterConfig, x):
    """The relative error of a score, in units of 2^-24."""
    if config.scoring == "softmax":
        return (x.amax(-1, keepdim=True) - x) + math.log(x.shape[-1]) + 4
    return torch.full_like(x, 3.01 if config.scoring == "sigmoid" else 1.51)


def masked_by_groups(config: nv.RouterConfig, scores, error):
    """Scores with -inf for experts of excluded groups, and the tokens whose groups' margin is too small to decide."""
    unclear = torch.zeros(scores.shape[0], dtype=torch.bool)
    groups, kept = config.num_expert_group, config.topk_group
    if groups == kept:
        return scores, unclear
    grouped = scores.view(scores.shape[0], groups, -1)
    top = grouped.topk(1 if config.group_score == "max" else 2, dim=-1).values.sum(-1)
    order = top.topk(kept + 1, dim=-1)
    largest_error = 3 * error.amax(-1) + E24 * top.abs().amax(-1)
    unclear = order.values[:, kept - 1] - order.values[:, kept] <= 2 * largest_error
    mask = torch.zeros_like(top, dtype=torch.bool).scatter(1, order.indices[:, :kept], True)
    return torch.where(mask[:, :, None], grouped, -math.inf).flatten(1), unclear


def weight_bound(config: nv.RouterConfig, logits, ids, expected, expert_scale=None):
    """The difference that docs/explanation/numerics.md, section 12 allows between a weight and its real number."""
    factor = config.routed_scaling_factor * (1.0 if expert_scale is None else expert_scale[ids.long()].double().abs())
    x = logits.double()
    chosen = x.gather(1, ids.long())
    if config.scoring == "softmax":
        among = chosen if config.renormalize else x
        units = (among.amax(-1, keepdim=True) - chosen) + math.log(among.shape[-1]) + 4
    else:
        units = (2 if config.renormalize else 1) * (3.01 if config.scoring == "sigmoid" else 1.51) + 1.01
    return expected.abs() * units * E24 + factor * 2.0**-148 + 2.0**-150


def has_tie(config: nv.RouterConfig, logits, bias):
    """bool (T,): float32's error may decide which experts a token gets."""
    scores, error = selection_scores(config, logits, bias)
    masked, unclear = masked_by_groups(config, scores, 2 * error)
    best = masked.topk(config.top_k + 1, dim=-1)
    # Two scores that are equal in float32 are one number to plain float32 code.
    apart = 2 * (error.amax(-1) + 4 * E24 * scores.abs().amax(-1) + 8 * E24)
    return unclear | ((best.values[:, -2] - best.values[:, -1]) <= apart)


def plain_bound(config: nv.RouterConfig, logits, ids, expected):
    """The allowed difference between our weights and those of plain float32 code: the bounds of both."""
    units = 2.0 * (config.top_k + 2)
    if config.scoring == "softmax":  # exp(x - log Z) rounds its operands; ours are differences
        units = units + 2 * logits.double().abs().amax(-1, keepdim=True)
    return 2 * weight_bound(config, logits, ids, expected) + units * E24 * expected.abs()


def same_experts(ids, our_ids):
    """bool (T,): whether a token has the same experts in some order."""
    return torch.tensor([set(a) == set(b) for a, b in zip(ids.tolist(), our_ids.tolist(), strict=True)])


def in_their_order(ids, our_ids, our_weights):
    """Our weights, float64, in the order of the engine's ids."""
    return our_weights.gather(1, (ids[:, :, None] == our_ids[:, None, :]).int().argmax(-1)).double()


def numbers(tokens: int, experts: int, dtype, seed: int):
    g = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-2, 5, (tokens, 1), generator=g).float())
    return (torch.randn(tokens, experts, generator=g) * spread).to(dtype)
