"""The twin in float32 by transformers, and how far a run of an engine in bfloat16 may be from it.

The engine itself, run over the twin with the same weights, shows what bfloat16 can hold: the largest error (and root
mean square) of its log-probabilities, and of its routers' logits, against the truth. An NVFP4 model rounds activations
at the same places as the twin, so its choices may differ only at ties: if the truth holds two tokens, or the last
chosen expert and the first that is not, within twice that error, since each of the two may be off by it. After another
choice of experts everything is computed from other inputs, so the truth is computed again with that choice, and the
whole sequence is compared.

A run is a list by prompt of {"prompt", "tokens", "logprobs", "routers"}. logprobs are by position of prompt and tokens
but the last, {token: log-probability}. routers are by layer {"logits": (T, E), "experts": (T, top_k)}, empty if they
were not recorded.
"""

import dataclasses

import torch
import torch.nn.functional as F


class Truth:
    """of(sequence): log-probabilities (T, V), and router logits (T, E) by layer, in float32 or another dtype.

    With swaps {(layer, position): (chosen, other)}: the same, with the other expert computed instead of the chosen one.
    """

    def __init__(self, directory, dtype=torch.float32):
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self._known = {}

    def of(self, sequence, swaps=None):
        swaps = swaps or {}
        key = (tuple(sequence), tuple(sorted(swaps.items())))
        if key not in self._known:
            self._known[key] = self._compute(sequence, swaps)
        return self._known[key]

    def _compute(self, sequence, swaps):
        seen = []

        def route(gate, inputs, output):
            """Returns a gate's (logits, weights, experts) after the swaps of its layer."""
            logits = F.linear(inputs[0].reshape(-1, inputs[0].shape[-1]), gate.weight, getattr(gate, "bias", None))
            here = {position: pair for (layer, position), pair in swaps.items() if layer == len(seen)}
            seen.append(logits)
            if not here:
                return output
            said, _, experts = output
            experts = experts.clone()
            for position, (chosen, other) in here.items():
                assert (experts[position] == chosen).sum() == 1 and not (experts[position] == other).any()
                experts[position] = torch.where(experts[position] == chosen, other, experts[position])
            weights = torch.softmax(logits, -1).gather(-1, experts)
            return said, weights / weights.sum(-1, keepdim=True), experts

        blocks = [layer.mlp for layer in self._model.model.layers if hasattr(layer, "mlp")]
        gates = [getattr(block, "router", None) or block.gate for block in blocks]
        hooks = [gate.register_forward_hook(route) for gate in gates]
        with torch.no_grad():
            logits = self._model(torch.tensor([sequence])).logits[0]
        for hook in hooks:
            hook.remove()
        return torch.log_softmax(logits.double(), -1), seen


@dataclasses.dataclass
class Errors:
    """The largest errors of a run, the margins in the truth by which it took another token or expert, and the number of
    values compared."""

    logprob: float = 0.0
    squares: float = 0.0
    router: float = 0.0
    token_margins: list = dataclasses.field(default_factory=list)
    expert_margins: list = dataclasses.field(default_factory=list)
    values: int = 0
    tokens: int = 0
    decisions: int = 0

    @property
    def rms(self):
        return (self.squares / max(1, self.values)) ** 0.5

    def faults(self, yardstick):
        """Returns in words what exceeds twice the errors of the engine's bfloat16 twin, [] if nothing does."""
        worst_token, worst_expert = max(self.token_margins, default=0), max(self.expert_margins, default=0)
        checked = {
            f"rms {self.rms} of {yardstick.rms}": self.rms <= 2 * yardstick.rms,
            f"log-probability {self.logprob} of {yardstick.logprob}": self.logprob <= 2 * yardstick.logprob,
            f"router logit {self.router} of {yardstick.router}": self.router <= 2 * yardstick.router,
            f"token at a margin of {worst_token}": worst_token <= 2 * yardstick.logprob,
            f"expert at a margin of {worst_expert}": worst_expert <= 2 * yardstick.router,
            f"{self.values} values compared of {yardstick.values}": self.values > yardstick.values / 2,
        }
        return [words for words, good in checked.items() if not good]

    def __str__(self):
        return (
            f"{self.values} log-probabilities within {self.logprob:.4f}, rms {self.rms:.4f}, router logits within {self.router:.4f}; "
            f"of {self.tokens} tokens {len(self.token_margins)} others {self.token_margins}, of {self.decisions} "
            f"routings {len(self.expert_margins)} others {self.expert_margins}"
        )


