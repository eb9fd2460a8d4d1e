"""A build without CUDA on a machine with a GPU warns on import, in describe() and in the report of engines."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import nvfp4_moe
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


NOTHING_IS_MISSING = {
    "no GPU": {"names": ("null", "nvidiactl", "nvidia-uvm")},
    "hidden": {"CUDA_VISIBLE_DEVICES": ""},
    "hidden by -1": {"CUDA_VISIBLE_DEVICES": "-1"},
    "a build with CUDA": {"with_cuda": True},
}


def test_importing_a_build_without_cuda_warns_once_if_a_gpu_is_visible_and_loads_no_cuda():
    again = "import importlib, nvfp4_moe, nvfp4_moe.layer, nvfp4_moe.engines\n"
    loaded, said = pretend(again + "print('libcuda' in open('/proc/self/maps').read(), 'torch' in sys.modules)\n")
    assert len(re.findall(NOTE, said)) == 1 and "RuntimeWarning" in said and "docs/explanation/cuda.md" in said
    assert loaded == "False False\n"
    for name, where in NOTHING_IS_MISSING.items():
        assert pretend("import nvfp4_moe\n", **where) == ("", ""), name


def test_describe_has_the_note(monkeypatch):
    layer = opened(parameters()).layer
    before = layer.describe()["notes"]
    monkeypatch.setattr(_build, "_gpu_is_visible", lambda: True)
    monkeypatch.setattr(nvfp4_moe._core, "built_with_cuda", False)
    (note,) = [note for note in layer.describe()["notes"] if note not in before]
    assert re.match(NOTE, note)


def test_the_report_of_engines_names_the_build():
    report = "from nvfp4_moe import engines\nengines.main(['--json'])\nengines.main([])\n"
    text = pretend(report)[0]
    build, end = json.JSONDecoder().raw_decode(text)
    version = nvfp4_moe.__version__
    assert (build["nvfp4_moe"]["version"], build["nvfp4_moe"]["built_with_cuda"]) == (version, False)
    assert re.match(NOTE, build["nvfp4_moe"]["note"])
    assert re.match(rf"nvfp4_moe +{re.escape(version)} +{NOTE}", text[end:].strip())
    plain = pretend(report, names=())[0].strip()
    assert f"nvfp4_moe     {version}" in plain and "for CPUs only" in plain


def test_the_version_is_the_distribution_s():
    assert re.fullmatch(r"\d+\.\d+\.\d+", nvfp4_moe.__version__)
    try:
        assert importlib.metadata.version("nvfp4-moe") == nvfp4_moe.__version__
    except importlib.metadata.PackageNotFoundError:
        assert nvfp4_moe.__version__ == nvfp4_moe._core.__version__
