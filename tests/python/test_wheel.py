"""The package as a user installs it: sdist, wheel, an environment without torch, types.

The fast tier puts the build tree's module into the wheel of this Python. The long tier makes the wheels of the other
Pythons that are found, with the build tree's library and bindings of their own, the wheel of a release, and runs `pip
install` of a fresh clone, which compiles everything. All install from the package index. ./dev test skips these tests by
name without --wheels.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import build_wheels  # conftest puts tools/release/ on the path
import nvfp4_moe as nv
import pytest
import wheel_tool

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BUILD = Path(nv.__file__).resolve().parents[2]
SYSTEM_LIBRARIES = r"(libc|libm|libpthread|libdl|librt)\.so\.\d+|ld-linux-.*\.so\.\d+"
FAST_VERSION = "3.11"  # Debian 12's
VERSIONS = [
    version if version == FAST_VERSION else pytest.param(version, marks=pytest.mark.long)
    for version in build_wheels.VERSIONS
]


def clean_environment() -> dict[str, str]:
    """The environment without variables that let a new interpreter find this build tree or its packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    """A directory for environments. They are large, so it is deleted at the end of the session."""
    if os.environ.get("NVFP4_MOE_NO_WHEELS"):
        pytest.skip("NVFP4_MOE_NO_WHEELS is set: ./dev test --wheels")
    directory = tmp_path_factory.mktemp("wheels")
    yield directory
    shutil.rmtree(directory)


def interpreter_of(version: str) -> Path:
    """Returns the interpreter. Skips the test by name if there is no such Python, unless it is FAST_VERSION."""
    interpreter = build_wheels.find_interpreter(version)
    if interpreter is None and version != FAST_VERSION:
        pytest.skip(f"no Python {version} with venv and headers")
    assert interpreter is not None, f"Python {version} with venv and headers: install python3-venv python3-dev"
    return interpreter


@pytest.fixture(scope="session")
def sdist(work) -> Path:
    return build_wheels.build_sdist(work / "dist", work, interpreter_of(FAST_VERSION))


@pytest.fixture(scope="session")
def wheel(work, sdist):
    """wheel(version) -> the file, made once."""

    @functools.cache
    def make(version: str) -> Path:
        ours = sys.version_info[:2] == tuple(map(int, version.split(".")))
        prebuilt = Path(nv._core.__file__) if ours else BUILD
        assert (BUILD / "libnvfp4_moe_internal.a").exists(), f"{BUILD}: build the target nvfp4_moe_internal first"
        return build_wheels.build_wheel(sdist, work / "dist", work, interpreter_of(version), prebuilt)

    return make


@pytest.fixture(scope="session")
def installed(work, wheel):
    """installed(version) -> python of an environment with only the wheel, NumPy and pytest."""

    @functools.cache
    def make(version: str) -> Path:
        packages = (wheel(version), "numpy", "pytest")
        return build_wheels.make_environment(work / f"env-{version}", *packages, interpreter=interpreter_of(version))

    return make


def run_numpy_only(python: Path) -> None:
    """Runs the tests of numpy_only/ with that python, which has no torch: none may fail, none may be skipped. The
    slowest ones are left out: they test the library's own memory and threads, and this build shares those with the
    build tree's."""
    options = dict(capture_output=True, text=True, cwd=python.parent, env=clean_environment(), timeout=600)
    where = "import sys, importlib.util as u, nvfp4_moe; print(nvfp4_moe.__file__, u.find_spec('torch'))"
    told = subprocess.run([python, "-c", where], check=True, **options).stdout
    assert told.startswith(str(python.parents[1])) and told.endswith(" None\n")
    chosen = ["-m", "not long", "-k", "not ten_thousand and not daemon", HERE / "numpy_only"]
    ran = subprocess.run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen], check=False, **options)
    summary = ran.stdout.strip().splitlines()[-1]
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert re.match(r"\d+ passed", summary) and "skipped" not in summary, ran.stdout[-2000:]