def _other_choice(routers, logits, swaps):
    """Returns the first decision that is not the truth's with these swaps, or None: (layer, position, experts that only
    the truth chose, experts that only the run chose)."""
    for position in range(len(routers[0]["experts"])):
        for layer, (said, exact) in enumerate(zip(routers, logits, strict=True)):
            experts = set(said["experts"][position])
            expected = set(exact[position].argsort(descending=True)[: len(experts)].tolist())
            if (layer, position) in swaps:
                chosen, other = swaps[layer, position]
                expected = expected - {chosen} | {other}
            if experts != expected:
                return layer, position, expected - experts, experts - expected
    return None


def _follow(truth, sequence, routers, errors):
    """Returns the truth with the run's choices of experts: log-probabilities, router logits, and the number of
    positions up to which the choices could be followed. Adds the margins of choices that are not the truth's."""
    swaps = {}
    exact, logits = truth.of(sequence)
    while logits and (found := _other_choice(routers, logits, swaps)):
        layer, position, chosen, others = found
        of_experts = logits[layer][position]
        margin = max(of_experts[expert] for expert in chosen) - min(of_experts[expert] for expert in others)
        errors.expert_margins.append(float(margin))
        if len(chosen) > 1 or (layer, position) in swaps:  # Truth.of swaps one expert of a decision
            return exact, logits, position
        swaps[layer, position] = (*chosen, *others)
        exact, logits = truth.of(sequence, swaps)
    return exact, logits, len(sequence)


def measure(truth, run):
    """Returns the errors of a run with recorded routers."""
    errors = Errors()
    for result in run:
        sequence = result["prompt"] + result["tokens"][:-1]
        assert len(result["logprobs"]) == len(sequence)
        assert all(len(layer["experts"]) == len(sequence) for layer in result["routers"])
        # A model whose tokens go to all of its experts has no decisions to record.
        exact, logits, followed = _follow(truth, sequence, result["routers"], errors)
        for said, of_layer in zip(result["routers"] if logits else [], logits, strict=True):
            off = (of_layer[:followed] - torch.tensor(said["logits"])[:followed]).abs()
            errors.router = max([errors.router, *off.flatten().tolist()])
            errors.decisions += followed
        for position in range(followed):
            for token, value in result["logprobs"][position].items():
                error = abs(value - float(exact[position, int(token)]))
                errors.values += 1
                errors.squares += error**2
                errors.logprob = max(errors.logprob, error)
            step = position - len(result["prompt"]) + 1
            if step >= 0:
                errors.tokens += 1
                margin = float(exact[position].max() - exact[position, result["tokens"][step]])
                if margin > 0:
                    errors.token_margins.append(round(margin, 5))
    return errors


def measure_beside(exact, coarse, run):
    """Returns (Errors of a run, Errors of the same model in `coarse`, a Truth in bfloat16, over the run's own
    sequences). This is the yardstick if an engine cannot serve the twin. For models without router decisions."""
    twin = []
    for result in run:
        said = coarse.of(result["prompt"] + result["tokens"][:-1])[0]
        values = [{token: float(said[at, int(token)]) for token in step} for at, step in enumerate(result["logprobs"])]
        twin.append(result | {"logprobs": values})
    return measure(exact, run), measure(exact, twin)
