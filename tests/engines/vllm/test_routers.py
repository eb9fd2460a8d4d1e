"""select_experts against vLLM's own routers as they run on CPUs: a second oracle, next to transformers' (tests/python).

vLLM's compute in float32 too, so neither is the truth. float64 is, with the bounds that section 12 of
docs/explanation/numerics.md derives. Chosen experts must be the same if float64's margin is above the possible error of
both sides. A weight may differ by our bound plus theirs, which includes the roundings of a plain float32 sum of top_k
weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

import nvfp4_moe as nv  # noqa: E402
from router_bounds import (  # noqa: E402
    E24,
    has_tie,
    in_their_order,
    numbers,
    plain_bound,
    same_experts,
    weight_bound,
)

TOKENS = 400


def deepseek_v3(experts: int, top_k: int, groups: int, kept: int) -> nv.RouterConfig:
    options = {"group_score": "top2_sum", "correction_bias": True}
    return nv.RouterConfig(experts, top_k, "sigmoid", True, 1e-20, 2.5, groups, kept, **options)


# The sizes are those of published models.
ROUTERS = {
    "qwen3": nv.RouterConfig(128, 8, renormalize=True),
    "qwen2": nv.RouterConfig(60, 4, renormalize=False),
    "mixtral": nv.RouterConfig(8, 2, renormalize=True),
    "deepseek_v2": nv.RouterConfig(160, 6, routed_scaling_factor=16.0, num_expert_group=8, topk_group=3),
    "deepseek_v3": deepseek_v3(256, 8, 8, 4),
    "kimi_k2": deepseek_v3(384, 8, 1, 1),
    "glm4": deepseek_v3(128, 8, 1, 1),
}


def theirs(config: nv.RouterConfig, logits, bias, function: str):
    grouped = config.num_expert_group > 1 or config.scoring == "sigmoid"
    options = {
        "renormalize": config.renormalize,
        "num_expert_group": config.num_expert_group,
        "topk_group": config.topk_group,
        "scoring_func": config.scoring,
        "routed_scaling_factor": config.routed_scaling_factor,
        "e_score_correction_bias": bias,
    }
    if function == "select_experts":
        from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts

        return select_experts(logits, logits, top_k=config.top_k, use_grouped_topk=grouped, **options)
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import grouped_topk

    with torch.compiler.set_stance("force_eager"):
        return grouped_topk(logits, logits, config.top_k, **options)


CASES = [(name, "select_experts") for name in ROUTERS]
# grouped_topk multiplies by the score of each group. Without groups and bias it equals the plain router's softmax.
CASES += [(name, "grouped_topk") for name, r in ROUTERS.items() if r.num_expert_group > 1 or r.correction_bias]


@pytest.mark.parametrize(("name", "function"), CASES)
def test_chosen_experts_and_weights_are_vllm_s(name, function):
    config = ROUTERS[name]
    logits = numbers(TOKENS, config.num_experts, torch.float32, seed=len(name))
    bias = torch.randn(config.num_experts, generator=torch.Generator().manual_seed(2)) * 0.1
    bias = bias if config.correction_bias else None
    weights, ids = theirs(config, logits, bias, function)
    our_ids, our_weights = nv.select_experts(logits, config, correction_bias=bias)
    unclear = has_tie(config, logits, bias)
    same = same_experts(ids, our_ids)
    print(f"\n{name}, {function}: {int((~same).sum())} of {TOKENS} tokens differ, {int(unclear.sum())} have a tie")
    assert (same | unclear).all()
    assert int(unclear.sum()) < TOKENS / 4, "too many ties to say anything"
    ours = in_their_order(ids, our_ids, our_weights)
    off = ((weights.double() - ours).abs() > plain_bound(config, logits, ids, ours))[same]
    assert not off.any(), f"{int(off.sum())} weights beyond the bound"


@pytest.mark.parametrize("routing", ["bias", "hash"])
def test_deepseek_v4_s_router(routing):
    """vLLM's are AVX-512 kernels for the published models' sizes. log(1 + e^x) of float32 numbers is off by about 2^-24
    however small it is, and its root by up to the root of that, 2^-12. That is much of a small weight chosen by a hash
    table."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts

    experts, top_k, vocabulary = 256, 6, 512
    is_hash = routing == "hash"
    options = {"correction_bias": not is_hash, "hash_routing": is_hash}
    config = nv.RouterConfig(experts, top_k, "sqrt_softplus", True, 1e-20, 1.5, **options)
    random = torch.Generator().manual_seed(3)
    logits = numbers(TOKENS, experts, torch.float32, seed=9)
    bias = None if is_hash else torch.randn(experts, generator=random) * 0.1
    tokens = torch.randint(0, vocabulary, (TOKENS,), generator=random)
    table = torch.rand(vocabulary, experts, generator=random).argsort(-1)[:, :top_k].int().contiguous()
    named = {"token_ids": tokens, "hash_table": table} if is_hash else {"correction_bias": bias}
    try:
        weights, ids = select_experts(
            logits,
            logits,
            top_k=top_k,
            use_grouped_topk=False,
            renormalize=True,
            scoring_func="sqrtsoftplus",
            routed_scaling_factor=1.5,
            e_score_correction_bias=bias,
            input_ids=tokens if is_hash else None,
            hash_indices_table=table if is_hash else None,
        )
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"vLLM's kernel is not to be had on this CPU: {error}")
    our_ids, our_weights = nv.select_experts(logits, config, **named)
    score = torch.nn.functional.softplus(logits.double(), threshold=700).sqrt()
    if is_hash:
        assert torch.equal(ids.sort(-1).values, our_ids.sort(-1).values)
        same = torch.ones(TOKENS, dtype=torch.bool)
    else:
        best = (score + bias.double()).topk(top_k + 1, dim=-1).values
        same = same_experts(ids, our_ids)
        margins = (best[:, -2] - best[:, -1])[~same]
        print(f"\nbias: {int((~same).sum())} of {TOKENS} tokens differ, margins {margins.tolist()}")
        assert (margins <= 2 * (2.0**-12 + E24)).all()
    chosen = score.gather(1, ids.long())
    truth = chosen / chosen.sum(-1, keepdim=True) * 1.5
    allowed = 1.5 * (top_k + 1) * 2.0**-12 / chosen.sum(-1, keepdim=True)
    error = ((weights.double() - truth).abs() / allowed)[same]
    print(f"\n{routing}: largest error of vLLM's weights {float(error.max()):.2e} of what float32 allows")
    assert (error <= 1).all(), "vLLM's kernel computes something else"
    ours = in_their_order(ids, our_ids, our_weights)
    assert ((ours - truth).abs() <= weight_bound(config, logits, ids, truth))[same].all()
