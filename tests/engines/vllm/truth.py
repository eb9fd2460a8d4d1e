"""What a twin's model computes in float32, by transformers: the truth that engines in bfloat16 are measured against.

A greedy engine may choose another token, or another expert, only where the truth has a tie: a margin that bfloat16 cannot
hold. What bfloat16 can hold is measured on the stock engine over the twin: the largest error of its log-probabilities
(and router logits) against the truth. Each side of a comparison may be off by that much, so a margin below twice that
error is a tie.

After another choice of an expert, everything behind it in the sequence is computed from other inputs: comparisons end there,
or go on with the truth of that choice, where the routers of an engine cannot be recorded (explain).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

# An expert that is computed in place of another: at a layer and a token.
Swaps = dict[tuple[int, int], tuple[int, int]]


class Truth:
    """A twin in float32. of(sequence) gives log-probabilities (T, V) and router logits [layer] (T, E)."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.gates = [layer.mlp.gate for layer in self.model.model.layers]
        self._known: dict[tuple[Any, ...], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def of(self, sequence: list[int], swaps: Swaps | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """With swaps {(layer, token): (chosen, other)}: what follows when the other expert is computed there."""
        swaps = swaps or {}
        key = (tuple(sequence), tuple(sorted(swaps.items())))
        if key not in self._known:
            seen: list[torch.Tensor] = []

            def route(gate: Any, inputs: Any, output: Any) -> Any:
                """The gate's (logits, weights, ids) of its tokens, with the swaps of its layer in."""
                logits = torch.nn.functional.linear(inputs[0].reshape(-1, inputs[0].shape[-1]), gate.weight)
                here = {token: pair for (layer, token), pair in swaps.items() if layer == len(seen)}
                seen.append(logits)
                if not here:
                    return output
                said, _, ids = output
                ids = ids.clone()
                for token, (chosen, other) in here.items():
                    assert (ids[token] == chosen).sum() == 1 and not (ids[token] == other).any()
                    ids[token] = torch.where(ids[token] == chosen, other, ids[token])
                probabilities = torch.softmax(logits, -1).gather(-1, ids)
                return said, probabilities / probabilities.sum(-1, keepdim=True), ids

            hooks = [gate.register_forward_hook(route) for gate in self.gates]
            with torch.no_grad():
                logits = self.model(torch.tensor([sequence])).logits[0]
            for hook in hooks:
                hook.remove()
            self._known[key] = torch.log_softmax(logits.double(), -1), seen
        return self._known[key]


@dataclasses.dataclass
class Errors:
    """Largest errors against the truth, and their mean squares; what was compared, and where a flip ended it."""

    logprob: float = 0.0
    router: float = 0.0
    squares: float = 0.0
    compared: int = 0
    routed: int = 0
    flips: list[float] = dataclasses.field(default_factory=list)  # margins in the truth

    @property
    def rms(self) -> float:
        return (self.squares / max(1, self.compared)) ** 0.5


def _experts(ids: list[int]) -> frozenset[int]:
    return frozenset(ids)


def _first_flip(result: dict[str, Any], logits: list[torch.Tensor], errors: Errors) -> int:
    """The first token that other experts than the truth's compute in some layer; its length where there is none."""
    tokens = min(len(layer["ids"]) for layer in result["routers"].values())
    for token in range(tokens):
        for layer, said in zip(logits, result["routers"].values(), strict=True):
            errors.routed += 1
            top_k = len(said["ids"][token])
            best = torch.topk(layer[token], top_k + 1)
            if _experts(said["ids"][token]) != _experts(best.indices[:top_k].tolist()):
                chosen = torch.tensor(sorted(_experts(said["ids"][token])))
                errors.flips.append(float(best.values[top_k - 1] - layer[token][chosen].min()))
                return token
            errors.router = max(errors.router, float((layer[token] - torch.tensor(said["logits"][token])).abs().max()))
    return tokens


def measure(truth: Truth, run: list[dict[str, Any]]) -> tuple[Errors, list[float]]:
    """The errors of a run with routers recorded, up to the first flip of each sequence; and the margins in the truth, 0 or
    more, by which it chose each token up to there that is not the truth's."""
    errors, margins = Errors(), []
    for result in run:
        prompt, tokens = result["prompt"], result["tokens"]
        logprobs, logits = truth.of(prompt + tokens[:-1])
        equal = _first_flip(result, logits, errors)
        steps = [(i - 1, step) for i, step in enumerate(result["prompt_logprobs"]) if step is not None]
        steps += [(len(prompt) - 1 + i, step) for i, step in enumerate(result["logprobs"])]
        for position, step in steps:
            if position >= equal:
                continue
            for token, value in step.items():
                error = abs(value - float(logprobs[position, int(token)]))
                errors.logprob = max(errors.logprob, error)
                errors.squares += error**2
                errors.compared += 1
        for i, token in enumerate(tokens):
            position = len(prompt) - 1 + i
            if position < equal and (margin := float(logprobs[position].max() - logprobs[position, token])) > 0:
                margins.append(margin)
    return errors, margins


@dataclasses.dataclass
class Explained:
    """What is left of a run's distance from the truth when routers may decide ties either way."""

    largest: float = 0.0  # error of a log-probability that no tie explains
    compared: int = 0
    swapped: list[tuple[int, int, float]] = dataclasses.field(default_factory=list)  # layer, token, margin


def _worst(logprobs: torch.Tensor, steps: list[tuple[int, dict[str, float]]], bound: float) -> tuple[int | None, float]:
    """The first position with an error above the bound (None: no such), and the largest error up to there, or anywhere."""
    largest = 0.0
    for position, step in steps:
        error = max(abs(value - float(logprobs[position, int(token)])) for token, value in step.items())
        largest = max(largest, error)
        if error > bound:
            return position, largest
    return None, largest


def explain(truth: Truth, run: list[dict[str, Any]], top_k: int, bound: float, router_tie: float) -> Explained:
    """A run whose routers are not recorded. Where a log-probability is further from the truth than the bound, the truth is
    computed anew with one router decision at a tie, at that token or before it, taken the other way: the one that lets the
    run agree the furthest. What no such decision explains stays in `largest`."""
    explained = Explained()
    for result in run:
        sequence, length = result["prompt"] + result["tokens"][:-1], len(result["prompt"])
        steps = [(i - 1, step) for i, step in enumerate(result["prompt_logprobs"]) if step is not None]
        steps += [(length - 1 + i, step) for i, step in enumerate(result["logprobs"])]
        explained.compared += sum(len(step) for _, step in steps)
        swaps: Swaps = {}
        logprobs, logits = truth.of(sequence, swaps)
        wrong, largest = _worst(logprobs, steps, bound)
        while wrong is not None:
            best = None
            for layer, of_layer in enumerate(logits):
                for token in range(wrong + 1):
                    near = torch.topk(of_layer[token], top_k + 1)
                    margin = float(near.values[top_k - 1] - near.values[top_k])
                    if (layer, token) in swaps or margin > router_tie:
                        continue
                    pair = (int(near.indices[top_k - 1]), int(near.indices[top_k]))
                    tried = swaps | {(layer, token): pair}
                    # What is behind a swap is computed from other inputs: later swaps that no longer fit are dropped.
                    tried = {
                        at: swap for at, swap in tried.items() if at[1] < token or at[0] < layer or at == (layer, token)
                    }
                    then, largest_then = _worst(truth.of(sequence, tried)[0], steps, bound)
                    rank = (len(sequence) if then is None else then, -largest_then)
                    if best is None or rank > best[0]:
                        best = (rank, tried, then, largest_then, (layer, token, margin))
            if best is None or best[0][0] <= wrong:
                break
            _, swaps, wrong, largest, how = best
            explained.swapped.append(how)
            logits = truth.of(sequence, swaps)[1]
        explained.largest = max(explained.largest, largest)
    return explained
