#!/usr/bin/env python3
"""Estimates, without a measurement, the time of the FP4 backends on Blackwell chips and what would limit it.

    bench_blackwell_plans >plans.json bench/estimate_blackwell.py --plans plans.json --objects FOLDER_OF_OBJECTS...
    [--nvdisasm PATH] [--commit C] --out FILE bench/estimate_blackwell.py --from
    bench/results/blackwell-estimate-b8c9577.json        the tables of docs/contribute/blackwell-estimate.md

Bytes, tiles, splits and the longest cta come from the kernels' plan and schedule. Instructions are counted in their
machine code. Rates of chips are in CHIPS, each with its source. docs/contribute/blackwell-estimate.md describes the
model.
"""

import argparse
import json
import pathlib
import shutil
import sys

import records
import sass_loops

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "bench/results/hopper-layers-h200-1a49611.json"
TILE_M, BYTES_A_VALUE = 128, 0.5625  # 4 bits of code and 8 bits of scale for 16
ROW_BYTES = 144  # of a k-block of 256: codes and scales (fp4_operand.h)
FILL_BYTES_A_CLOCK = 64  # from L2 into a multiprocessor
SHARED_BYTES_A_CLOCK = 128
READ_SHARE = 4.3 / 4.8  # share of the data-sheet bandwidth that is reached; an H200's

# macs: multiply-adds of dense FP4 per clock and multiprocessor, from the rate, the multiprocessors and the clock next
# to it.
CHIPS = {
    "B200": {
        "backend": "sm100", "multiprocessors": 148, "clock_ghz": 1.86,
        "memory_tb_s": 8.0, "fp4_pflop_s": 9.0, "macs": 16384,
        "from": "9 PFLOP/s dense FP4 and 8 TB/s: NVIDIA's data sheet (HGX B200); 148 multiprocessors, 1.86 GHz under "
        "tensor load: third-party tables",
    },
    "RTX 5090": {
        "backend": "sm120", "multiprocessors": 170, "clock_ghz": 2.407,
        "memory_tb_s": 1.792, "fp4_pflop_s": 1.676, "macs": 2048,
        "from": "NVIDIA's data sheet: 3352 TOPS of sparse FP4, half of it dense, 1792 GB/s, 170 multiprocessors, "
        "2.407 GHz",
    },
    "RTX PRO 6000": {
        "backend": "sm120", "multiprocessors": 188, "clock_ghz": 2.6,
        "memory_tb_s": 1.792, "fp4_pflop_s": 2.0, "macs": 2048,
        "from": "NVIDIA's data sheet: 4000 TOPS of sparse FP4, half of it dense, 1792 GB/s, 188 multiprocessors; "
        "2.6 GHz is what 125 TFLOP/s of fp32 come to",
    },
}  # fmt: skip
PRODUCTS = {"sm120": "OMMA", "sm100": "UTCOMMA"}
SHAPES = ["v4pro_ep8", "v4flash", "qwen30b", "mixtral"]
MOST_TOKENS = 4096

# Figures published by others. gemms: the cell of this estimate with the same experts, rows and sizes, and what differs.
MEGA = "dispatch and combine between ranks are in it, nothing of them is in the estimate"
ANCHORS = [
    ("DeepGEMM #316, FP8xFP4 mega, V4-Pro, EP8", "B200", "v4pro_ep8", 8, [(1, 108), (512, 370), (8192, 2819)],
     f"{MEGA}; activations are FP8, products at half of FP4's rate"),
    ("DeepGEMM #316, FP8xFP4 mega, V4-Flash, EP8", "B200", "v4flash_ep8", 8, [(1, 56.5), (512, 146.5), (8192, 1283)],
     f"{MEGA}; activations are FP8, products at half of FP4's rate"),
    ("FlashInfer TUNING.md, NVFP4 mega, V4-Pro, 4 x GB200 EP4, p50", "B200", "v4pro_ep4", 4,
     [(8, 304), (64, 562), (512, 622), (2048, 761), (8192, 1897)], f"{MEGA}; a GB200 is a tenth faster than a B200"),
    ("FlashInfer TUNING.md, NVFP4 mega, V4-Flash, 4 x GB200 EP4, p50", "B200", "v4flash_ep4", 4,
     [(8, 142), (512, 231), (8192, 1070)], f"{MEGA}; a GB200 is a tenth faster than a B200"),
]  # fmt: skip
NOT_COMPARABLE = [
    ("LightMoE, V4-Flash layer, local shard, B200", "1: 20.5 us; 128: 48.9; 8192: 679.5",
     "how many experts a shard has is not said"),
    ("TRTLLM-gen NVFP4, DeepSeek shape, B200 shard (flashinfer #5301)", "1: 25.7 us; 64: 140; 1024: 294; 8192: 386",
     "another shape and shard"),
    ("CUTLASS 79d NVFP4 grouped, RTX PRO 6000 (cutlass #3346)", "303 / 253 TFLOPS",
     "a grouped GEMM whose groups are not said"),
    ("Qwen3-30B-A3B NVFP4 decode, RTX 5090 (imp #469)", "307.5 tok/s", "a whole model"),
]  # fmt: skip


