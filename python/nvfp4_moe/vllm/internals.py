"""The members of vLLM that the plugin uses, in one table that is checked before any of them is used.

vLLM documents entry points and register_quantization_config, but its MoE classes are internal and change between
releases. REQUIRED lists each member with the parameters that the plugin passes or overrides. nvfp4_moe._signatures
defines the entries and compares the table with the installed release. Scripts that read wheels load REQUIRED from this
file, so it is plain data and imports nothing of the package.
"""

from __future__ import annotations

import importlib
from typing import Any

# Releases whose members were compared with the table. Newer ones are checked against it when they are loaded.
RELEASES = ("0.24", "0.25", "0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")

_FUSED = "vllm.model_executor.layers.fused_moe"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_COMPRESSED = f"{_QUANTIZATION}.compressed_tensors"

# If a group does not fit, vLLM handles that format; if "core" does not fit, all formats. Without "router" vLLM selects
# the experts, without "gate" it computes the logits, and without "exchange" it exchanges between ranks.
REQUIRED: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "core": (
        ("calls", f"{_QUANTIZATION}:register_quantization_config", ("quantization",)),
        ("calls", "vllm.config:get_current_vllm_config", ()),
        ("has", "vllm.config:VllmConfig", ("additional_config", "load_config")),
        (
            "has",
            f"{_FUSED}.config:FusedMoEConfig",
            (
                "num_experts",
                "num_local_experts",
                "experts_per_token",
                "hidden_dim",
                "intermediate_size_per_partition",
                "activation",
                "device",
                "moe_backend",
                "max_num_tokens",
                "has_bias",
                "is_lora_enabled",
                "moe_parallel_config",
            ),
        ),
        (
            "has",
            f"{_FUSED}.config:FusedMoEParallelConfig",
            ("dp_size", "pcp_size", "sp_size", "tp_size", "enable_eplb", "all2all_backend", "use_all2all_kernels"),
        ),
        ("calls", f"{_FUSED}.config:nvfp4_w4a16_moe_quant_config", ("g1_alphas", "g2_alphas", "w1_scale", "w2_scale")),
        (
            "has",
            f"{_FUSED}.activation:MoEActivation",
            ("SILU", "SWIGLUSTEP", "SWIGLUOAI", "SWIGLUOAI_UNINTERLEAVE", "RELU2_NO_MUL"),
        ),
        (
            "calls",
            f"{_FUSED}.all2all_utils:maybe_make_prepare_finalize",
            ("moe", "quant_config", "routing_tables", "allow_new_interface", "use_monolithic"),
        ),
        ("calls", f"{_FUSED}.routed_experts:RoutedExperts._expert_routing_tables", ()),
        ("has", f"{_FUSED}.routed_experts:RoutedExperts", ("expert_map", "weight_loader")),
        ("calls", f"{_FUSED}.fused_moe_method_base:FusedMoEMethodBase.__init__", ("moe",)),
        ("has", f"{_FUSED}.fused_moe_method_base:FusedMoEMethodBase", ("supports_eplb", "is_monolithic")),
        (
            "overrides",
            f"{_FUSED}.fused_moe_method_base:FusedMoEMethodBase.apply",
            ("layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"),
        ),
        ("overrides", f"{_FUSED}.fused_moe_method_base:FusedMoEMethodBase.get_fused_moe_quant_config", ("layer",)),
        ("calls", f"{_FUSED}.modular_kernel:FusedMoEKernel.__init__", ("prepare_finalize", "fused_experts")),
        ("calls", f"{_FUSED}.modular_kernel:FusedMoEKernel.output_is_reduced", ()),
        (
            "calls",
            f"{_FUSED}.modular_kernel:FusedMoEKernel.apply",
            (
                "hidden_states",
                "w1",
                "w2",
                "topk_weights",
                "topk_ids",
                "activation",
                "global_num_experts",
                "expert_map",
                "apply_router_weight_on_input",
                "shared_experts",
                "shared_experts_input",
            ),
        ),
        ("calls", f"{_FUSED}.modular_kernel:FusedMoEExpertsModular.__init__", ("moe_config", "quant_config")),
        ("has", f"{_FUSED}.modular_kernel:FusedMoEActivationFormat", ("Standard",)),
        (
            "overrides",
            f"{_FUSED}.modular_kernel:FusedMoEExpertsModular.apply",
            (
                "output",
                "hidden_states",
                "w1",
                "w2",
                "topk_weights",
                "topk_ids",
                "activation",
                "global_num_experts",
                "expert_map",
                "a1q_scale",
                "a2_scale",
                "workspace13",
                "workspace2",
                "expert_tokens_meta",
                "apply_router_weight_on_input",
            ),
        ),
        (
            "overrides",
            f"{_FUSED}.modular_kernel:FusedMoEExpertsModular.workspace_shapes",
            (
                "M",
                "N",
                "K",
                "topk",
                "global_num_experts",
                "local_num_experts",
                "expert_tokens_meta",
                "activation",
            ),
        ),
        (
            "overrides",
            f"{_FUSED}.modular_kernel:FusedMoEExpertsModular.moe_problem_size",
            ("a1", "w1", "w2", "topk_ids"),
        ),
        ("overrides", f"{_FUSED}.modular_kernel:FusedMoEExpertsModular.finalize_weight_and_reduce_impl", ()),
        ("has", f"{_FUSED}.modular_kernel:FusedMoEExpertsModular", ("expects_unquantized_inputs",)),
        ("calls", f"{_FUSED}.topk_weight_and_reduce:TopKWeightAndReduceNoOP", ()),
    ),
    "router": (
        (
            "overrides",
            f"{_FUSED}.fused_moe_method_base:FusedMoEMethodBase.apply_monolithic",
            ("layer", "x", "router_logits", "input_ids"),
        ),
        (
            "has",
            f"{_FUSED}.routed_experts:RoutedExperts",
            (
                "renormalize",
                "use_grouped_topk",
                "custom_routing_function",
                "scoring_func",
                "e_score_correction_bias",
                "routed_scaling_factor",
            ),
        ),
    ),
    "gate": (
        ("overrides", "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply", ("layer", "x", "bias")),
        ("has", "vllm.model_executor.layers.linear:UnquantizedLinearMethod", ()),
        ("has", "vllm.model_executor.layers.linear:ReplicatedLinear", ()),
    ),
    "exchange": (
        (
            "overrides",
            f"{_FUSED}.prepare_finalize.no_dp_ep:MoEPrepareAndFinalizeNoDPEPModular.output_is_reduced",
            (),
        ),
        ("has", f"{_FUSED}.config:FusedMoEParallelConfig", ("use_ep", "ep_size", "ep_rank")),
        ("has", f"{_FUSED}.runner.moe_runner:MoERunner", ("routed_experts", "shared_experts")),
        ("calls", "vllm.distributed.parallel_state:get_ep_group", ()),
        ("has", "vllm.distributed.parallel_state:GroupCoordinator", ("cpu_group", "world_size")),
        ("has", "vllm.config:VllmConfig", ("compilation_config", "parallel_config")),
        ("has", "vllm.envs:environment_variables", ()),
        ("calls", "vllm.envs:compile_factors", ()),
    ),
    "modelopt_fp4": (
        ("overrides", f"{_QUANTIZATION}.modelopt:ModelOptNvFp4Config.get_quant_method", ("layer", "prefix")),
        ("calls", f"{_QUANTIZATION}.modelopt:ModelOptNvFp4Config.is_layer_excluded", ("prefix",)),
        ("passes", f"{_QUANTIZATION}.modelopt:ModelOptNvFp4FusedMoE.create_weights", ()),
        ("overrides", f"{_QUANTIZATION}.modelopt:ModelOptNvFp4FusedMoE.process_weights_after_loading", ("layer",)),
        ("has", f"{_QUANTIZATION}.modelopt:ModelOptNvFp4FusedMoE", ("uses_weight_scale_2_pattern",)),
    ),
    "modelopt_mixed": (
        ("overrides", f"{_QUANTIZATION}.modelopt:ModelOptMixedPrecisionConfig.get_quant_method", ("layer", "prefix")),
        ("calls", f"{_QUANTIZATION}.modelopt:ModelOptMixedPrecisionConfig.is_layer_excluded", ("prefix",)),
        ("calls", f"{_QUANTIZATION}.modelopt:ModelOptMixedPrecisionConfig._resolve_quant_algo", ("prefix",)),
        ("passes", f"{_QUANTIZATION}.modelopt:ModelOptNvFp4FusedMoE.create_weights", ()),
        ("overrides", f"{_QUANTIZATION}.modelopt:ModelOptNvFp4FusedMoE.process_weights_after_loading", ("layer",)),
    ),
    "compressed-tensors": (
        (
            "overrides",
            f"{_COMPRESSED}.compressed_tensors:CompressedTensorsConfig.get_quant_method",
            ("layer", "prefix"),
        ),
        ("calls", f"{_COMPRESSED}.compressed_tensors:CompressedTensorsConfig._add_fused_moe_to_target_scheme_map", ()),
        (
            "calls",
            f"{_COMPRESSED}.compressed_tensors:CompressedTensorsConfig.get_scheme_dict",
            ("layer", "layer_name"),
        ),
        ("has", f"{_COMPRESSED}.compressed_tensors:CompressedTensorsConfig", ("_is_nvfp4_format",)),
        (
            "passes",
            f"{_COMPRESSED}.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4:"
            "CompressedTensorsW4A4Nvfp4MoEMethod.create_weights",
            (),
        ),
        (
            "overrides",
            f"{_COMPRESSED}.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4:"
            "CompressedTensorsW4A4Nvfp4MoEMethod.process_weights_after_loading",
            ("layer",),
        ),
    ),
    "deepseek_v4_fp8": (
        ("has", "vllm.models.deepseek_v4.quant_config:DeepseekV4FP8Config", ("expert_dtype", "moe_quant_algo")),
        ("calls", "vllm.models.deepseek_v4.quant_config:DeepseekV4FP8Config._get_nvfp4_config", ()),
        (
            "overrides",
            "vllm.models.deepseek_v4.quant_config:DeepseekV4FP8Config.get_quant_method",
            ("layer", "prefix"),
        ),
        (
            "calls",
            f"{_QUANTIZATION}.utils.quant_utils:is_layer_skipped",
            ("prefix", "ignored_layers", "fused_mapping"),
        ),
        ("passes", f"{_QUANTIZATION}.mxfp4:Mxfp4MoEMethod.create_weights", ()),
        ("overrides", f"{_QUANTIZATION}.mxfp4:Mxfp4MoEMethod.process_weights_after_loading", ("layer",)),
        ("passes", f"{_FUSED}.fused_moe_method_base:FusedMoEMethodBase.maybe_roundup_sizes", ()),
        ("passes", f"{_QUANTIZATION}.modelopt:ModelOptNvFp4FusedMoE.create_weights", ()),
    ),
    "gpt_oss_mxfp4": (
        ("overrides", f"{_QUANTIZATION}.mxfp4:GptOssMxfp4Config.get_quant_method", ("layer", "prefix")),
        ("passes", f"{_QUANTIZATION}.mxfp4:GptOssMxfp4MoEMethod.create_weights", ()),
        ("overrides", f"{_QUANTIZATION}.mxfp4:GptOssMxfp4MoEMethod.process_weights_after_loading", ("layer",)),
        ("passes", f"{_FUSED}.fused_moe_method_base:FusedMoEMethodBase.maybe_roundup_sizes", ()),
    ),
}

# Groups that serving does not need.
OPTIONAL = ("router", "gate", "exchange")
FORMATS = tuple(group for group in REQUIRED if group not in ("core", *OPTIONAL))


def __getattr__(name: str) -> Any:
    """Provides `fitting`, the groups of OPTIONAL that fit this release (release.py)."""
    if name != "fitting":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: frozenset[str] = importlib.import_module(f"{__package__}.release").fitting()
    return found.intersection(OPTIONAL)


def version() -> str:
    """Returns vLLM's own version string."""
    return str(getattr(importlib.import_module("vllm"), "__version__", "of an unknown version"))


def logger() -> Any:
    """Returns a child of vLLM's logger, with its handler and level."""
    return importlib.import_module("vllm.logger").init_logger("vllm.nvfp4_moe")


def find(name: str) -> Any:
    """Returns a member by its name in the table. Raises ImportError or AttributeError if it does not exist."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def find_or_none(name: str) -> Any:
    """Returns an optional member that not every release has, or None."""
    try:
        return find(name)
    except (ImportError, AttributeError):
        return None
