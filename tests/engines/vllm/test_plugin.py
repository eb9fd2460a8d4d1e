"""The plugin itself: registration, and releases that do not fit, without an engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pickle
import subprocess
import sys

import pytest

vllm = pytest.importorskip("vllm")

import nvfp4_moe.vllm as plugin  # noqa: E402
import torch  # noqa: E402
from nvfp4_moe._signatures import misfits  # noqa: E402
from nvfp4_moe.vllm import internals  # noqa: E402


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NVFP4_MOE_MODE", "NVFP4_MOE_ACTIVATIONS"):
        monkeypatch.delenv(name, raising=False)


def registered(name):
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config(name)


# ---- registration


def test_vllm_finds_the_entry_point():
    (found,) = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "nvfp4_moe"]
    assert found.value == "nvfp4_moe.vllm:register" and found.load() is plugin.register


def test_importing_the_package_imports_no_engine():
    code = "import sys, nvfp4_moe, nvfp4_moe.vllm, nvfp4_moe._fused_experts; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_registering_twice_leaves_the_first_registration_under_vllm_s_names():
    plugin.register()
    first = {name: registered(name) for name in internals.FORMATS}
    assert all(config.nvfp4_moe_config for config in first.values())
    assert [object.__new__(config).get_name() for config in first.values()] == list(first)
    plugin.register()
    assert {name: registered(name) for name in internals.FORMATS} == first


def test_a_config_reaches_another_process():
    """vLLM sends a config to its workers, which may read it before they load plugins."""
    plugin.register()
    config = registered("modelopt_fp4")(is_checkpoint_nvfp4_serialized=True, exclude_modules=["lm_head"])
    code = (
        "import pickle, sys; config = pickle.load(sys.stdin.buffer); "
        "assert type(config).__name__ == 'NvFp4MoeModelOptConfig' and config.exclude_modules == ['lm_head']; "
        "import nvfp4_moe.vllm as plugin; plugin.register(); "
        "from vllm.model_executor.layers.quantization import get_quantization_config as get; "
        "assert get('modelopt_fp4') is type(config)"
    )
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(config), check=True)


COSTS = """
import contextlib, io, sys, time
import vllm, vllm.plugins
before, cpu = set(sys.modules), time.process_time()
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
    vllm.plugins.load_general_plugins()
cpu = time.process_time() - cpu
new = set(sys.modules) - before
of_vllm = sorted(name for name in new if name.partition(".")[0] == "vllm")
assert "nvfp4_moe.vllm" in new and not of_vllm, of_vllm
assert len(new) < 100 and cpu < 0.1, (len(new), cpu)
assert said.getvalue() == "", said.getvalue()
from vllm.model_executor.layers.quantization import get_quantization_config
for name in FORMATS:
    assert get_quantization_config(name).__module__ == "nvfp4_moe.vllm.configs", name
assert not hasattr(get_quantization_config("fp8"), "nvfp4_moe_config")
left = [name for name in ("taking", "methods", "experts") if f"nvfp4_moe.vllm.{name}" in sys.modules]
assert not left, left
print(len(new), cpu)
"""


def test_the_entry_point_costs_nothing_before_a_method_is_asked_for():
    """It takes less than 0.1 s, imports no module of vLLM's and prints nothing. The configs are there once vLLM
    resolves one."""
    code = COSTS.replace("FORMATS", repr(internals.FORMATS))
    environment = os.environ | {"VLLM_PLUGINS": "nvfp4_moe"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    print(f"modules, seconds of CPU: {done.stdout}")


def test_a_module_that_cannot_be_imported_is_waited_for(tmp_path, monkeypatch):
    """Finding a module, or an import that fails, loses no call. An import that works makes the call once."""
    from nvfp4_moe.vllm import late

    module, calls = tmp_path / "late_one.py", []
    module.write_text("raise ImportError('not yet')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    call = lambda: calls.append("made")  # noqa: E731
    late.after_import("late_one", call)
    late.after_import("late_one", call)
    assert importlib.util.find_spec("late_one") is not None
    with pytest.raises(ImportError):
        importlib.import_module("late_one")
    module.write_text("here = 1")
    importlib.invalidate_caches()
    assert importlib.import_module("late_one").here == 1 and calls == ["made"]
    monkeypatch.delitem(sys.modules, "late_one")
    importlib.import_module("late_one")
    assert calls == ["made"] and "late_one" not in late._finder.calls
    monkeypatch.delitem(sys.modules, "late_one")


def test_off_registers_nothing_and_does_not_import_vllm():
    code = "import sys, nvfp4_moe.vllm as p; p.register(); sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"NVFP4_MOE_MODE": "0", "PATH": ""}).returncode == 0


def test_a_value_that_means_nothing_is_an_error(monkeypatch):
    monkeypatch.setenv("NVFP4_MOE_MODE", "on")
    with pytest.raises(ValueError, match="NVFP4_MOE_MODE: expected one of 0, auto, 1, got 'on'"):
        plugin.register()


# ---- releases


def test_the_release_that_is_here_fits():
    assert misfits(internals.REQUIRED) == {}
    assert ".".join(internals.version().split(".")[:2]) in internals.RELEASES


def test_no_abstract_member_is_left():
    from nvfp4_moe.vllm.experts import NvFp4MoeExperts

    assert NvFp4MoeExperts.__abstractmethods__ == frozenset()


@pytest.fixture
def changed_release(monkeypatch):
    """A vLLM with another parameter in a method that the plugin overrides."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as modular

    def apply(self, output, hidden_states, weights, topk_weights, topk_ids):
        raise NotImplementedError

    monkeypatch.setattr(modular.FusedMoEExpertsModular, "apply", apply)


