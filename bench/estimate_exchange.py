#!/usr/bin/env python3
"""Estimates, without a measurement, the exchange of one layer: all_reduce and all_to_all of 4 to 256 ranks.

    bench/estimate_exchange.py        the tables of docs/benchmarks.md, "Several ranks"

Ranks of one host are estimated by a latency and a rate, fitted to measured collectives of 4 H200s of one host.
Everything between hosts is assumed; NETWORK has the assumptions. docs/benchmarks.md describes the model.
"""

import json
import math
import pathlib

KIB, MIB = 1 << 10, 1 << 20

# (bytes of a rank's buffer, microseconds): 4 H200s of one host, NVLink, NCCL 2.28.9 without multicast, in a CUDA graph.
MEASURED_RANKS = 4
MEASURED = {
    "all_reduce": [(14 * KIB, 13.4), (56 * KIB, 15.0), (224 * KIB, 13.4), (896 * KIB, 18.9), (3.5 * MIB, 39),
                   (14 * MIB, 87), (56 * MIB, 285), (224 * MIB, 1038)],
    "all_to_all": [(14 * KIB, 12.5), (56 * KIB, 10.2), (224 * KIB, 11.2), (896 * KIB, 15.3), (3.5 * MIB, 22.5),
                   (14 * MIB, 58), (56 * MIB, 167), (224 * MIB, 571)],
}  # fmt: skip

# Later measurements on two GPUs of one host, to check the model: H100s, torch.distributed in a CUDA graph.
TWO_GPUS = pathlib.Path(__file__).resolve().parent.parent / "bench/results/exchange-nccl-2h100-016ca99.json"

# Assumptions, not measured: a NIC of 400 Gbit/s for each GPU at nine tenths of its rate, and the cost of a message.
NETWORK = {
    "ranks_of_a_host": 8,  # over one NVLink switch, at the latency and rate of the 4 measured
    "nic_bytes_a_us": 45_000,  # 45 GB/s each way
    "nic_latency_us": 8.0,
    "message_us": 0.3,  # for each rank of another host: a send and a receive, handled by the host's proxy thread
}

# A layer of DeepSeek-V4-Pro.
MODEL = {"hidden": 7168, "experts": 384, "top_k": 6}
RANKS = [4, 8, 16, 64, 256]
TOKENS = [1, 16, 128, 1024]  # of each rank
MEMORY_GIB = 8  # message buffers above this are reported as too large for a rank


def wire_bytes(kind, size, ranks):
    """Returns the bytes that a rank sends: its buffer without its own part, and twice that for all_reduce."""
    return size * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def line(kind):
    """Fits (latency in us, bytes per us) to the measurements, with the least relative errors."""
    points = [(wire_bytes(kind, size, MEASURED_RANKS), us) for size, us in MEASURED[kind]]
    w = sum(1 / us**2 for _, us in points)
    wx = sum(x / us**2 for x, us in points)
    wxx = sum(x * x / us**2 for x, us in points)
    wy = sum(1 / us for _, us in points)
    wxy = sum(x / us for x, us in points)
    slope = (w * wxy - wx * wy) / (w * wxx - wx * wx)
    return (wy - slope * wx) / w, 1 / slope


