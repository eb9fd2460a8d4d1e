"""Decides whether ties of routers explain the differences of a run whose routers are not recorded (compiled models)."""

import dataclasses
import itertools


@dataclasses.dataclass
class Explained:
    """The outcome of explaining a run.

    largest: the largest error of a log-probability that no tie explains. values: the number of compared values.
    swapped: router decisions that were taken the other way, as (layer, position, margin in the truth).
    """

    largest: float = 0.0
    values: int = 0
    swapped: list = dataclasses.field(default_factory=list)


def _worst(exact, said, bound):
    """Returns the first position with an error above the bound (or None), and the largest error up to there."""
    largest = 0.0
    for position, values in enumerate(said):
        error = max(abs(value - float(exact[position, int(token)])) for token, value in values.items())
        largest = max(largest, error)
        if error > bound:
            return position, largest
    return None, largest


def _swaps_at_ties(logits, last, top_k, router_tie, swaps):
    """(swaps with one more, how) for each tie of a chosen expert and another in the router decisions up to a position.
    More than two experts may be at a tie."""
    for layer, of_layer in enumerate(logits):
        for position in range(last + 1):
            if (layer, position) in swaps:
                continue
            # Everything after a swap is computed from other inputs, so swaps found there may no longer fit: drop them.
            before = {at: swap for at, swap in swaps.items() if at[1] < position or at[0] < layer}
            values, experts = (found.tolist() for found in of_layer[position].sort(descending=True))
            for chosen, other in itertools.product(range(top_k), range(top_k, len(experts))):
                if (margin := values[chosen] - values[other]) <= router_tie:
                    swap = {(layer, position): (experts[chosen], experts[other])}
                    yield before | swap, (layer, position, round(margin, 5))


def explain(truth, run, top_k, bound, router_tie):
    """Explains errors above the bound by router ties.

    If a log-probability is further from the truth than the bound, the truth is computed again with one router decision
    at a tie, at that position or before it, taken the other way. The decision with which the run agrees longest is
    kept. Errors that no such decision explains stay in `largest`.
    """
    explained = Explained()
    for result in run:
        sequence, said = result["prompt"] + result["tokens"][:-1], result["logprobs"]
        assert len(said) == len(sequence)
        explained.values += sum(map(len, said))
        swaps = {}
        exact, logits = truth.of(sequence)
        wrong, largest = _worst(exact, said, bound)
        while wrong is not None:
            tried = [
                (*_worst(truth.of(sequence, more)[0], said, bound), more, how)
                for more, how in _swaps_at_ties(logits, wrong, top_k, router_tie, swaps)
            ]
            best = max(tried, key=lambda one: (len(said) if one[0] is None else one[0], -one[1]), default=None)
            if best is None or (best[0] is not None and best[0] <= wrong):
                break
            wrong, largest, swaps, how = best
            explained.swapped.append(how)
            logits = truth.of(sequence, swaps)[1]
        explained.largest = max(explained.largest, largest)
    return explained
