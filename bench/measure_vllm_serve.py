#!/usr/bin/env python3
"""Measures `vllm serve` with one MoE backend after the other on one GPU, and compares their tokens. A command a table:

    python bench/measure_vllm_serve.py speed MODEL OUT.json --commit SHA
    python bench/measure_vllm_serve.py tokens MODEL TWIN OUT.json --commit SHA

bench/make_serving_model.py writes models and their twins. OUT.json is written after each cell. The same command again
measures the cells that are missing, so --limit-s may end it early. It exits with 3 if cells are missing, and with 1 if
a server failed, which is recorded too. It refuses an OUT.json of another command, commit, engine or device. Servers'
logs go to OUT.BACKEND.log.

speed: `vllm bench serve` with random prompts of exact lengths at each concurrency. A server starts for each backend in
each round, and each round begins with the next backend, so that a drift of the device shows. Its time to ready and the
memory in use are measured too; every server gets the same KV cache.

tokens: greedy tokens against the twin's. The twin's text is also given to each server as a prompt, which shows every
log-probability after the same text. A token may differ only if the twin holds both within --tie, and the error of the
log-probabilities is at most --rms: exit status 1 if not. Ties of a router, decided the other way, are part of that
error. The twin in other modes shows what bfloat16 can hold. With --routes servers report the experts that they select,
and a position is compared only if all its layers select the twin's. So a tie of a router does not count as an error;
but if more than half of the positions have other experts, the run is not right. vLLM selects the experts then.

--backends: nvfp4_moe,humming,marlin by default. nvfp4_moe_fp8 and nvfp4_moe_nvfp4 are this library with
NVFP4_MOE_ACTIVATIONS set, and triton is vLLM's own choice for gpt-oss. A record takes more backends later on.

Options after `--` go to every server. Each one listens on the loopback interface only, and ends with this process.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import measure_vllm
import records
from vllm_server import Deadline, OutOfTime, Server, ServerFailed

MISSING = 3
WARM_UP = {"prompts": 2, "concurrency": 2, "output": 8, "round": 99}  # instead of a cell's
KEPT = (
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "output_throughput", "total_token_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_itl_ms",
    "median_itl_ms", "p99_itl_ms",
)  # fmt: skip


class Record:
    """The result file. It remembers what made it, and is written after each row."""

    def __init__(self, asked: argparse.Namespace, what: str, **setup: object) -> None:
        import torch

        self.path: Path = asked.out
        self.failures = 0  # of this command. The next one tries again
        self.result: dict[str, Any] = {
            "schema": 1, "what": what, "device": measure_vllm.device_name(), "commit": asked.commit,
            **asked.engine.versions(), "torch": torch.__version__, "server_options": asked.options,
            "model": json.loads((asked.model / "config.json").read_text()) | {"quantization_config": "..."}, **setup,
            "servers": [], "cells": [],
        }  # fmt: skip
        if self.path.exists():
            old = json.loads(self.path.read_text())
            for key, value in self.result.items():
                if key not in ("servers", "cells") and old.get(key) != value:
                    sys.exit(f"{self.path}: made with {key} {old.get(key)}, not {value}: choose another file")
            self.result = old

    def has(self, **key: object) -> bool:
        return any(all(cell.get(name) == value for name, value in key.items()) for cell in self.result["cells"])

    def add(self, cell: dict[str, object]) -> None:
        self.result["cells"].append(cell)
        print(json.dumps(cell), flush=True)
        self.write()

    def add_server(self, server: Server, **key: object) -> None:
        """Adds a server's facts, once it is ready, and its peak, once it has served."""
        facts = key | {"ready_s": server.ready_s, "in_use_when_ready_mib": server.in_use_mib}
        facts |= {"peak_mib": server.memory.peak, "memory": measure_vllm.MEMORY}
        facts["log"] = [line for line in server.lines() if server.log_lines.search(line)]
        self.result["servers"].append(facts)
        self.write()

    def add_failure(self, error: ServerFailed, **key: object) -> None:
        self.failures += 1
        self.result["servers"].append(key | {"failed": str(error).splitlines()})
        print(error, flush=True)
        self.write()

    def write(self) -> None:
        waiting = self.path.with_suffix(".new")
        waiting.write_text(records.text(self.result))
        waiting.replace(self.path)


# ---- speed


def plan(asked: argparse.Namespace) -> list[tuple[int, str, list[dict[str, Any]]]]:
    """Returns (round, backend, cells) in the order of measuring: each round begins with the next backend."""
    servers = []
    for number in range(asked.rounds):
        first = number % len(asked.backends)
        for backend in asked.backends[first:] + asked.backends[:first]:
            cells = [
                {
                    "round": number, "backend": backend, "input": given, "output": wanted, "concurrency": concurrency,
                    "prompts": max(asked.least_prompts, asked.waves * concurrency),
                }
                for given, wanted in asked.lengths
                for concurrency in asked.concurrency
            ]  # fmt: skip
            servers.append((number, backend, cells))
    return servers


