"""The plugin itself: registration, releases that do not fit, and which layers it takes, without an engine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pickle
import subprocess
import sys
import types

import pytest

vllm = pytest.importorskip("vllm")

import nvfp4_moe.vllm as plugin  # noqa: E402
import torch  # noqa: E402
from nvfp4_moe._signatures import misfits  # noqa: E402
from nvfp4_moe.vllm import internals  # noqa: E402


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NVFP4_MOE", "NVFP4_MOE_ACTIVATIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def written(monkeypatch):
    """The lines that the plugin writes."""
    lines: list[str] = []

    class Kept:
        def __getattr__(self, level):
            return lambda line, *args: lines.append(line % args)

    monkeypatch.setattr(internals, "logger", Kept)
    return lines


@pytest.fixture
def vllm_config(monkeypatch):
    """The config that vLLM would have current while it builds a model; set(additional_config=..., load_format=...)."""
    from nvfp4_moe.vllm import plan

    current = types.SimpleNamespace(additional_config={}, load_config=types.SimpleNamespace(load_format="auto"))
    monkeypatch.setattr(plan, "_current_config", lambda: current)
    return current


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


def test_registering_twice_leaves_the_first_registration():
    plugin.register()
    first = {name: registered(name) for name in internals.FORMATS}
    assert all(config.nvfp4_moe_config for config in first.values())
    plugin.register()
    assert {name: registered(name) for name in internals.FORMATS} == first


def test_the_configs_keep_vllm_s_names():
    plugin.register()
    for name in internals.FORMATS:
        assert object.__new__(registered(name)).get_name() == name


def test_a_config_reaches_another_process():
    """vLLM sends it to its workers, which may read it before they have loaded plugins."""
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


def test_off_registers_nothing_and_does_not_import_vllm():
    code = "import sys, nvfp4_moe.vllm as p; p.register(); sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"NVFP4_MOE": "0", "PATH": ""}).returncode == 0


def test_a_value_that_means_nothing_is_an_error(monkeypatch):
    monkeypatch.setenv("NVFP4_MOE", "on")
    with pytest.raises(ValueError, match="NVFP4_MOE: expected one of 0, auto, 1, got 'on'"):
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
    """vLLM with another parameter where the plugin overrides apply."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as modular

    def apply(self, output, hidden_states, weights, topk_weights, topk_ids):
        raise NotImplementedError

    monkeypatch.setattr(modular.FusedMoEExpertsModular, "apply", apply)


