"""The plugin's quantization methods of routed experts. Each derives from vLLM's method and keeps its parameters and
loading.

RoutedExperts.weight_loader searches the name of a method's class for "ModelOpt" or "compressed", so the classes here
keep those words in their names. vLLM's constructors are not called, because they choose one of vLLM's kernels and fail
without one. FusedMoEMethodBase's constructor is called.

Parameters keep their names and are emptied after packing. The layer's state still has the checkpoint's names, and a
reload finds what it expects.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import Tensor

from .. import Error
from .._fused_experts import FusedExperts, OverRanks, Placement, device_name, named, open_fused, replace_fused
from .._fused_parameters import Form, FusedParameters, empty_parameters
from .._load_log import LoadLog
from .._mxfp4 import padded_to_blocks
from . import internals, weights
from .experts import NvFp4MoeExperts
from .plan import COMPRESSED, GPT_OSS, MXFP4, NVFP4, LayerPlan, keeps_reductions
from .ranks import NoExchange, PrepareAndFinalizeOverRanks, note_combine, over_ranks
from .router import OwnRouter, own_router

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_FUSED = "vllm.model_executor.layers.fused_moe"
_base = internals.find(f"{_FUSED}.fused_moe_method_base:FusedMoEMethodBase")
_kernel = internals.find(f"{_FUSED}.modular_kernel:FusedMoEKernel")
_prepare_finalize = internals.find(f"{_FUSED}.all2all_utils:maybe_make_prepare_finalize")
_quant_config = internals.find(f"{_FUSED}.config:nvfp4_w4a16_moe_quant_config")
_no_exchange = internals.find_or_none(f"{_FUSED}.prepare_finalize:MoEPrepareAndFinalizeNoDPEPModular")

_log = LoadLog(lambda said: internals.logger().info("nvfp4-moe: %s", said))


class Method:
    """The part shared by all checkpoint formats; the first base of each method."""

    form: Form = NVFP4
    # vLLM's cache of weights already repacked for a kernel has none in this format.
    supports_pre_processed_weights = False

    def open(self, moe_config: Any, plan: LayerPlan) -> None:
        """Replaces the stock constructor."""
        _base.__init__(self, moe_config)
        self.plan = plan
        _log.plan()
        self.experts_cls = NvFp4MoeExperts
        self.fused: FusedExperts | None = None
        self.router: OwnRouter | None = None
        # Attributes that the stock methods and the weight loader read.
        self.use_a16 = True
        self.use_global_sf = False
        self.per_token_activation = False
        self.activation_key = None
        self.nvfp4_backend = self.mxfp4_backend = None

    @property
    def supports_eplb(self) -> bool:
        return False  # EPLB moves rows of parameters, and packed weights are not parameters

    @property
    def is_monolithic(self) -> bool:
        return self.router is not None

    @property
    def skip_forward_padding(self) -> bool:
        return False

    @property
    def has_unpadded_output(self) -> bool:
        return False

    def maybe_roundup_sizes(self, *args: Any, **kwargs: Any) -> Any:
        return _base.maybe_roundup_sizes(self, *args, **kwargs)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Creates the stock parameters, prepared to detect what a checkpoint lacks (weights.py)."""
        if "weight_loader" in kwargs:
            kwargs["weight_loader"] = weights.loader_of(layer, kwargs["weight_loader"])
        super().create_weights(layer, *args, **kwargs)  # type: ignore[misc]
        weights.prepare(layer)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Tells vLLM's side of the kernel that rows stay unquantized."""
        none = torch.empty(0, dtype=torch.float32, device=layer.w13_weight_scale.device)
        return _quant_config(g1_alphas=none, g2_alphas=none, w1_scale=none, w2_scale=none)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs and warms up. Everything that may allocate, load a module or fail happens here, before profiling and
        capture.

        On a reload it writes the new weights into the existing layer, whose memory captured graphs use.
        """
        names = [self.form.weight, "weight_scale"]
        if self.plan.options.get("expert_biases"):
            names.append(self.form.bias)
        parameters = [getattr(layer, f"{matrix}_{name}") for name in names for matrix in ("w13", "w2")]
        if any(parameter.numel() == 0 for parameter in parameters):
            if self.fused is not None:
                return  # called twice without a reload in between
            raise RuntimeError(
                f"nvfp4-moe: {self.plan.name}: expected loaded weights, got parameters without elements; reload all "
                "weights of the layer"
            )
        started = time.monotonic()
        try:
            with torch.no_grad():
                self.fused = self._packed(layer)
        except BaseException as error:
            self._refuse(f"it failed: {error}", parameters[0].is_cuda)
            if not isinstance(error, Error):
                raise
            internals.logger().error("nvfp4-moe: %s cannot be packed: %s", self.plan.name, error)
            raise named(error, self.plan.name) from error
        self._refuse(None, parameters[0].is_cuda)
        empty_parameters(parameters)
        if self.moe_kernel is None:
            self._build(layer)
        _log.packed(self.plan.name, self.fused, time.monotonic() - started, self.plan.activations)

    def _refuse(self, why: str | None, on_gpu: bool) -> None:
        """Disables the layer after a failed reload: its weights may be partly old, partly new."""
        if self.fused is not None:
            after = f"nvfp4-moe: {self.plan.name} does not run after its last reload: {why}; reload weights that load"
            weights.refuse(self.fused.layer.handle, why and after, on_gpu)

    def _packed(self, layer: Any) -> FusedExperts:
        # vLLM loads w2's biases as zeros on all ranks of a tensor parallel group except the first.
        parameters = FusedParameters.of_layer(layer, self.form, self.plan.options)
        if self.plan.dummy and self.fused is None:
            parameters.make_scales_legal()
        parameters.zero_padding(self.plan.filled)
        if self.fused is not None:
            return replace_fused(self.fused, parameters)
        w13 = parameters.w13
        experts = open_fused(
            parameters,
            placement=Placement.from_map(layer.expert_map, self.plan.options["num_experts"], w13.shape[0]),
            max_tokens=self.plan.max_tokens,
            over_ranks=self._over_ranks(layer, device_name(w13.device)),
            **self.plan.options,
        )
        experts.layer.warmup()
        if experts.mxfp4_rounded:
            internals.logger().warning(
                "nvfp4-moe: %s: the cast from MXFP4 rounded %d blocks of 16", self.plan.name, experts.mxfp4_rounded
            )
        return experts

    def _over_ranks(self, layer: Any, device: str) -> OverRanks | None:
        """Returns the exchange that the layer runs over, or None if vLLM adds the rows. Collective."""
        if self.plan.ranks is None:
            return None
        try:
            return over_ranks(layer, self.plan.ranks, device)
        except NoExchange as why:
            keeps_reductions(self.plan.name, why, self.plan.ranks.insists)
            return None

    def _prepare_finalize(self, layer: Any) -> Any:
        """Makes vLLM's part of the kernel, which exchanges rows before and after the experts."""
        assert self.fused is not None
        combine = self.plan.ranks.combine if self.fused.over_ranks and self.plan.ranks is not None else None
        note_combine(self.plan.name, combine)
        if self.fused.over_ranks:
            return PrepareAndFinalizeOverRanks()
        return _prepare_finalize(
            moe=self.moe,  # type: ignore[attr-defined]
            quant_config=self.moe_quant_config,
            routing_tables=layer._expert_routing_tables(),
            allow_new_interface=True,
            use_monolithic=False,
        )

    def _check_sums(self, kernel: Any, exchange: str) -> None:
        """Checks that vLLM adds the ranks' rows: a run has only local rows, and vLLM may treat them as summed."""
        assert self.fused is not None
        parallel = self.moe.moe_parallel_config  # type: ignore[attr-defined]
        ranks = max(getattr(parallel, size, 1) for size in ("tp_size", "dp_size", "pcp_size", "ep_size"))
        if ranks > 1 and not self.fused.over_ranks and kernel.output_is_reduced():
            raise RuntimeError(
                f"nvfp4-moe: {self.plan.name}: {exchange} of --all2all-backend "
                f"{parallel.all2all_backend} would take one rank's rows for the sum over {ranks} ranks; "
                "use --all2all-backend allgather_reducescatter"
            )

    def _build(self, layer: Any) -> None:
        assert self.fused is not None
        if self.fused.placement.lookup is not None:
            # A buffer, because level 2 of sleep mode discards all other tensors made while the model was loaded.
            layer.register_buffer("nvfp4_moe_lookup", self.fused.placement.lookup, persistent=False)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        prepare_finalize = self._prepare_finalize(layer)
        experts = NvFp4MoeExperts.over(self.fused, self.moe, self.moe_quant_config)  # type: ignore[attr-defined]
        kernel = _kernel(prepare_finalize=prepare_finalize, fused_experts=experts)
        self._check_sums(kernel, type(prepare_finalize).__name__)
        self.moe_kernel = kernel
        # If vLLM exchanges no rows, its kernel would only add a copy. It also skips runs without tokens, but a rank of
        # the library's exchange has to take part in those.
        self.alone = experts if _no_exchange is not None and isinstance(prepare_finalize, _no_exchange) else None
        self.router = own_router(layer, self.plan) if self.alone is not None and not self.fused.over_ranks else None
        # The kernel only reads the number of experts from the weights.
        device = self.fused.placement.lookup.device if self.fused.placement.lookup is not None else "cpu"
        self.no_weights = torch.empty((self.fused.layer.expert_count, 0, 0), dtype=torch.uint8, device=device)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Any:
        assert self.fused is not None
        # vLLM runs shared experts before these or on another stream, unless its kernel can run them between its parts.
        if self.alone is not None and not (shared_experts is not None and self._runs_shared_experts()):
            return self.alone.reduced(x, topk_ids, topk_weights, layer.apply_router_weight_on_input)
        return self.moe_kernel.apply(
            hidden_states=x,
            w1=self.no_weights,
            w2=self.no_weights,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )

    def _runs_shared_experts(self) -> bool:
        """Returns whether vLLM's kernel runs the shared experts; over the library's ranks nothing does."""
        assert self.fused is not None
        return not self.fused.over_ranks and bool(getattr(self, "mk_can_overlap_shared_experts", True))

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        assert self.router is not None and self.alone is not None
        if layer.apply_router_weight_on_input or torch.compiler.is_compiling():
            topk_ids, topk_weights = self.router.select(router_logits)
            return self.alone.reduced(x, topk_ids, topk_weights, layer.apply_router_weight_on_input)
        return self.alone.selected(x, router_logits, self.router.config, self.router.correction_bias)


