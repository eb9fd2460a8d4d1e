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

import acceptance_report
import acceptance_results as results
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests/acceptance/recorded"
H200 = ROOT / "bench/results/moe-layers-h200-bba0682.json"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_ctest_is_read_with_its_states_and_names():
    figures, wrong = results.tests_of_ctest("12.0")(recorded("ctest.txt"))
    assert [figures[state] for state in ("passed", "failed", "skipped")] == [3, 4, 1]
    assert figures["passed_of_backend"] == {"sm120": 2} and wrong == "4 tests failed"
    assert "cuda/Sm120Layer.ARunIsItsSteps: Exception: SEGFAULT" in figures["failed_tests"]
    # Tests of another backend are not enough.
    passed = "1/1 Test  #1: steps/Backends/Steps.FourthCasesEveryStep/{} ....   Passed    1.00 sec\n"
    for capability, backend, wrong in (
        ("12.0", "sm120", ""),
        ("12.0", "cuda", "no test of the backend sm120 passed"),
        ("8.0", "cuda", ""),
    ):
        assert results.tests_of_ctest(capability)(passed.format(backend))[1] == wrong


def test_doctor_and_probes_are_read():
    figures, wrong = results.doctor_facts("12.0")(recorded("doctor.json"))
    assert (wrong, figures["gpu"]["compute_capability"]) == ("", 120)
    figures, wrong = results.probe_findings("12.0")(recorded("probes.json"))
    assert (wrong, [one["bits"] for one in figures["bits_of_sums"].values()]) == ("", [34, 23])
    for reader, name in ((results.doctor_facts, "doctor.json"), (results.probe_findings, "probes.json")):
        assert reader("12.1")(recorded(name))[1] == "ran on a device of compute capability 120"
    doctor, probes = json.loads(recorded("doctor.json")), json.loads(recorded("probes.json"))
    next(test for test in doctor["self_test"] if "sm120" in test["name"])["ok"] = False
    assert "tiny layer W4A4, sm120 on cuda:0" in results.doctor_facts("12.0")(json.dumps(doctor))[1]
    doctor["self_test"] = [test for test in doctor["self_test"] if "cuda:0" not in test["name"]]
    assert results.doctor_facts("12.0")("a warning\n" + json.dumps(doctor))[1] == "no self-test ran on the device"
    probes["kernels"][0]["launch"] = "too many resources requested for launch"
    probes["kernels"][1]["ctas_per_multiprocessor"] = 0
    wrong = results.probe_findings("12.0")(json.dumps(probes))[1]
    assert "sm120_gemm1_kernel<0>: launch with 98560 bytes of shared memory: too many resources" in wrong
    assert "sm120_gemm2_kernel<2>: no multiprocessor holds a cta of it" in wrong


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[  PASSED  ] 9 tests.\n========= ERROR SUMMARY: 0 errors\n", ""),
        ("[  PASSED  ] 9 tests.\n========= ERROR SUMMARY: 3 errors\n", "3 errors"),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", "2 errors"),
        ("[  PASSED  ] 9 tests.\n", "no summary of compute-sanitizer"),
        ("========= ERROR SUMMARY: 0 errors\n", "no test passed under it"),
    ],
)
def test_sanitizers_are_read(text, wrong):
    assert results.sanitizer_errors(text)[1] == wrong


