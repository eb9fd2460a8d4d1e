"""Tests of tests/acceptance/acceptance.py, its readers and its report.

The inputs are outputs of the emulator's runs (doctor, probes), outputs written in the tools' form (ctest, bench), and
whole runs with stand-ins for the tools.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import acceptance_ladder as ladder
import acceptance_report
import acceptance_results as results
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests/acceptance/recorded"
H200 = ROOT / "bench/results/moe-layers-h200-f61f177.json"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_outputs_are_read_and_what_is_wrong_in_them_is_named():
    ctest, doctor, probes = (
        recorded("ctest.txt"),
        json.loads(recorded("doctor.json")),
        json.loads(recorded("probes.json")),
    )
    figures, wrong = results.tests_of_ctest("12.0")(ctest)
    assert [figures[state] for state in ("passed", "failed", "skipped")] == [3, 4, 1] and wrong == "4 tests failed"
    assert figures["passed_of_backend"] == {"sm120": 2}
    assert "cuda/Sm120Layer.ARunIsItsSteps: Exception: SEGFAULT" in figures["failed_tests"]
    passed = "1/1 Test  #1: steps/Backends/Steps.FourthCasesEveryStep/{} ....   Passed    1.00 sec\n"
    of_cuda, none = passed.format("cuda"), "no test of the backend sm120 passed"  # another backend's are not enough
    sums = [one["bits"] for one in results.probe_findings("12.0")(json.dumps(probes))[0]["bits_of_sums"].values()]
    failed = json.loads(json.dumps(doctor))
    next(test for test in failed["self_test"] if "sm120" in test["name"])["ok"] = False
    refused = json.loads(json.dumps(probes))
    refused["kernels"][0]["launch"] = "too many resources requested for launch"
    assert sums == [34, 23]
    for reader, text, wrong in (
        (results.tests_of_ctest("12.0"), passed.format("sm120"), ""),
        (results.tests_of_ctest("12.0"), of_cuda, none),
        (results.tests_of_ctest("8.0"), of_cuda, ""),
        (results.doctor_facts("12.0"), json.dumps(doctor), ""),
        (results.doctor_facts("12.1"), json.dumps(doctor), "ran on a device of compute capability 120"),
        (results.doctor_facts("12.0"), json.dumps(failed), "tiny layer W4A4, sm120 on cuda:0"),
        (results.probe_findings("12.0"), json.dumps(probes), ""),
        (results.probe_findings("12.0"), json.dumps(refused), "too many resources requested for launch"),
        (results.sanitizer_errors, "[  PASSED  ] 9 tests.\n==== ERROR SUMMARY: 0 errors\n", ""),
        (results.sanitizer_errors, "[  PASSED  ] 9 tests.\n==== ERROR SUMMARY: 3 errors\n", "3 errors"),
        (results.sanitizer_errors, "==== RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", "2 errors"),
        (results.sanitizer_errors, "[  PASSED  ] 9 tests.\n", "no summary of compute-sanitizer"),
        (results.bench_figures(H200), recorded("bench.txt"), ""),
        (results.bench_figures(H200), "CUDA: an error\n", "no layer was timed"),
    ):
        found = reader(text)[1]
        assert wrong in found and bool(wrong) == bool(found), text


def test_a_report_says_nothing_of_whose_machine_it_is():
    whose = dict(home_folder="/home/ada", user="ada", host="turing.example.org")
    scrub = acceptance_report.Scrubber("/home/ada/code/moe", **whose)
    texts = [
        "/home/ada/code/moe/src/backend/x.cu(3): error",
        "cd /home/ada/other && ls",
        "turing.example.org: nvcc in /usr/local/cuda-13.0/bin/nvcc and /opt/secret/bin",
        "on turing by ada, ada@example.org, 10.1.2.3, GPU-01234567-89ab-cdef-0123-456789abcdef, 00000000:3B:00.0",
        "link 52:54:00:12:34:56",
    ]
    clean = scrub({"list": texts, "figure": 3.5, "none": None})
    joined = json.dumps(clean)
    for private in ("ada", "turing", "example.org", "secret", "10.1.2.3", "89ab", "3B:00", "52:54", "/usr/local"):
        assert private not in joined, joined
    assert clean["list"][0] == "./src/backend/x.cu(3): error" and clean["figure"] == 3.5
    kept = "0.5/2 us at 3/4, sm_120a/sm_120f, 12.8.1, cuda/Backends/X.Y/sm120 and I/O"
    assert scrub(kept) == kept


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        ({"a": "passed", "b": "passed"}, "ACCEPTED: 2 steps with 4 tests passed on this GPU"),
        ({"a": "failed"}, "NOT ACCEPTED: failed on this GPU: a"),
        ({"a": "passed", "b": "running"}, "INCOMPLETE: nothing failed on this GPU, and not run: b"),
        ({"a": "passed", "b": "absent"}, "INCOMPLETE: nothing failed on this GPU, and not run: b"),
    ],
)
def test_a_report_has_a_verdict_and_is_resumed_only_on_the_same_machine(states, verdict, tmp_path, capsys):
    facts = {"gpu": {"name": "a GPU", "compute_cap": "12.0"}, "commit": "0" * 40}
    report, same, other = (acceptance_report.new(facts, "12.0", datetime.datetime(2026, 1, 1)) for _ in range(3))
    for name, state in states.items():
        step = {"name": name, "state": state, "seconds": 1.0, "why": "", "figures": {"passed": 2}}
        acceptance_report.put(report, step)
    acceptance_report.write(report, tmp_path / "report.txt", ["a", "b"])
    assert report["verdict"] == verdict and acceptance_report.read(tmp_path / "report.txt") == report
    acceptance_report.take_over(same, tmp_path / "report.txt")
    was = ["not run" if state == "running" else state for state in states.values()]
    assert [step["state"] for step in same["steps"]] == was
    other["machine"] = {**other["machine"], "commit": "1" * 40}
    acceptance_report.take_over(other, tmp_path / "report.txt")
    assert other["steps"] == [] and "another machine" in capsys.readouterr().out


# ---- whole runs: the kit in a copy of the tree, with stand-ins that print recorded outputs

TOOLS = {
    "nvcc": "echo Build cuda_13.0",
    "nvidia-smi": 'case $1 in -L) echo "GPU 0: RTX (UUID: GPU-1)" ;; *) echo "RTX 9, 12.0, 580.1, 32607 MiB, 575 W, 2850, 14001" ;; esac',
    "git": "echo 0123456789abcdef0123456789abcdef01234567",
    "c++": "echo c++ 12",
    "cmake": 'echo "cmake $*" >>$LOG; exit ${CMAKE_FAILS:-0}',
    "ctest": 'echo "ctest $* on $CUDA_VISIBLE_DEVICES" >>$LOG; [ -z "$NVFP4_MOE_BACKEND" ] || exit 7; [ -n "$HANGS" ] && { sleep 100 & sleep 100; }; '
    "echo '1/2 Test  #1: cuda/CudaLayer.RunsThroughC ....   Passed    0.10 sec'; "
    "echo '2/2 Test  #2: layer/Backends/ExactSums.LayersHaveTheReferencesBits/sm120 ....   '$RESULT'    0.10 sec'; "
    '[ "$RESULT" = Passed ]',
    "compute-sanitizer": 'echo "sanitizer $*" >>$LOG; echo "[  PASSED  ] 4 tests."; echo "===== ERROR SUMMARY: 0 errors"',
}
# A rung, or what a planted fault does to it: $HANGS_IN and $WRONG_IN are parts of its arguments.
RUNG = """for_all() { [ -n "$1" ] && case "$2" in *"$1"*) return 0 ;; esac; return 1; }
echo "ladder $*" >>$LOG
kernels='"kernels": ["gemm2: '$(echo "$*" | sed 's/.* \\(nvfp4\\|bf16\\) [0-9]* \\([-0-9]*\\) .*/tile_\\2/')'"]'
problem='"problem": "gemm1_swiglu: unspecified launch failure"'
for_all "$HANGS_IN" "$*" && { echo "{$problem, $kernels, \\"waits\\": [$WAIT]}"; exit 1; }
problem='"problem": "gemm1_swiglu, intermediate: 5 of 48 values differ"'
for_all "$WRONG_IN" "$*" && { echo "{$problem, $kernels, \\"waits\\": []}"; exit 1; }
echo '{"problem": "", "waits": [], "configurations": {"nvfp4": 2, "bf16": 1}, '"$kernels"'}'"""
BUILT = {
    **{f"tests/{prefix}ladder": RUNG for prefix in ("", "emulated_")},
    "cli/nvfp4-moe": "cat $RECORDED/doctor.json",
    "tests/emulated_nvfp4-moe": "cat $RECORDED/doctor.json",
    "tests/test_cuda": "exit 9",
    **{f"tests/{prefix}device_probes": "cat $RECORDED/probes.json" for prefix in ("", "emulated_")},
    **{f"bench/{prefix}bench_hopper_layers": "cat $RECORDED/bench.txt" for prefix in ("", "emulated_")},
}


def executable(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def kit(tmp_path):
    """Call: kit(options..., VARIABLE=value) -> (exit code, output, report). kit.ran: command lines of the tools."""
    tree = tmp_path / "tree"
    (tree / "src/backend/sm120").mkdir(parents=True)
    (tree / "tests/acceptance").mkdir(parents=True)
    for script in ROOT.glob("tests/acceptance/acceptance*.py"):
        shutil.copy(script, tree / "tests/acceptance")
    (tree / "tools/check").mkdir(parents=True)
    (tree / "tools/check/check_ptxas.py").write_text(
        "import os, sys\nprint('gemm: registers 68 of', sys.argv[1])\nsys.exit(int(os.environ.get('SPILLS', 0)))\n"
    )
    (tree / "bench/results").mkdir(parents=True)
    shutil.copy(H200, tree / "bench/results")
    for name, body in TOOLS.items():
        executable(tmp_path / "bin" / name, body)
    for folder in ("gpu", "racecheck", "cpu", "bounded"):
        for name, body in BUILT.items():
            executable(tree / "build" / folder / name, body)
    log = tmp_path / "log"

    own = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "LOG": str(log), "RECORDED": str(RECORDED), "RESULT": "Passed"}

    def run(*options: str, **variables: str):
        log.write_text("")
        command = [sys.executable, tree / "tests/acceptance/acceptance.py", *options]
        done = subprocess.run(command, env={**os.environ, **own, **variables}, capture_output=True, text=True)
        run.ran = log.read_text()
        path = tree / "build/acceptance/report.txt"
        return done.returncode, done.stdout + done.stderr, acceptance_report.read(path) if path.exists() else None

    run.tools, run.tree = tmp_path / "bin", tree
    return run


LADDER = ["build-ladder", *(name for name, *_ in ladder.rungs("12.0"))]
STEPS = [*LADDER, "build", "machine-code", "doctor", "probes", "exact-sums", "steps", "layers", "graphs-and-repeats"]
STEPS += [f"sanitize-{tool}" for tool in ("memcheck", "racecheck", "initcheck", "synccheck")]
STEPS += ["bench", "configurations"]


def states(report: dict) -> dict[str, str]:
    return {step["name"]: step["state"] for step in report["steps"]}


def test_all_that_passes_is_accepted_on_one_gpu_whatever_the_environment_says_of_the_library(kit):
    code, said, report = kit(CUDA_VISIBLE_DEVICES="3,1", NVFP4_MOE_BACKEND="cpu")
    assert code == 0, said
    assert states(report) == dict.fromkeys(STEPS, "passed")
    assert report["verdict"] == f"ACCEPTED: {len(STEPS)} steps with 24 tests passed on this GPU"
    assert said.index("Host and user names, paths and") < said.index("== build-ladder"), "said before it starts"
    assert all(line.endswith(" on 3") for line in kit.ran.splitlines() if line.startswith("ctest"))
    assert str(kit.tree) not in (kit.tree / "build/acceptance/report.txt").read_text()


def test_a_step_that_fails_does_not_end_it_but_for_the_build(kit):
    code, _, report = kit(RESULT="***Failed", SPILLS="1")
    assert code == 1
    assert report["verdict"].startswith("NOT ACCEPTED: failed on this GPU: machine-code, exact-sums, steps, layers, ")
    assert states(report)["bench"] == states(report)["sanitize-memcheck"] == "passed"
    code, _, report = kit(CMAKE_FAILS="1")
    assert code == 1 and "ctest" not in kit.ran
    assert states(report) == {**dict.fromkeys(STEPS, "not run"), "build-ladder": "failed", "build": "failed"}


def test_a_step_that_hangs_is_ended_with_all_that_it_started(kit):
    script = kit.tree / "tests/acceptance/acceptance_steps.py"
    limit = '"the case table through every step", "steps", 600'
    assert limit in script.read_text()
    script.write_text(script.read_text().replace(limit, limit.replace("600", "1")))
    code, said, report = kit("--only", "build,steps", HANGS="1")
    (step,) = (step for step in report["steps"] if step["name"] == "steps")
    assert code == 1 and "ctest: did not end within 1 s" in step["why"] and step["seconds"] < 30, said


def wait_in(file: str, line: int) -> str:
    wait = {"file_hash": ladder.file_hash(file), "line": line, "parity": 1, "warps": 8, "ctas": 4}
    return json.dumps({**wait, "first_cta": 2, "first_thread": 64, "began_us_after_the_first": 0})


def rung(report: dict, name: str) -> dict:
    return next(step for step in report["steps"] if step["name"] == name)


def test_a_rung_that_hangs_names_its_barrier_is_bisected_and_stops_what_needs_it(kit):
    source = kit.tree / "src/backend/sm120/mainloop.cuh"
    source.write_text("// a file\n  ptx::mbarrier_wait(full_barrier(stage),\n                     parity ^ 1);\n")
    # Configuration 1 hangs, which only W4A4 has.
    code, said, report = kit("--plant", "hang@640", HANGS_IN="nvfp4 40", WAIT=wait_in("sm120/mainloop.cuh", 2))
    hang = (
        "src/backend/sm120/mainloop.cuh:2: mbarrier_wait(full_barrier(stage), parity ^ 1), phase 1: 8 warps of 4 ctas"
    )
    assert code == 1 and hang in rung(report, "gemm-nvfp4")["why"], said
    assert report["verdict"].endswith("rehearsed with the planted fault hang@640: gemm-nvfp4")
    assert "--plant hang@640 --layer layer nvfp4 40 1 0 steps" in kit.ran
    found = rung(report, "gemm-nvfp4")["figures"]["bisection"]
    assert found["result"].startswith("4 of 9 variants failed: ") and len(found["variants"]) == 9
    assert "tile_1, nvfp4, split may, many k-blocks" in found["result"]
    assert "layer nvfp4" not in said.split("== gemm-bf16")[1] and states(report)["gemm-bf16"] == "passed"
    stopped = ("decode-nvfp4", "layer-nvfp4", "steps", "sanitize-memcheck", "bench")
    assert {(states(report)[name], rung(report, name)["why"]) for name in stopped} == {("not run", "gemm-nvfp4 failed")}
    assert states(report)["layer-bf16"] == states(report)["probes"] == states(report)["machine-code"] == "passed"
    assert f"waits: {hang}" in (kit.tree / "build/acceptance/report.txt").read_text()


def test_a_bisection_names_what_all_failures_share(kit):
    _, _, report = kit("--only", "ladder", WRONG_IN="bf16")
    first = rung(report, "stage-bf16")
    assert "gemm1_swiglu, intermediate: 5 of 48 values differ" in first["why"]
    assert first["figures"]["bisection"]["result"] == "3 of 9 variants failed: all and only those of activations bf16"
    assert states(report)["tile-bf16"] == "not run" and states(report)["layer-nvfp4"] == "passed"
    one = {"activations": "nvfp4", "tile": "a", "split": "no", "k-blocks": "one", "problem": ""}
    assert "every variant passed" in ladder.common_of_failures([one])
    assert "every variant failed" in ladder.common_of_failures([{**one, "problem": "hang"}])


def test_every_instruction_fails_by_itself_and_the_hash_of_a_file_is_the_kernels(kit):
    assert ladder.file_hash("/src/backend/sm90/producer.cuh") == 0x52933A09  # as in ladder.cpp
    for capability, instruction, stopped in (
        ("9.0", "wgmma-bf16", "stage-nvfp4"),
        ("10.0", "tcgen05-alloc", "tcgen05-mma-fp4"),
        ("12.0", "mma-fp4", "stage-nvfp4"),
    ):
        _, said, report = kit("--only", "ladder", "--emulate", capability, WRONG_IN=f"--instruction {instruction}")
        assert states(report)[instruction] == "failed" and states(report)[stopped] == "not run", said
        assert "bisecting" not in said and states(report)["mbarrier"] == "passed"


def test_steps_begin_for_that_many_minutes_and_the_rest_waits_for_resume(kit):
    code, said, report = kit("--minutes", "0", "--skip", "ladder")
    late = [name for name, state in states(report).items() if state == "not run" and name not in LADDER]
    assert code == 3 and late and rung(report, late[0])["why"] == "0 minutes are over: --resume goes on", said
    code, said, report = kit("--resume")
    assert code == 0 and states(report) == dict.fromkeys(STEPS, "passed"), said


def test_two_parts_make_one_report_and_what_a_stop_left_is_resumed(kit):
    code, said, report = kit("--part", "tests")
    assert code == 3 and "sanitizer" not in kit.ran and "ladder" not in kit.ran, said
    acceptance_report.put(report, {"name": "probes", "state": "running", "why": "did not end"})
    acceptance_report.write(report, kit.tree / "build/acceptance/report.txt", STEPS)
    code, said, report = kit("--resume")
    assert code == 0 and states(report) == dict.fromkeys(STEPS, "passed"), said
    assert "== steps: kept, passed" in said and "== probes (at most" in said and "test_steps" not in kit.ran


def test_what_is_absent_is_incomplete_and_without_a_gpu_there_is_only_a_rehearsal(kit):
    (kit.tools / "compute-sanitizer").unlink()
    code, _, report = kit("--library-only")
    assert code == 3 and states(report)["doctor"] == states(report)["sanitize-racecheck"] == "absent"
    executable(kit.tools / "nvidia-smi", "echo No devices were found; exit 6")
    code, said, _ = kit()
    assert code == 2 and "expected nvcc on PATH and a GPU" in said
    code, said, report = kit("--emulate", "12.0")
    assert code == 0 and "proves nothing of a chip" in report["verdict"] and "--preset gpu" not in kit.ran, said


@pytest.mark.long
def test_the_rehearsal_on_the_emulator():
    if not (ROOT / "build/cpu/tests/emulated_test_layer").exists():
        pytest.skip("the emulator is not built here")
    done = subprocess.run([ROOT / "dev", "gpu", "--acceptance", "--emulate", "12.0"], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
