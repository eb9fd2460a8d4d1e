"""The experts of vLLM's modular kernel: rows and ids in, weighted and reduced rows out, by one run of a MoeLayer."""

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
    """Takes bf16, fp16 or fp32 rows as prepare() hands them over; the library quantizes them, or does not.

    What a layer needs to be taken is decided once, where its quantization method is chosen (configs.py): the questions
    that vLLM asks of a class of experts before it takes one are not asked of this one, and are answered with yes.
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
        # Numbers and tensors, which torch.compile can trace, where the layer itself is opaque to it.
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
        return True  # ids are given; which router made them means nothing here

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    def supports_expert_map(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return _no_op()

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        """(E, M, N, K, top_k), of which N comes from the layer: w1 and w2 hold no bytes."""
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
        """The second is the layer's workspace: vLLM has one for all layers, sized while it profiles and counted by it.

        In elements of two bytes or more. On CPUs the library has a workspace of its own.
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
        """output (M, K) = the sum over each token's experts that are here. Enqueues only; may be captured."""
        if apply_router_weight_on_input:  # prepare() has multiplied the rows
            topk_weights = torch.ones_like(topk_weights)
        self._run(hidden_states, topk_ids, topk_weights, output, workspace2 if self.on_gpu else None)

    def reduced(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, apply_router_weight_on_input: bool
    ) -> Tensor:
        """(T, H): what vLLM's kernel makes of prepare(), apply() and finalize() if it exchanges no rows.

        finalize() would copy the rows to a tensor of its own, a kernel more for each layer.
        """
        if apply_router_weight_on_input:
            hidden = hidden * topk_weights.to(hidden.dtype)
            topk_weights = torch.ones_like(topk_weights)
        out = torch.empty_like(hidden)
        self._run(hidden, topk_ids, topk_weights, out, self._workspace(hidden.size(0)))
        return out

    def selected(self, hidden: Tensor, logits: Tensor, router: RouterConfig) -> Tensor:
        """(T, H): the same where the router's logits (T, E) come: selection and run as one call."""
        check(self.experts.layer.handle)
        out = torch.empty_like(hidden)
        self.experts.run_logits(hidden.contiguous(), logits, router, out, self._workspace(hidden.size(0)))
        return out

    def _workspace(self, tokens: int) -> Tensor | None:
        """Of vLLM's, uint8; None: the library's own."""
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
