"""The measured layers, their token counts, and the number of steps timed in one CUDA graph."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    local_experts: int  # experts of this device: the model's experts 0 to local_experts - 1
    experts: int  # experts of the model, among which the router chooses
    top_k: int
    hidden: int
    intermediate: int
    layers: int  # layers in rotation, so that the weights of small ones do not stay in the L2 cache
    title: str

    @property
    def ranks(self) -> int:
        return self.experts // self.local_experts


SHAPES = {
    "v4pro_ep8": Shape(48, 384, 6, 7168, 3072, 1, "DeepSeek-V4-Pro, one rank of 8"),
    "v4flash": Shape(256, 256, 6, 4096, 2048, 1, "DeepSeek-V4-Flash"),
    "v41flash_ep8": Shape(48, 384, 6, 5120, 2304, 1, "DeepSeek-V4.1-Flash, one rank of 8"),
    "qwen30b": Shape(128, 128, 8, 2048, 768, 4, "Qwen3-30B-A3B"),
    "qwen_next": Shape(512, 512, 10, 2048, 512, 2, "Qwen3-Next-80B-A3B"),
    "mixtral": Shape(8, 8, 2, 4096, 14336, 2, "Mixtral-8x7B"),
}

# Checked before anything is timed, see workload.hard_weights.
HARD_SHAPE = Shape(12, 16, 4, 1024, 512, 1, "hard case")
HARD_LIMIT = 0.5
HARD_TOKENS = [1, 7, 64, 300]

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]


def steps(tokens: int) -> int:
    """Returns the number of layer steps in one timed graph, each with its own routing."""
    return 16 if tokens <= 64 else 8 if tokens <= 512 else 4
