"""The plugin in new processes: the effect of NVFP4_MOE_MODE, and an SGLang that lacks required members."""

import subprocess
import sys

import pytest

# Printed by a process once SGLang has loaded its plugins.
REPORT = """
import logging
logging.basicConfig(level=logging.INFO)
{before}
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import MOE_RUNNER_BACKEND_CHOICES
print("CHOICE", "nvfp4_moe" in MOE_RUNNER_BACKEND_CHOICES, "HOOKS", len(HookRegistry._patched))
"""

# A release in which a member that the plugin uses takes another argument.
CHANGED = """
import sglang.srt.layers.moe.moe_runner.runner as runner
def register_moe_runner_core(name, factory): raise AssertionError("called")
runner.register_moe_runner_core = register_moe_runner_core
"""
CHANGED_FORMAT = """
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
CompressedTensorsConfig.get_moe_scheme = lambda self, layer: None
"""


CHANGED_ROUTER = """
from sglang.srt.layers.moe import topk
topk.select_experts = lambda hidden_states, router_logits, topk_config, layer_id: None
"""


@pytest.fixture
def load(environment):
    def run(before="", **variables):
        command = [sys.executable, "-c", REPORT.format(before=before)]
        env = environment(**variables)
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)

    return run


def test_on_by_installing(load):
    run = load()
    assert "CHOICE True HOOKS 13" in run.stdout
    assert "nvfp4_moe takes NVFP4 experts of SGLang" in run.stderr


@pytest.mark.parametrize("variables", [{"NVFP4_MOE_MODE": "0"}, {"SGLANG_PLUGINS": "another"}], ids=str)
def test_off_or_left_out_of_sglangs_own_list(load, variables):
    run = load(**variables)
    assert "CHOICE False HOOKS 0" in run.stdout and "nvfp4_moe takes" not in run.stderr


@pytest.mark.parametrize(("name", "value"), [("NVFP4_MOE_MODE", "yes"), ("NVFP4_MOE_ACTIVATIONS", "int4")])
def test_a_value_that_means_nothing_ends_the_process(load, name, value):
    run = load(**{name: value})
    assert run.returncode != 0 and f"{name}: expected one of" in run.stderr and f"got '{value}'" in run.stderr


def test_a_release_that_does_not_fit_is_left_as_it_is(load):
    run = load(CHANGED)
    assert "CHOICE False HOOKS 0" in run.stdout and run.returncode == 0
    lines = [line for line in run.stderr.splitlines() if "does not fit" in line]
    assert len(lines) == 1
    for words in ("SGLang 0.", "register_moe_runner_core takes (name, factory)", "Releases that fit: 0.5.19"):
        assert words in lines[0]


def test_a_release_that_does_not_fit_is_an_error_where_the_user_insists(load):
    run = load(CHANGED, NVFP4_MOE_MODE="1")
    assert run.returncode == 1 and "CHOICE" not in run.stdout
    assert "nvfp4_moe: SGLang 0." in run.stderr and "register_moe_runner_core takes (name, factory)" in run.stderr


BROKEN = """
import sglang.srt.plugins.hook_registry as registry
@classmethod
def register(cls, target, hook, hook_type): raise KeyError("a hook of another kind")
registry.HookRegistry.register = register
"""


@pytest.mark.parametrize("mode", ["auto", "1"])
def test_what_fails_while_it_is_registered_is_an_error_where_the_user_insists(load, mode):
    run = load(BROKEN, NVFP4_MOE_MODE=mode)
    assert "a hook of another kind" in run.stderr
    assert (run.returncode != 0) == (mode == "1")


def test_a_format_that_does_not_fit_is_left_to_sglang(load):
    run = load(CHANGED_FORMAT)
    assert "CHOICE True HOOKS 12" in run.stdout
    assert "nvfp4_moe leaves compressed-tensors experts to SGLang" in run.stderr


def test_routers_are_sglangs_unless_they_fit_and_the_user_asks_for_them(load):
    assert "CHOICE True HOOKS 15" in load(NVFP4_MOE_ROUTER="own").stdout
    run = load(CHANGED_ROUTER, NVFP4_MOE_MODE="1", NVFP4_MOE_ROUTER="own")  # no error: serving does not need them
    assert "CHOICE True HOOKS 13" in run.stdout
    assert "nvfp4_moe leaves the selection of experts to SGLang 0." in run.stderr
    assert "select_experts takes (hidden_states, router_logits, topk_config, layer_id)" in run.stderr
    run = load(CHANGED_ROUTER)
    assert "CHOICE True HOOKS 13" in run.stdout and "leaves the selection" not in run.stderr
    run = load(NVFP4_MOE_ROUTER="mine")
    assert run.returncode != 0 and "NVFP4_MOE_ROUTER: expected one of auto, own, engine, got 'mine'" in run.stderr
