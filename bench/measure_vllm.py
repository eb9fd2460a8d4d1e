#!/usr/bin/env python3
"""Measures a model in vLLM with one NVFP4 MoE backend: time to ready, memory, tokens per second of decode and prefill.

    python bench/measure_vllm.py MODEL OUT.json --backend nvfp4_moe|marlin|humming --commit SHA

One backend per process; run it once for each, sequentially, on one GPU. Decode at batch size B: B prompts of PROMPT
tokens, DECODE tokens each. The time of generating 1 token is subtracted, and the least of REPEATS counts, to exclude
prefill and disturbed runs. Prefill: 8 prompts of 4096 tokens, one token each. Memory: the device's memory in use,
sampled during the whole life of the engine, minus that before; all engines get the same KV cache size. The engine's log
goes to OUT.log. MODEL: bench/make_serving_model.py writes one.

With --gate FILE an engine that is ready creates FILE.ready, and measures once FILE exists. So several engines can start
on one GPU and measure alternately while the others are idle. Their memory and time to ready are not reported, because
they share the device.

With --trace torch's profiler runs during 16 tokens at the first batch size, after everything that is measured. The
record then has the time of each kernel in one decode step, and OUT.trace.json.gz is the whole trace.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import records

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PROMPT, DECODE, REPEATS = 32, 128, 3
KV_CACHE_BYTES = 8 << 30
LOG_LINES = re.compile(
    "Model loading took|Graph capturing finished|torch.compile took|MoE backend|nvfp4-moe", re.IGNORECASE
)


def ask_device(what: str) -> str:
    """Queries nvidia-smi, so that this process makes no CUDA context in addition to the engine's.

    The device is the first one of CUDA_VISIBLE_DEVICES, which nvidia-smi itself ignores.
    """
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", f"--id={device}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


# The memory that is measured. An engine for CPUs uses only the host's.
MEMORY = "device" if shutil.which("nvidia-smi") else "host"


def device_name() -> str:
    return ask_device("name") if MEMORY == "device" else "CPU"


def memory_used() -> int:
    """Returns the MiB in use."""
    if MEMORY == "device":
        return int(ask_device("memory.used"))
    sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(sizes["MemTotal"].split()[0]) - int(sizes["MemAvailable"].split()[0])) >> 10


class Memory:
    """The MiB in use, above those at the beginning: now, and at the peak."""

    def __init__(self) -> None:
        self.before = memory_used()
        self.peak = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def used(self) -> int:
        return memory_used() - self.before

    def watch(self) -> None:
        while not self.ended.wait(0.1):
            self.peak = max(self.peak, self.used())

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()


def decode_step(trace: Path) -> dict[str, object]:
    """Returns the kernels of one decode step in a trace: a launch of the CUDA graph that has the most of them.

    The step that is reported is the one of median length. Times are in microseconds.
    """
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    launches = collections.defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            launches[event["args"]["correlation"]].append(event)
    most = max(map(len, launches.values()))
    steps = sorted((one for one in launches.values() if len(one) == most), key=lambda one: one[0]["ts"])
    starts = [min(event["ts"] for event in step) for step in steps]
    lengths = [after - before for before, after in itertools.pairwise(starts)]
    middle = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
    busy, end = 0.0, 0.0
    kernels: dict[str, list[float]] = collections.defaultdict(list)
    for event in sorted(steps[middle], key=lambda event: event["ts"]):
        kernels[event["name"][:160]].append(event["dur"])
        busy += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        end = max(end, event["ts"] + event["dur"])
    rows = sorted(kernels.items(), key=lambda row: -sum(row[1]))
    return {
        "step_us": round(lengths[middle], 1), "graph_us": round(end - starts[middle], 1), "busy_us": round(busy, 1),
        "kernels": [{"name": name, "count": len(us), "us": round(sum(us), 1)} for name, us in rows],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--backend", required=True, choices=("nvfp4_moe", "marlin", "humming"))
    parser.add_argument("--commit", required=True)
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--decode-only", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--attention", help="vLLM's attention backend, where its own choice is not to be had")
    asked = parser.parse_args()
    ours = asked.backend == "nvfp4_moe"
    os.environ["NVFP4_MOE_MODE"] = "1" if ours else "0"

    # The engine's core is a separate process that logs to the inherited stderr: redirected to a file, to be read at the
    # end.
    log = asked.out.with_suffix(".log")
    terminal = os.fdopen(os.dup(1), "w")
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    memory = Memory()
    import torch
    import vllm

    options: dict[str, object] = {} if ours else {"moe_backend": asked.backend}
    if asked.gate:
        options["gpu_memory_utilization"] = 0.3  # must be free when it starts, in addition to the other engine
    if asked.attention:
        options["attention_backend"] = asked.attention
    traces = Path(tempfile.mkdtemp())
    if asked.trace:
        options["profiler_config"] = {
            "profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False,
        }  # fmt: skip
    begun = time.perf_counter()
    llm = vllm.LLM(
        asked.model, skip_tokenizer_init=True, max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=8192,
        enable_prefix_caching=False, kv_cache_memory_bytes=KV_CACHE_BYTES, seed=0, **options,
    )  # fmt: skip
    ready = time.perf_counter() - begun
    in_use = memory.used()
    if asked.gate:
        asked.gate.with_suffix(".ready").touch()
        while not asked.gate.exists():
            time.sleep(0.1)
    random = torch.Generator().manual_seed(1)

    def seconds(prompts: int, length: int, tokens: int) -> float:
        ids = torch.randint(10, 30000, (prompts, length), generator=random).tolist()
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
        taken = time.perf_counter() - start
        assert all(len(one.outputs[0].token_ids) == tokens for one in done)
        return taken

    runs: list[dict[str, object]] = []
    for batch in map(int, asked.batches.split(",")):
        seconds(batch, PROMPT, 4)
        first = min(seconds(batch, PROMPT, 1) for _ in range(REPEATS))
        all_of_them = [seconds(batch, PROMPT, 1 + DECODE) - first for _ in range(REPEATS)]
        runs.append({
            "what": "decode", "batch": batch,
            "tokens_per_s": [round(batch * DECODE / s, 1) for s in all_of_them],
            "best_tokens_per_s": round(batch * DECODE / min(all_of_them), 1),
        })  # fmt: skip
        print(runs[-1], file=terminal, flush=True)
    if not asked.decode_only:
        seconds(8, 4096, 1)
        prefills = [seconds(8, 4096, 1) for _ in range(REPEATS)]
        runs.append({
            "what": "prefill", "batch": 8, "prompt": 4096,
            "tokens_per_s": [round(8 * 4096 / s, 1) for s in prefills],
            "best_tokens_per_s": round(8 * 4096 / min(prefills), 1),
        })  # fmt: skip
        print(runs[-1], file=terminal, flush=True)
    memory.stop()
    step: dict[str, object] = {}
    if asked.trace:
        llm.start_profile()
        seconds(int(asked.batches.split(",")[0]), PROMPT, 16)
        llm.stop_profile()
        trace = asked.out.with_suffix(".trace.json.gz")
        # The worker's trace is the larger one: the other has only the frontend's events.
        shutil.copy(max(traces.rglob("*.json.gz"), key=lambda path: path.stat().st_size), trace)
        step = {"decode_step": decode_step(trace)}
    shutil.rmtree(traces)
    result = {
        "schema": 1,
        "what": "one model in vLLM by one MoE backend",
        "device": device_name(),
        "commit": asked.commit,
        "command": f"python bench/measure_vllm.py MODEL OUT.json --backend {asked.backend}",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "backend": asked.backend,
        **(
            {}
            if asked.gate
            else {
                "ready_s": round(ready, 1),
                "in_use_when_ready_mib": in_use,
                "in_use_at_end_mib": memory.used(),
                "peak_mib": memory.peak,
            }
        ),  # fmt: skip
        "kv_cache_mib": KV_CACHE_BYTES >> 20,
        "log": [line for line in log.read_text(errors="replace").splitlines() if LOG_LINES.search(line)],
        "runs": runs,
        **step,
    }
    asked.out.write_text(records.text(result))
    print({key: value for key, value in result.items() if key not in ("runs", "log")}, file=terminal, flush=True)


if __name__ == "__main__":
    main()