def test_the_bench_stands_beside_the_recorded_table_and_configurations_beside_each_other():
    figures, wrong = results.bench_figures(H200)(recorded("bench.txt"))
    cells = {(cell["shape"], cell["tokens"], cell["format"]): cell for cell in figures["cells"]}
    of_h200 = {(row["shape"], row["tokens"], row["layer"]): row["us"] for row in json.loads(H200.read_text())["rows"]}
    cell = cells["v4flash", 64, "nvfp4"]
    assert (wrong, cell["us"], cell["h200_us"]) == ("", 512.3, of_h200["v4flash", 64, "nvfp4_moe_nvfp4"])
    assert results.bench_figures(H200)("CUDA: an error\n")[1] == "no layer was timed"
    cell = "v4flash 64 1.9 rows | floor 400.0 | sm120 {} (1.28x) | g1 3.5 3.01 TB/s 19 TF | g2 1.7 2.93 TB/s 19 TF\n"
    text = "".join(f"RTX, nvfp4, configuration {i}, us\n" + cell.format(us) for i, us in enumerate(("512.3", "600.1")))
    assert acceptance_report.rows_of_bench(results.bench_figures(H200)(text)[0]["cells"]) == [
        ("shape", "tokens", "rows an expert", "configuration 0, us", "configuration 1, us"),
        ("v4flash", 64, 1.9, "512.3", "600.1"),
    ]


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
    assert clean["list"][0] == "./src/backend/x.cu(3): error"
    assert "…/nvcc" in clean["list"][2]
    assert (clean["figure"], clean["none"]) == (3.5, None)
    kept = "0.5/2 us at 3/4, sm_120a/sm_120f, 12.8.1, cuda/Backends/X.Y/sm120 and I/O"
    assert scrub(kept) == kept


def a_report(**states: str) -> dict:
    facts = {"gpu": {"name": "a GPU", "compute_cap": "12.0"}, "commit": "0" * 40}
    report = acceptance_report.new(facts, "12.0", datetime.datetime(2026, 1, 1))
    for name, state in states.items():
        step = {"name": name, "state": state, "seconds": 1.0, "why": "", "figures": {"passed": 2}}
        acceptance_report.put(report, step)
    return report


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        ({"a": "passed", "b": "passed"}, "ACCEPTED: 2 steps with 4 tests passed on this GPU"),
        ({"a": "failed"}, "NOT ACCEPTED: failed on this GPU: a"),
        ({"a": "passed"}, "INCOMPLETE: nothing failed on this GPU, and not run: b"),
        ({"a": "passed", "b": "running"}, "INCOMPLETE: nothing failed on this GPU, and not run: b"),
        ({"a": "passed", "b": "absent"}, "INCOMPLETE: nothing failed on this GPU, and not run: b"),
    ],
)
def test_verdicts(states, verdict):
    assert acceptance_report.verdict(a_report(**states), ["a", "b"]) == verdict


