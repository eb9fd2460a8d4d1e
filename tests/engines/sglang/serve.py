"""One start of SGLang's engine on a CPU, in a process of its own: serve.py JOB.json RESULT.json.

JOB: {"model", "arguments" of Engine, "reload": a model directory to load weights from before a second round}. RESULT:
{"rounds": [[{"tokens", "logprobs", "prompt_logprobs"}, ...], ...]}: for each prompt the greedy tokens, and by step the
log-probabilities of the likeliest tokens, {token: log-probability}; of the prompt too, from its second token on.
"""

import json
import sys

PROMPTS = [
    [7, 11, 13, 17, 19, 23, 29, 31],
    [101, 99, 250, 201, 5],
    [200, 3, 77],
    [64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75],
]
NEW_TOKENS, TOP = 12, 20


def by_token(steps):
    """SGLang's lists of (log-probability, token, text), without the first of a prompt, which has none."""
    return [{token: value for value, token, _ in step} for step in steps if step]


def generate(engine):
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    outs = engine.generate(
        input_ids=PROMPTS, sampling_params=sampling, return_logprob=True, logprob_start_len=0, top_logprobs_num=TOP
    )
    return [
        {
            "tokens": out["output_ids"],
            "logprobs": by_token(out["meta_info"]["output_top_logprobs"]),
            "prompt_logprobs": by_token(out["meta_info"]["input_top_logprobs"]),
        }
        for out in outs
    ]


def main():
    from sglang.srt.entrypoints.engine import Engine

    with open(sys.argv[1]) as file:
        job = json.load(file)
    arguments = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "max_total_tokens": 512,
        "max_running_requests": 4,
        "mem_fraction_static": 0.1,
        "random_seed": 0,
        "log_level": "info",
    }
    engine = Engine(model_path=job["model"], **{**arguments, **job.get("arguments", {})})
    try:
        rounds = [generate(engine)]
        if "reload" in job:
            done, message, *_ = engine.update_weights_from_disk(job["reload"])
            if not done:
                raise RuntimeError(message)
            rounds.append(generate(engine))
        with open(sys.argv[2], "w") as file:
            json.dump({"rounds": rounds}, file)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
