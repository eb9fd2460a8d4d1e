#!/usr/bin/env python3
"""Measures the CPU backend: runs `nvfp4-moe bench` over shapes, formats, token counts and instruction sets.

Prints Markdown and writes one JSON file (bench/results/). Nothing else should run on the machine.

    bench/measure_cpu.py --out bench/results/cpu-layers.json
    bench/measure_cpu.py --quick --sets layers,scaling --out FILE    # for a host that is available for minutes

Sets: layers (shapes A and B in every activation format), instruction_sets (those of this host, alternating),
reference_shapes (the four models' shapes with fewer experts), reference_backend (the reference and cpu, shape A, 64
tokens), run (the same two with `nvfp4-moe run` on a checkpoint of shape A), scaling (shape B on one thread and on all,
alternating).
"""

from __future__ import annotations

import argparse
import array
import json
import os
import platform
import random
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import records

ROOT = Path(__file__).resolve().parents[1]
SETS = ["layers", "instruction_sets", "reference_shapes", "reference_backend", "run", "scaling"]
# Numbers of experts that make a few hundred megabytes.
REFERENCE_SHAPES = {"deepseek-v4-pro": 8, "deepseek-v4-flash": 16, "qwen3-30b-a3b": 128, "mixtral-8x7b": 4}
READ_TOKENS = 8  # up to here a layer should be limited by memory


