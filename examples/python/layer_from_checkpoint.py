#!/usr/bin/env python3
"""Loads one MoE layer of a checkpoint, runs it with both activation formats, and shows where its error comes from.

    layer_from_checkpoint.py                             makes a small checkpoint first, with the command line tool
    layer_from_checkpoint.py DIR [--layer L]             an NVFP4 checkpoint, against the reference backend
    layer_from_checkpoint.py DIR --against ORIGINAL      ... and against the float weights that it was made from

Prints a table and draws a histogram of the errors (matplotlib, if it is installed). Needs nvfp4_moe and NumPy. The
float weights run here in float32, expert by expert, so that a real layer needs no more memory than its NVFP4 form.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import nvfp4_moe

FORMATS = {"nvfp4": "W4A4 (nvfp4 activations)", "bf16": "W4A16 (bf16 activations)"}
SYNTHETIC = dict(layers=1, experts=8, top_k=4, hidden=512, intermediate=256, vocab=64)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, help="model directory; none: a small one is made")
    parser.add_argument(
        "--against", type=Path, metavar="ORIGINAL", help="the bf16, fp16 or fp32 checkpoint it was made from"
    )
    parser.add_argument("--layer", type=int, help="default: the first one with experts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--first-expert", type=int, default=0, help="the local experts, of an expert-parallel rank")
    parser.add_argument("--experts", type=int, default=0, help="how many of them; 0: all")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seed", type=int, default=1, help="of hidden states and routing")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="default: layer_errors.png, if matplotlib is there")
    parser.add_argument(
        "--tool", default=os.environ.get("NVFP4_MOE_TOOL", "nvfp4-moe"), help="the command line tool, where one is made"
    )
    return parser.parse_args(argv)


def synthesize(tool: str, directory: Path) -> tuple[Path, Path]:
    """A float checkpoint and its NVFP4 form, made in directory by the command line tool."""
    if shutil.which(tool) is None:
        raise SystemExit(f"{tool}: not found; give a checkpoint, or the command line tool with --tool")
    original, quantized = directory / "original", directory / "nvfp4"
    sizes = [word for name, value in SYNTHETIC.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    subprocess.run([tool, "synthesize", original, *sizes, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([tool, "quantize", original, quantized, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return quantized, original


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16's values, to nearest even; finite."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def seeded_batch(config: nvfp4_moe.MoeConfig, tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """hidden (T, H) float32 with values of bfloat16, topk_ids (T, k) int32, topk_weights (T, k) float32.

    Hidden states as they leave a norm: about 1, with a few channels that are much larger. Weights sum to 1; weights on
    the input are each below 1, like a sigmoid's.
    """
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((tokens, config.hidden_size))
    hidden[:, rng.permutation(config.hidden_size)[: max(1, config.hidden_size // 100)]] *= 10
    ids = np.stack([rng.permutation(config.num_experts)[: config.top_k] for _ in range(tokens)])
    weights = rng.exponential(size=ids.shape) + 0.05
    total = 1 + weights if config.router_weight == "on_input" else weights.sum(1, keepdims=True)
    return to_bf16(hidden), ids.astype(np.int32), (weights / total).astype(np.float32)


class FloatWeights:
    """The expert matrices of a float checkpoint, read one at a time from its safetensors files, as float32."""

    def __init__(self, directory: Path, layer: int):
        self.directory, self.layer = directory, layer
        self.where = {}  # tensor name: (file, offset, dtype, shape)
        for file in sorted(directory.glob("*.safetensors")):
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(size))
            for name, tensor in header.items():
                if name != "__metadata__":
                    self.where[name] = (file, 8 + size + tensor["data_offsets"][0], tensor["dtype"], tensor["shape"])

    def expert(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """gate, up (I, H) and down (H, I)."""
        names = nvfp4_moe.load_expert(self.directory, self.layer, index)["names"]
        return self._read(names["gate"]), self._read(names["up"]), self._read(names["down"])

    def _read(self, name: str) -> np.ndarray:
        if name not in self.where:
            raise SystemExit(
                f"{self.directory}: no tensor {name}; --against reads one matrix per expert, not stacked ones"
            )
        file, offset, dtype, shape = self.where[name]
        kinds = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
        if dtype not in kinds:
            raise SystemExit(f"{file}: {name}: expected BF16, F16 or F32 in the original, got {dtype}")
        values = np.memmap(file, dtype=kinds[dtype], mode="r", offset=offset, shape=tuple(shape))
        return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else values.astype(np.float32)


def activation(config: nvfp4_moe.MoeConfig, g: np.ndarray, u: np.ndarray) -> np.ndarray:
    def gated(x, slope=1.0):
        return x / (1 + np.exp(-slope * x))

    limit = config.swiglu_limit
    if config.activation == "swiglu":
        return gated(g) * u
    u = np.clip(u, -limit, limit)
    if config.activation == "swiglu_clamped":
        return gated(np.minimum(g, limit)) * u
    if config.activation == "swiglu_step":
        return np.minimum(gated(g), limit) * u
    return gated(np.minimum(g, limit), config.swiglu_alpha) * (u + 1)


def run_floats(config, original: FloatWeights, local: range, hidden, topk_ids, topk_weights) -> np.ndarray:
    """The layer with the original's weights, nothing quantized: (T, H) float32."""
    out = np.zeros_like(hidden)
    for expert in np.intersect1d(topk_ids, np.array(local)):
        gate, up, down = original.expert(int(expert))
        token, choice = np.nonzero(topk_ids == expert)
        x, weight = hidden[token], topk_weights[token, choice, None]
        if config.router_weight == "on_input":  # Llama-4
            x, weight = x * weight, 1
        np.add.at(out, token, weight * (activation(config, x @ gate.T, x @ up.T) @ down.T))
    return out


