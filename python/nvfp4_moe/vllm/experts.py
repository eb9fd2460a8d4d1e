"""The experts of vLLM's modular kernel: one run of a MoeLayer turns rows and ids into weighted and reduced rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._fused_experts import FusedExperts, Placement
from ..router import RouterConfig
from . import internals
from .op import check, moe_layer_by

_modular = internals.find("vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExpertsModular")
_format = internals.find("vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEActivationFormat")
_no_op = internals.find("vllm.model_executor.layers.fused_moe.topk_weight_and_reduce:TopKWeightAndReduceNoOP")
_workspaces = internals.find_or_none("vllm.v1.worker.workspace:current_workspace_manager")


class NvFp4MoeExperts(_modular):  # type: ignore[misc, valid-type]
    """Takes bf16, fp16 or fp32 rows from prepare(). The library quantizes them if the format requires it.

    Whether a layer is taken is decided once, when its quantization method is chosen (plan.py). So vLLM's questions to a
    class of experts (_supports_...) are all answered with yes.
    """

    experts: FusedExperts
    placement: Placement
    handle: Tensor
    num_experts: int
    rows: int
    on_gpu: bool

    @classmethod
    def over(cls, experts: FusedExperts, moe_config: Any, quant_config: Any) -> NvFp4MoeExperts:
        made = cls(moe_config=moe_config, quant_config=quant_config)
        made.experts = experts
        # Numbers and tensors, because torch.compile can trace them but not the layer itself.
        matrices = 1 if experts.layer.config.activation == "relu2" else 2
        made.num_experts, made.rows = experts.layer.expert_count, matrices * experts.layer.config.intermediate_size
        made.placement = experts.placement
        made.handle = torch.tensor([experts.layer.handle], dtype=torch.int64, device="cpu")
        made.on_gpu = str(moe_config.device).startswith("cuda")
        return made

    @staticmethod
    def activation_format() -> Any:
        return _format.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    @staticmethod
    def _supports_hash_routing() -> bool:
        return True  # ids are inputs; it does not matter which router made them

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    def supports_expert_map(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return _no_op()

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        """Returns (E, M, N, K, top_k). N comes from the layer, because w1 and w2 are empty."""
        return self.num_experts, a1.size(0), self.rows, a1.size(-1), topk_ids.size(1)

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Returns three shapes, the second for the layer's workspace, in elements of at least two bytes.

        vLLM has one workspace for all layers, which it sizes and counts during profiling. On CPUs the library uses its
        own workspace.
        """
        elements = (self.experts.layer.workspace_bytes(M) + 1) // 2 if self.on_gpu else 0
        return (0,), (elements,), (M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Computes output (M, K), the weighted sum of each token's local experts. Only enqueues; may be captured."""
        if apply_router_weight_on_input:  # prepare() has multiplied the rows
            topk_weights = torch.ones_like(topk_weights)
        self._run(hidden_states, topk_ids, topk_weights, output, workspace2 if self.on_gpu else None)

    def reduced(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, apply_router_weight_on_input: bool
    ) -> Tensor:
        """Returns (T, H), the result of vLLM's prepare(), apply() and finalize() if no rows are exchanged.

        It saves the kernel with which finalize() would copy the rows to another tensor.
        """
        if apply_router_weight_on_input:
            hidden = hidden * topk_weights.to(hidden.dtype)
            topk_weights = torch.ones_like(topk_weights)
        out = torch.empty_like(hidden)
        self._run(hidden, topk_ids, topk_weights, out, self._workspace(hidden.size(0)))
        return out

    def selected(self, hidden: Tensor, logits: Tensor, router: RouterConfig, correction_bias: Tensor | None) -> Tensor:
        """Returns the same (T, H) from the router's logits (T, E), with selection and run in one call.

        correction_bias: float32 (E,), if the router has one.
        """
        check(self.experts.layer.handle)
        out = torch.empty_like(hidden)
        workspace = self._workspace(hidden.size(0))
        self.experts.run_logits(hidden.contiguous(), logits, router, out, workspace, correction_bias)
        return out

    def _workspace(self, tokens: int) -> Tensor | None:
        """Returns vLLM's workspace as uint8, or None to use the library's own."""
        if not self.on_gpu or _workspaces is None:
            return None
        size_bytes = self.experts.layer.workspace_bytes(tokens)
        (workspace,) = _workspaces().get_simultaneous(((size_bytes,), torch.uint8))
        return workspace

    def _run(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor, workspace: Tensor | None
    ) -> None:
        weights = topk_weights.float().contiguous()
        if torch.compiler.is_compiling():
            ids = self.placement.local_ids(topk_ids).contiguous()
            moe_layer_by(out, hidden.contiguous(), ids, weights, self.handle)
        else:
            check(self.experts.layer.handle)
            in_bytes = None if workspace is None else workspace.view(torch.uint8)
            self.experts.run(hidden.contiguous(), topk_ids.contiguous(), weights, out, in_bytes)
