"""What a twin's model computes in float32, by transformers: the truth that engines in bfloat16 are measured against.

A greedy engine may choose another token, or another expert, only where the truth has a tie: a margin that bfloat16 cannot
hold. What bfloat16 can hold is measured on the stock engine over the twin: the largest error of its log-probabilities
(and router logits) against the truth. Each side of a comparison may be off by that much, so a margin below twice that
error is a tie.

After another choice of an expert, everything behind it in the sequence is computed from other inputs: comparisons end there.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch


class Truth:
    """A twin in float32. of(sequence) gives log-probabilities (T, V) and router logits [layer] (T, E)."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.gates = [layer.mlp.gate for layer in self.model.model.layers]
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def of(self, sequence: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        key = tuple(sequence)
        if key not in self._known:
            seen: list[torch.Tensor] = []
            hooks = [
                gate.register_forward_pre_hook(
                    lambda gate, inputs: seen.append(
                        torch.nn.functional.linear(inputs[0].reshape(-1, inputs[0].shape[-1]), gate.weight)
                    )
                )
                for gate in self.gates
            ]
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
