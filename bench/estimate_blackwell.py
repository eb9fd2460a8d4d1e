#!/usr/bin/env python3
"""Estimates, without a measurement, the time of the FP4 backends on Blackwell chips and what would limit it.

    bench_blackwell_plans >plans.json
    bench/estimate_blackwell.py --plans plans.json --objects FOLDER... [--nvdisasm PATH] [--commit C] --out FILE
    bench/estimate_blackwell.py --from RECORD               the tables of docs/contribute/blackwell-estimate.md
    bench/estimate_blackwell.py --from RECORD [--plans plans.json] --out FILE          after a change of the model

Bytes, tiles, splits and the longest cta come from the kernels' plan and schedule. Instructions are counted in their
machine code. Rates of chips are in CHIPS, each with its source. layer_time.py is the model, and
docs/contribute/blackwell-estimate.md describes it.
"""

import argparse
import json
import pathlib
import shutil
import sys

import layer_time
import records
import sass_loops

TILE_M, BYTES_A_VALUE = 128, layer_time.WEIGHT_BYTES
ROW_BYTES = 144  # of a k-block of 256: codes and scales (fp4_operand.h)
FILL_BYTES_A_CLOCK = 64  # from L2 into a multiprocessor
SHARED_BYTES_A_CLOCK = 128
# The power cap's share of the data sheets' memory bandwidth and products: an H200's, of E4M3 products.
POWER_OF_MEMORY = layer_time.CONSTANTS["power_tb_s"] / layer_time.CARDS["H200"]
POWER_OF_PRODUCTS = layer_time.CONSTANTS["power_fp8"] / 1.979

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


def gemm_estimate(chip, cell, gemm, sizes, loop):
    m, k = (2 * sizes["intermediate"], sizes["hidden"]) if gemm == "gemm1" else (sizes["hidden"], sizes["intermediate"])
    rates = {
        "memory_tb_s": chip["memory_tb_s"], "clock_ghz": chip["clock_ghz"],
        "power_tb_s": chip["memory_tb_s"] * POWER_OF_MEMORY, "power_pflop_s": chip["fp4_pflop_s"] * POWER_OF_PRODUCTS,
    }  # fmt: skip
    return layer_time.gemm_us(rates, {
        "bytes": cell["experts_hit"] * m * k * BYTES_A_VALUE, "flops": 2 * cell["rows"] * m * k,
        "clocks": clocks_of_longest_cta(chip, cell, cell[gemm], loop),
        "tiles": cell[gemm]["tiles"] / cell["ctas"], "outputs": cell["rows"] * m / cell["ctas"],
        "split": cell[gemm]["split_partials"] > 0,
        "epilogue_overlaps": chip["backend"] == "sm100",  # two sets of accumulators in tensor memory
    })  # fmt: skip


def floor_us(chip, cell, sizes):
    """Returns the floor as bench_hopper_layers defines it, at the chip's data-sheet rates."""
    h, n = sizes["hidden"], sizes["intermediate"]
    moved = cell["experts_hit"] * 3 * h * n * BYTES_A_VALUE + cell["local_tokens"] * h * 4 + cell["rows"] * n * 4
    return max(moved / (chip["memory_tb_s"] * 1e6), 6 * cell["rows"] * h * n / (chip["fp4_pflop_s"] * 1e9))


