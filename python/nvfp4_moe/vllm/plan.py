"""Decides whether the library takes a vLLM layer, and with which options, when the quantization method is chosen."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch

from .._declared import WEIGHT_ONLY, Declared, Refused
from .._fused_experts import clamped, why_slice_refused, with_activations
from .._fused_parameters import Form
from .._mxfp4 import BLOCK, padded_to_blocks
from .._settings import Settings, read_settings
from . import internals
from .ranks import NoExchange, RanksPlan, note_combine, plan_ranks

_activations = internals.find("vllm.model_executor.layers.fused_moe.activation:MoEActivation")
_current_config = internals.find("vllm.config:get_current_vllm_config")

# Constants of vLLM's kernels for swiglustep and gpt-oss' swigluoai.
_STEP_LIMIT = 7.0
_GPT_OSS = {"activation": "swiglu_oai", "swiglu_limit": 7.0, "swiglu_alpha": 1.702}

# vLLM's parameters by checkpoint format. NVFP4 is ModelOpt's.
NVFP4 = Form()
COMPRESSED = Form("weight_packed", "weight_global_scale", reciprocal=True)
MXFP4 = Form(tensor_scale="", mxfp4=True)
GPT_OSS = dataclasses.replace(MXFP4, interleaved=True)


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """How the library takes a layer.

    Attributes:
        name: vLLM's name of the layer.
        options: Fields of MoeConfig.
        dummy: The weights are random bytes.
        own_router: The library selects the experts if it knows the router (router.py).
        own_groups: It does so for groups of experts too, although vLLM's kernel for them is faster.
        max_tokens: The most tokens of all ranks whose rows vLLM gathers.
        filled: How much of intermediate_size the checkpoint has for this rank; the rest is padding.
        ranks: How the library exchanges between ranks (ranks.py); None if vLLM does.
        runners: vLLM's layers by name. vLLM adds them as it builds the model.
        activations: Their format and the reason for it, for the log.
    """

    name: str
    options: dict[str, Any]
    max_tokens: int
    dummy: bool
    own_router: bool
    own_groups: bool
    filled: int
    activations: str
    ranks: RanksPlan | None = None
    runners: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)


def settings() -> Settings:
    """Reads the settings from additional_config["nvfp4_moe"] of the engine being built, else from the environment."""
    additional = getattr(_current_config(), "additional_config", None)
    given = additional.get("nvfp4_moe") if isinstance(additional, Mapping) else None
    return read_settings(given)


def _activation(layer: Any, form: Form) -> dict[str, Any]:
    """Returns the library's activation and limit for what vLLM's own kernels compute."""
    activation, limit = layer.moe_config.activation, getattr(layer, "swiglu_limit", None)
    alpha, beta = getattr(layer, "swiglu_alpha", None), getattr(layer, "swiglu_beta", None)
    if (activation == _activations.SWIGLUOAI) != form.interleaved:
        rows = "in turn" if form.interleaved else "in halves"
        raise Refused(f"the activation {getattr(activation, 'value', activation)} over rows of gate and up {rows}")
    if form.interleaved:
        return dict(_GPT_OSS)
    if activation == _activations.SILU:
        return {"activation": clamped("swiglu", limit), "swiglu_limit": limit}
    if activation == _activations.SWIGLUSTEP:
        if limit not in (None, _STEP_LIMIT):
            raise Refused(f"swiglustep with a limit of {limit}, where vLLM's kernel has {_STEP_LIMIT}")
        return {"activation": "swiglu_step", "swiglu_limit": _STEP_LIMIT}
    if activation == _activations.SWIGLUOAI_UNINTERLEAVE:
        if limit is None or beta != 1.0:
            raise Refused(f"swigluoai with limit {limit} and beta {beta}: expected a limit and a beta of 1")
        return {"activation": "swiglu_oai", "swiglu_limit": limit, "swiglu_alpha": 1.0 if alpha is None else alpha}
    for name in ("gelu", "gelu_tanh"):
        if activation == getattr(_activations, name.upper(), ""):
            return {"activation": name}
    if activation == getattr(_activations, "SITU", ""):
        gate, up = (getattr(layer.moe_config, f"activation_situ_{name}", None) for name in ("beta", "linear_beta"))
        if gate is None or up is None:
            raise Refused(f"situ with beta {gate} and linear_beta {up}: expected both")
        return {"activation": "situ", "situ_gate_limit": float(gate), "situ_up_limit": float(up)}
    if activation == _activations.RELU2_NO_MUL:
        return {"activation": "relu2"}
    raise Refused(f"the activation {getattr(activation, 'value', activation)}")


def _sizes(moe: Any, form: Form) -> dict[str, int]:
    inner = int(moe.intermediate_size_per_partition)
    if form.interleaved:  # gpt-oss' loader gives ranks whole blocks, and fewer to the last ranks; the rest stays zero
        inner = padded_to_blocks(inner)
    return {
        "num_experts": int(moe.num_experts),
        "top_k": int(moe.experts_per_token),
        "hidden_size": int(moe.hidden_dim),
        "intermediate_size": inner,
    }


def _filled(moe: Any, padded: int) -> int:
    """Returns how much of this rank's intermediate dimension vLLM's loader fills.

    The loader gives slices of the padded size to the ranks in order, as long as any are left.
    """
    parallel = moe.moe_parallel_config
    ranks, rank = int(parallel.tp_size), int(getattr(parallel, "tp_rank", 0))
    whole = int(getattr(moe, "intermediate_size", 0) or moe.intermediate_size_per_partition * ranks)
    return max(0, min(padded, whole - rank * padded))


def _lora_may_change_experts(name: str) -> bool:
    """Returns whether vLLM may put LoRA adapters on this layer: yes, unless its target modules exclude the experts."""
    targets = getattr(getattr(_current_config(), "lora_config", None), "target_modules", None)
    experts = {"experts", "routed_experts", name.rpartition(".")[2]}
    return targets is None or any(experts.intersection(target.split(".")) for target in targets)


def _check_deployment(moe: Any, name: str, form: Form) -> None:
    """Raises Refused if vLLM uses a feature around the experts that this plugin does not support."""
    parallel = moe.moe_parallel_config
    if moe.moe_backend != "auto":
        raise Refused(f"--moe-backend {moe.moe_backend} was asked for; leave it out")
    if moe.has_bias and not form.mxfp4:
        raise Refused("experts with biases in a format for which vLLM has no parameters of biases")
    if moe.is_lora_enabled and _lora_may_change_experts(name):
        raise Refused(
            "LoRA, whose adapters may change experts: name the layers that they change with --lora-target-modules "
            "(q_proj k_proj v_proj o_proj, for example)"
        )
    if parallel.enable_eplb:
        raise Refused("EPLB, which moves rows of parameters where the weights are packed; leave --enable-eplb out")
    # passthrough replaces vLLM's sums even if tokens are not exchanged.
    used = parallel.use_all2all_kernels or parallel.all2all_backend == "passthrough"
    if used and parallel.all2all_backend not in ("allgather_reducescatter", "naive"):
        raise Refused(f"--all2all-backend {parallel.all2all_backend}: expected allgather_reducescatter")


def _device(moe: Any) -> torch.device:
    device = torch.device(moe.device)
    if device.type != "cpu" and (device.type != "cuda" or torch.version.hip is not None):
        raise Refused(f"the device {device.type}{' of ROCm' if device.type == 'cuda' else ''}")
    return device


def _rank_tokens(moe: Any) -> int:
    """Returns the most tokens of a data parallel rank: the scheduler's limit, padded for sequence parallel."""
    sp_size = int(moe.moe_parallel_config.sp_size)
    scheduler = getattr(_current_config(), "scheduler_config", None)
    most = max(int(moe.max_num_tokens), int(getattr(scheduler, "max_num_batched_tokens", 0) or 0))
    return most + (sp_size if sp_size > 1 else 0)


