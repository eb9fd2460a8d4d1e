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
    "epilogue": (3328 / 32768, "clocks", "of a multiprocessor for an output",
                 "hopper.md: 13 instructions an output, 32 lanes, four schedulers"),
}  # fmt: skip
# Fitted with --fit on 308 cells of the H200. Some were of the kernel of one launch, which the model then had.
FITTED = {
    "gemm_us": (3.64, "us", "from the end of the kernel before a GEMM to its first products"),
    "kernel_us": (2.17, "us", "of any other kernel, if it has little to do"),
    "split_us": (1.85, "us", "arrival at split tiles, and their reduction"),
    "tile": (3190, "clocks", "beginning and end of a work tile"),
    "rows_share": (1.37, "", "share of the memory bandwidth for rows between kernels (above 1: L2 holds some)"),
    "power_tb_s": (7.68, "TB/s", "weights, if the power cap were the only limit"),
    "power_bf16": (0.793, "PFLOP/s", "bf16 products, if the power cap were the only limit"),
    "power_fp8": (1.12, "PFLOP/s", "E4M3 products, if the power cap were the only limit"),
}
CONSTANTS = {name: value[0] for name, value in {**MEASURED, **FITTED}.items()}
# Limits that are close to each other do not overlap fully: together they take (a^n + b^n)^(1/n).
OVERLAP = 4

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


def overlapped(limits):
    return sum(limit**OVERLAP for limit in limits) ** (1 / OVERLAP)


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


def hopper_us(cell, plan, constants=CONSTANTS):
    """Returns the us of a measured cell. plan: its work, from bench_blackwell_plans."""
    _, _, top_k, hidden, intermediate = SHAPES[cell["shape"]]
    scale = cell["experts_hit"] / plan["experts_hit"]  # of the routings that were drawn
    hit, rows = cell["experts_hit"], plan["rows"] * scale
    fp8 = cell["format"] == "fp8"
    chip = {
        "memory_tb_s": CARDS[cell["card"]], "clock_ghz": constants["clock_ghz"],
        "power_tb_s": constants["power_tb_s"], "power_pflop_s": constants["power_fp8" if fp8 else "power_bf16"],
    }  # fmt: skip
    us = 0
    for gemm, m, k in (("gemm1", 2 * intermediate, hidden), ("gemm2", hidden, intermediate)):
        launch, blocks = plan[gemm], plan["tile_m"] / 256 * scale
        us += gemm_us(chip, {
            "bytes": hit * m * k * WEIGHT_BYTES, "flops": 2 * rows * m * k,
            "clocks": {"products": launch["longest_clocks"] * scale,
                       "dequantizing": launch["longest_k_blocks"] * blocks
                       * constants["issue_fp8" if fp8 else "issue_bf16"]},
            "tiles": launch["tiles"] * scale / MULTIPROCESSORS, "outputs": rows * m / MULTIPROCESSORS,
            "split": launch["partials"] > 0, "epilogue_overlaps": False,
        }, constants)["us"]  # fmt: skip
    part = SHAPES[cell["shape"]][0] < SHAPES[cell["shape"]][1] and cell["tokens"] >= 33
    by_gemm2 = fp8 and plan["tile_n"] == 8 and not part  # gemm2 requantizes as it loads
    return us + other_us(chip, {
        "tokens": cell["tokens"], "local_tokens": min(cell["tokens"], plan["local_tokens"] * scale), "rows": rows,
        "assignments": cell["tokens"] * top_k, "hidden": hidden, "intermediate": intermediate,
        "row_bytes": 1 if fp8 else 2, "gathers": plan["tma_rows"],
        "requantizes": cell["format"] != "bf16" and not by_gemm2,
    }, constants)  # fmt: skip


def measured_cells():
    """Returns this library's cells of moe_bench, and those of a launch per step, of both cards.

    Layers in one launch are left out. In moe_bench they are among those of W4A16 with at most 8 tokens.
    """
    cells = []
    for card in CARDS:
        record = json.loads(next(RESULTS.glob(f"moe-layers-{card.lower()}-*.json")).read_text())
        for row in record["rows"]:
            activations = row["layer"].removeprefix("nvfp4_moe_")
            if activations != row["layer"] and (activations != "bf16" or row["tokens"] > 8):
                cells.append({
                    "card": card, "record": "moe_bench", "shape": row["shape"], "tokens": row["tokens"],
                    "format": activations, "us": row["us"], "experts_hit": row["experts_hit"], "routing": "nearest",
                })  # fmt: skip
        record = json.loads(next(RESULTS.glob(f"hopper-few-tokens-{card.lower()}-*.json")).read_text())
        for shape, tokens, floor, *_, us in record["rows"]:
            _, _, _, hidden, intermediate = SHAPES[shape]
            hit = floor * PUBLISHED_FLOOR_TB_S * 1e6 / (3 * hidden * intermediate * WEIGHT_BYTES)
            cells.append({
                "card": card, "record": "a launch per step", "shape": shape, "tokens": tokens, "format": "bf16",
                "us": us, "experts_hit": hit, "routing": "any",
            })  # fmt: skip
    return cells


def compared(plans, constants=CONSTANTS):
    """Returns the measured cells with what the model predicts: model_us and error."""
    of = {(p["shape"], p["tokens"], p["products"], p["routing"]): p for p in plans["hopper"]}
    cells = measured_cells()
    for cell in cells:
        products = "fp8" if cell["format"] == "fp8" else "bf16"
        plan = of[cell["shape"], cell["tokens"], products, cell["routing"]]
        cell["model_us"] = hopper_us(cell, plan, constants)
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
