"""The steps of tests/acceptance/acceptance.py: their commands, limits, and what each needs."""

import os
import pathlib
import re
import sys
from dataclasses import dataclass, field

import acceptance_ladder as ladder
from acceptance_results import (
    bench_figures,
    doctor_facts,
    nothing,
    probe_findings,
    said_lines,
    sanitizer_errors,
    tests_of_ctest,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONGEST_TEST_S = 300

# The tests that run under compute-sanitizer, here and in ./dev gpu: whole layers of each backend, small enough for a
# tool that slows them down a hundred times.
SANITIZED = "CudaLayer.*:Sm90SmallLayer.*:Sm90SmallRequantize.*:Sm90WideTiles.*:*Fp4Layer.ARunIsItsSteps*:*OnADevice.AFewTokens*:*CudaAll*/peers_1"
BENCH_TOKENS = "1,4,16,64,256,1024,4096"
BOUND_TOKENS = "16,32,64,96,128,256,384,512,768,1024"  # 1 to 64 rows an expert
CONFIGURATIONS = 3  # in each of Blackwell's backends


@dataclass
class Step:
    """One step of the acceptance: commands that run one after the other, and a reader of their output."""

    name: str
    shows: str
    commands: list[list[str]]
    limit_s: int
    read: object = nothing  # (text, step's environment) -> (figures, error in them or "")
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple = ()  # names of steps without which this one cannot run
    absent: str = ""  # reason why it never runs
    part: str = "tests"  # of PARTS; "" for a build, which several parts begin with
    bisected: bool = False  # a failure is run again in other configurations


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
    # The ladder's last rungs, which whole layers need, and so most of the other steps.
    layers = ("build", *(f"layer-{format_}" for format_ in ladder.FORMATS))
    command_line = f"{build}/tests/emulated_nvfp4-moe" if emulated else f"{build}/cli/nvfp4-moe"
    jobs = str(options.jobs or os.cpu_count())
    # The emulator is too slow for the time limit of a self-check.
    device = {"PTXEMU_CC": capability, "NVFP4_MOE_SELF_CHECK": "off"} if emulated else chosen_device()

    def ctest(name, shows, label, limit_s, only=None, without=None, rehearsed=None):
        labels = "^emulated" if emulated else f"^({label})$"
        chosen = f"^emulated/{re.escape(capability)}/({label})/.*({rehearsed})" if emulated else only
        command = ["ctest", "--test-dir", build, "-j", "2" if emulated else "8", "-L", labels]
        command += ["--timeout", str(900 if emulated else LONGEST_TEST_S), "--output-on-failure"]
        command += ["-R", chosen] if chosen else []
        command += ["-E", without] if without and not emulated else []
        return Step(name, shows, [command], limit_s, tests_of_ctest(capability), device, needs=layers)

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
            900,
            sanitizer_errors,
            device,
            needs=layers,
            absent=sanitizer_absent,
            part="sanitizers",
        )

    bench = forced = [f"{build}/bench/{prefix}bench_hopper_layers", "rehearsal", "--tokens", "1", "--sm90-only"]
    if not emulated:
        bench = [bench[0], "--tokens", BENCH_TOKENS, "--sm90-only"]
        forced = [bench[0], "v4flash", "qwen30b", "--tokens", BOUND_TOKENS]
    steps = [
        *ladder_steps(options, capability, jobs, device),
        Step(
            "build",
            "nvcc and ptxas of this machine compile everything for this device",
            [configure, ["cmake", "--build", "--preset", preset, "-j", jobs, "--target", *targets]],
            7200,
            part="",
        ),
        Step(
            "machine-code",
            "ptxas spilled nothing, serialized nothing, and made the products that kernels are written for",
            [[sys.executable, "tools/check/check_ptxas.py", f"{build}/src/CMakeFiles"]],
            300,
            said_lines,
            needs=("build",),
        ),
        Step(
            "doctor",
            "the driver shows the device, a backend takes it, tiny layers agree with the reference",
            [[command_line, "doctor", "--device", "cuda:0", "--json", "--quiet"]],
            180,
            doctor_facts(capability),
            device,
            needs=layers,
            absent="the command line is not built here: CLI11's headers are missing" if options.library_only else "",
        ),
        Step(
            "probes",
            "what no emulator knows: registers, shared memory, occupancy, width of sums, scale bytes",
            [[f"{build}/tests/{prefix}device_probes", *(["--quick"] if emulated else [])]],
            180,
            probe_findings(capability),
            device,
            needs=("build", "device"),
        ),
        ctest("exact-sums", "sums that are exact have the reference's bits", "cuda|layer", 300, "ExactSums",
              rehearsed="ExactSums.*/" + tools["backend"]),
        ctest("steps", "the case table through every step", "steps", 600, rehearsed="Unpack.*/" + tools["backend"]),
        ctest("layers", "whole layers and their properties", "layer", 600, without="ExactSums",
              rehearsed="(ZeroTokensAreANoOp|NanTokenSpoilsOnlyItsRow).*/" + tools["backend"]),
        ctest("graphs-and-repeats", "configurations, graphs, repeats, memory, large shapes", "cuda", 900,
              without="ExactSums|ptxas", rehearsed="CudaLayer"),
        *[sanitize(tool) for tool in ("memcheck", "racecheck", "initcheck", "synccheck")],
        Step(
            "bench",
            "microseconds of a layer next to an H200's of the record",
            [[*bench, "--format", "nvfp4"], *([] if emulated else [[*bench, "--format", "bf16"]])],
            300,
            bench_figures(ROOT / "bench/results/moe-layers-h200-f61f177.json"),
            device,
            needs=layers,
        ),
    ]  # fmt: skip
    if capability.split(".")[0] in ("10", "12"):  # on other architectures the bounds were measured
        shows = "microseconds of each GEMM configuration, whose bounds on Blackwell are arithmetic"
        count = 1 if emulated else CONFIGURATIONS
        commands = [[*forced, "--format", "nvfp4", "--configuration", str(i)] for i in range(count)]
        steps.append(Step("configurations", shows, commands, 300, steps[-1].read, device, needs=layers))
    for step in steps:
        step.limit_s *= 4 if emulated and step.part == "tests" else 1
    return steps


