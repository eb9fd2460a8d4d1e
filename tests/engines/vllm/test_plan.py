"""The layers that the plugin takes, and its messages about others, without an engine."""

from __future__ import annotations

import dataclasses
import types

import pytest

pytest.importorskip("vllm")

import torch  # noqa: E402
from nvfp4_moe.vllm.plan import GPT_OSS, MXFP4, plan_of  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation as Activation  # noqa: E402


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NVFP4_MOE_MODE", "NVFP4_MOE_ACTIVATIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def vllm_config(monkeypatch):
    """The config that is current in vLLM while it builds a model."""
    from nvfp4_moe.vllm import plan

    current = types.SimpleNamespace(additional_config={}, load_config=types.SimpleNamespace(load_format="auto"))
    monkeypatch.setattr(plan, "_current_config", lambda: current)
    return current


@dataclasses.dataclass
class Parallel:
    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    pcp_size: int = 1
    sp_size: int = 1
    enable_eplb: bool = False
    all2all_backend: str = "allgather_reducescatter"
    use_all2all_kernels: bool = False


def layer(**fields):
    of_layer = {name: fields.pop(name, None) for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")}
    moe = {
        "num_experts": 8, "num_local_experts": 8, "experts_per_token": 2, "hidden_dim": 128,
        "intermediate_size_per_partition": 64, "activation": Activation.SILU, "device": torch.device("cpu"),
        "moe_backend": "auto", "max_num_tokens": 100, "has_bias": False, "is_lora_enabled": False,
        "moe_parallel_config": Parallel(),
    } | fields  # fmt: skip
    return types.SimpleNamespace(moe_config=types.SimpleNamespace(**moe), **of_layer)


def test_a_plain_layer_is_taken_in_w4a16(vllm_config):
    taken = plan_of(layer(), "model.layers.3.mlp.experts")
    assert taken.options == {
        "num_experts": 8, "top_k": 2, "hidden_size": 128, "intermediate_size": 64, "activation": "swiglu",
        "swiglu_limit": None, "activation_format": "bf16",
    }  # fmt: skip
    assert (taken.name, taken.max_tokens, taken.dummy) == ("model.layers.3.mlp.experts", 100, False)


def test_tokens_of_all_data_parallel_ranks_have_room(vllm_config):
    several = Parallel(tp_size=2, sp_size=2, dp_size=4, use_all2all_kernels=True)
    assert plan_of(layer(moe_parallel_config=several), "l").max_tokens == 408


def test_activations_by_vllm_s_names(vllm_config):
    def taken(**fields):
        options = plan_of(layer(**fields), "l").options
        return options["activation"], options["swiglu_limit"], options.get("swiglu_alpha")

    assert taken(swiglu_limit=10.0) == ("swiglu_clamped", 10.0, None)
    assert taken(activation=Activation.SWIGLUSTEP) == ("swiglu_step", 7.0, None)
    oai = {"activation": Activation.SWIGLUOAI_UNINTERLEAVE, "swiglu_limit": 7.0, "swiglu_beta": 1.0}
    assert taken(**oai, swiglu_alpha=1.702) == ("swiglu_oai", 7.0, 1.702)


@pytest.mark.skipif("SITU" not in Activation.__members__, reason="this vLLM has no situ")
def test_gelu_and_situ(vllm_config):
    for name in ("gelu", "gelu_tanh"):
        assert plan_of(layer(activation=Activation[name.upper()]), "l").options["activation"] == name
    caps = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    options = plan_of(layer(activation=Activation.SITU, **caps), "l").options
    assert (options["activation"], options["situ_gate_limit"], options["situ_up_limit"]) == ("situ", 4.0, 25.0)
    assert plan_of(layer(activation=Activation.SITU, **caps | {"activation_situ_linear_beta": None}), "l") is None


def test_what_the_user_configures_comes_before_the_environment(vllm_config, monkeypatch):
    monkeypatch.setenv("NVFP4_MOE_ACTIVATIONS", "int8_block")
    assert plan_of(layer(), "l").options["activation_format"] == "int8_block"
    vllm_config.additional_config = {"nvfp4_moe": {"activations": "nvfp4"}, "another": 1}
    assert plan_of(layer(), "l").options["activation_format"] == "nvfp4"
    vllm_config.additional_config = {"nvfp4_moe": {"mode": 0}}
    assert plan_of(layer(), "l") is None


def test_batch_invariance_is_asked_for(vllm_config, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert plan_of(layer(), "l").options["batch_invariant"] is True


ELSEWHERE = Parallel(dp_size=2, use_all2all_kernels=True, all2all_backend="deepep_low_latency")
REFUSED = [
    ({"moe_backend": "marlin"}, "--moe-backend marlin was asked for"),
    ({"has_bias": True}, "experts with biases in a format for which vLLM has no parameters of biases"),
    (
        {"is_lora_enabled": True},
        "LoRA, whose adapters may change experts: name the layers that they change with --lora-",
    ),
    (
        {"intermediate_size_per_partition": 56, "moe_parallel_config": Parallel(tp_size=2)},
        "intermediate_size: a rank's slice is 56 of 112, expected a multiple of 16; use expert parallel "
        "(--enable-expert-parallel), which does not slice experts, or fewer tensor parallel ranks",
    ),
    ({"moe_parallel_config": Parallel(enable_eplb=True)}, "EPLB, which moves rows of parameters"),
    ({"moe_parallel_config": ELSEWHERE}, "--all2all-backend deepep_low_latency: expected allgather_reducescatter"),
    (
        {"moe_parallel_config": Parallel(tp_size=2, all2all_backend="passthrough")},
        "--all2all-backend passthrough: expected allgather_reducescatter",
    ),
    ({"intermediate_size_per_partition": 40}, "intermediate_size"),
    ({"experts_per_token": 9}, "top_k"),
    ({"device": torch.device("xpu:0")}, "the device xpu"),
    ({"activation": types.SimpleNamespace(value="gelu")}, "the activation gelu"),
]


@pytest.mark.parametrize(("fields", "why"), REFUSED, ids=[why.split(":")[0] for _, why in REFUSED])
def test_a_layer_that_is_not_taken_says_why(fields, why, vllm_config, log, monkeypatch):
    assert plan_of(layer(**fields), "model.layers.12.mlp.experts") is None
    (line,) = log.lines
    assert line.startswith("nvfp4-moe leaves layers such as model.layers.*.mlp.experts to vLLM: ") and why in line
    monkeypatch.setenv("NVFP4_MOE_MODE", "1")
    with pytest.raises(NotImplementedError, match="nvfp4-moe cannot take model.layers.12.mlp.experts: ") as error:
        plan_of(layer(**fields), "model.layers.12.mlp.experts")
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("targets", "taken"),
    [
        (["q_proj", "k_proj", "v_proj", "o_proj"], True),
        (["qkv_proj", "gate_proj"], True),  # a plain gate_proj is not a module of the experts
        (["q_proj", "experts"], False),
        (["experts.0.gate_proj"], False),
        (["model.layers.0.mlp.experts"], False),
        (None, False),
    ],
    ids=str,
)
def test_lora_elsewhere_is_no_reason_to_refuse_experts(vllm_config, log, targets, taken):
    vllm_config.lora_config = types.SimpleNamespace(target_modules=targets)
    assert (plan_of(layer(is_lora_enabled=True), "model.layers.0.mlp.experts") is not None) == taken


def test_a_refusal_is_a_warning_and_a_note_if_vllm_has_no_kernel_either(vllm_config, log, monkeypatch):
    from nvfp4_moe.vllm import taking

    monkeypatch.setattr(taking, "_routed_experts", types.SimpleNamespace)
    monkeypatch.setattr(taking, "_current_config", lambda: vllm_config)

    def stock():
        raise NotImplementedError("No NvFp4 MoE backend supports the deployment configuration.")

    config = types.SimpleNamespace(is_layer_excluded=lambda prefix: False, quant_method="NVFP4")
    with pytest.raises(NotImplementedError, match="No NvFp4 MoE backend") as error:
        taking.method_of("modelopt_fp4", config, layer(is_lora_enabled=True), "model.layers.3.mlp.experts", stock)
    said = "nvfp4-moe left model.layers.3.mlp.experts to vLLM, which has no kernel for it here: LoRA, whose adapters"
    assert log.levels == ["info_once", "warning"] and log.lines[1].startswith(said)
    assert any(note.startswith(said) for note in error.value.__notes__)
    log.lines.clear()
    with pytest.raises(NotImplementedError) as error:  # of a layer that was not refused
        taking.method_of("modelopt_fp4", config, torch.nn.Identity(), "lm_head", stock)
    assert log.lines == [] and not getattr(error.value, "__notes__", [])


def test_what_vllm_s_kernels_would_compute_otherwise_is_refused(vllm_config, log):
    assert plan_of(layer(activation=Activation.SWIGLUSTEP, swiglu_limit=3.0), "l") is None
    assert plan_of(layer(activation=Activation.SWIGLUOAI_UNINTERLEAVE, swiglu_limit=7.0), "l") is None
    assert plan_of(layer(intermediate_size_per_partition=48), "l", MXFP4) is None
    assert plan_of(layer(intermediate_size_per_partition=48), "l") is not None
    assert plan_of(layer(activation=Activation.SWIGLUOAI), "l") is None
    assert plan_of(layer(), "l", GPT_OSS) is None
    said = [line.split("vLLM: ")[1] for line in log.lines]
    assert ["swiglustep", "swigluoai", "MXFP4", "the", "the"] == [line.split()[0] for line in said]
    assert said[3:] == [
        "the activation swigluoai over rows of gate and up in halves",
        "the activation silu over rows of gate and up in turn",
    ]


def test_gpt_oss_and_experts_without_a_gate_are_taken(vllm_config):
    # 720 is gpt-oss' intermediate size over four ranks: 22.5 blocks of 32.
    of_rank = layer(activation=Activation.SWIGLUOAI, has_bias=True, intermediate_size_per_partition=720)
    options = plan_of(of_rank, "l", GPT_OSS).options
    assert options["expert_biases"] is True and options["intermediate_size"] == 736
    assert (options["activation"], options["swiglu_limit"], options["swiglu_alpha"]) == ("swiglu_oai", 7.0, 1.702)
    options = plan_of(layer(activation=Activation.RELU2_NO_MUL), "l").options
    assert options["activation"] == "relu2" and "swiglu_limit" not in options and "expert_biases" not in options
    assert plan_of(layer(activation=Activation.RELU2), "l") is None, "relu2 of a gate is another activation"


@pytest.mark.parametrize(
    ("total", "ranks", "padded", "filled"),
    [
        (2880, 4, 736, [736, 736, 736, 672]),
        (2880, 8, 384, [384] * 7 + [192]),
        (96, 2, 64, [64, 32]),
        (96, 4, 32, [32] * 3 + [0]),
    ],
)
def test_ranks_of_a_padded_gpt_oss_know_what_is_filled(vllm_config, total, ranks, padded, filled):
    fields = {"activation": Activation.SWIGLUOAI, "has_bias": True, "intermediate_size_per_partition": total // ranks}
    plans = [
        plan_of(layer(**fields, moe_parallel_config=Parallel(tp_size=ranks, tp_rank=rank)), "l", GPT_OSS)
        for rank in range(ranks)
    ]
    assert [plan.filled for plan in plans] == filled
    assert {plan.options["intermediate_size"] for plan in plans} == {padded}