def measure_speed(asked: argparse.Namespace, deadline: Deadline) -> int:
    longest = max(given + wanted for given, wanted in asked.lengths)
    options = asked.engine.options(asked.model, longest + 64, max(asked.concurrency), 8192, asked.kv_cache_gib)
    record = Record(
        asked, f"{asked.engine.what}, one MoE backend after the other", kv_cache_gib=asked.kv_cache_gib,
        waves=asked.waves, least_prompts=asked.least_prompts, lengths=asked.lengths, concurrency=asked.concurrency,
        command=f"{asked.engine.script} speed",
    )  # fmt: skip
    for number, backend, cells in plan(asked):
        waiting = [cell for cell in cells if not record.has(**cell)]
        if not waiting:
            continue
        deadline.need(asked.start_s)
        log = asked.out.with_suffix(f".{backend}.log")
        try:
            with asked.engine(asked.program, asked.model, backend, options + asked.options, log, deadline) as server:
                try:
                    measure_cells(asked, record, server, waiting, deadline)
                finally:
                    record.add_server(server, round=number, backend=backend)
        except ServerFailed as error:
            record.add_failure(error, round=number, backend=backend)
    return 1 if record.failures else 0


def measure_cells(
    asked: argparse.Namespace, record: Record, server: Server, cells: list[dict[str, Any]], deadline: Deadline
) -> None:
    server.bench(asked.model, cells[0] | WARM_UP, deadline.need(1))
    for cell in cells:
        said = server.bench(asked.model, cell, deadline.need(1))
        if said["failed"] or said["completed"] != cell["prompts"]:
            raise server.failed(f"{said['completed']} of {cell['prompts']} prompts completed in {cell}")
        record.add(cell | {name: _rounded(said[name]) for name in KEPT})


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


# ---- tokens


def compare(twin: dict[str, Any], run: dict[str, Any], tie: float, rms: float) -> dict[str, Any]:
    """Compares a run of a server with the twin's.

    Both: {"tokens": by prompt, "steps": by prompt and position, "routes": likewise, or None}. A difference is (twin's
    log-probability of its own token) - (twin's of the other one). A token that the twin does not list is below all that
    it lists. Positions with other routes are counted and not compared.
    """
    margins, errors, same, first_differences = [], [], 0, []
    routed = bool(twin["routes"])
    to_compare = [
        [not routed or twin["routes"][at][i] == run["routes"][at][i] for i in range(len(steps))]
        for at, steps in enumerate(twin["steps"])
    ]
    others = sum(not one for prompt in to_compare for one in prompt)
    for text, expected, steps, mask in zip(twin["texts"], twin["steps"], run["steps"], to_compare, strict=True):
        for token, exact, said, is_compared in zip(text[1:], expected, steps, mask, strict=True):
            if not is_compared:
                continue
            errors.append(said[token] - exact[token])
            best, other = max(exact, key=exact.__getitem__), max(said, key=said.__getitem__)
            if best != other:
                margins.append(exact[best] - exact.get(other, min(exact.values())))
    for at, (expected, said) in enumerate(zip(twin["tokens"], run["tokens"], strict=True)):
        length = next((i for i, pair in enumerate(zip(expected, said, strict=True)) if len(set(pair)) > 1), len(said))
        same += length
        position = len(twin["texts"][at]) - len(expected) - 1 + length
        if length < len(said) and to_compare[at][position]:
            step = twin["steps"][at][position]
            first_differences.append(step[expected[length]] - step.get(said[length], min(step.values())))
    worst = max((*margins, *first_differences), default=0.0)
    rms_error = (sum(error**2 for error in errors) / max(len(errors), 1)) ** 0.5
    return {
        "positions": len(errors),
        **({"positions_of_other_experts": others} if routed else {}),
        "largest_error": round(max(map(abs, errors), default=0.0), 5),
        "rms_error": round(rms_error, 5),
        "others_likeliest": len(margins),
        "greedy_tokens": sum(map(len, run["tokens"])),
        "greedy_the_same_until_the_first_other": same,
        "largest_margin_of_an_other": round(worst, 5),
        "right": worst <= tie and rms_error <= rms and others <= len(errors),
    }