def estimate(plans, code):
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
        gemms = {gemm: gemm_estimate(chip, cell, gemm, of, loops.get(f"{gemm}/{index}")) for gemm in ("gemm1", "gemm2")}
        other = layer_time.other_us(chip, {
            "tokens": cell["tokens"], "local_tokens": cell["local_tokens"], "rows": cell["rows"],
            "assignments": cell["tokens"] * of["top_k"], "hidden": of["hidden"], "intermediate": of["intermediate"],
            "row_bytes": BYTES_A_VALUE, "gathers": False, "requantizes": True,
        })  # fmt: skip
        both = gemms["gemm1"]["us"] + gemms["gemm2"]["us"]
        limits = {g: {name: round(us, 2) for name, us in gemms[g]["limits"].items()} for g in gemms}
        cells.append({
            "chip": cell["chip"], "shape": cell["shape"], "tokens": cell["tokens"], "config": cell["config"],
            "rows_per_expert": round(cell["rows"] / cell["experts_hit"], 1),
            "floor_us": round(floor_us(chip, cell, of), 1),
            "gemms_us": round(both, 1), "layer_us": round(both + other, 1),
            "gemm1": limits["gemm1"], "gemm2": limits["gemm2"], "limit": gemms["gemm1"]["limit"],
        })  # fmt: skip
    hopper = layer_time.compared(plans)
    return {
        "constants": layer_time.CONSTANTS,
        "hopper_within_15_percent": {
            card: [layer_time.within(of_card), len(of_card)]
            for card in layer_time.CARDS
            for of_card in [[cell for cell in hopper if cell["card"] == card]]
        },
        "cells": cells,
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
    yield ""
    yield from hopper_tables(layer_time.compared(result["plans"]))


def shown(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def hopper_tables(cells):
    """Markdown: prediction next to measurement for every cell, and how many are within 15 %."""
    yield line(["constant", "value", "what it is", "from"])
    yield "|---|---:|---|---|"
    for name, (value, unit, meaning, source) in layer_time.MEASURED.items():
        yield line([f"`{name}`", f"{shown(value)} {unit}".strip(), meaning, source])
    for name, (value, unit, meaning) in layer_time.FITTED.items():
        yield line([f"`{name}`", f"{shown(value)} {unit}".strip(), meaning, "fitted on the H200"])
    yield ""
    records = list(dict.fromkeys(cell["record"] for cell in cells))
    yield line(["card", *records, "all"])
    yield "|---|" + "---:|" * (len(records) + 1)
    for card in layer_time.CARDS:
        groups = [[c for c in cells if c["card"] == card and c["record"] == record] for record in records]
        groups.append([c for c in cells if c["card"] == card])
        yield line([card, *(f"{layer_time.within(group)} of {len(group)}" for group in groups)])
    yield "\nFarther off:\n"
    for c in sorted((c for c in cells if abs(c["error"]) > 0.15), key=lambda c: c["error"]):
        what = f"`{c['shape']}` T = {c['tokens']}, {layer_time.FORMATS[c['format']]}, {c['record']}"
        yield f"* {c['card']}, {what}: {c['us']:.1f} us measured, {c['model_us']:.1f} by the model."
    yield ""
    for card in layer_time.CARDS:
        for record in records:
            yield f"### {card}, {record}\n"
            group = [c for c in cells if c["card"] == card and c["record"] == record]
            tokens = sorted({c["tokens"] for c in group})
            yield line(["shape", "us", *(f"T = {t}" for t in tokens)])
            yield "|---|---|" + "---:|" * len(tokens)
            for shape, activations in dict.fromkeys((c["shape"], c["format"]) for c in group):
                of = {c["tokens"]: c for c in group if (c["shape"], c["format"]) == (shape, activations)}
                row = [of.get(t) for t in tokens]
                what = f"{shape}, {layer_time.FORMATS[activations]}"
                yield line([what, "measured", *(shown(c["us"]) if c else "" for c in row)])
                yield line(["", "model", *(shown(c["model_us"]) if c else "" for c in row)])
                yield line(["", "error, %", *(f"{100 * c['error']:+.0f}" if c else "" for c in row)])
            yield ""


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
        if options.plans:  # new plans or constants, and the machine code of the record
            result["plans"] = json.loads(options.plans.read_text())
        if options.out:
            if options.commit:
                result["commit"] = options.commit
            result.update(estimate(result["plans"], result["machine_code"]))
            options.out.write_text(records.text(result))
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
            **estimate(plans, code),
        }
        result["plans"] = plans
        options.out.write_text(records.text(result))
    print("\n".join(tables(result)))


if __name__ == "__main__":
    sys.exit(main())