def machine_code(folders, nvdisasm):
    """Returns {backend: {"gemm1 fp4_128x8's index": loop}} for the available objects."""
    code = {}
    for backend, product in PRODUCTS.items():
        for gemm, file in (("gemm1", "gemm1_swiglu.cu.o"), ("gemm2", "gemm2.cu.o")):
            for folder in folders:
                for path in sorted(pathlib.Path(folder).rglob(f"backend/{backend}/{file}")):
                    for name, text in sass_loops.disassembled(path, nvdisasm).items():
                        index = name.partition(f"{backend}_{gemm}_kernelILm")[2][:1]
                        loop = sass_loops.loop_over_k(text, product)
                        if index and loop:
                            code.setdefault(backend, {})[f"{gemm}/{index}"] = loop
    return code


def clocks_of_longest_cta(chip, cell, launch, loop):
    """Returns {limiting resource: clocks} of the cta with the most work. An octet is 8 rows of activations."""
    k_blocks, octets, block_k = launch["longest_k_blocks"], launch["longest_octet_k_blocks"], cell["block_k"]
    weight_bytes, octet_bytes = TILE_M * block_k * BYTES_A_VALUE, 8 * ROW_BYTES
    clocks = {
        "products": octets * TILE_M * 8 * block_k / chip["macs"],
        "L2 to shared memory": (k_blocks * weight_bytes + octets * octet_bytes) / FILL_BYTES_A_CLOCK,
    }
    if chip["backend"] == "sm120":
        warps_n = 2 if cell["tile_n"] > 32 else 1  # 8 consumer warps: 8 / warps_n along weight rows
        read = k_blocks * weight_bytes * warps_n + octets * octet_bytes * 8 / warps_n
        if loop:
            # Two warps per scheduler share all octets, each once for every warp along N.
            fixed = loop["before_first_load"]
            octet = (loop["instructions"] - fixed) / (cell["tile_n"] / 8 / warps_n)
            clocks["instructions"] = 2 * fixed * k_blocks + octet * octets * 2 / warps_n
    else:
        read = (k_blocks * TILE_M + octets * 8) * block_k / 2  # codes by the tensor core, scales from tensor memory
        if loop:
            clocks["instructions"] = k_blocks * loop["clocks_of_one_warp"]  # the warp that issues the products
    clocks["shared memory"] = read / SHARED_BYTES_A_CLOCK
    return clocks


def gemm_estimate(chip, cell, gemm, sizes, loop, startup_us):
    launch = cell[gemm]
    values = sizes["hidden"] * sizes["intermediate"] * (2 if gemm == "gemm1" else 1)
    memory_bytes = cell["experts_hit"] * values * BYTES_A_VALUE
    limits = {"memory": memory_bytes / (chip["memory_tb_s"] * READ_SHARE * 1e6)}
    for name, clocks in clocks_of_longest_cta(chip, cell, launch, loop).items():
        limits[name] = clocks / (chip["clock_ghz"] * 1e3)
    limit = max(limits, key=limits.get)
    return {
        "limits_us": {name: round(us, 2) for name, us in limits.items()},
        "limit": limit,
        "us": limits[limit] + startup_us,
    }