def metrics(actual: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Errors of actual (T, H) in float64. A token's is relative to its norm or, if larger, a tenth of the mean norm."""
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    error, norms = np.linalg.norm(a - e, axis=1), np.linalg.norm(e, axis=1)
    return {
        "relative L2": np.linalg.norm(a - e) / np.linalg.norm(e),
        "worst token": (error / np.maximum(norms, 0.1 * norms[norms > 0].mean())).max(),
        "1 - cosine": 1 - (a * e).sum() / (np.linalg.norm(a) * np.linalg.norm(e)),
        "largest": np.abs(a - e).max(),
        "equal": float((a == e).mean()),
    }


def table(rows: list[tuple[str, str, dict[str, float]]]) -> str:
    lines = [
        "| layer                    | against            | relative L2 | worst token | 1 - cosine "
        "| largest error | equal bits |",
        "|--------------------------|--------------------|------------:|------------:|-----------:"
        "|--------------:|-----------:|",
    ]
    for what, against, m in rows:
        lines.append(
            f"| {what:24} | {against:18} | {m['relative L2']:11.3e} | {m['worst token']:11.3e} "
            f"| {m['1 - cosine']:10.2e} | {m['largest']:13.3e} | {100 * m['equal']:8.1f} % |"
        )
    return "\n".join(lines)


def draw(path: Path, title: str, runs: list[tuple[str, str, np.ndarray, np.ndarray]]) -> None:
    """Histograms of |actual - expected| over the rms of expected; runs: (format, against, actual, expected)."""
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    from matplotlib import pyplot as plt

    colours = {"nvfp4": "tab:blue", "bf16": "tab:orange"}
    errors = []
    for form, against, actual, expected in runs:
        e = expected.astype(np.float64)
        errors.append((form, against, (np.abs(actual - e) / np.sqrt((e**2).mean())).ravel()))
    nonzero = np.concatenate([e[e > 0] for *_, e in errors])
    if nonzero.size == 0:  # equal bits everywhere: an axis all the same
        nonzero = np.array([1e-7, 1.0])
    # The least errors are elements that cancel: their tail means nothing and would squeeze the rest.
    low, high = np.floor(np.log10(np.quantile(nonzero, 0.001))), np.log10(nonzero.max() * 1.5)
    bins = np.logspace(low, high, 1 + int(20 * (high - low)))

    figure, axes = plt.subplots(figsize=(9, 5.4), dpi=120, layout="constrained")
    for form, against, error in errors:
        # Kernels err rarely and little, quantization everywhere: lines for the one, areas for the other.
        area = against != "reference"
        equal = float((error == 0).mean())
        axes.hist(
            error[error > 0],
            bins=bins,
            histtype="stepfilled" if area else "step",
            color=colours[form],
            alpha=0.4 if area else 1.0,
            linewidth=1.5,
            label=f"{FORMATS[form]} against the {against}" + (f" ({equal:.2%} equal bits)" if equal > 0.0005 else ""),
        )
        if area:
            level = np.sqrt((error**2).mean())
            axes.axvline(level, color=colours[form], linestyle=":", linewidth=1.6)
            right = form == "nvfp4"  # activations that are quantized too lose more
            axes.text(
                level,
                0.86 if right else 0.8,
                f"  rms {level:.2g}  ",
                transform=axes.get_xaxis_transform(),
                color=colours[form],
                ha="left" if right else "right",
                fontweight="bold",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(bins[0], bins[-1])
    axes.set_ylim(0.7, 40 * axes.get_ylim()[1])  # the legend's room
    axes.set_xlabel("error of an output element, relative to the rms of what was expected")
    axes.set_ylabel(f"elements per bin, of {errors[0][2].size:,}")
    axes.set_title(title, fontsize=11)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(loc="upper left", fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def plot_path(args: argparse.Namespace) -> Path | None:
    """Where to draw, None: nowhere. Asked for before the work is done, so that a missing package costs no wait."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        message = f"matplotlib is not there ({error}); pip install matplotlib"
        if args.plot is not None:
            raise SystemExit(f"--plot: {message}") from None
        print(f"no histogram: {message}", file=sys.stderr)
        return None
    return args.plot or Path("layer_errors.png")


def compare(args: argparse.Namespace, checkpoint: Path, original: Path | None) -> None:
    picture = plot_path(args)
    number = args.layer if args.layer is not None else nvfp4_moe.inspect(checkpoint, [])["layers"][0]

    def load(activation_format: str, backend: str) -> nvfp4_moe.MoeLayer:
        return nvfp4_moe.MoeLayer.from_checkpoint(
            checkpoint,
            number,
            args.first_expert,
            args.experts,
            max_tokens=args.tokens,
            backend=backend,
            activation_format=activation_format,
        )

    layers = {form: load(form, args.backend) for form in FORMATS}
    first = layers["nvfp4"]
    config = first.config
    print(f"checkpoint  {checkpoint}, layer {number}\nlayer       {first!r}")
    batch = seeded_batch(config, args.tokens, args.seed)
    exact = None
    if original is not None:
        local = range(first.first_expert, first.first_expert + first.expert_count)
        exact = run_floats(config, FloatWeights(original, number), local, *batch)

    rows, runs = [], []
    for form, layer in layers.items():
        out = layer.run(*batch)
        truths = [("reference", load(form, "reference").run(*batch))]
        if exact is not None:
            truths.append(("original weights", exact))
        for against, expected in truths:
            rows.append((FORMATS[form], against, metrics(out, expected)))
            runs.append((form, against, out, expected))
    print(f"tokens      {args.tokens}, seed {args.seed}\n\n{table(rows)}")
    if picture is not None:
        sizes = (
            f"{config.num_experts} experts, top-{config.top_k}, "
            f"hidden {config.hidden_size}, intermediate {config.intermediate_size}"
        )
        draw(picture, f"{checkpoint.resolve().name}, layer {number}: {sizes}, {args.tokens} tokens", runs)
        print(f"\nhistogram   {picture}")


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.checkpoint is not None:
        compare(args, args.checkpoint, args.against)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        compare(args, *synthesize(args.tool, Path(directory)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (nvfp4_moe.Error, ValueError, OSError) as error:
        sys.exit(f"layer_from_checkpoint: {error}")