def test_sdist_holds_what_the_wheel_needs(sdist):
    """The sdist has every repository file under src, include, cli, python and cmake, the build's own files, no others."""
    listed = subprocess.run(["tar", "tzf", sdist], capture_output=True, text=True, check=True).stdout.split()
    held = {name.split("/", 1)[1] for name in listed}
    command = ["git", "ls-files", "-co", "--exclude-standard", "src", "include", "cli", "python", "cmake"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    expected = {name for name in tracked if (ROOT / name).exists() and not name.startswith("python/requirements-")}
    expected |= {"CMakeLists.txt", "LICENSE", "THIRD_PARTY_NOTICES.txt", "README.md", "pyproject.toml", "PKG-INFO"}
    assert held == expected


def test_the_source_distribution_has_the_same_bytes_from_another_folder_and_time(work, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    made = []
    for place, umask in (("first", 0o022), ("a second place", 0o002)):
        source = tmp_path / place
        before = os.umask(umask)
        subprocess.run(["git", "clone", "-q", "--shared", ROOT, source], check=True)
        for path in source.glob("python/nvfp4_moe/*.py"):
            os.utime(path, (time.time() - 1e6 * umask, time.time() - 1e6 * umask))
        os.umask(before)
        monkeypatch.setattr(build_wheels, "ROOT", source)
        made.append(build_wheels.build_sdist(source / "dist", work, interpreter_of(FAST_VERSION)).read_bytes())
    assert len(made[0]) > 500_000 and made[0] == made[1]


@pytest.mark.parametrize("version", VERSIONS)
def test_wheel_contents(wheel, version):
    """The package's files, the entry points, and the license of every work that is linked into the module."""
    tag = f"cp{version.replace('.', '')}"
    assert re.fullmatch(rf"nvfp4_moe-{nv.__version__}-{tag}-{tag}-linux_\w+\.whl", wheel(version).name)
    with zipfile.ZipFile(wheel(version)) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
        info = {name.rsplit("/", 1)[1]: opened.read(name).decode() for name in set(opened.namelist()) - names}
    for group, adapter in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        assert f"[{group}]\nnvfp4_moe = nvfp4_moe.{adapter}:register" in info["entry_points.txt"]
    metadata = info["METADATA"].split("\n\n")[0]
    pythons = re.findall(r"^Classifier: Programming Language :: Python :: (3\.\d+)$", metadata, re.MULTILINE)
    assert pythons == list(build_wheels.VERSIONS)
    assert re.search("^Summary: .*GPU", metadata, re.MULTILINE) and re.search(
        "^Keywords: .*GPU", metadata, re.MULTILINE
    )
    assert "[console_scripts]\nnvfp4-moe = nvfp4_moe._tool:main" in info["entry_points.txt"]
    package = ROOT / "python"
    files = [path for path in (package / "nvfp4_moe").rglob("*") if path.is_file() and path.suffix in (".py", ".typed")]
    sources = {str(path.relative_to(package)) for path in files} | {"nvfp4_moe/_core.pyi"}
    (extension,) = names - sources
    assert re.fullmatch(rf"nvfp4_moe/_core\.cpython-{tag[2:]}-.*\.so", extension) and names == sources | {extension}
    for name in ("LICENSE", "THIRD_PARTY_NOTICES.txt"):
        assert info[name] == (ROOT / name).read_text()
    entries = info["THIRD_PARTY_NOTICES.txt"].split("=" * 120)[1:]
    in_module = {entry.split("\n")[1] for entry in entries if "Python module" in entry.split("\nLicense:")[0]}
    expected = {"nlohmann-json", "fmt", "xxHash", "CLI11", "nanobind", "robin-map (part of nanobind)"}
    assert in_module == expected | {"libstdc++ and libgcc (GCC)", "CUDA run time (cudart)"}


@pytest.mark.parametrize("version", VERSIONS)
def test_module_brings_its_own_runtime(wheel, version, tmp_path):
    """It needs libc and libm of a version that this host has, no C++ runtime, and exports only its entry."""
    with zipfile.ZipFile(wheel(version)) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".so")]
        module = opened.extract(name, tmp_path)

    def read(*options: str) -> str:
        return subprocess.run(["readelf", "-W", *options, module], capture_output=True, text=True, check=True).stdout

    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", read("-d"))
    assert needed and not [library for library in needed if not re.fullmatch(SYSTEM_LIBRARIES, library)], needed
    versions = set(re.findall(r"Name: (\w+?)_([\d.]+)", read("-V")))
    assert {kind for kind, _ in versions} == {"GLIBC"}, versions
    newest = max(tuple(map(int, number.split("."))) for _, number in versions)
    here = tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[1].split(".")))
    assert newest <= here
    symbols = [line.split() for line in read("--dyn-syms").splitlines()[4:]]
    assert [fields[7] for fields in symbols if fields[6] not in ("UND", "ABS")] == ["PyInit__core"]


@pytest.mark.parametrize("version", VERSIONS)
def test_installed_without_torch(installed, version):
    run_numpy_only(installed(version))


def test_the_tool_is_installed(installed):
    """The script has the tool's output and exit status, and needs no program of the build tree."""
    script = installed(FAST_VERSION).parent / "nvfp4-moe"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([script, *words], capture_output=True, text=True, check=False, env=clean_environment())

    assert run("--version").stdout == f"{nv.__version__}\n"
    doctor = run("doctor")
    assert doctor.returncode == 0 and "self-tests passed" in doctor.stdout, doctor
    refused = run("inspect", "/nonexistent")
    assert refused.returncode == 4 and refused.stderr.startswith("nvfp4-moe: error: /nonexistent"), refused


