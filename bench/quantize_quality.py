#!/usr/bin/env python3
"""Compares ways to quantize an expert (ours, llm-compressor's observers, ModelOpt): weight SQNR, output error, speed.

The expert is y = down(silu(gate x) * up x) with weights from each of four distributions. Activations are correlated,
and their channels have gains, a few of them outliers. Half of the tokens are for calibration, the other half for the
error. Every method quantizes the same bf16 matrices, each with its own tensor scale. Outputs are computed in float64
from the decoded weights and unquantized activations, so that only the weights cause the error. Speed is the best of
several runs for the three matrices, in bytes of bf16 per second of CPU time on one thread, which other load on the
machine affects less than wall time. It includes measuring moments for llm-compressor's observers, whose hooks do that.

Run it in a separate environment (torch, llmcompressor, nvidia-modelopt) with this library's module:
PYTHONPATH=build/cpu/python PYTHON bench/quantize_quality.py --out bench/results/quantize-quality.json
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import nvfp4_moe as nv
import records
import torch

warnings.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parent.parent
Expert = dict[str, torch.Tensor]  # gate, up (intermediate, hidden), down (hidden, intermediate)

# ---- weights and activations


def draw(distribution: str, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(shape, generator=generator)
    uniform = torch.rand(shape, generator=generator)
    if distribution == "normal":
        values = normal
    elif distribution == "laplace":
        values = -torch.sign(uniform - 0.5) * torch.log1p(-2 * (uniform - 0.5).abs().clamp(max=0.4999999))
    elif distribution == "student_t":  # four degrees of freedom
        chi = sum(torch.randn(shape, generator=generator) ** 2 for _ in range(4))
        values = normal / (chi / 4).sqrt()
    elif distribution == "outlier":  # one element of 256 is ten times as large
        values = torch.where(uniform < 1 / 256, 10 * normal, normal)
    else:
        raise ValueError(distribution)
    return (values * 0.02).to(torch.bfloat16)


def make_expert(distribution: str, hidden: int, intermediate: int, seed: int) -> Expert:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    return {name: draw(distribution, shape, generator) for name, shape in shapes.items()}


def make_activations(tokens: int, hidden: int, seed: int) -> torch.Tensor:
    """Draws (tokens, hidden): gains exp(N(0, 0.5)), 1 of 128 channels 10 times larger, half the power in 32 factors."""
    generator = torch.Generator().manual_seed(seed)
    gains = torch.exp(0.5 * torch.randn(hidden, generator=generator))
    gains[torch.randperm(hidden, generator=generator)[: hidden // 128]] *= 10
    factors = torch.randn(32, hidden, generator=generator) / 32**0.5
    own = torch.randn(tokens, hidden, generator=generator)
    shared = torch.randn(tokens, 32, generator=generator) @ factors
    return ((own + shared) / 2**0.5 * gains).to(torch.bfloat16)


def run_expert(expert: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes (intermediate, output) in float64."""
    w = {name: matrix.double() for name, matrix in expert.items()}
    x = x.double()
    h = torch.nn.functional.silu(x @ w["gate"].T) * (x @ w["up"].T)
    return h, h @ w["down"].T


# ---- methods: (expert, inputs of each matrix) -> a function that quantizes and returns decoded float32 matrices

Inputs = dict[str, torch.Tensor]  # calibration inputs, (tokens, columns) each
Decode = Callable[[], Expert]
Method = Callable[[Expert, Inputs], tuple[Callable[[], object], Callable[[object], Expert]]]


def ours(search: str, calibrated: bool = False) -> Method:
    def prepare(expert: Expert, inputs: Inputs):
        weights = {}
        for name in expert if calibrated else ():
            moments = inputs[name].double().square().mean(0)
            weights[name] = (moments / moments.mean() + 0.01).float().numpy()  # as quantize --calibration does

        def quantize():
            return {
                name: nv.quantize(matrix, search=search, channel_weights=weights.get(name))
                for name, matrix in arrays.items()
            }

        arrays = {name: matrix.view(torch.uint16).numpy() for name, matrix in expert.items()}
        return quantize, lambda q: {name: torch.from_numpy(nv.dequantize(*parts)) for name, parts in q.items()}

    return prepare


def llm_compressor(observer: str, calibrated: bool = False) -> Method:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from llmcompressor.observers.base import Observer

    def prepare(expert: Expert, inputs: Inputs):
        args = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
        linears = {name: linear_of(matrix) for name, matrix in expert.items()}

        def quantize():
            decoded = {}
            for name, matrix in expert.items():
                own = args.model_copy(deep=True)
                observing = Observer.load_from_registry(observer, base_name="weight", args=own)
                if calibrated:
                    observing.attach(linears[name])
                    linears[name](inputs[name])
                observing(matrix)
                q = observing.get_qparams()
                observing.detach(linears[name])
                decoded[name] = fake_quantize(
                    matrix.float(), q["scale"], q["zero_point"], own, global_scale=q["global_scale"]
                )
            return decoded

        return quantize, lambda decoded: decoded

    return prepare