def test_a_report_is_resumed_only_on_the_same_machine(tmp_path, capsys):
    path = tmp_path / "report.txt"
    report = a_report(a="passed", b="running")
    acceptance_report.write(report, path, ["a", "b"])
    assert path.read_text().startswith("INCOMPLETE: ") and acceptance_report.read(path) == report
    resumed, other = a_report(), a_report()
    acceptance_report.take_over(resumed, path)
    assert [step["state"] for step in resumed["steps"]] == ["passed", "not run"]
    other["machine"] = {**other["machine"], "commit": "1" * 40}
    acceptance_report.take_over(other, path)
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
BUILT = {
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
    for folder in ("gpu", "racecheck", "cpu"):
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


STEPS = ["build", "machine-code", "doctor", "probes", "exact-sums", "steps", "layers", "graphs-and-repeats"]
STEPS += [f"sanitize-{tool}" for tool in ("memcheck", "racecheck", "initcheck", "synccheck")]
STEPS += ["bench", "configurations"]


def states(report: dict) -> dict[str, str]:
    return {step["name"]: step["state"] for step in report["steps"]}


def test_all_that_passes_is_accepted_on_one_gpu_whatever_the_environment_says_of_the_library(kit):
    code, said, report = kit(CUDA_VISIBLE_DEVICES="3,1", NVFP4_MOE_BACKEND="cpu")
    assert code == 0, said
    assert states(report) == dict.fromkeys(STEPS, "passed")
    assert report["verdict"] == "ACCEPTED: 14 steps with 24 tests passed on this GPU"
    assert said.index("Host and user names, paths and") < said.index("== build"), "said before it starts"
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        assert f"sanitizer --tool {tool} --error-exitcode 1 build/" in kit.ran
    assert all(line.endswith(" on 3") for line in kit.ran.splitlines() if line.startswith("ctest"))
    text = (kit.tree / "build/acceptance/report.txt").read_text()
    assert str(kit.tree) not in text and text.startswith("ACCEPTED")
    assert "sm120_gemm1_kernel<0>" in text and "512.3" in text


def test_a_step_that_fails_does_not_end_it_but_for_the_build(kit):
    code, _, report = kit(RESULT="***Failed", SPILLS="1")
    assert code == 1
    assert report["verdict"].startswith("NOT ACCEPTED: failed on this GPU: machine-code, exact-sums, steps, layers, ")
    assert states(report)["bench"] == states(report)["sanitize-memcheck"] == "passed"
    failed = next(step for step in report["steps"] if step["name"] == "layers")
    assert "LayersHaveTheReferencesBits/sm120: Failed" in failed["figures"]["failed_tests"][0]
    code, _, report = kit(CMAKE_FAILS="1")
    assert code == 1 and "ctest" not in kit.ran
    assert states(report) == {**dict.fromkeys(STEPS, "not run"), "build": "failed"}


def test_a_step_that_hangs_is_ended_with_all_that_it_started(kit):
    script = kit.tree / "tests/acceptance/acceptance.py"
    limit = '"the case table through every step", "steps", 3600'
    assert limit in script.read_text()
    script.write_text(script.read_text().replace(limit, limit.replace("3600", "1")))
    code, said, report = kit("--only", "build,steps", HANGS="1")
    assert code == 1, said
    step = next(step for step in report["steps"] if step["name"] == "steps")
    assert "ctest: did not end within 1 s" in step["why"], said
    assert step["seconds"] < 30
    assert states(report)["bench"] == "not run"


def test_two_parts_make_one_report_and_what_a_stop_left_is_resumed(kit):
    code, said, report = kit("--part", "tests")
    assert code == 3, said
    left_out = [name for name, state in states(report).items() if state == "not run"]
    assert left_out == [name for name in STEPS if name.startswith("sanitize-")] and "sanitizer" not in kit.ran
    acceptance_report.put(report, {"name": "probes", "state": "running", "why": "did not end"})
    acceptance_report.write(report, kit.tree / "build/acceptance/report.txt", STEPS)
    code, said, report = kit("--resume")
    assert code == 0, said
    assert states(report) == dict.fromkeys(STEPS, "passed")
    assert "== steps: kept, passed" in said and "== probes (at most" in said and "test_steps" not in kit.ran


def test_what_is_absent_on_a_device_is_incomplete_and_it_cannot_begin_without_a_gpu(kit):
    (kit.tools / "compute-sanitizer").unlink()
    code, _, report = kit("--library-only")
    assert code == 3
    assert states(report)["doctor"] == states(report)["sanitize-racecheck"] == "absent"
    executable(kit.tools / "nvidia-smi", "echo No devices were found; exit 6")
    code, said, _ = kit()
    assert (code, "expected nvcc on PATH and a GPU" in said) == (2, True)


def test_a_rehearsal_says_so_and_asks_no_gpu(kit):
    executable(kit.tools / "nvidia-smi", "exit 6")
    code, said, report = kit("--emulate", "12.0")
    assert code == 0, said
    assert "proves nothing of a chip" in report["verdict"]
    assert "cmake --preset cpu" in kit.ran and "--preset gpu" not in kit.ran and "sanitizer" not in kit.ran


@pytest.mark.long
def test_the_rehearsal_on_the_emulator():
    if not (ROOT / "build/cpu/tests/emulated_test_layer").exists():
        pytest.skip("the emulator is not built here")
    done = subprocess.run([ROOT / "dev", "gpu", "--acceptance", "--emulate", "12.0"], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
