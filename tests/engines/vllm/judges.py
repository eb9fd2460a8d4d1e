"""What a served run has to be: as near to the truth of its model (../common/truth.py) as the stock engine's run of the twin."""

from __future__ import annotations


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def ok(result: dict) -> dict:
    assert result["error"] is None, result["error"]
    return result


def judge(truth_of_model, twin_run, run, what: str) -> None:
    """A run against the truth: no further from it than twice what the stock engine is on the twin."""
    import truth

    twin, ours = truth.measure(truth_of_model, twin_run), truth.measure(truth_of_model, run)
    print(f"\n{what}: {ours}\ntwin: {twin}")
    assert twin.values > 50, "the twin itself leaves the truth at once: there is nothing to compare"
    assert ours.faults(twin) == []


def judge_without_routers(truth_of_model, twin_run, run, what: str) -> None:
    """A run whose routers were not recorded: what is further off than the stock engine over the twin, whose routers were,
    must be what follows from a router's tie decided the other way, and nothing else."""
    from explain import explain
    from models import TOP_K
    from truth import measure

    stock = measure(truth_of_model, twin_run)
    bound, router_tie = 2 * stock.logprob, 2 * stock.router
    explained = explain(truth_of_model, run, TOP_K, bound, router_tie)
    print(f"\n{what}: {explained}, bound {bound:.5f}, a router's tie below {router_tie:.5f}")
    assert explained.values > 100
    assert explained.largest <= bound
