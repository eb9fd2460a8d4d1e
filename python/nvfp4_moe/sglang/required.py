"""The members of SGLang that the adapter relies on, and the releases they were compared with. Plain data, no imports.

nvfp4_moe._signatures defines the entries. The adapter checks the table against the SGLang that loads it.
tools/check/check_engine_signatures.py checks it against releases' wheels and writes
docs/reference/engines-compatibility.md.
"""

RELEASES = ("0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")  # those that fit
OPTIONAL = ("router",)  # groups that serving does not need
LACKING = {"router": ("0.5.19", "0.5.20", "0.5.21", "0.5.22")}  # releases that fit without one of them

_MOE = "sglang.srt.layers.moe"
_MODELOPT = "sglang.srt.layers.quantization.modelopt_quant"
_METHOD = f"{_MODELOPT}:ModelOptNvFp4FusedMoEMethod"
_MXFP4 = "sglang.srt.layers.quantization.mxfp4:Mxfp4MoEMethod"
_COMPRESSED = "sglang.srt.layers.quantization.compressed_tensors"
_CONFIG = f"{_COMPRESSED}.compressed_tensors:CompressedTensorsConfig"
_SCHEME = f"{_COMPRESSED}.schemes.compressed_tensors_scheme:CompressedTensorsMoEScheme"

