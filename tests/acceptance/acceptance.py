#!/usr/bin/env python3
"""Runs the acceptance of the CUDA backends on this machine's GPU and writes one report to send back.

    ./dev gpu --acceptance [--resume] [--part PART] [--skip STEP,...] [--only STEP,...] [--out FILE]
    ./dev gpu --acceptance --emulate 12.0       rehearses a short list of tests on the emulator
                                                (docs/contribute/emulator.md)

Each step has a time limit, and a failed step does not stop the others. The report is rewritten before and after every
step, so it survives if the machine stops; --resume continues from there. Exit code: 0 accepted, 1 not accepted, 2
cannot begin, 3 incomplete. docs/contribute/acceptance.md describes the steps.
"""

import argparse
import datetime
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

import acceptance_report as report_file
from acceptance_report import Scrubber
from acceptance_results import (
    backend_of,
    bench_figures,
    cannot_begin,
    doctor_facts,
    end_in_words,
    nothing,
    probe_findings,
    said_lines,
    sanitizer_errors,
    tests_of_ctest,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONGEST_TEST_S = 900
KILLED_AFTER_S = 20  # a process that a GPU holds may never end; it is not waited for
TAIL_LINES = 60

# The tests that run under compute-sanitizer, here and in ./dev gpu: whole layers of each backend, small enough for a
# tool that slows them down a hundred times.
SANITIZED = "CudaLayer.*:Sm90SmallLayer.*:Sm90SmallRequantize.*:Sm90WideTiles.*:*Fp4Layer.ARunIsItsSteps*:*OnADevice.AFewTokens*:*CudaAll*/peers_1"
BENCH_TOKENS = "1,4,16,64,256,1024,4096"
BOUND_TOKENS = "16,32,64,96,128,256,384,512,768,1024"  # 1 to 64 rows an expert
CONFIGURATIONS = 3  # in each of Blackwell's backends
PARTS = ("tests", "sanitizers")  # also for ./dev gpu; each takes less than ten minutes on 16 cores


@dataclass
class Step:
    """One step of the acceptance: commands that run one after the other, and a reader of their output."""

    name: str
    shows: str
    commands: list[list[str]]
    limit_s: int
    read: object = nothing  # (text, step's environment) -> (figures, error in them or "")
    environment: dict[str, str] = field(default_factory=dict)
    needs: str = ""  # a step without which this one cannot run
    absent: str = ""  # reason why it never runs


def chosen_device():
    """Makes one GPU visible: nvidia-smi's first, or the first that CUDA_VISIBLE_DEVICES names."""
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0",
    }