def _max_tokens(moe: Any) -> int:
    """Returns the most tokens of a run if vLLM gathers the tokens of data parallel ranks."""
    parallel = moe.moe_parallel_config
    return _rank_tokens(moe) * max(1, int(parallel.dp_size)) * max(1, int(parallel.pcp_size))


def _batch_invariant() -> bool:
    """Returns whether the user wants the same bits in every batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def _routers_are_watched() -> bool:
    """Returns whether vLLM's routers must report the selected experts elsewhere, or may be overridden."""
    config = _current_config()
    holders = (getattr(config, "model_config", None), getattr(config, "aux_output_config", None))
    reported = any(getattr(holder, "enable_return_routed_experts", False) is True for holder in holders)
    return reported or os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "") != ""


def keeps_reductions(name: str, why: NoExchange, insists: bool) -> None:
    """Logs once why vLLM adds the rows of expert parallel ranks. Raises NotImplementedError if the user insists."""
    if insists:
        raise NotImplementedError(
            f"nvfp4-moe cannot exchange the rows of {name}: {why}; NVFP4_MOE_MODE=auto leaves that to vLLM"
        )
    internals.logger().info_once(
        "nvfp4-moe leaves the sums over ranks of layers such as %s to vLLM: %s", pattern(name), str(why)
    )


