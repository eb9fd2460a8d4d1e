"""Parses the output of the steps of tests/acceptance/acceptance.py.

Each reader takes the whole output of a step and returns (figures, problem), with "" for no problem.
"""

import collections
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
NVCC = (12, 9)  # the least, as in cmake/cuda_language.cmake
MOST_NAMED = 200  # for failed tests, and for reasons of skipped ones

CTEST_LINE = re.compile(r"^ *\d+/\d+ +Test +#\d+: (\S+)(?: +# GetParam.*?)? \.+(.*?) +(\d+\.\d+) sec", re.MULTILINE)
# Tests without a backend suffix run on the backend that the device gets.
ON_ANY_DEVICE = ("cuda/CudaLayer.", "cuda/CApiOnGpu.")


def end_in_words(code, limit_s, printed):
    """Describes how a command failed. code: as in run_command."""
    if code == "time limit":
        return f"did not end within {limit_s} s"
    if code == "cannot be ended":
        return "hangs and cannot be ended: the device may need a reset"
    if code == "missing":
        return f"cannot be started: {printed}"
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def cannot_begin(nvcc, capability):
    """Returns why the acceptance cannot begin with that compiler (the last line of nvcc --version) and GPU, or ""."""
    if not nvcc or not re.fullmatch(r"\d+\.\d", capability):
        return "expected nvcc on PATH and a GPU that nvidia-smi lists"
    release = re.search(r"cuda_(\d+)\.(\d+)", nvcc)
    if release is None or tuple(map(int, release.groups())) < NVCC:
        return f"expected nvcc 12.9 or later (the kernels of sm100 are PTX 8.8), got {nvcc!r}"
    return ""


def nothing(text):
    """For a command whose exit code is the whole result: no figures."""
    return {}, ""


def said_lines(text):
    """For a command whose exit code decides: keeps everything it printed."""
    return {"said": text.splitlines()}, ""


def backend_of(capability):
    """Returns the preferred backend of a device of that compute capability ("12.0")."""
    own = {"9": "sm90", "10": "sm100", "11": "sm100", "12": "sm120"}.get(capability.split(".")[0], "cuda")
    return own if (ROOT / "src/backend" / own).is_dir() or own == "cuda" else "cuda"


def json_in(text):
    """Returns the JSON object that begins on the first line with a valid one. Other output around it is ignored."""
    for match in re.finditer(r"^\{", text, re.MULTILINE):
        try:
            return json.JSONDecoder().raw_decode(text, match.start())[0]
        except ValueError:
            continue
    raise ValueError("no JSON object")


def tests_of_ctest(capability):
    """Makes a reader of ctest's output, which may be cut off. Tests of the device's own backend must be among those
    that passed."""
    backend = backend_of(capability)

    def of_the_device(name):
        return name.endswith(f"/{backend}") or f"/{backend.capitalize()}" in name or name.startswith(ON_ANY_DEVICE)

    def read(text):
        states = collections.Counter()
        failed, passed_of_device, slowest = [], 0, []
        for listed, result, seconds in CTEST_LINE.findall(text):
            name = re.sub(r"^emulated/[0-9.]+/", "", listed)
            state = "passed" if "Passed" in result else "skipped" if "***Skipped" in result else "failed"
            states[state] += 1
            slowest.append((float(seconds), name))
            if state == "failed":
                failed.append(f"{name}: {result.strip(' *')}")
            passed_of_device += state == "passed" and of_the_device(name)
        figures = {state: states[state] for state in ("passed", "failed", "skipped")}
        figures["passed_of_backend"] = {backend: passed_of_device}
        figures["failed_tests"] = failed[:MOST_NAMED]
        figures["slowest_s"] = [[name, seconds] for seconds, name in sorted(slowest, reverse=True)[:5]]
        if failed:
            return figures, f"{len(failed)} tests failed"
        if not passed_of_device:
            return figures, f"no test of the backend {backend} passed"
        return figures, ""

    return read


def other_device(capability, found):
    """Reports an error if a program ran on another device than the accepted one. found: 120 for 12.0."""
    return "" if found == int(capability.replace(".", "")) else f"ran on a device of compute capability {found}"


def doctor_facts(capability):
    """Makes a reader of `doctor --json`: some of its self-tests must have run on the device."""

    def read(text):
        doctor = json_in(text)
        tests = doctor["self_test"]
        gpu = next(iter(doctor.get("gpus", [])), None)
        figures = {
            "version": doctor.get("version"),
            "gpu": gpu,
            "self_test": {
                test["name"]: test["detail"] if test["ok"] else f"FAILED: {test['detail']}" for test in tests
            },
        }
        wrong = [test["name"] for test in tests if not test["ok"]]
        if wrong:
            return figures, f"self-tests failed: {', '.join(wrong)}"
        if gpu is None or not any("on cuda:0" in test["name"] for test in tests):
            return figures, "no self-test ran on the device"
        return figures, other_device(capability, gpu["compute_capability"])

    return read