def floor_us(chip, cell, sizes):
    """Returns the floor as bench_hopper_layers defines it, at the chip's data-sheet rates."""
    h, n = sizes["hidden"], sizes["intermediate"]
    moved = cell["experts_hit"] * 3 * h * n * BYTES_A_VALUE + cell["local_tokens"] * h * 4 + cell["rows"] * n * 4
    return max(moved / (chip["memory_tb_s"] * 1e6), 6 * cell["rows"] * h * n / (chip["fp4_pflop_s"] * 1e9))


def of_the_h200(record):
    """Returns, from the recorded run of all cells in nvfp4: the us of one token outside the GEMMs, the start-up us of a
    GEMM, and {(shape, tokens): (floor, layer)} up to 64 tokens, which are memory bound.

    The first two come from one token and layers with all experts, because then every routing hits the same number of
    experts: the record's GEMMs were timed with the last of several routings, its layers with all of them.
    """
    run = next(
        r for r in record["runs"] if r["format"] == "nvfp4" and {row[0] for row in r["rows"]} >= {"plain", "invariant"}
    )
    rest, startups, measured = [], [], {}
    for build, shape, tokens, floor, layer, gemm1, gemm2 in run["rows"]:
        if build == "plain" and tokens <= 64:
            measured[shape, tokens] = floor, min(layer)
        if build == "plain" and tokens == 1 and not shape.endswith("ep8"):
            rest.append(min(layer) - gemm1 - gemm2)
            startups.append((gemm1 + gemm2 - floor) / 2)
    return sum(rest) / len(rest), sum(startups) / len(startups), measured


def other_bytes(cell, sizes):
    """Returns the bytes of all steps but the GEMMs: hidden, intermediate and their codes, rows, and the output."""
    h, n, tokens, rows = sizes["hidden"], sizes["intermediate"], cell["local_tokens"], cell["rows"]
    return tokens * h * (2 + BYTES_A_VALUE + 2) + rows * n * (4 + BYTES_A_VALUE) + rows * h * 4


def estimate(plans, code, record):
    rest_us, startup_us, measured = of_the_h200(record)
    sizes = {shape["name"]: shape for shape in plans["shapes"]}
    tile_n = {}  # of each backend's configurations
    for cell in plans["cells"]:
        tile_n.setdefault(CHIPS[cell["chip"]]["backend"], {})[cell["config"]] = cell["tile_n"]
    cells = []
    for cell in plans["cells"]:
        chip, of = CHIPS[cell["chip"]], sizes[cell["shape"]]
        of_backend = tile_n[chip["backend"]]
        index = sorted(of_backend, key=of_backend.get).index(cell["config"])
        loops = code.get(chip["backend"], {})
        gemms = {
            gemm: gemm_estimate(chip, cell, gemm, of, loops.get(f"{gemm}/{index}"), startup_us)
            for gemm in ("gemm1", "gemm2")
        }
        other = rest_us + other_bytes(cell, of) / (chip["memory_tb_s"] * READ_SHARE * 1e6)
        both = gemms["gemm1"]["us"] + gemms["gemm2"]["us"]
        cells.append({
            "chip": cell["chip"], "shape": cell["shape"], "tokens": cell["tokens"], "config": cell["config"],
            "rows_per_expert": round(cell["rows"] / cell["experts_hit"], 1),
            "floor_us": round(floor_us(chip, cell, of), 1),
            "gemms_us": round(both, 1), "layer_us": round(both + other, 1),
            "gemm1": gemms["gemm1"]["limits_us"], "gemm2": gemms["gemm2"]["limits_us"],
            "limit": gemms["gemm1"]["limit"],
        })  # fmt: skip
    # The same arithmetic for the measured chip, in memory bound cells, shows how far it may be trusted.
    trial = [
        {
            "shape": shape,
            "tokens": tokens,
            "estimate_us": round(floor + 2 * startup_us + rest_us, 1),
            "measured_us": layer,
        }
        for (shape, tokens), (floor, layer) in measured.items()
    ]
    return {
        "startup_us": round(startup_us, 2),
        "rest_us": round(rest_us, 2),
        "cells": cells,
        "trial_on_h200": trial,
        "anchors": list(anchors(cells)),
    }