@functools.cache
def modelopt_method() -> type:
    """For ModelOpt's parameters: NVFP4 and W4A16_NVFP4, also within MIXED_PRECISION and DeepSeek-V4's hybrid."""
    stock = internals.find(f"{_QUANTIZATION}.modelopt:ModelOptNvFp4FusedMoE")

    class NvFp4MoeModelOptMethod(Method, stock):  # type: ignore[misc, valid-type]
        def __init__(self, quant_config: Any, moe_config: Any, plan: LayerPlan) -> None:
            self.open(moe_config, plan)
            self.quant_config = quant_config

    return NvFp4MoeModelOptMethod


@functools.cache
def compressed_tensors_method() -> type:
    """For compressed-tensors' parameters, whose global scales are reciprocals."""
    stock = internals.find(
        f"{_QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4:"
        "CompressedTensorsW4A4Nvfp4MoEMethod"
    )

    class NvFp4MoeCompressedTensorsMethod(Method, stock):  # type: ignore[misc, valid-type]
        form = COMPRESSED

        def __init__(self, moe_config: Any, plan: LayerPlan) -> None:
            self.open(moe_config, plan)
            self.group_size = 16

    return NvFp4MoeCompressedTensorsMethod


@functools.cache
def mxfp4_method() -> type:
    """For DeepSeek-V4's MXFP4 parameters, cast to NVFP4 during packing."""
    stock = internals.find(f"{_QUANTIZATION}.mxfp4:Mxfp4MoEMethod")

    class NvFp4MoeMxfp4Method(Method, stock):  # type: ignore[misc, valid-type]
        form = MXFP4

        def __init__(self, moe_config: Any, plan: LayerPlan) -> None:
            self.open(moe_config, plan)
            self.weight_dtype = "mxfp4"

    return NvFp4MoeMxfp4Method


@functools.cache
def gpt_oss_method() -> type:
    """For gpt-oss' MXFP4 parameters and biases, cast to NVFP4 during packing."""
    stock = internals.find(f"{_QUANTIZATION}.mxfp4:GptOssMxfp4MoEMethod")

    class NvFp4MoeGptOssMethod(Method, stock):  # type: ignore[misc, valid-type]
        form = GPT_OSS

        def __init__(self, moe_config: Any, plan: LayerPlan) -> None:
            self.open(moe_config, plan)
            self.weight_dtype = "gpt_oss_mxfp4"  # the model's loader reads the order of rows from this

        def maybe_roundup_sizes(self, *args: Any, **kwargs: Any) -> Any:
            hidden, inner = super().maybe_roundup_sizes(*args, **kwargs)
            return hidden, padded_to_blocks(inner)

    return NvFp4MoeGptOssMethod
