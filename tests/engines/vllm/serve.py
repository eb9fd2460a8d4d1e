"""Runs engines one after the other in this process and writes their results. usage: serve.py JOBS.json

A job: {"name", "model", "out", "options": of vllm.LLM, "environment", "tokens", "reload": directories to load into the
engine in turn, "routers": whether to record the routers' decisions, "without_a_gate": whether the model has such
experts}. The result, JSON at "out": {"runs": for the first weights and each reload, a run in the form of
../common/truth.py, "handles", "log", "seconds", "error"}.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import sys
import time
import traceback

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # a JIT compiler builds it; greedy choices do not need it

_choose = random.Random(0)
# Random tokens of ../common/models.py's vocabulary. ../common/judges.py gives the reason for the number of prompts.
PROMPTS = [[_choose.randrange(3, 384) for _ in range(_choose.randrange(3, 9))] for _ in range(24)]


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "nvfp4" in record.getMessage().lower():
            self.lines.append(f"{record.levelname} {record.getMessage()}")


def model_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def moe_runners(model):
    return {name: module for name, module in model.named_modules() if hasattr(module, "routed_experts")}


def record_routers(model) -> dict:
    """Replaces each router's select_experts by one that also keeps logits and ids."""
    kept: dict = {}
    for name, runner in moe_runners(model).items():
        kept[name] = {"logits": [], "experts": []}

        def keep(*args, _own=runner.router.select_experts, _into=kept[name], **named):
            weights, ids = _own(*args, **named)
            _into["logits"] += named["router_logits"].float().tolist()
            _into["experts"] += ids.tolist()
            return weights, ids

        runner.router.select_experts = keep
    return kept


def generate(llm, tokens: int, kept: dict) -> list[dict]:
    """Generates greedily, one prompt at a time, so that the routers get one prompt's tokens in order."""
    from vllm import SamplingParams

    asked = SamplingParams(
        temperature=0, max_tokens=tokens, logprobs=5, ignore_eos=True, detokenize=False, prompt_logprobs=0
    )
    results = []
    for prompt in PROMPTS:
        for layer in kept.values():
            layer.update(logits=[], experts=[])
        (said,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        (output,) = said.outputs
        steps = [*said.prompt_logprobs[1:], *output.logprobs]  # the first token has no log-probabilities
        results.append(
            {
                "prompt": prompt,
                "tokens": list(output.token_ids),
                "logprobs": [{token: value.logprob for token, value in step.items()} for step in steps],
                "routers": [dict(layer) for layer in kept.values()],
            }
        )
    return results


def serve(job: dict) -> dict:
    import torch
    from vllm import LLM

    handler = _Kept()
    logging.getLogger("vllm").addHandler(handler)
    result: dict = {"runs": [], "handles": [], "error": None}
    started = time.monotonic()
    llm = None
    try:
        options = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
            "dtype": "bfloat16",
            "seed": 0,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            **({"kv_cache_memory_bytes": 256 << 20} if torch.cuda.is_available() else {}),
        } | job.get("options", {})
        if job.get("without_a_gate"):
            import without_a_gate

            options["worker_extension_cls"] = f"{without_a_gate.__name__}.Extension"
        if job.get("routers"):  # vLLM's, which can be watched
            additional = dict(options.get("additional_config", {}))
            additional["nvfp4_moe"] = {"router": "engine"} | additional.get("nvfp4_moe", {})
            options["additional_config"] = additional
        if options.get("load_format") == "tiny_deepseek_v4":
            import deepseek_v4

            deepseek_v4.register_loader()
        llm = LLM(job["model"], **options)
        alone = options.get("tensor_parallel_size", 1) == 1
        kept = record_routers(model_of(llm)) if alone and job.get("routers") else {}
        for directory in [None, *job.get("reload", [])]:
            if directory is not None:
                llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})
            result["runs"].append(generate(llm, job.get("tokens", 8), kept))
            if alone:
                methods = [r.routed_experts.quant_method for r in moe_runners(model_of(llm)).values()]
                fused = [getattr(method, "fused", None) for method in methods]
                result["handles"].append([f and f.layer.handle for f in fused])
                result["methods"] = [type(method).__name__ for method in methods]
                result["routes"] = [bool(method.is_monolithic) for method in methods]
                result["layers"] = [f and repr(f.layer) for f in fused]
    except BaseException as error:
        result["error"] = "".join(traceback.format_exception(error))
        if isinstance(error, KeyboardInterrupt):
            raise
    finally:
        logging.getLogger("vllm").removeHandler(handler)
        result["log"], result["seconds"] = handler.lines, time.monotonic() - started
        del llm
        gc.collect()
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    return result


def main() -> None:
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    for job in jobs:
        before = {name: os.environ.get(name) for name in job.get("environment", {})}
        os.environ.update(job.get("environment", {}))
        result = serve(job)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        with open(job["out"], "w") as file:
            json.dump(result, file)
        print(job["name"], f"{result['seconds']:.1f} s", result["error"] or "", flush=True)


if __name__ == "__main__":
    main()