REQUIRED: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "core": (
        # Hooks, options, arguments.
        (
            "calls",
            "sglang.srt.plugins.hook_registry:HookRegistry.register",
            ("target", "hook", "hook_type"),
        ),
        ("has", "sglang.srt.plugins.hook_registry:HookType", ("AROUND",)),
        ("has", "sglang.srt.server_args:MOE_RUNNER_BACKEND_CHOICES", ()),
        ("has", "sglang.srt.server_args:add_moe_runner_backend_choices", ()),
        ("calls", "sglang.srt.runtime_context:get_server_args", ()),
        ("calls", "sglang.srt.arg_groups.overrides:resolution_result", ("server_args", "field", "default")),
        ("calls", f"{_MOE}.utils:get_moe_a2a_backend", ()),
        ("calls", f"{_MOE}.utils:get_moe_runner_backend", ()),
        ("calls", f"{_MOE}.utils:resolve_moe_runner_backend", ("backend",)),
        ("calls", f"{_MOE}.utils:MoeRunnerBackend.is_auto", ()),
        ("calls", f"{_MOE}.utils:MoeA2ABackend.is_none", ()),
        # The runner and its inputs.
        ("calls", f"{_MOE}.moe_runner.runner:register_moe_runner_core", ("backend_name", "factory")),
        ("calls", f"{_MOE}.moe_runner.runner:MoeRunner.__init__", ("runner_backend", "config")),
        ("calls", f"{_MOE}.moe_runner.runner:MoeRunner.run", ("dispatch_output", "quant_info")),
        ("has", f"{_MOE}.moe_runner.base:MoeQuantInfo", ()),
        ("has", f"{_MOE}.moe_runner.base:DispatchMoeRunnerCore", ("runner_backend",)),
        ("calls", f"{_MOE}.moe_runner.base:DispatchMoeRunnerCore.__init__", ("config",)),
        (
            "overrides",
            f"{_MOE}.moe_runner.base:DispatchMoeRunnerCore.run_from_dispatch",
            ("dispatch_output", "quant_info", "runner_config", "hooks"),
        ),
        (
            "has",
            f"{_MOE}.moe_runner.base:MoeRunnerConfig",
            (
                "activation",
                "apply_router_weight_on_input",
                "gemm1_alpha",
                "gemm1_clamp_limit",
                "intermediate_size_per_partition",
                "is_gated",
                "no_combine",
                "routed_scaling_factor",
                "swiglu_limit",
                "top_k",
            ),
        ),
        (
            "has",
            f"{_MOE}.token_dispatcher.standard:StandardDispatchOutput",
            ("hidden_states", "hidden_states_scale", "topk_output"),
        ),
        ("has", f"{_MOE}.token_dispatcher.standard:StandardCombineInput", ("hidden_states",)),
        ("has", f"{_MOE}.token_dispatcher.standard:StandardDispatcher", ("local_expert_mapping",)),
        ("has", f"{_MOE}.topk:StandardTopKOutput", ("topk_ids", "topk_weights")),
        ("calls", f"{_MOE}.topk:TopKOutputChecker.format_is_standard", ("topk_output",)),
        # The layer and its loader.
        (
            "has",
            f"{_MOE}.fused_moe_triton.layer:FusedMoE",
            (
                "hidden_size",
                "layer_id",
                "layer_name",
                "moe_ep_rank",
                "moe_runner_config",
                "moe_tp_rank",
                "num_experts",
                "should_fuse_routed_scaling_factor_in_topk",
            ),
        ),
        (
            "overrides",
            f"{_MOE}.fused_moe_triton.layer:FusedMoE.weight_loader",
            ("param", "loaded_weight", "weight_name", "shard_id", "expert_id"),
        ),
        ("has", f"{_MOE}.fused_moe_triton.layer:FusedMoeWeightScaleSupported", ("GROUP", "TENSOR")),
        (
            "overrides",
            "sglang.srt.model_loader.loader:DefaultModelLoader.load_weights_and_postprocess",
            ("model", "weights", "target_device"),
        ),
    ),
    # Hooks replace methods of SGLang's class.
    "modelopt": (
        ("has", f"{_MODELOPT}:ModelOptFp4Config", ("is_checkpoint_nvfp4_serialized", "group_size")),
        ("overrides", f"{_METHOD}.__init__", ("quant_config",)),
        (
            "overrides",
            f"{_METHOD}.create_weights",
            ("layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"),
        ),
        ("overrides", f"{_METHOD}.process_weights_after_loading", ("layer",)),
        ("overrides", f"{_METHOD}.create_moe_runner", ("layer", "moe_runner_config")),
        ("overrides", f"{_METHOD}.apply", ("layer", "dispatch_output")),
        ("overrides", f"{_METHOD}.get_moe_quant_info", ("layer", "runner_backend")),
        ("has", _METHOD, ("load_up_proj_weight_first",)),
    ),
    "mxfp4": (
        ("passes", f"{_MXFP4}.__init__", ()),
        (
            "overrides",
            f"{_MXFP4}.create_weights",
            ("layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype", "with_bias"),
        ),
        ("overrides", f"{_MXFP4}.process_weights_after_loading", ("layer",)),
        ("overrides", f"{_MXFP4}.create_moe_runner", ("layer", "moe_runner_config")),
        ("overrides", f"{_MXFP4}.apply", ("layer", "dispatch_output")),
        ("has", f"{_MOE}.fused_moe_triton.layer:FusedMoE", ("moe_tp_size",)),
    ),
    # A hook on the method that gives a layer its scheme, and our own scheme.
    "compressed-tensors": (
        ("overrides", f"{_CONFIG}.get_moe_scheme", ("layer", "layer_name")),
        ("calls", f"{_CONFIG}.get_scheme_dict", ("layer", "layer_name")),
        ("calls", f"{_CONFIG}._add_fused_moe_to_target_scheme_map", ()),
        (
            "overrides",
            f"{_COMPRESSED}.compressed_tensors:CompressedTensorsFusedMoEMethod.apply",
            ("layer", "dispatch_output"),
        ),
        ("overrides", f"{_SCHEME}.create_moe_runner", ("layer", "moe_runner_config")),
        ("overrides", f"{_SCHEME}.process_weights_after_loading", ("layer",)),
        ("overrides", f"{_SCHEME}.apply_weights", ("layer", "dispatch_output")),
    ),
    # The selection of experts. select_experts calls a config's custom_routing_function.
    "router": (
        ("overrides", f"{_MOE}.topk:TopK.bind_runner_backend", ("runner_backend", "routing_method_type")),
        ("has", f"{_MOE}.topk:TopK", ("topk_config",)),
        (
            "has",
            f"{_MOE}.topk:TopKConfig",
            (
                "apply_routed_scaling_factor_on_output",
                "correction_bias",
                "custom_routing_function",
                "fused_gate_packed_ids",
                "layer_id",
                "num_expert_group",
                "renormalize",
                "routed_scaling_factor",
                "runner_backend",
                "scoring_func",
                "shared_experts",
                "top_k",
                "topk_group",
                "use_grouped_topk",
            ),
        ),
        (
            "has",
            "sglang.srt.configs.shared_experts:SharedExpertsConfig",
            ("num_fused_shared_experts", "use_waterfill"),
        ),
        (
            "overrides",
            f"{_MOE}.topk:select_experts",
            (
                "hidden_states",
                "router_logits",
                "topk_config",
                "layer_id",
                "num_token_non_padded",
                "expert_location_dispatch_info",
                "dynamic_expert_bias",
                "router_logits_partials",
            ),
        ),
        ("calls", "sglang.srt.runtime_context:get_parallel", ()),
    ),
}
