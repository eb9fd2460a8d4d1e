"""Tests of ./dev, with stubs for compilers, CMake and the GPU's tools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CMAKE = """#!/bin/sh
echo "$*" >>"$DEV_LOG"
case $1 in
  --preset)
    case $2 in *gpu*) folder=build/gpu ;; *) folder=build/cpu ;; esac
    mkdir -p $folder/cli && echo NVFP4_MOE_CLI:BOOL=ON >$folder/CMakeCache.txt
    printf '#!/bin/sh\\necho "tool $*" >>"$DEV_LOG"\\n' >$folder/cli/nvfp4-moe
    chmod +x $folder/cli/nvfp4-moe ;;
  -S) mkdir -p "$4" ;;
  --build) for folder in build/*/; do : >$folder/libnvfp4_moe_internal.a; done ;;
esac
"""


@pytest.fixture
def dev(tmp_path):
    """A copy of ./dev, with stand-ins on PATH. Call: dev(verb, ...) -> (exit status, commands it ran, output)."""
    shutil.copy(ROOT / "dev", tmp_path / "dev")
    tools = tmp_path / "bin"
    tools.mkdir()

    def stand_in(name: str, text: str) -> None:
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    stand_in("cmake", CMAKE)
    stand_in("dpkg-query", "#!/bin/sh\necho install ok installed\n")
    stand_in("nvidia-smi", "#!/bin/sh\necho No devices found.\nexit 6\n")
    stand_in("nvcc", "#!/bin/sh\nexit 1\n")
    stand_in("python3", "#!/bin/sh\nexit 1\n")
    log = tmp_path / "log"

    def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
        log.write_text("")
        path = f"{tools}:{os.environ['PATH']}"
        done = subprocess.run(
            [tmp_path / "dev", *arguments],
            env={**os.environ, "PATH": path, "DEV_LOG": str(log), "NO_COLOR": "1", **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, log.read_text(), done.stdout + done.stderr

    run.stand_in = stand_in
    run.folder = tmp_path
    return run


LISTS_A_GPU = "#!/bin/sh\necho 'GPU 0: a name (UUID: GPU-1)'\n"


def test_demo_compiles_no_cuda_if_there_is_nvcc_but_no_gpu_and_configures_a_folder_once(dev):
    code, ran, said = dev("demo")
    assert code == 0, said
    assert ran.startswith("--preset demo\n--build --preset demo ")
    assert "tool verify .demo/nvfp4 --against .demo/bf16\n" in ran
    presets = {
        preset["name"]: preset for preset in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
    }
    assert presets["demo"]["cacheVariables"] == {"NVFP4_MOE_TESTS": "OFF", "NVFP4_MOE_CUDA": "OFF"}
    assert presets["demo"]["binaryDir"] == "${sourceDir}/build/cpu", "where ./dev test goes on"
    assert not any(line.startswith("--preset") for line in dev("demo")[1].splitlines())
    (dev.folder / "build/cpu/libnvfp4_moe_internal.a").unlink()
    assert dev("demo")[1].startswith("--preset demo\n"), "a test run that was stopped while it compiled, for example"
    dev.stand_in("python3", "#!/bin/sh\n")
    assert dev("wheel")[1].startswith("--preset wheel\n--build --preset wheel "), "the tests' has PTX, a demo's no CUDA"


def test_every_verb_but_bench_shows_the_help(dev):
    shown = dev("help")
    assert shown[0] == 0 and "./dev demo" in shown[2]
    for words in (["--help"], ["-h"], ["demo", "--help"], ["test", "-h"]):
        assert dev(*words) == shown
    assert dev("--helpless")[0] == 2
    assert "./dev demo" not in dev("bench", "--help")[2]


def test_demo_runs_the_tool_of_a_wheel_without_a_build_but_not_for_a_gpu(dev):
    tool = dev.folder / "wheel/nvfp4-moe"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "from the wheel $*" >>"$DEV_LOG"\n')
    tool.chmod(0o755)
    dev.stand_in("python3", f'#!/bin/sh\n[ "$*" = tools/release/wheel_tool.py ] && echo {tool}\n')
    code, ran, said = dev("demo")
    assert code == 0, said
    assert f"== the tool: {tool}\n" in said and "--preset" not in ran and "--build" not in ran
    assert ran.endswith("from the wheel verify .demo/nvfp4 --against .demo/bf16\n")
    for options in (["--build"], ["--build", "--model", "folder"]):
        _, ran, said = dev("demo", *options)
        assert "== the tool: build/cpu/cli/nvfp4-moe\n" in said and "from the wheel" not in ran
    dev.stand_in("nvidia-smi", LISTS_A_GPU)
    _, ran, said = dev("demo")
    assert "== the tool: build/gpu/cli/nvfp4-moe\n" in said and "from the wheel" not in ran


def test_packages_are_made_without_the_oracles_and_tried_with_them(dev):
    """./dev release makes them as any user, without torch."""
    script = dev.folder / "tools/release/debian_packages.sh"
    script.parent.mkdir(parents=True)
    script.write_text('echo "debian_packages.sh $*" >>"$DEV_LOG"\n')
    maintainer = {"DEBFULLNAME": "A Name", "DEBEMAIL": "a@example.org", "SOURCE_DATE_EPOCH": "1"}
    code, ran, said = dev("package", "--make", "-DOPTION=1", **maintainer)
    assert code == 0, said
    assert ran.startswith(
        "--preset deb -DNVFP4_MOE_DEB_MAINTAINER=A Name <a@example.org> -DOPTION=1\n--build --preset deb "
    )
    assert ran.endswith("debian_packages.sh make build/deb dist\n") and not (dev.folder / ".venv").exists()
    code, ran, said = dev("package", "--try")
    assert (code, ran) == (2, "") and "expected one dist/nvfp4-moe-tools_*.deb" in said
    assert dev("package", "--try", "-DOPTION=1")[0] == 2


@pytest.mark.parametrize("stored", ["float", "modelopt"])
def test_demo_quantizes_a_model_in_floats_and_verifies_others(dev, stored):
    """inspect's JSON is one line, in which a later "format" is the activations'."""
    dev("demo")
    tool = dev.folder / "build/cpu/cli/nvfp4-moe"
    object_ = json.dumps({"ok": True, "format": stored, "activations": {"format": "bf16"}}, separators=(",", ":"))
    tool.write_text(f"""#!/bin/sh\necho "tool $*" >>"$DEV_LOG"\necho '{object_}'\n""")
    code, ran, _ = dev("demo", "--model", "folder")
    assert code == 0
    assert ("tool quantize folder .demo/quantized\n" in ran) == (stored == "float")
    assert ("tool verify folder\n" in ran) == (stored != "float")


def test_demo_takes_the_gpu_that_is_listed_and_insists_on_one_if_asked(dev):
    code, ran, said = dev("demo", "--gpu")
    assert (code, ran) == (2, "") and "nvidia-smi lists none" in said
    dev.stand_in("nvidia-smi", LISTS_A_GPU)
    code, ran, said = dev("demo")
    assert code == 0, said
    assert ran.startswith("--preset gpu-demo\n")
    assert "tool verify .demo/nvfp4 --against .demo/bf16 --device cuda:0\n" in ran


@pytest.mark.parametrize("missing", ["xxhash.h|CLI/CLI.hpp", "xxhash.h", "CLI/CLI.hpp"])
def test_gpu_names_missing_headers_before_it_builds_and_can_do_without_one(dev, missing):
    dev.stand_in("nvidia-smi", LISTS_A_GPU)
    dev.stand_in("c++", f"#!/bin/sh\n! grep -qE '{missing}'\n")
    code, ran, said = dev("gpu")
    packages = {"xxhash.h": "libxxhash-dev", "CLI/CLI.hpp": "libcli11-dev"}
    listed = ", ".join(f"{packages[header]} (<{header}>)" for header in missing.split("|"))
    assert f"headers that this host lacks: {listed}\n" in said
    if missing == "CLI/CLI.hpp":
        assert ran.startswith("--preset gpu ") and "-DNVFP4_MOE_CLI=ON" not in ran
    else:
        assert (code, ran) == (2, "")


@pytest.fixture
def on_a_gpu(dev):
    """dev on a machine with a GPU and every header, whose tools succeed and log their arguments."""
    dev.stand_in("nvidia-smi", LISTS_A_GPU)
    dev.stand_in("c++", "#!/bin/sh\ncat >/dev/null\n")
    for tool in ("ctest", "compute-sanitizer"):
        dev.stand_in(tool, f'#!/bin/sh\necho "{tool} $*" >>"$DEV_LOG"\n')
    dev.stand_in("python3", '#!/bin/sh\n[ "$1" != -c ] || exit 1\necho "python3 $*" >>"$DEV_LOG"\n')
    for program in ("test_cuda", "test_cli"):
        path = dev.folder / "build/gpu/tests" / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\nexit 0\n")
        path.chmod(0o755)
    return dev


def test_gpu_runs_one_part_or_both_and_says_which_failed(on_a_gpu):
    code, ran, said = on_a_gpu("gpu", "sanitizers")
    assert code == 0, said
    assert [line for line in ran.splitlines() if "--build" in line] == [
        f"--build --preset {preset} -j {os.cpu_count()} --target test_cuda" for preset in ("gpu", "racecheck")
    ]
    assert ran.count("compute-sanitizer --tool") == 4 and "ctest" not in ran
    assert "== gpu sanitizers: passed in" in said and "== gpu tests: not run (./dev gpu tests)" in said
    on_a_gpu.stand_in("ctest", "#!/bin/sh\nexit 8\n")
    code, ran, said = on_a_gpu("gpu")
    assert code == 1 and "compute-sanitizer --tool" in ran
    assert "== gpu tests: FAILED after" in said and "== gpu sanitizers: passed in" in said
    assert on_a_gpu("gpu", "everything")[0] == 2


@pytest.fixture
def tested(dev):
    """dev with all that `./dev setup` makes. Stand-ins for ctest and the oracles' Python print how they are called."""
    for name in ("python/requirements-test.txt", "python/requirements-test.lock", ".venv/.requirements"):
        path = dev.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    header = dev.folder / ".deps/cutlass/include/cutlass/version.h"
    header.parent.mkdir(parents=True)
    header.write_text("")
    (dev.folder / ".venv/bin").mkdir()
    logs = '#!/bin/sh\necho "${0##*/} $*" >>"$DEV_LOG"\n'
    dev.stand_in("ctest", logs + "echo Test project\n")
    dev.stand_in("../.venv/bin/python", logs + "case $* in *$FAILS*) exit 1 ;; esac\n")
    return dev