def measure_tokens(asked: argparse.Namespace, deadline: Deadline) -> int:
    options = [*asked.engine.options(asked.model, 512, 8, 512, asked.kv_cache_gib), *asked.options]
    if asked.routes:
        options += asked.engine.routes_options
    setup = {
        "tie": asked.tie,
        "rms": asked.rms,
        "prompts": asked.prompts,
        "tokens": asked.tokens,
        "twin": asked.twin.name,
        **({"routes": True} if asked.routes else {}),
    }
    record = Record(
        asked, f"tokens of {asked.engine.what} against the twin's", **setup, command=f"{asked.engine.script} tokens"
    )
    vocabulary = json.loads((asked.model / "config.json").read_text())["vocab_size"]
    draw = random.Random(1)
    prompts = [[draw.randrange(10, vocabulary) for _ in range(24)] for _ in range(asked.prompts)]
    said = asked.out.with_suffix(".twin.json")  # the twin's run, for the next command

    def run(model: Path, backend: str, mode: str, texts: list[list[int]] | None) -> dict[str, Any]:
        deadline.need(asked.start_s)
        log = asked.out.with_suffix(f".{backend}.log")
        with asked.engine(asked.program, model, backend, options + asked.engine.modes[mode], log, deadline) as server:
            tokens = [server.greedy(prompt, asked.tokens) for prompt in prompts]
            texts = texts or [prompt + more for prompt, more in zip(prompts, tokens, strict=True)]
            forced = [server.forced(text) for text in texts]
            result = {"texts": texts, "tokens": tokens, "steps": [steps for steps, _ in forced], "routes": None}
            if asked.routes:
                result["routes"] = [routes for _, routes in forced]
                if None in result["routes"]:
                    raise server.failed("expected the selected experts of every prompt, got none")
            record.add_server(server, backend=backend, mode=mode)
        return result

    if not said.exists() or not record.result["servers"]:
        said.write_text(json.dumps(run(asked.twin, "twin", "eager", None)))
    twin = json.loads(said.read_text())
    twin["steps"] = [[{int(token): value for token, value in step.items()} for step in one] for one in twin["steps"]]
    for mode in asked.modes:
        for backend in ("twin", *asked.backends):
            if record.has(backend=backend, mode=mode) or (backend, mode) == ("twin", "eager"):
                continue
            try:
                result = run(asked.twin if backend == "twin" else asked.model, backend, mode, twin["texts"])
            except ServerFailed as error:
                record.add_failure(error, backend=backend, mode=mode)
                continue
            record.add({"backend": backend, "mode": mode} | compare(twin, result, asked.tie, asked.rms))
    return 0 if not record.failures and all(cell["right"] for cell in record.result["cells"]) else 1


def pairs(text: str) -> list[list[int]]:
    return [[int(number) for number in one.split("/")] for one in text.split(",")]


def parsed(engine: type[Server] = Server) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    speed, tokens = commands.add_parser("speed"), commands.add_parser("tokens")
    for command in (speed, tokens):
        command.add_argument("model", type=Path)
        if command is tokens:
            command.add_argument("twin", type=Path)
        command.add_argument("out", type=Path)
        command.add_argument("--commit", required=True)
        command.add_argument("--backends", type=lambda text: text.split(","), default=list(engine.backends))
        command.add_argument("--program", type=shlex.split, help="the engine's program; default: this Python's")
        command.add_argument("--limit-s", type=float, help="ends in time, to be continued by the same command")
        command.add_argument("--start-s", type=float, default=60, help="no server starts with less time left")
        command.add_argument("--kv-cache-gib", type=float, default=40 if command is speed else 1)
    speed.add_argument("--lengths", type=pairs, default=pairs("1024/1024,8192/1024"), help="prompt/output,...")
    speed.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64, 256])
    speed.add_argument("--rounds", type=int, default=2)
    speed.add_argument("--waves", type=int, default=1, help="prompts of a cell: that many times the concurrency")
    speed.add_argument("--least-prompts", type=int, default=4)
    tokens.add_argument("--modes", type=lambda text: text.split(","), default=list(engine.modes))
    if engine.routes_options:
        tokens.add_argument("--routes", action="store_true", help="compare only positions with the twin's experts")
    parser.set_defaults(routes=False)
    tokens.add_argument("--prompts", type=int, default=8)
    tokens.add_argument("--tokens", type=int, default=32)
    tokens.add_argument("--tie", type=float, default=0.5, help="the largest difference at which tokens may differ")
    tokens.add_argument("--rms", type=float, default=0.15, help="the largest error of log-probabilities, as an rms")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    asked = parser.parse_args(own)
    asked.options = sys.argv[len(own) + 2 :]
    for names, known in ((asked.backends, engine.known), (getattr(asked, "modes", []), engine.modes)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"expected {', '.join(known)}, got {', '.join(unknown)}")
    asked.program = asked.program or list(engine.program)
    asked.engine = engine
    return asked


def main(engine: type[Server] = Server) -> int:
    asked = parsed(engine)
    deadline = Deadline(asked.limit_s)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a server ends with it
    try:
        return (measure_speed if asked.command == "speed" else measure_tokens)(asked, deadline)
    except ServerFailed as error:  # the twin's, without which there is nothing to compare
        sys.exit(str(error))
    except OutOfTime:
        print(f"{asked.out}: the time is over and cells are missing: run the same command again", flush=True)
        return MISSING


if __name__ == "__main__":
    sys.exit(main())