def steps_of(options, tools, capability):
    """Returns the list of steps. capability: "12.0", of the device or of the emulated one."""
    emulated = options.emulate is not None
    preset = "cpu" if emulated else "gpu"
    build = f"build/{preset}"
    # The same programs, linked with the emulator (tests/emulated/emulated_room.cmake).
    prefix = "emulated_" if emulated else ""
    targets = [
        prefix + name for name in ("test_cuda", "test_steps", "test_layer", "device_probes", "bench_hopper_layers")
    ]
    configure = ["cmake", "--preset", preset, "-DNVFP4_MOE_TESTS=ON", "-DNVFP4_MOE_BENCH=ON"]
    if emulated:
        configure += ["-DNVFP4_MOE_CUDA=ON", "-DNVFP4_MOE_EMULATE=ON"]
    if not options.library_only:
        configure.append("-DNVFP4_MOE_CLI=ON")
        targets.append(prefix + "nvfp4-moe")
    if options.part == "sanitizers":
        targets = targets[:1]
    command_line = f"{build}/tests/emulated_nvfp4-moe" if emulated else f"{build}/cli/nvfp4-moe"
    jobs = str(options.jobs or os.cpu_count())
    device = {"PTXEMU_CC": capability} if emulated else chosen_device()

    def ctest(name, shows, label, limit_s, only=None, without=None, rehearsed=None):
        labels = "^emulated" if emulated else f"^({label})$"
        chosen = f"^emulated/{re.escape(capability)}/({label})/.*({rehearsed})" if emulated else only
        command = ["ctest", "--test-dir", build, "-j", "2" if emulated else "8", "-L", labels]
        command += ["--timeout", str(LONGEST_TEST_S), "--output-on-failure"]
        command += ["-R", chosen] if chosen else []
        command += ["-E", without] if without and not emulated else []
        return Step(name, shows, [command], limit_s, tests_of_ctest(capability), device, needs="build")

    sanitizer_absent = ""
    if emulated:
        sanitizer_absent = "compute-sanitizer runs on a device alone"
    elif not tools["compute-sanitizer"]:
        sanitizer_absent = "compute-sanitizer is not on PATH"
    racecheck = [
        ["cmake", "--preset", "racecheck"],
        ["cmake", "--build", "--preset", "racecheck", "-j", jobs, "--target", "test_cuda"],
    ]

    def sanitize(tool):
        folder = "build/racecheck" if tool == "racecheck" else build
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", f"{folder}/tests/test_cuda"]
        return Step(
            f"sanitize-{tool}",
            f"whole layers under compute-sanitizer {tool}",
            (racecheck if tool == "racecheck" else []) + [[*command, f"--gtest_filter={SANITIZED}"]],
            5400,
            sanitizer_errors,
            device,
            needs="build",
            absent=sanitizer_absent,
        )

    bench = forced = [f"{build}/bench/{prefix}bench_hopper_layers", "rehearsal", "--tokens", "1", "--sm90-only"]
    if not emulated:
        bench = [bench[0], "--tokens", BENCH_TOKENS, "--sm90-only"]
        forced = [bench[0], "v4flash", "qwen30b", "--tokens", BOUND_TOKENS]
    steps = [
        Step(
            "build",
            "nvcc and ptxas of this machine compile everything for this device",
            [configure, ["cmake", "--build", "--preset", preset, "-j", jobs, "--target", *targets]],
            7200,
        ),
        Step(
            "machine-code",
            "ptxas spilled nothing, serialized nothing, and made the products that kernels are written for",
            [[sys.executable, "tools/check/check_ptxas.py", f"{build}/src/CMakeFiles"]],
            300,
            said_lines,
            needs="build",
        ),
        Step(
            "doctor",
            "the driver shows the device, a backend takes it, tiny layers agree with the reference",
            [[command_line, "doctor", "--device", "cuda:0", "--json", "--quiet"]],
            300,
            doctor_facts(capability),
            device,
            needs="build",
            absent="the command line is not built here: CLI11's headers are missing" if options.library_only else "",
        ),
        Step(
            "probes",
            "what no emulator knows: registers, shared memory, occupancy, width of sums, scale bytes",
            [[f"{build}/tests/{prefix}device_probes", *(["--quick"] if emulated else [])]],
            900,
            probe_findings(capability),
            device,
            needs="build",
        ),
        ctest("exact-sums", "sums that are exact have the reference's bits", "cuda|layer", 1800, "ExactSums",
              rehearsed="ExactSums.*/" + tools["backend"]),
        ctest("steps", "the case table through every step", "steps", 3600, rehearsed="Unpack.*/" + tools["backend"]),
        ctest("layers", "whole layers and their properties", "layer", 5400, without="ExactSums",
              rehearsed="(ZeroTokensAreANoOp|NanTokenSpoilsOnlyItsRow).*/" + tools["backend"]),
        ctest("graphs-and-repeats", "configurations, graphs, repeats, memory, large shapes", "cuda", 7200,
              without="ExactSums|ptxas", rehearsed="CudaLayer"),
        *[sanitize(tool) for tool in ("memcheck", "racecheck", "initcheck", "synccheck")],
        Step(
            "bench",
            "microseconds of a layer beside an H200's of the record",
            [[*bench, "--format", "nvfp4"], *([] if emulated else [[*bench, "--format", "bf16"]])],
            3600,
            bench_figures(ROOT / "bench/results/moe-layers-h200-f61f177.json"),
            device,
            needs="build",
        ),
    ]  # fmt: skip
    if capability.split(".")[0] in ("10", "12"):  # on other architectures the bounds were measured
        shows = "microseconds of each GEMM configuration, whose bounds on Blackwell are arithmetic"
        count = 1 if emulated else CONFIGURATIONS
        commands = [[*forced, "--format", "nvfp4", "--configuration", str(i)] for i in range(count)]
        steps.append(Step("configurations", shows, commands, 3600, steps[-1].read, device, needs="build"))
    return steps