@pytest.mark.long
@pytest.mark.parametrize("version", [FAST_VERSION, "3.12", "3.13"])
def test_release_wheel(work, sdist, version):
    """A release's wheel needs no newer glibc than that of its tag, and passes the tests. From 3.12 on it is one file."""
    interpreter = interpreter_of(version)
    sources = wheel_tool.hash_sources(ROOT)
    release = build_wheels.Release(platform.machine(), bool(nv._core.built_with_cuda), sources)
    wheel = build_wheels.build_wheel(sdist, work / "release", work, interpreter, BUILD, release)
    python, abi, tags = wheel.name.removesuffix(".whl").split("-")[2:]
    assert (python, abi) == (("cp311", "cp311") if version == FAST_VERSION else ("cp312", "abi3"))
    assert tags == f"manylinux_2_28_{platform.machine()}"
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".so")]
        module = opened.extract(name, work / f"release-{version}")
        assert opened.read(wheel_tool.RECORD).decode() == f"{sources}\n", "./dev demo takes a wheel of its sources only"
    said = subprocess.run(["readelf", "-WV", module], capture_output=True, text=True, check=True).stdout
    versions = [tuple(map(int, number.split("."))) for number in re.findall(r"Name: GLIBC_([\d.]+)", said)]
    assert versions and max(versions) <= (2, 28), max(versions)
    run_numpy_only(
        build_wheels.make_environment(work / f"env-release-{version}", wheel, "pytest", interpreter=interpreter)
    )


def test_strict_types(installed):
    """Checks the installed package, a user's program, and one with mistakes: exactly its marked lines are errors."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", installed(FAST_VERSION),
               "--config-file", ROOT / "pyproject.toml", "--cache-dir", BUILD / "mypy_cache"]  # fmt: skip

    def mypy(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=False, cwd=HERE, env=clean_environment()
        )

    for good in (("-p", "nvfp4_moe"), ("typed/user_program.py",)):
        told = mypy(*good)
        assert told.returncode == 0, told.stdout + told.stderr
    said = mypy("typed/misuse.py").stdout
    lines = (HERE / "typed/misuse.py").read_text().splitlines()
    marked = [number for number, line in enumerate(lines, 1) if "# error" in line]
    assert sorted({int(line) for line in re.findall(r"misuse\.py:(\d+): error", said)}) == marked, said


def configured(folder: Path, *options: str, **variables: str) -> str:
    """Configures a build that must fail. Returns the messages, in one line."""
    command = ["cmake", "-S", ROOT, "-B", folder, "-DNVFP4_MOE_CUDA=OFF", *options]
    env = {name: value for name, value in os.environ.items() if name != "CXX"}
    told = subprocess.run(command, capture_output=True, text=True, check=False, env={**env, **variables})
    assert told.returncode != 0
    return " ".join(told.stderr.split())


def test_missing_headers_are_named(tmp_path):
    """All of them at once, by the names to install."""
    packages = ("nlohmann_json", "fmt", "CLI11")
    said = configured(tmp_path, "-DNVFP4_MOE_PYTHON=ON", "-DXXHASH_INCLUDE_DIR=", "-DPython_INCLUDE_DIR=/nowhere",
                      *(f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in packages))  # fmt: skip
    wanted = ("nlohmann-json3-dev", "libfmt-dev", "libxxhash-dev", "libcli11-dev", "python3-dev")
    assert all(name in said for name in wanted), said


def test_a_missing_or_old_compiler_is_named(tmp_path):
    """A g++ that reports version 9, and a build that finds no compiler."""
    old = tmp_path / "old-g++"
    old.write_text('#!/bin/sh\nexec g++ -U__GNUC__ -D__GNUC__=9 "$@"\n')
    old.chmod(0o755)
    said = configured(tmp_path / "old", CXX=str(old))
    assert "expected g++ 12 or clang 14 or later" in said and f"got GNU 9.2.0 ({old})" in said, said
    said = configured(tmp_path / "none", "-DCMAKE_CXX_COMPILER=NOTFOUND")
    assert "there is no C++ compiler. Install g++ 12 or later" in said, said


def test_an_nvcc_that_compiles_nothing_is_a_warning(tmp_path):
    """Without it a build for GPUs would become one for CPUs in silence."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.61'\nexit 1\n")
    nvcc.chmod(0o755)
    command = ["cmake", "-S", ROOT, "-B", tmp_path / "build", "-DNVFP4_MOE_TESTS=OFF", "-DNVFP4_MOE_CLI=OFF"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDACXX": ""}
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert f"{nvcc} compiles nothing here" in " ".join(told.stderr.split()), told.stderr


@pytest.mark.long
def test_pip_install_of_a_fresh_clone(tmp_path):
    """pip install . of the committed tree, which compiles everything."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", ROOT, clone], check=True, capture_output=True)
    interpreter = interpreter_of(FAST_VERSION)
    run_numpy_only(build_wheels.make_environment(tmp_path / "env", clone, "pytest", interpreter=interpreter))