def test_a_release_that_does_not_fit_is_refused_by_name(changed_release, log, monkeypatch):
    monkeypatch.setattr("vllm.model_executor.layers.quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    plugin.register()
    (line,) = log.lines
    assert line.startswith(f"vLLM {vllm.__version__} does not fit nvfp4-moe (core): ")
    assert "FusedMoEExpertsModular.apply takes (output, hidden_states, weights, topk_weights, topk_ids)" in line
    assert "expected (output, hidden_states, w1, w2," in line
    assert not hasattr(registered("modelopt_fp4"), "nvfp4_moe_config"), "vLLM serves without the plugin"


def test_a_release_that_does_not_fit_is_an_error_where_the_user_insists(changed_release, monkeypatch):
    monkeypatch.setenv("NVFP4_MOE_MODE", "1")
    with pytest.raises(RuntimeError, match=r"does not fit nvfp4-moe \(core\).*NVFP4_MOE_MODE=auto serves without"):
        plugin.register()


def test_a_release_that_does_not_fit_is_found_out_when_a_layer_asks(changed_release, log, monkeypatch):
    """For modules that did not exist yet when the plugin was registered, and so were not compared then."""
    from nvfp4_moe.vllm import release

    config = registered("modelopt_fp4")(is_checkpoint_nvfp4_serialized=True, exclude_modules=[])
    release.forget()
    assert config.get_quant_method(torch.nn.Identity(), "l") is None, "vLLM's own answer"
    assert config.get_quant_method(torch.nn.Identity(), "l") is None
    (line,) = log.lines
    assert line.startswith(f"vLLM {vllm.__version__} does not fit nvfp4-moe (core): ")
    release.forget()
    monkeypatch.setenv("NVFP4_MOE_MODE", "1")
    with pytest.raises(RuntimeError, match="does not fit nvfp4-moe"):
        config.get_quant_method(torch.nn.Identity(), "l")
    release.forget()


def test_what_the_table_does_not_see_does_not_stop_vllm(log, monkeypatch):
    from nvfp4_moe.vllm.experts import NvFp4MoeExperts

    monkeypatch.setattr(NvFp4MoeExperts, "__abstractmethods__", frozenset({"combine"}))
    plugin.register()
    assert log.lines == [f"nvfp4-moe cannot register with vLLM {vllm.__version__}, which serves without it"]
    monkeypatch.setenv("NVFP4_MOE_MODE", "1")
    with pytest.raises(TypeError, match="abstract members that the plugin lacks: combine"):
        plugin.register()


def test_a_format_that_does_not_fit_leaves_the_others(log, monkeypatch):
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig

    monkeypatch.setattr("vllm.model_executor.layers.quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    monkeypatch.delattr(ModelOptMixedPrecisionConfig, "_resolve_quant_algo")
    plugin.register()
    assert "does not fit nvfp4-moe (modelopt_mixed): " in log.lines[0] and "_resolve_quant_algo" in log.lines[0]
    assert not hasattr(registered("modelopt_mixed"), "nvfp4_moe_config")
    assert registered("modelopt_fp4").nvfp4_moe_config
