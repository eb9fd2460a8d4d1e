"""A `vllm serve` process of a benchmark, and the time that the benchmark may take."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import measure_vllm
import numpy

BACKENDS = ("nvfp4_moe", "humming", "marlin")
# This library's backends, and what NVFP4_MOE_ACTIVATIONS is for them. None: what the environment has.
OURS: dict[str, str | None] = {"nvfp4_moe": None, "nvfp4_moe_fp8": "fp8", "nvfp4_moe_nvfp4": "nvfp4"}
STOCK = ("humming", "marlin", "triton")  # vLLM's. triton is for gpt-oss only
KNOWN = (*OURS, *STOCK)
MODEL = "model"  # the name that servers give to it


class OutOfTime(Exception):
    """The limit of this run is near. What was measured is written."""


class ServerFailed(Exception):
    """A server did not start or did not answer. Its text ends with the end of the log."""


class Deadline:
    def __init__(self, limit_s: float | None) -> None:
        self.end = time.monotonic() + limit_s if limit_s else None

    def left(self) -> float:
        return 1e9 if self.end is None else self.end - time.monotonic()

    def need(self, seconds: float) -> float:
        """Returns the seconds left, or raises OutOfTime if they are fewer than needed."""
        if self.left() < seconds:
            raise OutOfTime
        return self.left()


Route = list[list[int]]  # of a token: each layer's selected experts, in ascending order


def routes_of(npy: bytes) -> list[Route]:
    """Returns each token's route. npy: a file of (tokens, layers, top_k) expert ids; a layer without experts has 0."""
    ids = numpy.load(io.BytesIO(npy), allow_pickle=False)
    routes: list[Route] = numpy.sort(ids, axis=-1).tolist()
    return routes


class Server:
    """`vllm serve` in a process group of its own, on a free port of the loopback interface.

    sglang_server.py has the one of SGLang, which overrides what an engine decides.
    """

    what = "vllm serve"
    script = "python bench/measure_vllm_serve.py"
    program = (sys.executable, "-m", "vllm.entrypoints.cli.main")
    backends, known = BACKENDS, KNOWN
    modes: Mapping[str, list[str]] = {
        "graphs": [], "compiled": ["-cc.cudagraph_mode=NONE"], "eager": ["--enforce-eager"],
    }  # fmt: skip
    log_lines = measure_vllm.LOG_LINES
    # For a server that reports the selected experts, which vLLM keeps with cached prefixes.
    routes_options = ("--enable-return-routed-experts", "--enable-prefix-caching")

    @staticmethod
    def versions() -> dict[str, str]:
        """Returns fields of a record."""
        import vllm

        return {"vllm": vllm.__version__}

    @staticmethod
    def options(model: Path, tokens: int, requests: int, prefill: int, kv_cache_gib: float) -> list[str]:
        """Returns the options for requests of that many tokens, prompt and output together."""
        return [
            "--max-model-len", str(tokens), "--max-num-seqs", str(requests), "--max-num-batched-tokens", str(prefill),
            "--kv-cache-memory-bytes", str(int(kv_cache_gib * 2**30)),
        ]  # fmt: skip

    def __init__(
        self, program: list[str], model: Path, backend: str, options: list[str], log: Path, deadline: Deadline
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        command = [*program, *self.arguments(model, backend), *options]
        environment = os.environ | {"NVFP4_MOE_MODE": "1" if backend in OURS else "0"}
        if activations := OURS.get(backend):
            environment["NVFP4_MOE_ACTIVATIONS"] = activations
        self.log = log
        self.memory = measure_vllm.Memory()
        began = time.perf_counter()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait(deadline)
            self.ready_s = round(time.perf_counter() - began, 1)
            self.in_use_mib = self.memory.used()
        except BaseException:
            self.stop()
            raise

    def arguments(self, model: Path, backend: str) -> list[str]:
        """Returns the program's arguments. "twin": as it is, without the plugin, by the engine's choice."""
        return [
            "serve", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port),
            "--seed", "0", "--no-enable-prefix-caching", "--disable-uvicorn-access-log",
            *(["--moe-backend", backend] if backend in STOCK else []),
        ]  # fmt: skip

    def _wait(self, deadline: Deadline) -> None:
        while True:
            if self.process.poll() is not None:
                raise self.failed(f"it ended with {self.process.returncode} before it was ready")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                deadline.need(0)
                time.sleep(0.2)

    def failed(self, why: str) -> ServerFailed:
        """Returns the error with the log's last errors, which a long trace may follow."""
        lines = self.lines()
        errors = [line for line in lines if "Error" in line][-5:]
        return ServerFailed("\n".join([f"{self.log.name}: {why}", *(errors or lines[-5:])]))

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def ask(self, **fields: object) -> Any:
        """Returns the first choice of a greedy completion."""
        return self.post("/v1/completions", {"model": MODEL, "temperature": 0, "return_token_ids": True} | fields)[
            "choices"
        ][0]

    def post(self, path: str, body: dict[str, object]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except OSError as error:  # also every error of urllib
            raise self.failed(f"a completion failed: {error}") from error

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        said: list[int] = self.ask(prompt=prompt, max_tokens=tokens, ignore_eos=True)["token_ids"]
        return said

    def forced(self, text: list[int]) -> tuple[list[dict[int, float]], list[Route] | None]:
        """Returns what the server makes of a text: log-probabilities and routes, of each position but the last.

        {token: log-probability} of the next token: the likeliest five and the text's own. Routes are None unless the
        server has routes_options.
        """
        answer = self.ask(prompt=text, max_tokens=1, prompt_logprobs=5)
        steps = [
            {int(token): value["logprob"] for token, value in step.items()} for step in answer["prompt_logprobs"][1:]
        ]
        routes = answer.get("routed_experts")
        return steps, routes and routes_of(base64.b64decode(routes))[: len(steps)]

    def bench(self, model: Path, cell: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Runs `vllm bench serve` in this process, which saves its imports for each cell."""
        from vllm.benchmarks import serve
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser()
        serve.add_cli_args(parser)

        async def within() -> dict[str, Any]:
            try:
                return await asyncio.wait_for(serve.main_async(parser.parse_args(self._bench(model, cell))), limit_s)
            except TimeoutError:  # asyncio's own class before Python 3.11
                raise OutOfTime from None

        return asyncio.run(within())

    def _bench(self, model: Path, cell: dict[str, Any]) -> list[str]:
        """Returns the arguments of `vllm bench serve`."""
        return [
            "--backend", "vllm", "--host", "127.0.0.1", "--port", str(self.port), "--model", MODEL, "--tokenizer",
            str(model), "--dataset-name", "random", "--random-input-len", str(cell["input"]),
            "--random-output-len", str(cell["output"]), "--random-range-ratio", "0", "--ignore-eos",
            "--num-prompts", str(cell["prompts"]), "--max-concurrency", str(cell["concurrency"]), "--temperature", "0",
            "--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99", "--ready-check-timeout-sec", "0",
            "--disable-tqdm", "--seed", str(cell["round"]),
        ]  # fmt: skip

    def stop(self) -> None:
        """Ends its process group: first politely, so that it frees the device."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(30)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        for _ in range(100):  # the driver frees a process's memory some time after its end
            if measure_vllm.MEMORY == "host" or self.memory.used() < 256:
                break
            time.sleep(0.1)
        self.memory.stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