def test_a_release_that_does_not_fit_is_refused_by_name(changed_release, written, monkeypatch):
    monkeypatch.setattr("vllm.model_executor.layers.quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    plugin.register()
    (line,) = written
    assert line.startswith(f"vLLM {vllm.__version__} does not fit nvfp4-moe (core): ")
    assert "FusedMoEExpertsModular.apply takes (output, hidden_states, weights, topk_weights, topk_ids)" in line
    assert "expected (output, hidden_states, w1, w2," in line
    assert not hasattr(registered("modelopt_fp4"), "nvfp4_moe_config"), "vLLM serves without the plugin"


def test_a_release_that_does_not_fit_is_an_error_where_the_user_insists(changed_release, monkeypatch):
    monkeypatch.setenv("NVFP4_MOE", "1")
    with pytest.raises(RuntimeError, match=r"does not fit nvfp4-moe \(core\).*NVFP4_MOE=auto serves without"):
        plugin.register()


def test_what_the_table_does_not_see_does_not_stop_vllm(written, monkeypatch):
    from nvfp4_moe.vllm.experts import NvFp4MoeExperts

    monkeypatch.setattr(NvFp4MoeExperts, "__abstractmethods__", frozenset({"combine"}))
    plugin.register()
    assert written == [f"nvfp4-moe cannot register with vLLM {vllm.__version__}, which serves without it"]
    monkeypatch.setenv("NVFP4_MOE", "1")
    with pytest.raises(TypeError, match="abstract members that the plugin lacks: combine"):
        plugin.register()


def test_a_format_that_does_not_fit_leaves_the_others(written, monkeypatch):
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig

    monkeypatch.setattr("vllm.model_executor.layers.quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    monkeypatch.delattr(ModelOptMixedPrecisionConfig, "_resolve_quant_algo")
    plugin.register()
    assert "does not fit nvfp4-moe (modelopt_mixed): " in written[0] and "_resolve_quant_algo" in written[0]
    assert not hasattr(registered("modelopt_mixed"), "nvfp4_moe_config")
    assert registered("modelopt_fp4").nvfp4_moe_config


# ---- which layers are taken


@dataclasses.dataclass
class Parallel:
    tp_size: int = 1
    dp_size: int = 1
    pcp_size: int = 1
    sp_size: int = 1
    enable_eplb: bool = False
    all2all_backend: str = "allgather_reducescatter"
    use_all2all_kernels: bool = False


def layer(**fields):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    of_layer = {name: fields.pop(name, None) for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")}
    moe = {
        "num_experts": 8,
        "num_local_experts": 8,
        "experts_per_token": 2,
        "hidden_dim": 128,
        "intermediate_size_per_partition": 64,
        "activation": MoEActivation.SILU,
        "device": torch.device("cpu"),
        "moe_backend": "auto",
        "max_num_tokens": 100,
        "has_bias": False,
        "is_lora_enabled": False,
        "moe_parallel_config": Parallel(),
    } | fields
    return types.SimpleNamespace(moe_config=types.SimpleNamespace(**moe), **of_layer)


def test_a_plain_layer_is_taken_in_w4a16(vllm_config):
    from nvfp4_moe.vllm.plan import plan_of

    taken = plan_of(layer(), "model.layers.3.mlp.experts")
    assert taken.options == {
        "num_experts": 8,
        "top_k": 2,
        "hidden_size": 128,
        "intermediate_size": 64,
        "activation": "swiglu",
        "swiglu_limit": None,
        "activation_format": "bf16",
    }
    assert (taken.name, taken.max_tokens, taken.dummy) == ("model.layers.3.mlp.experts", 100, False)


def test_tokens_of_all_data_parallel_ranks_have_room(vllm_config):
    from nvfp4_moe.vllm.plan import plan_of

    several = Parallel(tp_size=2, sp_size=2, dp_size=4, use_all2all_kernels=True)
    assert plan_of(layer(moe_parallel_config=several), "l").max_tokens == 408


def test_activations_by_vllm_s_names(vllm_config):
    from nvfp4_moe.vllm.plan import plan_of
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation as Activation

    def taken(**fields):
        options = plan_of(layer(**fields), "l").options
        return options["activation"], options["swiglu_limit"], options.get("swiglu_alpha")

    assert taken(swiglu_limit=10.0) == ("swiglu_clamped", 10.0, None)
    assert taken(activation=Activation.SWIGLUSTEP) == ("swiglu_step", 7.0, None)
    oai = {"activation": Activation.SWIGLUOAI_UNINTERLEAVE, "swiglu_limit": 7.0, "swiglu_beta": 1.0}
    assert taken(**oai, swiglu_alpha=1.702) == ("swiglu_oai", 7.0, 1.702)


def test_what_the_user_configures_comes_before_the_environment(vllm_config, monkeypatch):
    from nvfp4_moe.vllm.plan import plan_of

    monkeypatch.setenv("NVFP4_MOE_ACTIVATIONS", "int8_block")
    assert plan_of(layer(), "l").options["activation_format"] == "int8_block"
    vllm_config.additional_config = {"nvfp4_moe": {"activations": "nvfp4"}, "another": 1}
    assert plan_of(layer(), "l").options["activation_format"] == "nvfp4"
    vllm_config.additional_config = {"nvfp4_moe": {"mode": 0}}
    assert plan_of(layer(), "l") is None


def test_batch_invariance_is_asked_for(vllm_config, monkeypatch):
    from nvfp4_moe.vllm.plan import plan_of

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert plan_of(layer(), "l").options["batch_invariant"] is True


REFUSED = [
    ({"moe_backend": "marlin"}, "--moe-backend marlin was asked for"),
    ({"has_bias": True}, "experts with biases in a format for which vLLM has no parameters of biases"),
    ({"is_lora_enabled": True}, "LoRA"),
    ({"moe_parallel_config": Parallel(enable_eplb=True)}, "EPLB, which moves rows of parameters"),
    (
        {"moe_parallel_config": Parallel(dp_size=2, use_all2all_kernels=True, all2all_backend="deepep_low_latency")},
        "--all2all-backend deepep_low_latency: expected allgather_reducescatter",
    ),
    (
        {"moe_parallel_config": Parallel(tp_size=2, all2all_backend="passthrough")},
        "--all2all-backend passthrough: expected allgather_reducescatter",
    ),
    ({"intermediate_size_per_partition": 40}, "intermediate_size"),
    ({"experts_per_token": 9}, "top_k"),
    ({"device": torch.device("xpu:0")}, "the device xpu"),
    ({"activation": types.SimpleNamespace(value="gelu")}, "the activation gelu"),
]


@pytest.mark.parametrize(
    ("fields", "why"), REFUSED, ids=[next(iter(fields)) + f"-{i}" for i, (fields, _) in enumerate(REFUSED)]
)
def test_a_layer_that_is_not_taken_says_why(fields, why, vllm_config, written, monkeypatch):
    from nvfp4_moe.vllm.plan import plan_of

    assert plan_of(layer(**fields), "model.layers.12.mlp.experts") is None
    (line,) = written
    assert line.startswith("nvfp4-moe leaves layers such as model.layers.*.mlp.experts to vLLM: ") and why in line
    monkeypatch.setenv("NVFP4_MOE", "1")
    with pytest.raises(NotImplementedError, match="nvfp4-moe cannot take model.layers.12.mlp.experts: ") as error:
        plan_of(layer(**fields), "model.layers.12.mlp.experts")
    assert why in str(error.value)


def test_what_vllm_s_kernels_would_compute_otherwise_is_refused(vllm_config, written):
    from nvfp4_moe.vllm.plan import GPT_OSS, MXFP4, plan_of
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation as Activation

    assert plan_of(layer(activation=Activation.SWIGLUSTEP, swiglu_limit=3.0), "l") is None
    assert plan_of(layer(activation=Activation.SWIGLUOAI_UNINTERLEAVE, swiglu_limit=7.0), "l") is None
    assert plan_of(layer(intermediate_size_per_partition=48), "l", MXFP4) is None
    assert plan_of(layer(intermediate_size_per_partition=48), "l") is not None
    assert plan_of(layer(activation=Activation.SWIGLUOAI), "l") is None
    assert plan_of(layer(), "l", GPT_OSS) is None
    said = [line.split("vLLM: ")[1] for line in written]
    assert ["swiglustep", "swigluoai", "MXFP4", "the", "the"] == [line.split()[0] for line in said]
    assert said[3:] == [
        "the activation swigluoai over rows of gate and up in halves",
        "the activation silu over rows of gate and up in turn",
    ]


def test_gpt_oss_and_experts_without_a_gate_are_taken(vllm_config):
    from nvfp4_moe.vllm.plan import GPT_OSS, plan_of
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation as Activation

    # 720 is gpt-oss' intermediate size over four ranks: 22.5 blocks of 32.
    of_rank = layer(activation=Activation.SWIGLUOAI, has_bias=True, intermediate_size_per_partition=720)
    options = plan_of(of_rank, "l", GPT_OSS).options
    assert options["expert_biases"] is True and options["intermediate_size"] == 736
    assert (options["activation"], options["swiglu_limit"], options["swiglu_alpha"]) == ("swiglu_oai", 7.0, 1.702)
    options = plan_of(layer(activation=Activation.RELU2_NO_MUL), "l").options
    assert options["activation"] == "relu2" and "swiglu_limit" not in options and "expert_biases" not in options
    assert plan_of(layer(activation=Activation.RELU2), "l") is None, "relu2 of a gate is another activation"
