"""python3 -m bench.moe_bench: times the layers of several libraries. See this package's docstring."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from bench.records import text

from . import reference
from .layers import KINDS, Layer, compiler, opener, version
from .record import OURS, Record
from .roofline import floor
from .shapes import HARD_LIMIT, HARD_SHAPE, HARD_TOKENS, SHAPES, TOKENS, Shape, steps
from .table import summary
from .timing import capture, time_graph
from .workload import Routing, Weights, hard_weights, make_hidden, make_routings, make_weights

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda:0")
PREFIXES = ("NVFP4_MOE_", "HUMMING_", "VLLM_")  # of environment variables that affect the measurement


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    def choices(known: dict[str, Any]) -> Any:
        def read(text: str) -> list[str]:
            names = list(dict.fromkeys(text.split(",")))
            if unknown := [name for name in names if name not in known]:
                raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, got {','.join(unknown)}")
            return names

        return read

    def counts(text: str) -> list[int]:
        if not all(part.isdigit() and int(part) > 0 for part in text.split(",")):
            raise argparse.ArgumentTypeError(f"expected token counts such as 1,64,1024, got {text}")
        return sorted({int(part) for part in text.split(",")})

    parser = argparse.ArgumentParser(prog="python3 -m bench.moe_bench", description=__doc__)
    parser.add_argument(
        "--shapes", type=choices(SHAPES), default=list(SHAPES), help="comma separated, of " + ",".join(SHAPES)
    )
    parser.add_argument("--tokens", type=counts, default=TOKENS, help="comma separated; default 1,2,4,...,8192")
    parser.add_argument(
        "--layers", type=choices(KINDS), default=list(KINDS), help="comma separated, of " + ",".join(KINDS)
    )
    parser.add_argument(
        "--passes", type=int, default=2, help="every second pass runs the layers in reverse order; default 2"
    )
    parser.add_argument("--budget", type=float, default=3600, help="no cell is begun after this many seconds")
    parser.add_argument("--check-only", action="store_true", help="check every cell and time nothing")
    parser.add_argument("--json", metavar="FILE", help="write the record here, after each shape")
    parser.add_argument("--commit", help="of this library, for the record; default: git's")
    options = parser.parse_args(arguments)
    if options.passes < 1:
        parser.error(f"--passes: expected at least 1, got {options.passes}")
    return options


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def commit_of_tree() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


class Run:
    def __init__(self, options: argparse.Namespace, command: list[str]):
        self.options, self.start = options, time.monotonic()
        commit = options.commit or commit_of_tree()
        self.record: dict[str, Any] = {
            "commit": commit,
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name(DEVICE),
            "torch": torch.__version__,
            "command": shlex.join(["python3", "-m", "bench.moe_bench", *command]),
            "environment": {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)},
            "tolerance": reference.TOLERANCE,
            "layers": {},
            "skipped": {},
            "errors": [],
            "rows": [],
        }
        self.names = []
        for name in options.layers:
            try:
                opener(name)
                found = f"nvfp4-moe {commit}" if name in OURS else version(name)
            except ImportError as error:
                self.record["skipped"][name] = str(error)
                log(f"{name}: skipped, {error}")
                continue
            kind = KINDS[name]
            self.record["layers"][name] = {
                "version": found,
                "weights": kind.weights,
                "activations": kind.activations,
                "about": kind.about,
            }
            self.names.append(name)

    def failed(self, where: str, error: Exception) -> None:
        traceback.print_exc()
        self.record["errors"].append(f"{where}: {error!r}"[:500])
        torch.cuda.synchronize()  # raises if the device is lost, which ends the run

    def save(self) -> None:
        if self.options.json:
            Path(self.options.json).write_text(text(self.record))

    def late(self) -> bool:
        return time.monotonic() - self.start > self.options.budget

    def compile_kernels(self) -> None:
        shapes = [SHAPES[name] for name in self.options.shapes]
        for name in self.names:
            if compile_all := compiler(name):
                log(f"{name}: compiling its kernels")
                compile_all(shapes, self.options.tokens)

    def check_hard_case(self) -> None:
        """Checks a small layer of this library with an active clamp, block scales over all of E4M3, and idle tokens."""
        weights = hard_weights(make_weights(HARD_SHAPE, 0, DEVICE))
        for name in filter(OURS.__contains__, self.names):
            activations = KINDS[name].activations
            layer = opener(name)(HARD_SHAPE, [weights], max(HARD_TOKENS), HARD_LIMIT)
            for tokens in HARD_TOKENS:
                routing, x = make_routings(HARD_SHAPE, tokens, 1, DEVICE)[0], make_hidden(HARD_SHAPE, tokens, DEVICE)
                out = torch.full_like(x, float("nan"))
                layer.run(0, x, routing, out)
                expected = reference.moe(weights, x, routing, activations, HARD_LIMIT)
                error = reference.errors(out, expected)
                if not reference.within(error, activations):
                    self.record["errors"].append(f"hard case, {tokens} tokens, {name}: errors {error}")

    def open_layers(self, shape: Shape, weights: list[Weights], where: str) -> dict[str, Layer]:
        layers = {}
        for name in self.names:
            try:
                layers[name] = opener(name)(shape, weights, max(self.options.tokens))
            except Exception as error:
                self.failed(f"{where}, {name}", error)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return layers

    def measure(
        self, layer: Layer, x: torch.Tensor, routings: list[Routing], expected: torch.Tensor, rotation: int
    ) -> Any:
        """Checks the last step, times a graph of all steps, then checks the output of the graph's last step."""
        out = torch.full_like(x, float("nan"))

        def step(number: int) -> None:
            layer.run(number % rotation, x, routings[number], out)

        step(len(routings) - 1)
        torch.cuda.synchronize()
        first = reference.errors(out, expected)
        if self.options.check_only:
            return None, [first]
        graph = capture(step, len(routings))
        timed = time_graph(graph, len(routings))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        return timed, [first, reference.errors(out, expected)]

    def run_cell(self, name: str, tokens: int, layers: dict[str, Layer], weights: list[Weights]) -> None:
        shape = SHAPES[name]
        routings, x = make_routings(shape, tokens, steps(tokens), DEVICE), make_hidden(shape, tokens, DEVICE)
        slots = sum(routing.slots for routing in routings) / len(routings)
        hit = sum(routing.experts_hit for routing in routings) / len(routings)
        last = weights[(len(routings) - 1) % len(weights)]
        expected = {
            activations: reference.moe(last, x, routings[-1], activations, None)
            for activations in {KINDS[each].activations for each in layers}
        }
        passes: dict[str, list[Any]] = {each: [] for each in layers}
        for number in range(1 if self.options.check_only else self.options.passes):
            for each in list(layers)[:: -1 if number % 2 else 1]:
                try:
                    layers[each].prepare(tokens)
                    wanted = expected[KINDS[each].activations]
                    passes[each].append(self.measure(layers[each], x, routings, wanted, len(weights)))
                except Exception as error:
                    self.failed(f"{name}, {tokens} tokens, {each}", error)
        for each, measured in passes.items():
            if not measured:
                continue
            found = [error for _, errors in measured for error in errors]
            row = {
                "shape": name,
                "tokens": tokens,
                "layer": each,
                "slots": slots,
                "experts_hit": hit,
                "floor_us": round(floor(shape, tokens, slots, hit).us, 3),
                "error": max(error[0] for error in found),
                "token_error": max(error[1] for error in found),
                "ok": all(reference.within(error, KINDS[each].activations) for error in found),
            }
            times = [timed for timed, _ in measured if timed]
            if times:
                row["us"] = round(sum(timed.us for timed in times) / len(times), 3)
                row["us_of_passes"] = [round(timed.us, 3) for timed in times]
                row["fastest_us"] = round(min(timed.fastest for timed in times), 3)
                row["slowest_us"] = round(max(timed.slowest for timed in times), 3)
            self.record["rows"].append(row)
            log(
                f"{name} {tokens} {each}: {row.get('us', '-')} us, error {row['error']:.1e}"
                + ("" if row["ok"] else " BAD")
            )

    def run(self) -> None:
        self.compile_kernels()
        self.check_hard_case()
        for name in self.options.shapes:
            shape = SHAPES[name]
            weights = [make_weights(shape, number, DEVICE) for number in range(shape.layers)]
            layers = self.open_layers(shape, weights, name)
            for tokens in self.options.tokens:
                if self.late():
                    self.record["errors"].append(f"out of time at {name}, {tokens} tokens")
                    break
                try:
                    self.run_cell(name, tokens, layers, weights)
                except Exception as error:
                    self.failed(f"{name}, {tokens} tokens", error)
            self.save()
            del weights, layers
            torch.cuda.empty_cache()


def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        print("bench.moe_bench: expected a CUDA GPU; torch sees none", file=sys.stderr)
        return 2
    torch.cuda.set_device(DEVICE)
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference multiplies in fp32
    run = Run(options, sys.argv[1:])
    try:
        run.run()
    except Exception as error:  # keep what was measured
        traceback.print_exc()
        run.record["errors"].append(f"the run ended: {error!r}"[:500])
    run.save()
    rows = run.record["rows"]
    if options.json and not options.check_only and rows:
        print(summary(Record(options.json)))
    bad = [f"{row['shape']} {row['tokens']} {row['layer']}" for row in rows if not row["ok"]]
    for problem in [*(f"check failed: {cell}" for cell in bad), *run.record["errors"]]:
        print(problem)
    return 1 if bad or run.record["errors"] or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
