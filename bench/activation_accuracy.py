#!/usr/bin/env python3
"""Measures the error of each activation format (W4A16, W4A8 in E4M3 and in int8, W4A4) for several distributions.

The layer has two experts that every token uses, normally distributed weights quantized by this library (search "max"),
and rows and output in fp32. The truth is the same layer in float64, with the original weights and hidden in bf16: a
bf16 model without its roundings. Errors are relative L2 over all tokens, against that truth and against W4A16. W4A16
has the same NVFP4 weights, so that only activations differ, and with fp8 also the weights' rounding to E4M3.

    PYTHONPATH=build/cpu/python python3 bench/activation_accuracy.py --out
    bench/results/activation-accuracy-cpu-990086d.json python3 bench/activation_accuracy.py --table
    bench/results/activation-accuracy-cpu-990086d.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import records

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {"2048 x 768": (2048, 768), "2880 x 2880": (2880, 2880), "7168 x 2048": (7168, 2048)}
DISTRIBUTIONS = ("normal", "gains", "student_t", "outliers")
FORMATS = {"bf16": "W4A16", "fp8": "W4A8, fp8", "int8_block": "W4A8, int8_block", "nvfp4": "W4A4"}
EXPERTS, TOKENS = 2, 64


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounds float32 to bf16, returned as float32."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


def draw(distribution: str, tokens: int, hidden: int, random: np.random.Generator) -> np.ndarray:
    """Draws (tokens, hidden) in bf16."""
    x = random.standard_normal((tokens, hidden))
    if distribution == "gains":  # each channel has a gain exp(N(0, 0.5)), and 1 of 128 is 10 times as large
        gains = np.exp(0.5 * random.standard_normal(hidden))
        gains[random.permutation(hidden)[: hidden // 128]] *= 10
        x = x * gains
    elif distribution == "student_t":  # four degrees of freedom
        x = random.standard_t(4, (tokens, hidden))
    elif distribution == "outliers":  # 1 channel of 32 is 20 times as large
        x[:, random.permutation(hidden)[: hidden // 32]] *= 20
    return to_bf16(x)


def make_weights(hidden: int, intermediate: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    return {
        name: to_bf16(random.standard_normal((EXPERTS, *shape), dtype=np.float32) / np.sqrt(np.float32(shape[1])))
        for name, shape in shapes.items()
    }


def true_output(weights: dict[str, np.ndarray], x: np.ndarray, router: np.ndarray) -> np.ndarray:
    out = np.zeros(x.shape)
    wide = x.astype(np.float64)
    for e in range(EXPERTS):
        gate, up = (wide @ weights[name][e].astype(np.float64).T for name in ("gate", "up"))
        out += router[:, e : e + 1] * (gate / (1 + np.exp(-gate)) * up @ weights["down"][e].astype(np.float64).T)
    return out


def relative_l2(actual: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(actual - truth) / np.linalg.norm(truth))


def measure(backend: str) -> list[dict[str, object]]:
    import nvfp4_moe as nv

    results = []
    for shape, (hidden, intermediate) in SHAPES.items():
        random = np.random.default_rng(hidden)
        weights = make_weights(hidden, intermediate, random)
        packed = {}
        for name, stack in weights.items():
            parts = [nv.quantize(matrix) for matrix in stack]
            packed[name] = (
                np.stack([part[0] for part in parts]),
                np.stack([part[1] for part in parts]),
                np.array([part[2] for part in parts], dtype=np.float32),
            )
        ids = np.tile(np.arange(EXPERTS, dtype=np.int32), (TOKENS, 1))
        router = random.uniform(0.2, 0.8, (TOKENS, EXPERTS)).astype(np.float32)
        hiddens = {name: draw(name, TOKENS, hidden, random) for name in DISTRIBUTIONS}
        truths = {name: true_output(weights, x, router.astype(np.float64)) for name, x in hiddens.items()}
        w4a16 = {}
        for activation_format in FORMATS:
            layer = nv.MoeLayer.from_tensors(
                nv.MoeConfig(
                    num_experts=EXPERTS,
                    top_k=EXPERTS,
                    hidden_size=hidden,
                    intermediate_size=intermediate,
                    activation_format=activation_format,
                    row_format="fp32",
                ),
                **packed,
                max_tokens=TOKENS,
                backend=backend,
            )
            for name, x in hiddens.items():
                out = np.empty((TOKENS, hidden), dtype=np.float32)
                layer.run(x, ids, router, out=out)  # bf16 values: exact in fp32
                if activation_format == "bf16":
                    w4a16[name] = out.astype(np.float64)
                results.append(
                    {
                        "shape": shape,
                        "activations": name,
                        "activation_format": activation_format,
                        "relative_l2": round(relative_l2(out, truths[name]), 5),
                        "relative_l2_to_w4a16": round(relative_l2(out, w4a16[name]), 5),
                    }
                )
    return results


def table(bench: dict) -> str:
    """Makes the table of numerics.md: errors against the truth / against W4A16, by shape and distribution."""
    found = {(row["shape"], row["activations"], row["activation_format"]): row for row in bench["results"]}
    formats = list(dict.fromkeys(row["activation_format"] for row in bench["results"]))
    lines = [
        "| hidden x intermediate, activations | " + " | ".join(FORMATS[name] for name in formats) + " | fp8 / nvfp4 |",
        "|---|" + "---:|" * (len(formats) + 1),
    ]
    for shape, activations in dict.fromkeys((row["shape"], row["activations"]) for row in bench["results"]):
        cells = []
        for name in formats:
            row = found[shape, activations, name]
            to_w4a16 = "" if name == "bf16" else f" / {row['relative_l2_to_w4a16']:.3f}"
            cells.append(f"{row['relative_l2']:.3f}{to_w4a16}")
        of_fp8, of_nvfp4 = (found[shape, activations, name]["relative_l2_to_w4a16"] for name in ("fp8", "nvfp4"))
        lines.append(
            f"| {shape}, {activations.replace('_', ' ')} | " + " | ".join(cells) + f" | {of_fp8 / of_nvfp4:.2f} |"
        )
    return "\n".join(lines)


def device() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="where the JSON goes")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--table", metavar="JSON", help="print the table of a JSON, and measure nothing")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(Path(options.table).read_text())))
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    bench = {
        "schema": 1,
        "what": "accuracy of activation formats",
        "date": datetime.date.today().isoformat(),
        "device": device(),
        "commit": commit.stdout.strip(),
        "command": shlex.join(["bench/activation_accuracy.py", *sys.argv[1:]]),
        "backend": options.backend,
        "experts": EXPERTS,
        "tokens": TOKENS,
        "results": measure(options.backend),
    }
    text = records.text(bench)
    if options.out:
        Path(options.out).write_text(text)
    print(table(bench))


if __name__ == "__main__":
    main()
