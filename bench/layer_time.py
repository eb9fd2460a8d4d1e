#!/usr/bin/env python3
"""The time of a layer from the work of its plan and the rates of a chip: one model for Hopper, which is compared with
measurements, and for Blackwell, which was never measured. docs/contribute/blackwell-estimate.md explains it.

    bench/layer_time.py --fit bench/results/blackwell-estimate-2e0f1b0.json
        fits the constants named FITTED on the H200's cells, and then without each shape (needs scipy; a minute)
"""

import argparse
import json
import math
import pathlib

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
WEIGHT_BYTES = 0.5625  # of a value: 4 bits of code, and 8 bits of scale for 16

# Constants that were measured by themselves: (value, unit, meaning, source).
MEASURED = {
    "read_share": (0.908, "", "share of the data sheet's memory bandwidth that a GEMM reads",
                   "ncu-limits-h200-1a49611: the greatest, `v4flash` T = 64"),
    "clock_ghz": (1.85, "GHz", "clock without the power cap", "the same record: gemm1 and gemm2 at T = 1"),
    "issue_bf16": (704, "clocks", "to dequantize a k-block of 256 weight rows for bf16 products",
                   "hopper.md: 176 instructions, four warps a scheduler"),
    "issue_fp8": (544, "clocks", "the same for E4M3 products", "hopper.md: 136 instructions, four warps"),
    "issue_one_launch": (692, "clocks", "a subtile of each warp in the kernel of one launch",
                         "hopper.md: 173 instructions, four warps a scheduler"),
    "epilogue": (3328 / 32768, "clocks", "of a multiprocessor for an output",
                 "hopper.md: 13 instructions an output, 32 lanes, four schedulers"),
}  # fmt: skip
# Fitted on the 308 cells of the H200, with --fit; block_us later, with the others as they were.
FITTED = {
    "gemm_us": (3.64, "us", "from the end of the kernel before a GEMM to its first products"),
    "kernel_us": (2.17, "us", "of any other kernel, if it has little to do"),
    "split_us": (1.85, "us", "arrival at split tiles, and their reduction"),
    "one_launch_us": (6.92, "us", "launch, routing, barrier and combine of the kernel of one launch"),
    "block_us": (0.528, "us", "in that kernel, for each time that a cta divides down among its warps"),
    "tile": (3190, "clocks", "beginning and end of a work tile"),
    "rows_share": (1.37, "", "share of the memory bandwidth for rows between kernels (above 1: L2 holds some)"),
    "power_tb_s": (7.68, "TB/s", "weights, if the power cap were the only limit"),
    "power_bf16": (0.793, "PFLOP/s", "bf16 products, if the power cap were the only limit"),
    "power_fp8": (1.12, "PFLOP/s", "E4M3 products, if the power cap were the only limit"),
}
CONSTANTS = {name: value[0] for name, value in {**MEASURED, **FITTED}.items()}
# Limits that are close to each other do not overlap fully: together they take (a^n + b^n)^(1/n).
OVERLAP, OVERLAP_ONE_LAUNCH = 4, 2  # in one launch the warps that multiply also request the copies

CARDS = {"H100": 3.35, "H200": 4.8}  # TB/s, NVIDIA's data sheets; both have 132 multiprocessors and 700 W
MULTIPROCESSORS = 132
PUBLISHED_FLOOR_TB_S = 4.3  # of the recorded floors
FORMATS = {"bf16": "W4A16", "fp8": "W4A8", "nvfp4": "W4A4"}
# local experts, experts, top_k, hidden, intermediate
SHAPES = {
    "v4pro_ep8": (48, 384, 6, 7168, 3072), "v4flash": (256, 256, 6, 4096, 2048),
    "v41flash_ep8": (48, 384, 6, 5120, 2304), "qwen30b": (128, 128, 8, 2048, 768),
    "qwen_next": (512, 512, 10, 2048, 512), "mixtral": (8, 8, 2, 4096, 14336),
    "k3_ep8": (112, 896, 16, 3584, 3072), "gptoss_ep4": (32, 128, 4, 2880, 2880),
}  # fmt: skip