def hosts(ranks):
    return max(1, ranks // NETWORK["ranks_of_a_host"])


def all_to_all_us(sent, ranks):
    """Estimates an all_to_all; sent: bytes from a rank to all others, evenly. NVLink and NICs work at the same time."""
    latency, rate = line("all_to_all")
    if hosts(ranks) == 1:
        return latency + sent / rate
    here = min(ranks, NETWORK["ranks_of_a_host"]) - 1
    far = ranks - 1 - here
    across = sent * far / (ranks - 1) / NETWORK["nic_bytes_a_us"]
    network = NETWORK["nic_latency_us"] + far * NETWORK["message_us"]
    return latency + max(sent * here / (ranks - 1) / rate, network + across)


def all_reduce_us(size, ranks):
    """Estimates an all_reduce: inside each host, then between hosts through the GPUs' NICs, then inside again."""
    latency, rate = line("all_reduce")
    here = min(ranks, NETWORK["ranks_of_a_host"])
    us = latency + wire_bytes("all_reduce", size, here) / rate
    if hosts(ranks) > 1:
        across = wire_bytes("all_reduce", size / here, hosts(ranks))
        us += 2 * math.ceil(math.log2(hosts(ranks))) * NETWORK["nic_latency_us"] + across / NETWORK["nic_bytes_a_us"]
    return us


def record_bytes(model):
    """Returns the bytes of a token in NVFP4 on the wire, in the layout of src/backend/device_exchange.h."""
    activations = model["hidden"] // 2 + model["hidden"] // 16 + 4 + 1
    return -(-(-(-activations // 4) * 4 + 8 * model["top_k"] + 4) // 16) * 16


def other_ranks_of_a_token(model, ranks):
    """Returns the mean number of other ranks with an expert of a token, if experts are selected evenly."""
    return (ranks - 1) * (1 - (1 - 1 / ranks) ** model["top_k"])


def cell(model, ranks, tokens):
    """Estimates one layer with `tokens` tokens per rank. With all_reduce all ranks have all of them."""
    reduced = ranks * tokens * model["hidden"] * 4
    dispatched = tokens * other_ranks_of_a_token(model, ranks) * record_bytes(model)
    as_bf16 = tokens * other_ranks_of_a_token(model, ranks) * model["hidden"] * 2
    returned = tokens * model["top_k"] * (ranks - 1) / ranks * model["hidden"] * 2
    result = {
        "ranks": ranks,
        "tokens": tokens,
        "all_reduce_us": all_reduce_us(reduced, ranks),
        "dispatch_us": all_to_all_us(dispatched, ranks),
        "dispatch_bf16_us": all_to_all_us(as_bf16, ranks),
        "return_us": all_to_all_us(returned, ranks),
        # A fixed capacity of one rank's tokens: packets and rows, in both directions.
        "buffers_gib": 2 * ranks * tokens * (record_bytes(model) + model["top_k"] * model["hidden"] * 2) / (1 << 30),
    }
    result["all_to_all_us"] = result["dispatch_us"] + result["return_us"]
    result["faster"] = "all_reduce" if result["all_reduce_us"] < result["all_to_all_us"] else "all_to_all"
    return result


def uneven_slots(model, ranks):
    """Returns the most experts of a rank over the mean, if each expert has one slot."""
    return -(-model["experts"] // ranks) / (model["experts"] / ranks)


def cells(model=MODEL):
    return [cell(model, ranks, tokens) for ranks in RANKS for tokens in TOKENS]


def two_gpus():
    """Yields (collective, tokens per rank, estimated us, measured us): fp32 sums of all tokens, and one copy per
    assignment
    there and back."""
    measured = json.loads(TWO_GPUS.read_text())["torch_distributed"][0]
    hidden, top_k = measured["hidden"], measured["top_k"]
    for row in measured["rows"]:
        tokens = row["tokens_a_rank"]
        sums = all_reduce_us(2 * tokens * hidden * 4, 2)
        yield "all_reduce", tokens, sums, row["graph_all_reduce_f32_us"]
        copies = wire_bytes("all_to_all", tokens * top_k * hidden * 2, 2)
        yield "all_to_all", tokens, 2 * all_to_all_us(copies, 2), row["graph_wire_assignment_us"]


def us_text(us):
    return f"{us:.0f}" if us < 10_000 else f"{us / 1000:.1f} ms"


def tables(model=MODEL):
    lines = [
        "| collective | latency, us | GB/s out of a rank | furthest from what was measured |",
        "|---|---:|---:|---:|",
    ]
    for kind in MEASURED:
        latency, rate = line(kind)
        off = [(latency + wire_bytes(kind, size, MEASURED_RANKS) / rate) / us - 1 for size, us in MEASURED[kind]]
        lines.append(f"| {kind} | {latency:.1f} | {rate / 1000:.0f} | {100 * max(off, key=abs):+.0f} % |")
    lines += ["", "| two GPUs: | tokens a rank | estimated, us | measured, us | off by |", "|---|---:|---:|---:|---:|"]
    for kind, tokens, estimated, us in sorted(two_gpus()):
        off = 100 * (estimated / us - 1)
        lines.append(f"| {kind} | {tokens} | {us_text(estimated)} | {us_text(us)} | {off:+.0f} % |")
    lines += ["", "| ranks | tokens a rank | all_reduce, us | dispatch | rows back | all_to_all, us | faster "
              "| buffers, GiB |",
              "|---:|---:|---:|---:|---:|---:|---|---:|"]  # fmt: skip
    for one in cells(model):
        lines.append(
            f"| {one['ranks']} | {one['tokens']} | {us_text(one['all_reduce_us'])} | {us_text(one['dispatch_us'])} "
            f"(bf16 {us_text(one['dispatch_bf16_us'])}) | {us_text(one['return_us'])} "
            f"| {us_text(one['all_to_all_us'])} | {one['faster']} "
            f"| {one['buffers_gib']:.2f}{' !' if one['buffers_gib'] > MEMORY_GIB else ''} |"
        )
    lines += ["", "| ranks | experts a rank | most over the mean, one slot each |", "|---:|---:|---:|"]
    for ranks in RANKS:
        lines.append(f"| {ranks} | {model['experts'] / ranks:g} | {uneven_slots(model, ranks):.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