def left_out(step, options, report):
    """Returns why the options or a failed step exclude this one, or "" if it runs. Both parts begin with the build,
    which makes only what the part needs."""
    part = options.part
    if part and step.name != "build" and step.name.startswith("sanitize-") != (part == "sanitizers"):
        return f"not of the part {part}"
    if options.only and step.name not in options.only.split(","):
        return "left out by --only"
    if step.name in options.skip.split(","):
        return "left out by --skip"
    failed = step.needs and report_file.state(report, step.needs) == "failed"
    return f"{step.needs} failed" if failed and not step.absent else ""


def end_group(process):
    """Ends a command and what it started. False if the system cannot."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return True
        try:
            process.wait(KILLED_AFTER_S)
            return True
        except subprocess.TimeoutExpired:
            continue
    return False


def run_command(command, environment, log, limit_s):
    """Returns (exit code, or "time limit", "missing", "cannot be ended"), and the output."""
    with open(log, "ab+") as out:
        start = out.seek(0, os.SEEK_END)
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                # A user's own settings of the library, for example a backend, are not part of the acceptance.
                env={**{k: v for k, v in os.environ.items() if not k.startswith("NVFP4_MOE_")}, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return "missing", str(error)
        try:
            code = process.wait(max(1, limit_s))
        except subprocess.TimeoutExpired:
            code = "time limit" if end_group(process) else "cannot be ended"
        except KeyboardInterrupt:
            end_group(process)
            raise
        out.seek(start)
        return code, out.read().decode(errors="replace")


def run_step(step, folder):
    """Makes the step's entry of the report. Its texts are not scrubbed yet."""
    log = folder / f"{step.name}.log"
    log.unlink(missing_ok=True)
    start, text, bad, code = time.monotonic(), "", "", 0
    for command in step.commands:
        code, printed = run_command(command, step.environment, log, step.limit_s - (time.monotonic() - start))
        text += printed
        if code != 0:
            bad = f"{pathlib.Path(command[0]).name}: {end_in_words(code, step.limit_s, printed)}"
            break
    try:
        figures, wrong = step.read(text)
    except Exception as error:  # the later steps run even if a tool printed something unexpected
        figures, wrong = {}, f"its output is not understood: {error!r}"
    entry = {
        "name": step.name,
        "state": "failed" if bad or wrong else "passed",
        "seconds": round(time.monotonic() - start, 1),
        "why": "; ".join(filter(None, (bad, wrong))),
        "figures": figures,
    }
    if entry["state"] == "failed":
        entry["end_of_output"] = text.splitlines()[-TAIL_LINES:]
    return entry