def linear_of(matrix: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, dtype=matrix.dtype)
    linear.weight.data.copy_(matrix)
    return linear


def modelopt_max() -> Method:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def prepare(expert: Expert, inputs: Inputs):
        def quantize():
            return {name: NVFP4QTensor.quantize(matrix, 16) for name, matrix in expert.items()}

        def decode(quantized):
            return {
                name: q.dequantize(dtype=torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16})
                for name, (q, scale, double) in quantized.items()
            }

        return quantize, decode

    return prepare


METHODS: dict[str, Callable[[], Method]] = {
    "nvfp4-moe max": lambda: ours("max"),
    "nvfp4-moe mse": lambda: ours("mse"),
    "nvfp4-moe sweep": lambda: ours("sweep"),
    "nvfp4-moe mse, calibration": lambda: ours("mse", calibrated=True),
    "nvfp4-moe sweep, calibration": lambda: ours("sweep", calibrated=True),
    "llm-compressor memoryless_minmax": lambda: llm_compressor("memoryless_minmax"),
    "llm-compressor memoryless_mse": lambda: llm_compressor("memoryless_mse"),
    "llm-compressor nvfp4_expanded_mse (fouroversix is its alias)": lambda: llm_compressor("nvfp4_expanded_mse"),
    "llm-compressor imatrix_mse, calibration": lambda: llm_compressor("imatrix_mse", calibrated=True),
    "llm-compressor nvfp4_expanded_imatrix, calibration": lambda: llm_compressor(
        "nvfp4_expanded_imatrix", calibrated=True
    ),
    "ModelOpt max": modelopt_max,  # its searches (mse, four over six, local Hessian) need a GPU
}

# ---- comparison


def decibels(signal: torch.Tensor | list[torch.Tensor], noise: torch.Tensor | list[torch.Tensor]) -> float:
    power = lambda parts: sum(float(part.double().square().sum()) for part in parts)  # noqa: E731
    signal, noise = ([x] if isinstance(x, torch.Tensor) else x for x in (signal, noise))
    return float(10 * np.log10(power(signal) / power(noise)))


def measure(method: Method, expert: Expert, inputs: Inputs, judged: torch.Tensor, repeats: int) -> dict[str, float]:
    quantize, decode = method(expert, inputs)
    seconds, result = [], None
    for _ in range(repeats):
        begin = time.process_time()
        result = quantize()
        seconds.append(time.process_time() - begin)
        if sum(seconds) > 8:
            break
    decoded = decode(result)
    source_bytes = sum(2 * matrix.numel() for matrix in expert.values())
    _, expected = run_expert(expert, judged)
    _, output = run_expert(decoded, judged)
    errors = [decoded[name].double() - expert[name].double() for name in expert]
    return {
        "weight_sqnr_db": round(decibels(list(expert.values()), errors), 3),
        "output_snr_db": round(decibels(expected, output - expected), 3),
        "gb_per_s": float(f"{source_bytes / min(seconds) / 1e9:.3g}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096, help="half of them calibrate, half are judged")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="methods whose name has this in it")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for seed, distribution in enumerate(("normal", "laplace", "student_t", "outlier")):
        expert = make_expert(distribution, arguments.hidden, arguments.intermediate, seed)
        x = make_activations(arguments.tokens, arguments.hidden, 100 + seed)
        calibration, judged = x[: len(x) // 2], x[len(x) // 2 :]
        intermediate = run_expert(expert, calibration)[0].to(torch.bfloat16)
        inputs = {"gate": calibration, "up": calibration, "down": intermediate}
        for name, make in METHODS.items():
            if arguments.only not in name:
                continue
            torch.manual_seed(0)
            found = measure(make(), expert, inputs, judged, arguments.repeats)
            table.append({"weights": distribution, "method": name, **found})
            print(f"{distribution:10} {name:62} {found}", flush=True)
    git = lambda *words: subprocess.run(  # noqa: E731
        ["git", "-C", ROOT, *words], capture_output=True, text=True
    ).stdout.strip()
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    packages = ("torch", "llmcompressor", "compressed-tensors", "nvidia-modelopt")
    result = {
        "schema": 1,
        "what": "quantize quality",
        "date": datetime.date.today().isoformat(),
        "device": f"{cpu.group(1) if cpu else 'unknown'}, 1 of {os.cpu_count()} threads",
        "commit": git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else ""),
        "command": shlex.join(["bench/quantize_quality.py", *sys.argv[1:]]),
        "load_average_1min": os.getloadavg()[0],
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "hidden": arguments.hidden,
        "intermediate": arguments.intermediate,
        "tokens": arguments.tokens,
        "results": table,
    }
    if arguments.out:
        arguments.out.write_text(records.text(result))


if __name__ == "__main__":
    main()
