"""A tiny Qwen3-MoE in SGLang's real engine on a CPU: greedy tokens and log-probabilities beside those of its twin in floats.

What a difference may be: the engine's own twin in bfloat16 is off from its twin in float32, of the very same weights, by up
to E in a log-probability over the same tokens (the prompts). An NVFP4 model rounds where the bfloat16 twin does, so it may be
off by as much; two runs that are each off by E differ by 2E. A greedy token may thus differ from the float32 twin's only
where that holds both tokens within 2E of each other: each of the two may move by E.
"""

import models
import pytest


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    first, second = models.make(1), models.make(2)
    made = {form: models.write(folder / form, form, first) for form in models.FORMS}
    return made | {"other": models.write(folder / "other", "modelopt", second)}


@pytest.fixture(scope="module")
def truth(serve, checkpoints):
    """(the float32 twin's answers, 2E)."""
    answers = {}
    for dtype in ("float32", "bfloat16"):
        rounds, status, log = serve(checkpoints["twin"], dtype=dtype)
        assert rounds, f"the twin in {dtype} ended with {status}:\n{log[-3000:]}"
        answers[dtype] = rounds[0]
    off = largest_difference(answers["float32"], answers["bfloat16"])
    assert off > 0
    return answers["float32"], 2 * off


def largest_difference(ours, theirs):
    """Over the prompts: which tokens follow is the same for both."""
    differences = [
        abs(value - step_theirs[token])
        for answer, answer_theirs in zip(ours, theirs, strict=True)
        for step, step_theirs in zip(answer["prompt_logprobs"], answer_theirs["prompt_logprobs"], strict=True)
        for token, value in step.items()
        if token in step_theirs
    ]
    assert len(differences) > 100
    return max(differences)


def judge(answers, truth, print_line):
    """Every greedy token is the twin's, until one where the twin holds both within 2E."""
    twin, bound = truth
    off = largest_difference(answers, twin)
    same = compared = 0
    for ours, theirs in zip(answers, twin, strict=True):
        for step, (token, expected) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
            compared += 1
            same += token == expected
            if token == expected:
                continue
            held = theirs["logprobs"][step]
            assert str(token) in held, f"step {step}: {token} is none of the likeliest tokens of the twin"
            margin = held[str(expected)] - held[str(token)]
            print_line(f"step {step}: {token} for {expected}, a tie: {margin:.4f} apart, {bound:.4f} are within rounding")
            assert margin <= bound
            break
    print_line(f"{same} of {compared} tokens, prompt log-probabilities within {off:.4f} of {bound:.4f}")
    assert off <= bound


def took(log):
    """Layers whose packing the log reports."""
    return [line for line in log.splitlines() if "<MoeLayer" in line]


@pytest.mark.parametrize(
    ("form", "arguments"),
    [
        ("modelopt_mixed", {}),
        ("compressed_w4a4", {"moe_runner_backend": "nvfp4_moe"}),
        ("compressed_w4a16", {}),
    ],
)
def test_tokens_are_the_twins(serve, checkpoints, truth, form, arguments):
    rounds, status, log = serve(checkpoints[form], **arguments)
    assert rounds, f"{form} ended with {status}:\n{log[-3000:]}"
    assert took(log)
    judge(rounds[0], truth, print)


def test_tokens_after_an_update_of_the_weights(serve, checkpoints, truth):
    rounds, status, log = serve(checkpoints["other"], reload=checkpoints["modelopt"])
    assert rounds, f"ended with {status}:\n{log[-3000:]}"
    assert [a["tokens"] for a in rounds[0]] != [a["tokens"] for a in rounds[1]]
    judge(rounds[1], truth, print)


@pytest.mark.parametrize("arguments", [{"tp_size": 2}, {"tp_size": 2, "ep_size": 2}])
def test_two_ranks(serve, checkpoints, truth, arguments):
    rounds, status, log = serve(checkpoints["modelopt"], variables={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, **arguments)
    assert rounds, f"ended with {status}:\n{log[-3000:]}"
    shown = took(log)
    assert len(shown) == 1 and ("experts 0..3 of 8" in shown[0]) == ("ep_size" in arguments)
    assert ("128x32" in shown[0]) == ("ep_size" not in arguments)
    judge(rounds[0], truth, print)


def test_without_the_plugin_sglang_has_no_kernel_here(serve, checkpoints):
    rounds, _, log = serve(checkpoints["modelopt"], variables={"NVFP4_MOE": "0"})
    assert rounds is None and not took(log)
    assert "Current platform does not support NVFP4" in log
