"""Records: reads a run's output and computes the figures for docs and README."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

HEADLINE_TOKENS = [1, 64, 1024, 8192]
OURS = {"nvfp4_moe_bf16": "W4A16", "nvfp4_moe_fp8": "W4A8", "nvfp4_moe_nvfp4": "W4A4"}


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


class Record:
    """A file that `python3 -m bench.moe_bench --json` wrote."""

    def __init__(self, path: str | Path):
        self.data = json.loads(Path(path).read_text())
        self.device: str = self.data["device"]
        self.layers: dict[str, dict[str, str]] = self.data["layers"]
        self.rows: dict[tuple[str, int, str], Row] = {
            (row["shape"], row["tokens"], row["layer"]): row for row in self.data["rows"]
        }
        self.shapes = list(dict.fromkeys(row["shape"] for row in self.data["rows"]))
        self.tokens = sorted({row["tokens"] for row in self.data["rows"]})

    def peers(self, weights: str = "nvfp4") -> list[str]:
        """Returns the other libraries' layers with such weights."""
        return [name for name, layer in self.layers.items() if name not in OURS and layer["weights"] == weights]

    def best_peer(self, shape: str, tokens: int, weights: str = "nvfp4") -> Row | None:
        """Returns the fastest of them in that cell; None if none ran there."""
        rows = [self.rows.get((shape, tokens, name)) for name in self.peers(weights)]
        return min((row for row in rows if row), key=lambda row: row["us"], default=None)

    def leads(self, layer: str) -> dict[tuple[str, int], float]:
        """Returns (best NVFP4 peer's time) / (this layer's) of every cell with both; above 1 this layer is faster."""
        leads = {}
        for (shape, tokens, name), row in self.rows.items():
            best = self.best_peer(shape, tokens)
            if name == layer and best:
                leads[shape, tokens] = best["us"] / row["us"]
        return leads

    def lead(self, layer: str) -> tuple[float, float, float]:
        """Returns (geometric mean, least, greatest) of leads(layer)."""
        values = self.leads(layer).values()
        return geometric_mean(values), min(values), max(values)