class Measurement:
    def __init__(self, options: argparse.Namespace):
        self.tool = str(options.build / "cli/nvfp4-moe")
        self.quick = options.quick
        self.rounds = options.rounds
        self.seconds = options.seconds or (0.3 if options.quick else 1.0)
        self.tokens = "1,64,512" if options.quick else "1,8,64,512"
        self.formats = "nvfp4,bf16" if options.quick else "nvfp4,bf16,int8_block"

    def call(self, *words: str) -> dict:
        print("measure_cpu.py: nvfp4-moe", *words, file=sys.stderr, flush=True)
        done = subprocess.run([self.tool, *words, "--json"], stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.exit(f"measure_cpu.py: nvfp4-moe {' '.join(words)}: exit code {done.returncode}")
        return json.loads(done.stdout)

    def bench(self, *words: str, rounds: int | None = None) -> dict:
        """Runs one process. Drops parts of the result that all runs share (plans, choices)."""
        repeat = ["--rounds", str(rounds or self.rounds), "--seconds", f"{self.seconds:g}"]
        result = self.call("bench", *words, *repeat, "--quiet")
        for configuration in result["configurations"]:
            configuration["kernel"] = configuration.pop("describe")["kernels"]["gemm2"]
        for key in ("schema", "verb", "version", "ok", "failures"):
            del result[key]
        return result

    def layers(self) -> list[dict]:
        words = ["--tokens", self.tokens, "--activation-format", self.formats, "--backend", "cpu", "--steps"]
        return [self.bench("--shape", shape, *words) for shape in "AB"]

    def instruction_sets(self) -> list[dict]:
        listed = self.call("explain", "--shape", "B")["backends"]
        names = [c["backend"] for c in listed if c["supported"] and c["backend"].startswith("cpu:")]
        names.remove("cpu:portable")
        words = ["--tokens", "1,512", "--activation-format", "nvfp4,bf16", "--backend", ",".join(names)]
        return [self.bench("--shape", shape, *words) for shape in ("B" if self.quick else "AB")]

    def reference_shapes(self) -> list[dict]:
        words = ["--tokens", self.tokens, "--activation-format", "nvfp4,bf16", "--backend", "cpu"]
        return [
            self.bench("--shape", shape, "--experts", str(experts), *words)
            for shape, experts in REFERENCE_SHAPES.items()
        ]

    def reference_backend(self) -> list[dict]:
        result = self.bench("--shape", "A", "--tokens", "64", "--backend", "reference,cpu")
        reference, cpu = (row["median_us"] for row in result["timings"])
        return [result | {"reference_over_cpu": reference / cpu}]

    def run(self) -> list[dict]:
        """Runs a layer as a user does: separate processes, the two backends alternating."""
        tokens, hidden = 64, 2048
        sizes = ["--layers", "1", "--experts", "64", "--top-k", "6", "--hidden", str(hidden), "--intermediate", "1408"]
        with tempfile.TemporaryDirectory() as folder:
            source, checkpoint, states = f"{folder}/float", f"{folder}/nvfp4", f"{folder}/states.safetensors"
            self.call("synthesize", "--family", "qwen3_moe", *sizes, source, "--quiet")
            self.call("quantize", source, checkpoint, "--quiet")
            write_normal(states, "hidden", (tokens, hidden))
            words = ["--layer", "0", "--input", states, "--output", f"{folder}/out.safetensors", "--quiet"]
            runs = {name: [] for name in ("reference", "cpu")}
            for _ in range(self.rounds):
                for backend, results in runs.items():
                    told = self.call("run", checkpoint, *words, "--backend", backend)
                    results.append({key: told[key] for key in ("elapsed_us", "again_us", "repeats")})
        ratios = {
            key: [a[key] / b[key] for a, b in zip(runs["reference"], runs["cpu"], strict=True)]
            for key in ("elapsed_us", "again_us")
        }
        return [{"layer": "checkpoint of shape A", "tokens": tokens, "runs": runs, "reference_over_cpu": ratios}]

    def scaling(self) -> list[dict]:
        words = ["--shape", "B", "--tokens", "1,512", "--activation-format", "nvfp4,bf16", "--backend", "cpu"]
        return [self.bench(*words, "--threads", count, rounds=1) for _ in range(self.rounds) for count in ("1", "0")]


def key_of(row: dict) -> tuple[str, str, int]:
    return row["backend"], row["activation_format"], row["tokens"]


def percent(row: dict, share: str) -> str:
    least, most = row["range"][share]
    text = f"{100 * row[share]:.0f} %"
    return text if least == most else f"{text} ({100 * least:.0f}-{100 * most:.0f})"


def cell_text(row: dict) -> str:
    if row["tokens"] <= READ_TOKENS:
        return f"{row['touched_gb_per_s']:.1f} GB/s, {percent(row, 'read_share')} of reads"
    rate = f"{row['gflop_per_s']:.0f} GFLOP/s"
    return rate if row["peak_share"] is None else f"{rate}, {percent(row, 'peak_share')} of peak"


def layers_markdown(results: list[dict]) -> str:
    tokens = sorted({row["tokens"] for result in results for row in result["timings"]})
    lines = [
        "| layer | backend | activations | peak | " + " | ".join(f"T = {t}" for t in tokens) + " |",
        "|---|---|---|---|" + "---|" * len(tokens),
    ]
    for result in results:
        rows = {key_of(row): row for row in result["timings"]}
        for one in result["configurations"]:
            name, activations = one["backend"], one["activation_format"]
            cells = [cell_text(rows[name, activations, t]) if (name, activations, t) in rows else "" for t in tokens]
            lines.append(f"| {result['layer']} | {name} | {activations} | {one['peak'] or ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def peaks_markdown(result: dict) -> str:
    lines = [f"| peak of {result['host']['threads']} threads | |", "|---|---|"]
    for peak in result["peaks"]:
        rate = f"{peak['gb_per_s']:.1f} GB/s" if peak["gflop_per_s"] is None else f"{peak['gflop_per_s']:.0f} GFLOP/s"
        lines.append(f"| {peak['name']} | {rate} |")
    return "\n".join(lines)


def scaling_markdown(runs: list[dict]) -> str:
    """Returns the ratios of all threads to one thread, for layers and for peaks: medians over the rounds."""
    one, many = runs[0::2], runs[1::2]
    lines = ["| what | one thread | all threads | ratio (rounds) |", "|---|---|---|---|"]

    def add(name: str, before: list[float], after: list[float], unit: str) -> None:
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        text = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        lines.append(f"| {name} | {statistics.median(before):.1f} | {statistics.median(after):.1f} {unit} | {text} |")

    def values(results: list[dict], table: str, row: int, key: str) -> list[float]:
        return [result[table][row][key] for result in results]

    for i, row in enumerate(runs[0]["timings"]):
        key, unit = ("touched_gb_per_s", "GB/s") if row["tokens"] <= READ_TOKENS else ("gflop_per_s", "GFLOP/s")
        name = f"{row['activation_format']}, T = {row['tokens']}"
        add(name, values(one, "timings", i, key), values(many, "timings", i, key), unit)
    for i, peak in enumerate(runs[0]["peaks"]):
        key, unit = ("gb_per_s", "GB/s") if peak["gflop_per_s"] is None else ("gflop_per_s", "GFLOP/s")
        add(f"peak {peak['name']}", values(one, "peaks", i, key), values(many, "peaks", i, key), unit)
    return "\n".join(lines)


def run_markdown(result: dict) -> str:
    lines = ["| backend | first run, ms (rounds) | runs after it, ms (medians) |", "|---|---|---|"]
    for backend, runs in result["runs"].items():
        times = [", ".join(f"{run[key] / 1e3:.1f}" for run in runs) for key in ("elapsed_us", "again_us")]
        lines.append(f"| {backend} | {times[0]} | {times[1]} |")
    ratios = [", ".join(f"{r:.1f}" for r in result["reference_over_cpu"][key]) for key in ("elapsed_us", "again_us")]
    return "\n".join([*lines, f"| reference over cpu | {ratios[0]} | {ratios[1]} |"])


def markdown(name: str, results: list[dict]) -> str:
    if name == "run":
        return run_markdown(results[0])
    if name == "scaling":
        return scaling_markdown(results)
    text = layers_markdown(results)
    if name == "layers":
        text += "\n\n" + "\n\n".join(peaks_markdown(result) for result in results[:1])
    if name == "reference_backend":
        text += f"\n\nreference over cpu: {results[0]['reference_over_cpu']:.1f}"
    return text


def write_normal(path: str, name: str, shape: tuple[int, int]) -> None:
    """Writes one F32 tensor of normally distributed values to a safetensors file."""
    draw = random.Random(1)
    data = array.array("f", (draw.gauss(0, 1) for _ in range(shape[0] * shape[1]))).tobytes()
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    Path(path).write_bytes(struct.pack("<Q", len(header)) + header + data)


def physical_cores() -> int | None:
    """Returns the number of cores of this process's threads, as far as the system reports siblings."""
    siblings = set()
    for thread in os.sched_getaffinity(0):
        path = Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
        if not path.exists():
            return None
        siblings.add(path.read_text().strip())
    return len(siblings)


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file, written again after every set")
    parser.add_argument("--build", type=Path, default=ROOT / "build/cpu", help="build folder")
    parser.add_argument("--sets", help=f"list of {', '.join(SETS)}; default all but scaling; --quick: layers")
    parser.add_argument("--quick", action="store_true", help="0.3 s a cell, two formats, three token counts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="for each cell and round")
    parser.add_argument("--commit", help="where the sources come without their history")
    options = parser.parse_args()
    names = (options.sets or ("layers" if options.quick else ",".join(SETS[:-1]))).split(",")
    for name in names:
        if name not in SETS:
            parser.error(f"--sets: expected {', '.join(SETS)}, got {name}")

    measurement = Measurement(options)
    doctor = measurement.call("doctor", "--quiet")["host"]
    cores, threads = physical_cores(), doctor["threads"]
    result = {
        "schema": 1,
        "what": "cpu layers",
        "device": f"{doctor['cpu']}, {threads} threads",
        "threads": threads,
        "cores": cores,  # as the system reports them; a virtual machine may not know
        "instruction_sets": doctor["instruction_sets"],
        "system": platform.release(),
        "commit": options.commit
        or git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
        or "unknown",
        "command": " ".join(["bench/measure_cpu.py", *(word for word in sys.argv[1:])]),
        "load_average_1min": os.getloadavg()[0],
        "sets": {},
    }
    for name in names:
        result["sets"][name] = getattr(measurement, name)()
        print(f"\n{name}\n\n{markdown(name, result['sets'][name])}", flush=True)
        if options.out:
            options.out.write_text(records.text(result))


if __name__ == "__main__":
    main()
