"""A rank that replays its graph with seven inputs in turn, before and after the other rank is killed, and counts
results.

Started like rank_process.py. One fixed input would hide the fault that this detects: stale bytes of an earlier replay
with the same input are right. Writes RANK.counts.json: replays that are right, all NaN, in rows right or NaN
("partly"), or finite and wrong.
"""

from __future__ import annotations

import json
import time

import torch
from rank_process import SUM, Rank, batch, capture, main, on

INPUTS = 7
# Number of replays enqueued before a synchronization: more than a stream takes before a launch blocks.
AHEAD = 400
# Replays that are checked from the first one on that is not right.
AFTER = 210
# Layers by name: options, and tokens of a run. A large sum goes shard by shard: more than a MiB of fp32.
LAYERS = {
    "sum": (SUM, 64),
    "large sum": (SUM, 2048),
    "capacity": ({"combine": "all_to_all", "capacity": 64}, 64),
}


def kind_of(out: torch.Tensor, expected: torch.Tensor) -> str:
    nan = out.isnan().all(dim=1)
    right = (out == expected).all(dim=1)
    if not bool((nan | right).all()):
        return "wrong"
    return "nan" if bool(nan.all()) else "right" if bool(right.all()) else "partly"


def replays(rank: Rank, name: str, at_once: int) -> None:
    options, tokens = LAYERS[name]
    # Over peers, if a queue is stuck and a rank's launches wait for room in it, only this timeout tells the rank of the
    # end.
    rank.connect(14)
    layer = rank.layer(max_tokens=tokens, **options)
    own = 0 if options["combine"] == "all_reduce" else 10 * rank.rank
    inputs = [on(rank.device, batch(tokens, own + seed, "spread")) for seed in range(INPUTS)]
    expected = [layer.run(*arrays).clone() for arrays in inputs]
    rank.synchronize()
    held = tuple(array.clone() for array in inputs[0])
    out = torch.empty_like(held[0])
    graph = capture(lambda: layer.run(*held, out=out))
    outs = torch.empty((at_once, *out.shape), dtype=out.dtype, device=out.device)
    counts = dict.fromkeys(("replays", "right", "nan", "partly", "wrong"), 0)
    counts["after"] = 0  # replays from the first one on that is not right
    begin = time.monotonic()
    at = 0
    while counts["after"] < AFTER and time.monotonic() - begin < 90:
        for slot in range(at_once):
            for array, fresh in zip(held, inputs[(at + slot) % INPUTS], strict=True):
                array.copy_(fresh)
            out.fill_(3.0)
            graph.replay()
            outs[slot].copy_(out)
        rank.synchronize()
        for slot in range(at_once):
            kind = kind_of(outs[slot], expected[(at + slot) % INPUTS])
            counts["replays"] += 1
            counts[kind] += 1
            counts["after"] += counts["after"] > 0 or kind != "right"
        at += at_once
        if counts["replays"] >= 3 * at_once:
            rank.say("runs")
    (rank.out / f"{rank.rank}.counts.json").write_text(json.dumps(counts))
    layer.status()


SCENARIOS = {
    f"{how} {name}": lambda rank, name=name, at_once=at_once: replays(rank, name, at_once)
    for how, at_once in (("each", 1), ("ahead", AHEAD))
    for name in LAYERS
}

if __name__ == "__main__":
    main(SCENARIOS)