def calls(ran: str, name: str) -> list[str]:
    return [line for line in ran.splitlines() if line.startswith(f"{name} ")]


def test_attack_and_test_run_and_record_what_they_should(tested):
    code, ran, said = tested("attack", FAILS="nothing")
    assert code == 0, said
    *_, first, second, summary = ran.splitlines()
    ctest, pytest_call = sorted((first, second))  # they run at the same time
    assert ctest.startswith("ctest ") and "-L ^attack$ -LE ^long$ " in ctest
    assert "-m attack and not long --junitxml build/attack.pytest.xml" in pytest_call
    junit = "build/attack.ctest.xml build/attack.pytest.xml"
    assert summary.endswith(f"tools/attack_summary.py --tier short --record tests/attack.json {junit}")
    for fails in ("tools/attack_summary.py", "-m pytest"):
        code, ran, _ = tested("attack", FAILS=fails)
        assert code == 1 and "attack_summary.py" in ran, "the table comes all the same"
    for options, expected, record in (
        ([], ("-LE ^(emulated_)?long$ ", "-m not long"), False),
        (["--long"], ("-LE ^emulated_long$ ", "--record tests/long_tier.json build/ctest.xml build/pytest.xml"), True),
        (["--long", "Fork"], ("-R Fork", "-k Fork"), False),
    ):
        _, ran, _ = tested("test", *options, FAILS="nothing")
        assert all(words in ran for words in expected) and ("--record" in ran) == record, ran
    _, ran, _ = tested("ptxemu", FAILS="nothing")
    assert ran.startswith("-S ptxemu -B build/ptxemu -G Ninja ") and "python -m pytest -q ptxemu/trial" in ran


