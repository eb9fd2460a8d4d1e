"""The ladder of tests/acceptance/acceptance.py: single instructions, one stage, one tile, one GEMM, a layer.

Each rung is a process of its own (tests/acceptance/ladder/ladder.cpp) of kernels whose waits are bounded: a wait that
takes too long is reported and traps. This file names the rungs and what each needs, reads their output, finds the
source line of a wait, and runs a failed layer in other configurations to see which of them fail.
"""

import concurrent.futures
import itertools
import pathlib
import re
import time

from acceptance_results import json_in

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNG_S = 30  # the driver's start included; kernels of a rung take milliseconds
EMULATED_RUNG_S = 600  # translating kernels included
BISECTION_S = 180  # in all
FORMATS = ("nvfp4", "bf16")

# Keys: the first number of the compute capability. Each instruction names one it builds on.
COMMON = {"mbarrier": "device", "bulk-copy": "mbarrier", "cp-async": "mbarrier"}
INSTRUCTIONS = {
    "9": {**COMMON, "tma": "bulk-copy", "wgmma-bf16": "device", "wgmma-e4m3": "device"},
    "10": {
        **COMMON,
        "tcgen05-alloc": "device",
        "tcgen05-cp-ld": "tcgen05-alloc mbarrier",
        "tcgen05-mma-bf16": "tcgen05-cp-ld",
        "tcgen05-mma-fp4": "tcgen05-cp-ld",
    },
    "12": {**COMMON, "mma-fp4": "device"},
}
# Size, tokens, how, what it needs in the same format, and what it shows.
LAYERS = {
    "stage": ("stage", 1, "steps", None, "one k-block of one tile"),
    "tile": ("tile", 1, "steps", "stage", "all stages of one tile"),
    "gemm": ("layer", 40, "steps", "tile", "both GEMMs, step by step"),
    "decode": ("layer", 1, "run", "gemm", "a layer of one token, in its own launches"),
    "layer": ("layer", 40, "run", "gemm", "a layer in its own launches"),
}


def rungs(capability):
    """Returns (name, what it shows, arguments, names of the rungs it needs), from small to large."""
    own = INSTRUCTIONS.get(capability.split(".")[0], {})
    all_ = [("device", "the driver opens the device; its backend and configurations", ["--list"], [])]
    for name, needs in own.items():
        all_.append((name, f"{name} by itself", ["--instruction", name], needs.split()))
    for name, format_ in itertools.product(LAYERS, FORMATS):
        size, tokens, how, below, shows = LAYERS[name]
        needs = [f"{below}-{format_}"] if below else [i for i in own if used_by(i, format_, capability)] or ["device"]
        arguments = ["--layer", size, format_, str(tokens), "-1", "1", how]
        all_.append((f"{name}-{format_}", f"{shows}, {format_} activations, exact sums", arguments, needs))
    return all_


def used_by(instruction, format_, capability):
    """Whether kernels of that format execute the instruction."""
    if instruction in ("tcgen05-mma-fp4", "mma-fp4"):
        return format_ == "nvfp4"
    if instruction == "wgmma-e4m3":  # fp8 activations
        return False
    return instruction != "tcgen05-mma-bf16" or format_ == "bf16"


def file_hash(path):
    """The same as wait_file_hash (src/backend/cuda/ptx/wait_report.h)."""
    value = 2166136261
    for byte in "/".join(pathlib.Path(path).parts[-2:]).encode():
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value


def waiting_files():
    """Returns the kernels' source files by their hash."""
    folders = (ROOT / "src/backend", ROOT / "tests/acceptance/ladder")
    paths = [path for folder in folders for path in sorted(folder.rglob("*.cu*"))]
    return {file_hash(path): path for path in paths}


def wait_in_words(wait):
    """Describes a wait that did not end, by the source line that waits: it has the barrier's name."""
    path = waiting_files().get(wait["file_hash"])
    place, text = f"an unknown file, line {wait['line']}", ""
    if path:
        place = f"{path.relative_to(ROOT)}:{wait['line']}"
        text = call_at(path.read_text().splitlines(), wait["line"])
    where = f"{wait['warps']} warps of {wait['ctas']} ctas, first cta {wait['first_cta']} thread {wait['first_thread']}"
    after = f"{wait['began_us_after_the_first']} us after the first"
    return f"{place}: {text or 'a wait'}, phase {wait['parity']}: {where}, {after}"