def overlapped(limits, exponent=OVERLAP):
    return sum(limit**exponent for limit in limits) ** (1 / exponent)


def gemm_us(chip, work, constants=CONSTANTS):
    """Returns {"limits": {name: us}, "limit": the longest, "us": with the start}.

    chip: memory_tb_s, clock_ghz, power_tb_s, power_pflop_s. work: bytes of weights, flops, and of the busiest cta its
    clocks by resource, tiles and outputs; split: whether tiles are split along K; epilogue_overlaps: whether a tile is
    stored while the next one is multiplied.
    """
    clocks = dict(work["clocks"])
    tiles = work["tiles"] * constants["tile"] + work["outputs"] * constants["epilogue"]
    if work["epilogue_overlaps"]:
        busy = overlapped([*clocks.values(), tiles])
    else:
        busy = overlapped(clocks.values()) + tiles
    clocks["tiles"] = tiles
    limits = {
        "memory": work["bytes"] / (chip["memory_tb_s"] * constants["read_share"] * 1e6),
        max(clocks, key=clocks.get): busy / (chip["clock_ghz"] * 1e3),
        "power": work["bytes"] / (chip["power_tb_s"] * 1e6) + work["flops"] / (chip["power_pflop_s"] * 1e9),
    }
    us = overlapped(limits.values()) + constants["gemm_us"] + work["split"] * constants["split_us"]
    return {"limits": limits, "limit": max(limits, key=limits.get), "us": us}


def other_us(chip, batch, constants=CONSTANTS):
    """Returns the us of all kernels but the GEMMs, from their number and the rows that they read and write.

    batch: tokens, local_tokens, rows, assignments, hidden, intermediate, row_bytes (of a value of a GEMM's rows),
    gathers (rows are put in order), requantizes (the intermediate, in a kernel of its own).
    """
    h, n, rows = batch["hidden"], batch["intermediate"], batch["rows"]
    moved = (batch["local_tokens"] + batch["tokens"]) * h * 2 + rows * h * 4 + rows * n * 4
    moved += batch["gathers"] * rows * h * batch["row_bytes"] * 2 + batch["requantizes"] * rows * n * 4
    # route and combine; route is three kernels if the assignments are too many for one cta
    kernels = 2 + batch["gathers"] + batch["requantizes"] + 2 * (batch["assignments"] > 2048)
    rate = chip["memory_tb_s"] * constants["rows_share"] * 1e6
    return kernels * constants["kernel_us"] + moved / rate


# ---- Hopper


SHARED_BYTES = 227 * 1024  # of a cta, at most


def in_one_launch(shape, tokens):
    """Whether an sm90 layer under bf16 takes one launch: plan_decode in backend/sm90/decode.cu."""
    local, experts, top_k, hidden, intermediate = SHAPES[shape]
    chosen = local * (1 - (1 - top_k / experts) ** tokens)
    weights = chosen * 3 * hidden * intermediate * WEIGHT_BYTES
    assignments = tokens * top_k
    partials = 8192 + blocks_of(hidden) * assignments * 64
    rings, routing = 16 * 4 * 1152, 9984  # routing: Bf16DecodeRouting
    rows = max(tokens * row_bytes(hidden), assignments * row_bytes(intermediate))
    return (tokens <= 8 and assignments <= 128 and weights <= 256e6 and intermediate <= hidden
            and rings + partials + rows + routing <= SHARED_BYTES)  # fmt: skip


def blocks_of(hidden):
    """The most blocks of 16 output channels that a cta has in one launch."""
    return math.ceil(hidden / 16 / MULTIPROCESSORS)


def row_bytes(k):
    return math.ceil(k / 128) * 256 + 64


