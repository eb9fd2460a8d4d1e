"""A build without CUDA on a machine with a GPU warns on import, in describe() and in the report of engines."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import nvfp4_moe
import pytest
from fused_layers import opened, parameters
from nvfp4_moe import _build

# The compiled module of a build without CUDA, and /dev of a machine with these names in it.
PRETEND = """
import glob, importlib.util, os, sys, warnings
(folder,) = importlib.util.find_spec("nvfp4_moe").submodule_search_locations
(path,) = glob.glob(f"{folder}/_core*.so")
spec = importlib.util.spec_from_file_location("nvfp4_moe._core", path)
core = sys.modules["nvfp4_moe._core"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
core.built_with_cuda = WITH_CUDA
stock = os.listdir
os.listdir = lambda path=".": NAMES if path == "/dev" else stock(path)
"""
NOTE = r"nvfp4_moe \d[\d.]* was built without CUDA, and this machine has an NVIDIA GPU: layers run on the CPU only\."


def pretend(code, names=("null", "nvidia0", "nvidiactl"), with_cuda=False, **variables):
    """Returns the output of a new interpreter."""
    clean = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    prepared = PRETEND.replace("NAMES", repr(list(names))).replace("WITH_CUDA", repr(with_cuda))
    run = subprocess.run([sys.executable, "-c", prepared + code], capture_output=True, text=True, env=clean | variables)
    assert run.returncode == 0, run.stderr
    return run.stdout, run.stderr


def test_importing_a_build_without_cuda_where_a_gpu_is_visible_gives_one_note():
    again = "import importlib, nvfp4_moe, nvfp4_moe.layer, nvfp4_moe.engines\n"
    _, said = pretend(again)
    assert len(re.findall(NOTE, said)) == 1 and "RuntimeWarning" in said
    assert "docs/explanation/cuda.md" in said and (nvfp4_moe.__file__ is not None)


@pytest.mark.parametrize(
    "where",
    [
        {"names": ("null", "nvidiactl", "nvidia-uvm")},
        {"CUDA_VISIBLE_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": "-1"},
        {"with_cuda": True},
    ],
    ids=["no GPU", "hidden", "hidden by -1", "a build with CUDA"],
)
def test_there_is_no_note_where_nothing_is_missing(where):
    assert pretend("import nvfp4_moe\n", **where) == ("", "")


def test_searching_for_a_gpu_loads_no_cuda():
    maps = "import nvfp4_moe\nprint('libcuda' in open('/proc/self/maps').read(), 'torch' in sys.modules)\n"
    assert pretend(maps)[0] == "False False\n"


def test_describe_has_the_note(monkeypatch):
    layer = opened(parameters()).layer
    before = layer.describe()["notes"]
    monkeypatch.setattr(_build, "_gpu_is_visible", lambda: True)
    monkeypatch.setattr(nvfp4_moe._core, "built_with_cuda", False)
    (note,) = [note for note in layer.describe()["notes"] if note not in before]
    assert re.match(NOTE, note)
    monkeypatch.setattr(nvfp4_moe._core, "built_with_cuda", True)
    assert layer.describe()["notes"] == before


def test_the_report_of_engines_names_the_build():
    report = "from nvfp4_moe import engines\nengines.main(['--json'] if JSON else [])\n"
    build = json.loads(pretend(report.replace("JSON", "True"))[0])["nvfp4_moe"]
    assert build["version"] == nvfp4_moe.__version__ and build["built_with_cuda"] is False
    assert re.match(NOTE, build["note"])
    first = pretend(report.replace("JSON", "False"))[0].splitlines()[0]
    assert re.match(rf"nvfp4_moe +{re.escape(nvfp4_moe.__version__)} +{NOTE}", first)
    plain = pretend(report.replace("JSON", "False"), names=())[0].splitlines()[0]
    assert plain.split() == ["nvfp4_moe", nvfp4_moe.__version__, "for", "CPUs", "only"]


def test_the_version_is_the_distribution_s():
    assert re.fullmatch(r"\d+\.\d+\.\d+", nvfp4_moe.__version__)
    try:
        assert importlib.metadata.version("nvfp4-moe") == nvfp4_moe.__version__
    except importlib.metadata.PackageNotFoundError:
        assert nvfp4_moe.__version__ == nvfp4_moe._core.__version__
