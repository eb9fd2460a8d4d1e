"""What the adapter relies on in SGLang, and the releases that were read for it: data alone, so that nothing is imported.

nvfp4_moe._signatures says what a row means. The adapter checks the table against the SGLang that loads it;
scripts/check_engine_signatures.py checks it against releases' wheels and writes docs/engines-compatibility.md.
"""

RELEASES = ("0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")  # those that fit

_MOE = "sglang.srt.layers.moe"
_MODELOPT = "sglang.srt.layers.quantization.modelopt_quant:ModelOptNvFp4FusedMoEMethod"
_COMPRESSED = "sglang.srt.layers.quantization.compressed_tensors"
_CREATE_WEIGHTS = (
    "self",
    "layer",
    "num_experts",
    "hidden_size",
    "intermediate_size_per_partition",
    "params_dtype",
    "**extra_weight_attrs",
)
_CONFIG_FIELDS = (
    "activation",
    "apply_router_weight_on_input",
    "gate_up_interleaved",
    "gemm1_alpha",
    "gemm1_clamp_limit",
    "is_gated",
    "layer",
    "no_combine",
    "num_experts",
    "routed_scaling_factor",
    "swiglu_limit",
    "top_k",
)
_LAYER_FIELDS = (
    "layer_id",
    "layer_name",
    "moe_ep_rank",
    "moe_runner_config",
    "moe_tp_rank",
    "num_experts",
    "should_fuse_routed_scaling_factor_in_topk",
)

REQUIRED: dict[str, tuple[str, ...]] = {
    # Hooks and names.
    "sglang.srt.plugins.hook_registry:HookRegistry.register": ("calls", "target", "hook", "hook_type"),
    "sglang.srt.plugins.hook_registry:HookType.AROUND": ("has",),
    "sglang.srt.server_args:MOE_RUNNER_BACKEND_CHOICES": ("has",),
    "sglang.srt.server_args:add_moe_runner_backend_choices": ("has",),
    "sglang.srt.runtime_context:get_server_args": ("calls",),
    f"{_MOE}.utils:get_moe_a2a_backend": ("calls",),
    f"{_MOE}.utils:get_moe_runner_backend": ("calls",),
    f"{_MOE}.utils:resolve_moe_runner_backend": ("calls", "backend"),
    f"{_MOE}.utils:MoeRunnerBackend.is_auto": ("calls", "self"),
    f"{_MOE}.utils:MoeA2ABackend.is_none": ("calls", "self"),
    # The runner.
    f"{_MOE}.moe_runner.runner:register_moe_runner_core": ("calls", "backend_name", "factory"),
    f"{_MOE}.moe_runner.runner:MoeRunner.__init__": ("calls", "self", "runner_backend", "config"),
    f"{_MOE}.moe_runner.runner:MoeRunner.run": ("calls", "self", "dispatch_output", "quant_info"),
    f"{_MOE}.moe_runner.base:MoeQuantInfo": ("has",),
    f"{_MOE}.moe_runner.base:DispatchMoeRunnerCore.__init__": ("calls", "self", "config"),
    f"{_MOE}.moe_runner.base:DispatchMoeRunnerCore.runner_backend": ("has",),
    f"{_MOE}.moe_runner.base:DispatchMoeRunnerCore.run_from_dispatch": (
        "overrides",
        "self",
        "dispatch_output",
        "quant_info",
        "runner_config",
        "hooks",
    ),
    f"{_MOE}.token_dispatcher.standard:StandardDispatchOutput.hidden_states": ("has",),
    f"{_MOE}.token_dispatcher.standard:StandardDispatchOutput.hidden_states_scale": ("has",),
    f"{_MOE}.token_dispatcher.standard:StandardDispatchOutput.topk_output": ("has",),
    f"{_MOE}.token_dispatcher.standard:StandardCombineInput.hidden_states": ("has",),
    f"{_MOE}.token_dispatcher.standard:StandardDispatcher.local_expert_mapping": ("has",),
    f"{_MOE}.topk:StandardTopKOutput.topk_ids": ("has",),
    f"{_MOE}.topk:StandardTopKOutput.topk_weights": ("has",),
    f"{_MOE}.topk:TopKOutputChecker.format_is_standard": ("calls", "topk_output"),
    # The layer and its loader.
    **{f"{_MOE}.moe_runner.base:MoeRunnerConfig.{field}": ("has",) for field in _CONFIG_FIELDS},
    **{f"{_MOE}.fused_moe_triton.layer:FusedMoE.{field}": ("has",) for field in _LAYER_FIELDS},
    f"{_MOE}.fused_moe_triton.layer:FusedMoE.weight_loader": (
        "overrides",
        "self",
        "param",
        "loaded_weight",
        "weight_name",
        "shard_id",
        "expert_id",
    ),
    f"{_MOE}.fused_moe_triton.layer:FusedMoeWeightScaleSupported.GROUP": ("has",),
    f"{_MOE}.fused_moe_triton.layer:FusedMoeWeightScaleSupported.TENSOR": ("has",),
    # ModelOpt's method, whose own methods are hooked.
    "sglang.srt.layers.quantization.modelopt_quant:ModelOptFp4Config.is_checkpoint_nvfp4_serialized": ("has",),
    "sglang.srt.layers.quantization.modelopt_quant:ModelOptFp4Config.group_size": ("has",),
    f"{_MODELOPT}.__init__": ("overrides", "self", "quant_config"),
    f"{_MODELOPT}.create_weights": ("overrides", *_CREATE_WEIGHTS),
    f"{_MODELOPT}.process_weights_after_loading": ("overrides", "self", "layer"),
    f"{_MODELOPT}.create_moe_runner": ("overrides", "self", "layer", "moe_runner_config"),
    f"{_MODELOPT}.apply": ("overrides", "self", "layer", "dispatch_output"),
    f"{_MODELOPT}.get_moe_quant_info": ("overrides", "self", "layer", "runner_backend"),
    f"{_MODELOPT}.load_up_proj_weight_first": ("has",),
    # compressed-tensors: the config that chooses a layer's scheme, and the scheme's interface.
    f"{_COMPRESSED}.compressed_tensors:CompressedTensorsConfig.get_moe_scheme": (
        "overrides",
        "self",
        "layer",
        "layer_name",
    ),
    f"{_COMPRESSED}.compressed_tensors:CompressedTensorsConfig.get_scheme_dict": (
        "calls",
        "self",
        "layer",
        "layer_name",
    ),
    f"{_COMPRESSED}.compressed_tensors:CompressedTensorsConfig._add_fused_moe_to_target_scheme_map": ("calls", "self"),
    f"{_COMPRESSED}.compressed_tensors:CompressedTensorsFusedMoEMethod.apply": (
        "overrides",
        "self",
        "layer",
        "dispatch_output",
    ),
    f"{_COMPRESSED}.schemes.compressed_tensors_scheme:CompressedTensorsMoEScheme.create_moe_runner": (
        "overrides",
        "self",
        "layer",
        "moe_runner_config",
    ),
    f"{_COMPRESSED}.schemes.compressed_tensors_scheme:CompressedTensorsMoEScheme.process_weights_after_loading": (
        "overrides",
        "self",
        "layer",
    ),
    f"{_COMPRESSED}.schemes.compressed_tensors_scheme:CompressedTensorsMoEScheme.apply_weights": (
        "overrides",
        "self",
        "layer",
        "dispatch_output",
    ),
}