def test_programs_for_aarch64_are_built_if_asked_for_and_then_kept_up_to_date(tested):
    for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64"):
        tested.stand_in(tool, "#!/bin/sh\n")
    tested.stand_in("uname", "#!/bin/sh\necho x86_64\n")

    def built(*options: str) -> bool:
        return "--build --preset aarch64 " in tested("test", *options, FAILS="nothing")[1]

    assert [built(*options) for options in ([], ["Fork"], ["--other-cpu"], ["--long"])] == [False, False, True, True]
    (tested.folder / "build/aarch64").mkdir()
    assert built() and not built("Fork")
    shutil.rmtree(tested.folder / "build/aarch64")
    tested.stand_in("ctest", "#!/bin/sh\necho '  Test #1: other_cpu/neoverse-n1/cpu'\nseq 100000\n")
    assert built("other_cpu") and not built()


def test_the_emulator_is_built_before_what_links_with_it(tested):
    tested.stand_in("uname", "#!/bin/sh\necho x86_64\n")
    tested.stand_in("cmake", CMAKE.replace("-S) ", "-S) sleep 0.5; "))
    _, ran, _ = tested("test", FAILS="nothing")
    assert ran.index("--build build/ptxemu ") < ran.index("--build --preset cpu ")
    tested.stand_in("cmake", CMAKE.replace("-S) ", "-S) exit 1; "))
    code, ran, _ = tested("test", FAILS="nothing")
    assert code == 1 and "--build --preset cpu " not in ran and not calls(ran, "ctest")


def test_wheels_are_tested_if_asked_for_and_by_ci(tested):
    logs = '#!/bin/sh\necho "without wheels: $NVFP4_MOE_NO_WHEELS; $*" >>"$DEV_LOG"\n'
    tested.stand_in("../.venv/bin/python", logs)

    def left_out(*options: str) -> bool:
        return "without wheels: 1; -m pytest" in tested("test", *options)[1]

    assert [left_out(*options) for options in ([], ["--wheels"], ["--long"], ["Fork"])] == [True, False, False, False]
    assert "test --other-cpu --wheels\n" in (ROOT / ".ci/run").read_text()