def subtiles_by_powers(items, planned_items, k_tiles):
    """Returns the subtiles of the busiest of 16 warps if a power of two of them shares an item along K, as kernels
    before f140f6f did."""

    def of(count, warps):
        return math.ceil(count / (16 // warps)) * (math.ceil(k_tiles / warps) + (1.5 if warps > 1 else 1))

    return of(items, min((w for w in (1, 2, 4, 8, 16) if w <= k_tiles), key=lambda w: of(planned_items, w)))


def subtiles_by_runs(items, _, k_tiles):
    """The same if all items, one after the other, are divided into equal runs (backend/sm90/decode_runs.h)."""
    return math.ceil(items * k_tiles / 16) + 1.5


def one_launch_us(cell, hit, rate, constants):
    local, experts, top_k, hidden, intermediate = SHAPES[cell["shape"]]
    planned = math.ceil(cell["tokens"] * top_k * local / experts)
    groups = 2 * intermediate / 16 / MULTIPROCESSORS  # of an expert, for each cta
    subtiles_of_a_warp = subtiles_by_runs if cell["by_runs"] else subtiles_by_powers
    blocks = blocks_of(hidden)
    gate_up = subtiles_of_a_warp(math.ceil(hit * groups), math.ceil(planned * groups), math.ceil(hidden / 128))
    # Kernels before ae8b8f1 divide the rows of each block by themselves, and wait for each other after each.
    divisions, in_one = (1, blocks) if cell["at_once"] else (blocks, 1)
    down = divisions * subtiles_of_a_warp(in_one * hit, planned, math.ceil(intermediate / 128))
    total = constants["one_launch_us"] + divisions * constants["block_us"]
    for subtiles, values in ((gate_up, 2 * hidden * intermediate), (down, hidden * intermediate)):
        warps = subtiles * constants["issue_one_launch"] / (constants["clock_ghz"] * 1e3)
        total += overlapped((hit * values * WEIGHT_BYTES / rate, warps), OVERLAP_ONE_LAUNCH)
    return total


def hopper_us(cell, plan, constants=CONSTANTS):
    """Returns (us, the limit of gemm1) of a measured cell. plan: its work, from bench_blackwell_plans."""
    _, _, top_k, hidden, intermediate = SHAPES[cell["shape"]]
    scale = cell["experts_hit"] / plan["experts_hit"]  # of the routings that were drawn
    hit, rows = cell["experts_hit"], plan["rows"] * scale
    fp8 = cell["format"] == "fp8"
    chip = {
        "memory_tb_s": CARDS[cell["card"]], "clock_ghz": constants["clock_ghz"],
        "power_tb_s": constants["power_tb_s"], "power_pflop_s": constants["power_fp8" if fp8 else "power_bf16"],
    }  # fmt: skip
    if cell["one_launch"]:
        return one_launch_us(cell, hit, chip["memory_tb_s"] * constants["read_share"] * 1e6, constants), "one launch"
    gemms = {}
    for gemm, m, k in (("gemm1", 2 * intermediate, hidden), ("gemm2", hidden, intermediate)):
        launch, blocks = plan[gemm], plan["tile_m"] / 256 * scale
        gemms[gemm] = gemm_us(chip, {
            "bytes": hit * m * k * WEIGHT_BYTES, "flops": 2 * rows * m * k,
            "clocks": {"products": launch["longest_clocks"] * scale,
                       "dequantizing": launch["longest_k_blocks"] * blocks
                       * constants["issue_fp8" if fp8 else "issue_bf16"]},
            "tiles": launch["tiles"] * scale / MULTIPROCESSORS, "outputs": rows * m / MULTIPROCESSORS,
            "split": launch["partials"] > 0, "epilogue_overlaps": False,
        }, constants)  # fmt: skip
    part = SHAPES[cell["shape"]][0] < SHAPES[cell["shape"]][1] and cell["tokens"] >= 33
    by_gemm2 = fp8 and plan["tile_n"] == 8 and not part  # gemm2 requantizes as it loads
    other = other_us(chip, {
        "tokens": cell["tokens"], "local_tokens": min(cell["tokens"], plan["local_tokens"] * scale), "rows": rows,
        "assignments": cell["tokens"] * top_k, "hidden": hidden, "intermediate": intermediate,
        "row_bytes": 1 if fp8 else 2, "gathers": plan["tma_rows"],
        "requantizes": cell["format"] != "bf16" and not by_gemm2,
    }, constants)  # fmt: skip
    return gemms["gemm1"]["us"] + gemms["gemm2"]["us"] + other, gemms["gemm1"]["limit"]


def measured_cells():
    """Returns this library's cells of moe_bench, and those of one launch and a launch per step, of both cards."""
    cells = []
    for card in CARDS:
        record = json.loads(next(RESULTS.glob(f"moe-layers-{card.lower()}-*.json")).read_text())
        for row in record["rows"]:
            activations = row["layer"].removeprefix("nvfp4_moe_")
            if activations != row["layer"]:
                cells.append({
                    "card": card, "record": "moe_bench", "shape": row["shape"], "tokens": row["tokens"],
                    "format": activations, "us": row["us"], "experts_hit": row["experts_hit"], "routing": "nearest",
                    "one_launch": activations == "bf16" and in_one_launch(row["shape"], row["tokens"]),
                    "by_runs": False, "at_once": False,
                })  # fmt: skip
        record = json.loads(next(RESULTS.glob(f"hopper-few-tokens-{card.lower()}-*.json")).read_text())
        division = record.get("division", "")
        for shape, tokens, floor, _, _, one, several in record["rows"]:
            _, _, _, hidden, intermediate = SHAPES[shape]
            hit = floor * PUBLISHED_FLOOR_TB_S * 1e6 / (3 * hidden * intermediate * WEIGHT_BYTES)
            one_launch = in_one_launch(shape, tokens)
            for kind, us, single in (("one launch", one, one_launch), ("a launch per step", several, False)):
                cells.append({
                    "card": card, "record": kind, "shape": shape, "tokens": tokens, "format": "bf16", "us": us,
                    "experts_hit": hit, "routing": "any", "one_launch": single, "by_runs": "runs" in division,
                    "at_once": "all output channels" in division,
                })  # fmt: skip
    return cells


def compared(plans, constants=CONSTANTS):
    """Returns the measured cells with what the model predicts: model_us, error and limit."""
    of = {(p["shape"], p["tokens"], p["products"], p["routing"]): p for p in plans["hopper"]}
    cells = measured_cells()
    for cell in cells:
        products = "fp8" if cell["format"] == "fp8" else "bf16"
        plan = of[cell["shape"], cell["tokens"], products, cell["routing"]]
        cell["model_us"], cell["limit"] = hopper_us(cell, plan, constants)
        cell["error"] = cell["model_us"] / cell["us"] - 1
    return cells


def within(cells, most=0.15):
    return sum(abs(cell["error"]) <= most for cell in cells)


# ---- fitting


def fitted(plans, use, names=tuple(FITTED)):
    """Returns CONSTANTS with the least squares of log(model / measured), softened, over the cells that use() takes."""
    from scipy.optimize import least_squares

    start = [FITTED[name][0] for name in names]

    def errors(factors):
        constants = {**CONSTANTS, **{n: s * f for n, s, f in zip(names, start, factors, strict=True)}}
        return [math.log(1 + cell["error"]) for cell in compared(plans, constants) if use(cell)]

    found = least_squares(errors, [1.0] * len(names), bounds=(0.05, 20), loss="soft_l1", f_scale=0.08).x
    return {**CONSTANTS, **{n: s * f for n, s, f in zip(names, start, found, strict=True)}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", type=pathlib.Path, required=True, metavar="RECORD")
    plans = json.loads(parser.parse_args().fit.read_text())["plans"]

    def shown(what, constants, test):
        cells = [cell for cell in compared(plans, constants) if test(cell)]
        print(f"{what}: {within(cells)} of {len(cells)} within 15 %")

    for card, other in (("H200", "H100"), ("H100", "H200")):
        constants = fitted(plans, lambda cell, card=card: cell["card"] == card)
        print(f"fitted on {card}:", {name: float(f"{constants[name]:.3g}") for name in FITTED})
        shown(card, constants, lambda cell, card=card: cell["card"] == card)
        shown(other, constants, lambda cell, other=other: cell["card"] == other)
    for shape in SHAPES:
        constants = fitted(plans, lambda cell, shape=shape: cell["card"] == "H200" and cell["shape"] != shape)
        for card in CARDS:
            shown(f"fitted on the H200 without {shape}: {shape} on {card}", constants,
                  lambda cell, card=card, shape=shape: cell["card"] == card and cell["shape"] == shape)  # fmt: skip


if __name__ == "__main__":
    main()
