"""A model's stack of layers as one CUDA graph, replayed with other contents: deepseek-v4-pro's shape on one rank of
eight.

61 layers, 48 local of 384 experts, top-6, hidden 7168, intermediate 3072; each layer's output is added to the residual
stream that the next one reads. Memory holds a few layers' weights, which the stack uses in turn.

Needs torch with CUDA and a GPU with room for the weights: skipped by name elsewhere.
"""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv
import pytest
from gpu import captured as captured_in_a_graph
from gpu import torch, why_not

LAYERS, EXPERTS, LOCAL, FIRST, TOP_K = 61, 384, 48, 96, 6
HIDDEN, INTER = 7168, 3072
LAYER_BYTES = LOCAL * 3 * HIDDEN * INTER * 9 // 16


def reason(layers: int) -> str:
    if why_not():
        return why_not()
    free, wanted = torch.cuda.mem_get_info()[0], int(1.1 * layers * LAYER_BYTES)
    return "" if free >= wanted else f"{layers} layers take {wanted} bytes, the GPU has {free} free"


def stacked(random: np.random.Generator, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Experts as overlapping windows of one array: they differ, and take hardly more memory than one."""

    def windows(low: int, high: int, width: int) -> np.ndarray:
        step = 48  # bytes from one expert's first to the next one's
        flat = random.integers(low, high, rows * width + LOCAL * step, dtype=np.uint8)
        return np.lib.stride_tricks.as_strided(flat, (LOCAL, rows, width), (step, width, 1), writeable=False)

    codes, scales = windows(0, 256, cols // 2), windows(0x58, 0x7E, cols // 16)
    return codes, scales, (random.uniform(0.75, 1.25, LOCAL) / (800 * cols**0.5)).astype(np.float32)


def make_layer(seed: int, activation_format: str, backend: str, max_tokens: int) -> nv.MoeLayer:
    random = np.random.default_rng(seed)
    options = {"activation": "swiglu_clamped", "swiglu_limit": 10.0, "activation_format": activation_format}
    sizes = {"gate": (INTER, HIDDEN), "up": (INTER, HIDDEN), "down": (HIDDEN, INTER)}
    return nv.MoeLayer.from_tensors(
        nv.MoeConfig(EXPERTS, TOP_K, HIDDEN, INTER, **options),
        **{name: stacked(random, *size) for name, size in sizes.items()},
        first_expert=FIRST,
        max_tokens=max_tokens,
        device="cuda:0",
        backend=backend,
    )


class Inputs:
    """Inputs of one step of the model, in the memory that the graph has captured. `draw` fills them again."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.random = torch.Generator("cuda").manual_seed(7)
        self.stream = torch.empty(tokens, HIDDEN, device="cuda")
        self.ids = torch.empty(LAYERS, tokens, TOP_K, dtype=torch.int32, device="cuda")
        self.router = torch.empty(LAYERS, tokens, TOP_K, device="cuda")

    def draw(self, step: int) -> int:
        """Draws other hidden states, routing, router weights and number of real tokens. Returns that number."""
        self.stream.normal_(generator=self.random)
        wanted = torch.rand(LAYERS, self.tokens, EXPERTS, device="cuda", generator=self.random)
        # From all ranks' experts equally, over mostly this rank's, to few of them.
        wanted[..., FIRST : FIRST + LOCAL] += 0.3 * (step % 4)
        if step % 5 == 4:
            wanted[..., FIRST : FIRST + TOP_K] += 2
        self.ids.copy_(wanted.topk(TOP_K).indices)
        self.router.uniform_(generator=self.random)
        real = 1 + step % self.tokens
        self.ids[:, real:] = -1
        return real


def forward(layers: list[nv.MoeLayer], inputs: Inputs, outs: torch.Tensor) -> torch.Tensor:
    """Returns the residual stream after the last layer. outs (LAYERS, tokens, HIDDEN) gets each layer's output."""
    stream = inputs.stream
    for i in range(LAYERS):
        hidden = torch.nn.functional.rms_norm(stream, (HIDDEN,)).bfloat16()
        layers[i % len(layers)].run(hidden, inputs.ids[i], inputs.router[i], out=outs[i])
        stream = stream + outs[i]
    return stream


@pytest.mark.parametrize(
    ("backend", "activation_format", "distinct", "tokens", "replays"),
    [("auto", "nvfp4", 2, 2, 1000), ("auto", "bf16", 1, 64, 20), ("cuda", "nvfp4", 1, 8, 10)],
)
def test_a_captured_stack_replays_as_it_runs(
    backend: str, activation_format: str, distinct: int, tokens: int, replays: int, record_property
) -> None:
    if reason(distinct):
        pytest.skip(reason(distinct))
    layers = [make_layer(seed, activation_format, backend, tokens) for seed in range(distinct)]
    record_property("backend", layers[0].describe()["backend"])
    inputs = Inputs(tokens)
    captured, eager = (torch.empty(LAYERS, tokens, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    inputs.draw(0)
    forward(layers, inputs, eager)
    graph, last = captured_in_a_graph(lambda: forward(layers, inputs, captured))

    seen = set()
    for step in range(replays):
        real = inputs.draw(step)
        captured.fill_(float("nan"))
        graph.replay()
        expected = forward(layers, inputs, eager)
        assert torch.equal(captured, eager) and torch.equal(last, expected), f"replay {step}"
        assert not captured[:, real:].any()
        seen.add(last.double().sum().item())
    assert len(seen) == replays and np.isfinite(list(seen)).all()
    assert captured[:, :real].abs().amax() > 0