def lines_of(*command):
    """Returns the lines that a command prints, or an empty list if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def machine_facts(emulate):
    """Returns facts about the machine and the tree, without names and addresses."""
    asked = "name,compute_cap,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory"
    query = [
        "nvidia-smi",
        f"--query-gpu={asked}",
        "--format=csv,noheader",
        "-i",
        chosen_device()["CUDA_VISIBLE_DEVICES"],
    ]
    gpu = dict(zip(asked.split(","), re.split(r",\s*", "".join(lines_of(*query)[-1:])), strict=False))
    cpus = pathlib.Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*:\s*(.*)", cpus.read_text() if cpus.exists() else "")
    return {
        "gpu": {"emulated": emulate} if emulate else gpu if gpu["name"] else {},
        "gpus": 0 if emulate else len(lines_of("nvidia-smi", "-L")),
        "nvcc": "".join(lines_of("nvcc", "--version")[-1:]),
        "compiler": "".join(lines_of("c++", "--version")[:1]),
        "kernel": os.uname().release,
        "cpu": cpu.group(1) if cpu else "",
        "cpus": os.cpu_count(),
        "commit": "".join(lines_of("git", "rev-parse", "HEAD")),
        "changed_files": len(lines_of("git", "status", "--porcelain", "-uno")),
    }


def print_plan(steps, options, path):
    hours = sum(step.limit_s for step in steps if not step.absent) / 3600
    print(
        f"Acceptance on {'the emulator as ' + options.emulate if options.emulate else 'the first GPU'}: {len(steps)} steps."
    )
    for step in steps:
        print(f"  {step.name:<20} {step.shows}" + (f" (left out: {step.absent})" if step.absent else ""))
    print(f"At most {hours:.1f} hours, as a rule far less; what is built and logged stays under build/.")
    print(f"The report, {path}, is plain text. It names the GPU, its driver, the CPU, compilers, the commit, tests and")
    print("their results, and figures; of steps that fail the end of their output. Host and user names, paths and")
    print("addresses are taken out. Nothing is sent anywhere: read it, and attach it to an issue.", flush=True)


def parse(arguments):
    parser = argparse.ArgumentParser(prog="./dev gpu --acceptance")
    parser.add_argument("--emulate", choices=["8.0", "9.0", "10.0", "12.0"], help="rehearse on the emulator")
    parser.add_argument("--resume", action="store_true", help="keep the steps that have ended")
    parser.add_argument("--part", default="", choices=PARTS, help="leave out the steps of the other part")
    parser.add_argument("--only", default="", help="names of steps, with commas between")
    parser.add_argument("--skip", default="", help="names of steps, with commas between")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/acceptance/report.txt")
    parser.add_argument("--jobs", type=int, default=0, help="of the build; one a core")
    parser.add_argument("--library-only", action="store_true", help="without the command line, and so without doctor")
    return parser.parse_args(arguments)


def on_path(name):
    return any(os.access(os.path.join(folder, name), os.X_OK) for folder in os.environ["PATH"].split(os.pathsep))


def main(arguments=None):
    options = parse(arguments)
    facts = machine_facts(options.emulate)
    capability = options.emulate or facts["gpu"].get("compute_cap", "")
    if problem := cannot_begin(facts["nvcc"] if on_path("nvcc") else "", capability):
        print(f"acceptance: {problem}", file=sys.stderr)
        return 2
    tools = {"compute-sanitizer": on_path("compute-sanitizer"), "backend": backend_of(capability)}
    steps = steps_of(options, tools, capability)
    names = [step.name for step in steps]
    for name in filter(None, (options.only + "," + options.skip).split(",")):
        if name not in names:
            print(f"acceptance: no step {name}; there are {', '.join(names)}", file=sys.stderr)
            return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    scrub = Scrubber(ROOT)
    report = report_file.new(scrub(facts), capability, datetime.datetime.now(datetime.UTC))
    if options.resume:
        report_file.take_over(report, options.out)
    print_plan(steps, options, os.path.relpath(options.out))
    for step in steps:
        ended = options.resume and report_file.state(report, step.name) in ("passed", "failed")
        if ended and not (options.part and step.name == "build"):
            print(f"== {step.name}: kept, {report_file.state(report, step.name)}", flush=True)
        elif why := left_out(step, options, report):
            report_file.put(report, {"name": step.name, "state": "not run", "why": why})
        elif step.absent:
            report_file.put(report, {"name": step.name, "state": "absent", "why": step.absent})
        else:
            print(f"== {step.name} (at most {step.limit_s} s)", flush=True)
            report_file.put(report, {"name": step.name, "state": "running", "why": "did not end"})
            report_file.write(report, options.out, names)
            entry = scrub(run_step(step, options.out.parent))
            report_file.put(report, entry)
            print(
                f"   {entry['state']}, {entry['seconds']:.0f} s{': ' if entry['why'] else ''}{entry['why']}", flush=True
            )
        report_file.write(report, options.out, names)
    print(f"{report['verdict']}\nThe report: {os.path.relpath(options.out)}")
    return {"ACCEPTED": 0, "NOT ACCEPTED": 1}.get(report["verdict"].split(":")[0], 3)


if __name__ == "__main__":
    sys.exit(main())