def call_at(lines, number):
    """Returns the call of a waiting function that begins on that line, or that contains it."""
    for first in (number - 1, number - 2, number - 3):
        joined = " ".join(line.strip() for line in lines[max(0, first) : first + 4])
        found = re.search(r"(?:mbarrier_wait|wait_for_grid)\(", joined)
        if not found:
            continue
        depth, end = 1, found.end()
        while end < len(joined) and depth:
            depth += {"(": 1, ")": -1}.get(joined[end], 0)
            end += 1
        return joined[found.start() : end]
    return ""


def read_rung(text):
    """Reads a rung's line of JSON: (figures, problem)."""
    try:
        figures = json_in(text)
    except ValueError:
        return {}, "it printed no result: a wait that this build cannot bound, such as bar.sync or tcgen05.alloc"
    problem = figures.get("problem", "")
    figures["hangs"] = [wait_in_words(wait) for wait in figures.pop("waits", [])]
    if figures["hangs"]:
        problem = f"hang in {figures['hangs'][0]}" + (f" ({problem})" if problem else "")
    if figures.get("planted"):
        figures["planted"] = f"rehearsed with a planted fault: {figures['planted']}"
    return figures, problem


def variants(configurations):
    """Yields (attributes, arguments) of the layers that a bisection runs."""
    for format_, split in itertools.product(FORMATS, (0, 1)):
        for index in range(configurations.get(format_, 0)):
            for size, tokens in (("stage", 1), ("layer", 40)):
                if size == "stage" and split:
                    continue  # one k-block is never split
                yield (
                    {"activations": format_, "configuration": index, "split": "may" if split else "no",
                     "k-blocks": "one" if size == "stage" else "many"},
                    ["--layer", size, format_, str(tokens), str(index), str(split), "steps"],
                )  # fmt: skip


def common_of_failures(results):
    """Says which attributes all failures share and no success has."""
    failed = [one for one in results if one["problem"]]
    passed = [one for one in results if not one["problem"]]
    if not failed:
        return "every variant passed: the failure is not of one configuration, or comes and goes"
    if not passed:
        return "every variant failed"
    said = []
    for name in ("activations", "tile", "split", "k-blocks"):
        bad = {one[name] for one in failed}
        good = {one[name] for one in passed}
        if not bad & good:
            said.append(f"{name} {', '.join(sorted(bad))}")
    of = f"{len(failed)} of {len(results)} variants failed"
    if said:
        return f"{of}: all and only those of {'; '.join(said)}"
    names = dict.fromkeys(
        f"{one['tile']}, {one['activations']}, split {one['split']}, {one['k-blocks']} k-blocks" for one in failed
    )
    return f"{of}: {'; '.join(names)}"


def tile_of(figures, index):
    """Returns the kernel that gemm2 took, such as wgmma_256x8."""
    kernels = [kernel for kernel in figures.get("kernels", []) if kernel.startswith(("gemm1", "gemm2"))]
    names = dict.fromkeys(kernel.partition(": ")[2] for kernel in kernels)
    return " and ".join(names) or f"configuration {index}"


def bisect(run, configurations, limit_s, at_once=4):
    """Runs the variants, each in a process, and returns figures. run: arguments -> (end in words, output)."""
    ends_at = time.monotonic() + limit_s

    def one(variant):
        attributes, arguments = variant
        if time.monotonic() > ends_at:
            return None
        ended, text = run(arguments)
        figures, problem = read_rung(text)
        return {**attributes, "tile": tile_of(figures, attributes["configuration"]), "problem": problem or ended}

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        all_ = list(pool.map(one, variants(configurations)))
    results = [result for result in all_ if result]
    found = common_of_failures(results) if results else "no variant ran"
    return {"result": found, "left_out": len(all_) - len(results), "variants": results}


def details(figures):
    """The lines of a rung in the report's text."""
    lines = [figures["planted"]] if figures.get("planted") else []
    lines += [f"waits: {hang}" for hang in figures.get("hangs", [])]
    bisection = figures.get("bisection")
    if bisection:
        lines.append(f"bisection: {bisection['result']}")
        for one in bisection["variants"]:
            what = f"{one['tile']}, {one['activations']}, split {one['split']}, {one['k-blocks']} k-blocks"
            lines.append(f"  {what}: {one['problem'] or 'passed'}")
        if bisection["left_out"]:
            lines.append(f"  {bisection['left_out']} variants were not run: the time was over")
    return lines


def configurations_in(report):
    """The numbers of configurations that the rung `device` has listed."""
    for entry in report["steps"]:
        if entry["name"] == "device":
            return entry.get("figures", {}).get("configurations", {})
    return {}