def anchors(cells):
    by_key = {(cell["chip"], cell["shape"], cell["tokens"]): cell for cell in cells}
    for what, chip, shape, ranks, figures, differs in ANCHORS:
        for tokens, us in figures:
            cell = by_key.get((chip, shape, tokens * ranks))
            if cell:
                yield {
                    "published": what, "tokens_per_rank": tokens, "published_us": us, "chip": chip, "shape": shape,
                    "tokens": tokens * ranks, "gemms_us": cell["gemms_us"], "floor_us": cell["floor_us"],
                    "differs": differs,
                }  # fmt: skip


def line(cells):
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def tables(result):
    """Markdown."""
    for chip in dict.fromkeys(cell["chip"] for cell in result["cells"]):
        yield f"### {chip}\n"
        of = {(c["shape"], c["tokens"]): c for c in result["cells"] if c["chip"] == chip and c["tokens"] <= MOST_TOKENS}
        tokens = sorted({t for _, t in of})
        yield line(["shape", "us", *(f"T = {t}" for t in tokens)])
        yield "|---|---|" + "---:|" * len(tokens)
        for shape in SHAPES:
            row = [of[shape, t] for t in tokens]
            yield line([shape, "floor", *(f"{c['floor_us']:.0f}" for c in row)])
            yield line(["", "estimate", *(f"{c['layer_us']:.0f}" for c in row)])
            yield line(["", "estimate / floor", *(f"{c['layer_us'] / c['floor_us']:.2f}" for c in row)])
            yield line(["", "limit", *({"L2 to shared memory": "fill"}.get(c["limit"], c["limit"]) for c in row)])
        yield ""
    yield "### Published figures beside it\n"
    yield line(["published", "tokens a rank", "published us", "GEMMs here, us", "floor here, us", "what differs"])
    yield "|---|---:|---:|---:|---:|---|"
    for one in result["anchors"]:
        yield line(
            [
                one["published"],
                one["tokens_per_rank"],
                one["published_us"],
                f"{one['gemms_us']:.0f}",
                f"{one['floor_us']:.0f}",
                one["differs"],
            ]
        )
    yield ""
    yield line(["not comparable", "figures", "why"])
    yield "|---|---|---|"
    for what, figures, why in NOT_COMPARABLE:
        yield line([what, figures, why])
    ratios = [one["estimate_us"] / one["measured_us"] for one in result["trial_on_h200"]]
    yield (
        f"\nThe same arithmetic on an H200, {len(ratios)} cells up to 64 tokens: "
        f"{min(ratios):.2f} to {max(ratios):.2f} of what was measured."
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=pathlib.Path)
    parser.add_argument("--objects", nargs="*", default=[])
    parser.add_argument("--nvdisasm", default=shutil.which("nvdisasm"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--from", dest="result", type=pathlib.Path)
    options = parser.parse_args()
    if options.result:
        result = json.loads(options.result.read_text())
    else:
        if not options.plans or not options.out:
            parser.error("expected --plans and --out, or --from")
        if options.objects and not options.nvdisasm:
            parser.error("expected nvdisasm on PATH or --nvdisasm (pip install nvidia-cuda-nvdisasm)")
        code = machine_code(options.objects, options.nvdisasm)
        plans = json.loads(options.plans.read_text())
        result = {
            "schema": 1,
            "what": "an estimate of layers on Blackwell, W4A4: no figure here was measured on such a chip",
            "commit": options.commit,
            "command": "bench_blackwell_plans >plans.json; "
            "bench/estimate_blackwell.py --plans plans.json --objects build/cpu/src --out FILE",
            "chips": CHIPS,
            "machine_code": code,
            **estimate(plans, code, json.loads(RECORD.read_text())),
        }
        result["plans"] = plans
        options.out.write_text(records.text(result))
    print("\n".join(tables(result)))


if __name__ == "__main__":
    sys.exit(main())
