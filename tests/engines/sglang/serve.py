"""Starts SGLang's engine once, on a GPU, or on a CPU if there is no GPU. usage: serve.py JOB.json RESULT.json

JOB: {"model", "arguments" of Engine, "reload": a model directory to load weights from before a second round}. RESULT:
{"rounds": [[{"prompt", "tokens", "logprobs", "routers"}, ...], ...]}. Each prompt is a batch of its own and has:

- the greedy tokens;
- by position of prompt and tokens but the last, the log-probabilities of the likeliest next tokens,
  {token: log-probability};
- by layer and position {"logits", "experts"} of the router, as record.py writes them. There are no layers if
  NVFP4_RECORD names no file.
"""

import json
import os
import sys
import time

PROMPTS = [
    [7, 11, 13, 17, 19, 23, 29, 31],
    [101, 99, 250, 201, 5],
    [200, 3, 77],
    [64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75],
    [150, 30, 151, 31, 152, 32],
    [90, 12, 44, 180],
]
NEW_TOKENS, TOP = 12, 20
CPU = {"device": "cpu", "attention_backend": "torch_native"}
# Neither backend is flashinfer, which takes gigabytes and is built by a JIT compiler.
GPU = {"device": "cuda", "attention_backend": "triton"}


def by_token(steps):
    """SGLang's lists of (log-probability, token, text). A prompt's first token has no log-probability: left out."""
    return [{token: value for value, token, _ in step} for step in steps if step]


def read_routers(record):
    """Returns [layer] -> {"logits": (T, E), "experts": (T, top_k)} since the last reading; nothing without a record."""
    if record is None:
        return []
    layers = {}
    lines = open(record).read().splitlines() if os.path.exists(record) else []
    for line in lines:
        said = json.loads(line)
        found = layers.setdefault(said["layer"], {"logits": [], "experts": []})
        found["logits"] += said["logits"]
        found["experts"] += said["experts"]
    open(record, "w").close()
    return [layers[layer] for layer in sorted(layers)]


def generate(engine, record):
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    results = []
    for prompt in PROMPTS:
        read_routers(record)
        (out,) = engine.generate(
            input_ids=[prompt], sampling_params=sampling, return_logprob=True, logprob_start_len=0, top_logprobs_num=TOP
        )
        meta = out["meta_info"]
        results.append(
            {
                "prompt": prompt,
                "tokens": out["output_ids"],
                "logprobs": by_token(meta["input_top_logprobs"]) + by_token(meta["output_top_logprobs"]),
                "routers": read_routers(record),
            }
        )
    return results


def main():
    import torch
    from sglang.srt.entrypoints.engine import Engine

    with open(sys.argv[1]) as file:
        job = json.load(file)
    record = os.environ.get("NVFP4_RECORD")
    arguments = {
        "skip_tokenizer_init": True, "sampling_backend": "pytorch", "disable_radix_cache": True,
        "disable_overlap_schedule": True, "disable_cuda_graph": True, "max_total_tokens": 512,
        "max_running_requests": 4, "mem_fraction_static": 0.1, "random_seed": 0, "log_level": "info",
        "decode_log_interval": 1,
    } | (GPU if torch.cuda.is_available() else CPU)  # fmt: skip
    engine = Engine(model_path=job["model"], **{**arguments, **job.get("arguments", {})})
    try:
        rounds = [generate(engine, record)]
        if "reload" in job:
            # SGLang answers a request before it retires it, and then reports that its cache was not flushed.
            for _ in range(20):
                done, message, *_ = engine.update_weights_from_disk(job["reload"])
                if done:
                    break
                time.sleep(0.5)
            else:
                raise RuntimeError(message)
            rounds.append(generate(engine, record))
        with open(sys.argv[2], "w") as file:
            json.dump({"rounds": rounds}, file)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