def _ranks(moe: Any, name: str, chosen: Settings) -> RanksPlan | None:
    try:
        return plan_ranks(moe, _current_config(), chosen.exchange, chosen.insists, _rank_tokens(moe))
    except NoExchange as why:
        keeps_reductions(name, why, chosen.insists and chosen.exchange != "auto")
        return None


def _plan(layer: Any, name: str, chosen: Settings, form: Form, declared: Declared) -> LayerPlan:
    """Raises Refused."""
    moe = layer.moe_config
    _check_deployment(moe, name, form)
    options = {**_sizes(moe, form), **_activation(layer, form)}
    if moe.has_bias:
        options["expert_biases"] = True
    if _batch_invariant():
        options["batch_invariant"] = True
    inner, multiple = options["intermediate_size"], BLOCK if form.mxfp4 else 16
    if why := why_slice_refused(inner, int(moe.moe_parallel_config.tp_size), multiple, "--enable-expert-parallel"):
        raise Refused(f"MXFP4: {why}" if form.mxfp4 else why)
    if inner % multiple != 0 and form.mxfp4:
        raise Refused(f"MXFP4 in slices of {inner}: expected whole blocks of {multiple}")
    device = _device(moe)
    options, activations = with_activations(options, device, chosen, declared)
    load_format = getattr(_current_config().load_config, "load_format", None)
    own_router = chosen.router == "own" or (chosen.router == "auto" and device.type != "cpu")
    own_router = own_router and not _routers_are_watched()
    dummy = str(load_format) == "dummy"
    ranks = _ranks(moe, name, chosen)
    runners = getattr(getattr(_current_config(), "compilation_config", None), "static_forward_context", {})
    filled, most = _filled(moe, inner), _max_tokens(moe)
    own_groups = chosen.router == "own"
    return LayerPlan(name, options, most, dummy, own_router, own_groups, filled, activations, ranks, runners)


_refusals: dict[str, str] = {}  # name of a layer left to vLLM -> the reason


def left_to_vllm(name: str, error: Exception) -> None:
    """Adds the plugin's reason to vLLM's error, as a warning and a note, if vLLM has no kernel for a refused layer."""
    if (why := _refusals.get(name)) is None:
        return
    said = f"nvfp4-moe left {name} to vLLM, which has no kernel for it here: {why}"
    internals.logger().warning(said)
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(said)


def plan_of(
    layer: Any, prefix: str, form: Form = NVFP4, declared: Declared | Refused = WEIGHT_ONLY
) -> LayerPlan | None:
    """Returns how the library takes a RoutedExperts layer, or None if it is left to vLLM, which logs the reason.

    declared is the checkpoint's declaration for activations, or the reason why the checkpoint's layer cannot run.
    Raises NotImplementedError if the layer is not taken and the user insists.
    """
    note_combine(prefix, None)  # an earlier engine in this process may have set it
    _refusals.pop(prefix, None)
    chosen = settings()
    if chosen.mode == "0":
        return None
    try:
        if isinstance(declared, Refused):
            raise declared
        return _plan(layer, prefix, chosen, form, declared)
    except Refused as refused:
        if chosen.insists:
            raise NotImplementedError(
                f"nvfp4-moe cannot take {prefix}: {refused}; NVFP4_MOE_MODE=auto leaves such layers to vLLM"
            ) from None
        _refusals[prefix] = str(refused)
        # A model's layers are usually refused for the same reason, which vLLM's logger then writes once.
        internals.logger().info_once("nvfp4-moe leaves layers such as %s to vLLM: %s", pattern(prefix), str(refused))
        return None


def gates_are_own() -> bool:
    """Returns whether the library computes routers' GEMMs for few tokens on GPUs.

    It does not if they must have the same bits as those of larger batches.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    chosen = settings()
    return chosen.mode != "0" and chosen.router != "engine" and not _batch_invariant() and "gate" in internals.fitting


def pattern(prefix: str) -> str:
    """Converts model.layers.7.mlp.experts to model.layers.*.mlp.experts."""
    return ".".join("*" if part.isdigit() else part for part in prefix.split("."))
