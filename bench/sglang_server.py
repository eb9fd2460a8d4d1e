"""An SGLang server process of a benchmark."""

from __future__ import annotations

import importlib.metadata
import json
import re
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import vllm_server
from vllm_server import MODEL, OURS, OutOfTime, ServerFailed

CLIENT = "sglang.bench_serving"


class Server(vllm_server.Server):
    """`python -m sglang.launch_server`. The plugin is switched on and off by NVFP4_MOE_MODE, as vLLM's is."""

    what = "sglang.launch_server"
    script = "python bench/measure_sglang_serve.py"
    program = (sys.executable, "-m", "sglang.launch_server")
    backends, known = ("nvfp4_moe", "marlin"), (*OURS, "marlin")
    modes = {"graphs": [], "eager": ["--disable-cuda-graph"]}
    routes_options = ()
    log_lines = re.compile(r"Load weight end|Capture.*end|KV Cache is allocated|max_total_num_tokens|nvfp4_moe|packed ")

    @staticmethod
    def versions() -> dict[str, str]:
        names = {"sglang": "sglang", "sglang_kernel": "sglang-kernel"}
        return {key: importlib.metadata.version(name) for key, name in names.items()} | {"client": CLIENT}

    @staticmethod
    def options(model: Path, tokens: int, requests: int, prefill: int, kv_cache_gib: float) -> list[str]:
        config = json.loads((model / "config.json").read_text())
        # SGLang has no option for the bytes of the KV cache, which holds keys and values in bfloat16.
        bytes_of_token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        return [
            "--context-length", str(tokens), "--max-running-requests", str(requests), "--chunked-prefill-size",
            str(prefill), "--max-total-tokens", str(int(kv_cache_gib * 2**30 / bytes_of_token)),
        ]  # fmt: skip

    def arguments(self, model: Path, backend: str) -> list[str]:
        return [
            "--model-path", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port),
            "--random-seed", "0", "--disable-radix-cache",
            *(["--moe-runner-backend", backend] if backend == "marlin" else []),
        ]  # fmt: skip

    def generate(self, prompt: list[int], tokens: int, **fields: object) -> Any:
        """Returns the answer to a greedy request of SGLang's own API."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return self.post("/generate", {"input_ids": prompt, "sampling_params": sampling} | fields)

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        said: list[int] = self.generate(prompt, tokens)["output_ids"]
        return said

    def forced(self, text: list[int]) -> tuple[list[dict[int, float]], None]:
        said = self.generate(text, 1, return_logprob=True, logprob_start_len=0, top_logprobs_num=5)["meta_info"]
        steps = zip(said["input_token_logprobs"], said["input_top_logprobs"], strict=True)
        return [{token: value for value, token, *_ in (own, *top)} for own, top in list(steps)[1:]], None

    def bench(self, model: Path, cell: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Runs SGLang's client in this process, which saves its imports for each cell.

        Returns its result with the two fields that only `vllm bench serve` has, "failed" and "total_token_throughput".
        """
        end = time.monotonic() + limit_s
        before = signal.signal(signal.SIGALRM, lambda number, frame: sys.exit("the time is over"))
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.jsonl"
            try:
                signal.setitimer(signal.ITIMER_REAL, limit_s)
                with mock.patch.object(sys, "argv", [CLIENT, *self._bench(model, cell), "--output-file", str(out)]):
                    runpy.run_module(CLIENT, run_name="__main__")
            except SystemExit as error:  # the client's, or the timer's
                if time.monotonic() >= end:
                    raise OutOfTime from None
                if error.code:
                    raise
            except Exception as error:
                raise self.failed(f"{CLIENT}: {type(error).__name__}: {error}") from error
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            if not out.exists():
                raise ServerFailed(f"{CLIENT}: it wrote no result of {cell}")
            said: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
        failed = cell["prompts"] - said["completed"]
        return said | {"total_token_throughput": said["total_throughput"], "failed": failed}

    def _bench(self, model: Path, cell: dict[str, Any]) -> list[str]:
        """Returns the client's arguments. Prompts are token ids of exact lengths."""
        return [
            "--backend", "sglang", "--host", "127.0.0.1", "--port", str(self.port), "--model", str(model),
            "--dataset-name", "random-ids", "--tokenize-prompt", "--random-input-len", str(cell["input"]),
            "--random-output-len", str(cell["output"]), "--random-range-ratio", "1",
            "--num-prompts", str(cell["prompts"]), "--max-concurrency", str(cell["concurrency"]),
            "--disable-tqdm", "--seed", str(cell["round"]),
        ]  # fmt: skip
