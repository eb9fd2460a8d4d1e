#!/usr/bin/env python3
"""Measures a MoE model in transformers on a GPU: NVFP4 experts with this library, or bf16 with transformers'
grouped_mm.

    python bench/measure_transformers.py MODEL OUT.json --experts nvfp4_moe|enabled|grouped_mm --commit SHA [--static]

One kind per process. MODEL is an NVFP4 checkpoint (bench/make_serving_model.py writes one). `enabled` and grouped_mm
take only its configuration, and random bf16 weights; `enabled` quantizes the experts with this library's enable().
Speed is tokens per second of generate() with DECODE tokens after prompts of PROMPT tokens; the time of one token is
subtracted, and the least of REPEATS counts. It is eager, or with --static has a static cache, for which transformers
compiles the decode step and captures it in CUDA graphs. The MoE part of an eager decode step is the time between CUDA
events around the experts modules, summed over the layers, including launches. Memory is torch's and the device's,
after the load and at its peak.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import records

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

PROMPT, DECODE, REPEATS = 32, 32, 3


def used_mib() -> int:
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def load(model: str, experts: str) -> torch.nn.Module:
    if experts == "nvfp4_moe":
        import nvfp4_moe.transformers  # noqa: F401  registers the quantizer

        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, device_map={"": 0}).eval()
    config = AutoConfig.from_pretrained(model)
    del config.quantization_config
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm").eval()
    if experts == "enabled":
        import nvfp4_moe.transformers

        nvfp4_moe.transformers.enable(made)
    return made


class MoePart:
    """Measures the milliseconds of the experts modules in a forward pass, from events around each."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.on = False
        modules = [module for name, module in model.named_modules() if name.endswith(".experts")]
        assert modules, "expected modules named experts"
        self.modules, self.layers = modules, len(modules)

    def watch(self) -> None:
        for module in self.modules:
            module.register_forward_pre_hook(self.begin)
            module.register_forward_hook(self.end)

    def begin(self, *_: object) -> None:
        if self.on:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self.events.append(pair)

    def end(self, *_: object) -> None:
        if self.on:
            self.events[-1][1].record()

    def per_pass_ms(self) -> float:
        """Returns the median over the passes since the last call."""
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) for begin, end in self.events]
        self.events.clear()
        passes = [sum(times[i : i + self.layers]) for i in range(0, len(times), self.layers)]
        return statistics.median(passes)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", required=True, choices=("nvfp4_moe", "enabled", "grouped_mm"))
    parser.add_argument("--static", action="store_true", help="a static cache, and a compiled decode step")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--batches", default="1,8,64")
    asked = parser.parse_args()
    before = used_mib()
    begun = time.perf_counter()
    model = load(asked.model, asked.experts)
    torch.cuda.synchronize()
    ready = time.perf_counter() - begun
    memory = {
        "load_peak_torch_mib": torch.cuda.max_memory_allocated() >> 20,
        "ready_torch_mib": torch.cuda.memory_allocated() >> 20,
        "ready_device_mib": used_mib() - before,
    }
    part = MoePart(model)
    if not asked.static:
        part.watch()
    random = torch.Generator().manual_seed(1)

    def seconds(batch: int, tokens: int) -> float:
        ids = torch.randint(10, 30000, (batch, PROMPT), generator=random).cuda()
        torch.cuda.synchronize()
        start = time.perf_counter()
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            cache_implementation="static" if asked.static else None,
        )  # fmt: skip
        torch.cuda.synchronize()
        assert made.shape == (batch, PROMPT + tokens)
        return time.perf_counter() - start

    runs = []
    for batch in map(int, asked.batches.split(",")):
        seconds(batch, 1 + DECODE if asked.static else 2)  # a cache of another length compiles once more
        first = min(seconds(batch, 1) for _ in range(REPEATS))
        rest = min(seconds(batch, 1 + DECODE) for _ in range(REPEATS)) - first
        run = {"batch": batch, "tokens_per_s": round(batch * DECODE / rest, 1)}
        if not asked.static:
            part.on = True
            seconds(batch, 1 + DECODE)
            part.on = False
            run["moe_ms_per_step"] = round(part.per_pass_ms(), 3)
        runs.append(run)
        print(run, flush=True)
    static = " --static" if asked.static else ""
    result = {
        "schema": 1,
        "what": f"one MoE model in transformers, {'compiled' if asked.static else 'eager'} generate()",
        "model": {"type": model.config.model_type, "layers": model.config.num_hidden_layers, "experts": part.layers},
        "device": torch.cuda.get_device_name(),
        "commit": asked.commit,
        "command": f"python bench/measure_transformers.py MODEL OUT.json --experts {asked.experts}{static}",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "experts": asked.experts,
        "ready_s": round(ready, 1),
        **memory,
        "end_device_mib": used_mib() - before,
        "runs": runs,
    }
    asked.out.write_text(records.text(result))
    print({key: value for key, value in result.items() if key != "runs"})


if __name__ == "__main__":
    main()