def width_of(sum_):
    """Returns the largest d for which a sum keeps all of a small part, 1 / 2^d of the large one."""
    left = sum_["of_small_left_for_d_from_2"]
    bits = 1
    while bits - 1 < len(left) and left[bits - 1] == 1:
        bits += 1
    return bits


def probe_findings(capability):
    """Makes a reader of device_probes. It keeps the tool's JSON, derives the width of sums from it, and lists kernels
    that did not get the resources they are planned for."""

    def read(text):
        probes = json_in(text)
        widths = {}
        for sum_ in probes.get("accumulation", []):
            if sum_["small_over_power_of_two"] == 1:
                bits = width_of(sum_)
                at_least = bits == len(sum_["of_small_left_for_d_from_2"]) + 1
                widths[f"{sum_['places']}, {sum_['tokens']} tokens"] = {"bits": bits, "at_least": at_least}
        figures = {"bits_of_sums": widths, "probes": probes}
        wrong = [probes["failure"]] if probes.get("failure") else []
        if "device" in probes:
            wrong += filter(None, [other_device(capability, probes["device"]["compute_capability"])])
        for kernel in probes.get("kernels", []):
            name = short_name(kernel["name"])
            if kernel["launch"] != "ok":
                wrong.append(
                    f"{name}: launch with {kernel['dynamic_shared_bytes']} bytes of shared memory: {kernel['launch']}"
                )
            elif kernel["ctas_per_multiprocessor"] < 1:
                wrong.append(f"{name}: no multiprocessor holds a cta of it")
        if not any("gemm" in kernel["name"] for kernel in probes.get("kernels", [])):
            wrong.append("no GEMM was launched")
        return figures, "; ".join(wrong)

    return read


def short_name(kernel):
    """Shortens a demangled name to sm120_gemm1_kernel<0>."""
    return re.sub(
        r"\(anonymous namespace\)::|\(nvfp4_moe::internal::\w+\)|nvfp4_moe::internal::|\b\w+::|^void |(?<=\d)ul\b|\([^()]*\)$",
        "",
        kernel,
    )


SANITIZER = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", re.IGNORECASE)


def sanitizer_errors(text):
    summaries = [int(count) for count in SANITIZER.findall(text)]
    ran = re.search(r"\[  PASSED  \] (\d+) tests?", text)
    figures = {"errors": sum(summaries) if summaries else None, "passed": int(ran.group(1)) if ran else 0}
    if not summaries:
        return figures, "no summary of compute-sanitizer"
    if sum(summaries):
        return figures, f"{sum(summaries)} errors"
    return figures, "" if figures["passed"] else "no test passed under it"


HEAD_OF_BENCH = re.compile(r"^(.*), (bf16|nvfp4)(?:, configuration (\d+))?, us$")
CELL_OF_BENCH = re.compile(
    r"^(\S+) +(\d+) +([\d.]+) rows \| floor +[\d.]+ \| (\S+) +([\d.]+) \([\d.]+x\) \| g1 +([\d.]+) .*? \| g2 +([\d.]+) "
)


def bench_figures(recorded):
    """Makes a reader of bench_hopper_layers' lines, which adds the H200's microseconds from the recorded table."""

    def read(text):
        rows = json.loads(recorded.read_text())["rows"]  # of all libraries' layers
        h200 = {(row["shape"], row["tokens"], row["layer"].removeprefix("nvfp4_moe_")): row["us"] for row in rows}
        cells, format_, configuration = [], "", None
        for line in text.splitlines():
            if head := HEAD_OF_BENCH.match(line):
                format_, configuration = head.group(2), head.group(3)
            elif cell := CELL_OF_BENCH.match(line):
                shape, tokens, rows, backend, us, gemm1, gemm2 = cell.groups()
                cells.append({
                    "shape": shape, "tokens": int(tokens), "format": format_, "backend": backend,
                    "rows_per_expert": float(rows), "us": float(us), "gemm1_us": float(gemm1), "gemm2_us": float(gemm2),
                    "h200_us": h200.get((shape, int(tokens), format_)),
                    **({} if configuration is None else {"configuration": int(configuration)}),
                })  # fmt: skip
        figures = {"h200": recorded.name, "cells": cells}
        return figures, "" if cells else "no layer was timed"

    return read