def ladder_steps(options, capability, jobs, device):
    """The ladder: its build, and a step for each rung. Its kernels' waits end."""
    emulated = options.emulate is not None
    configure = ["cmake", "--preset", "bounded", "-DNVFP4_MOE_TESTS=ON"]
    if emulated:
        configure += ["-DNVFP4_MOE_EMULATE=ON", "-DCMAKE_CUDA_ARCHITECTURES="]
        made = ROOT / "build/ptxemu"
        configure += [f"-DNVFP4_MOE_PTXEMU_BUILD={made}"] if (made / "libptxemu.so").exists() else []
    target = "emulated_ladder" if emulated else "ladder"
    build = ["cmake", "--build", "--preset", "bounded", "-j", jobs, "--target", target]
    shows = "kernels whose waits end with a report"
    steps = [Step("build-ladder", shows, [configure, build], 7200, part="ladder")]
    # On the emulator threads return from a wait only if all of them wait.
    program = [f"build/bounded/tests/{target}", "--wait-ms", "0" if emulated else "1000"]
    program += ["--plant", options.plant] if options.plant else []
    limit_s = ladder.EMULATED_RUNG_S if emulated else ladder.RUNG_S
    for name, shows, arguments, needs in ladder.rungs(capability):
        steps.append(
            Step(name, shows, [[*program, *arguments]], limit_s, ladder.read_rung, device,
                 needs=("build-ladder", *needs), part="ladder", bisected="--layer" in arguments)
        )  # fmt: skip
    return steps
