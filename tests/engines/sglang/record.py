"""An SGLang plugin for tests: records the routers' results, one JSON line per call, in the file NVFP4_RECORD."""

import json
import os


def before_forward(layer, hidden_states, topk_output, *rest, **named):
    """Records (layer, (T, E) router logits, (T, top_k) experts) of one rank: all ranks have the same."""
    if layer.moe_ep_rank == 0 and layer.moe_tp_rank == 0:
        said = {
            "layer": layer.layer_id,
            "logits": topk_output.router_logits.float().tolist(),
            "experts": topk_output.topk_ids.tolist(),
        }
        with open(os.environ["NVFP4_RECORD"], "a") as file:
            file.write(json.dumps(said) + "\n")


def mm_in_another_dtype(first, second, out_dtype):
    """torch.mm with out_dtype, which SGLang's Nemotron-H calls for its router and torch has only for GPUs."""
    return first.to(out_dtype) @ second.to(out_dtype)


def register():
    """Called by SGLang in each process. Records nothing if no file is named."""
    import torch

    if not torch.cuda.is_available():
        global _aten
        _aten = torch.library.Library("aten", "IMPL")
        _aten.impl("mm.dtype", mm_in_another_dtype, "CPU")
    if os.environ.get("NVFP4_RECORD"):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        target = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.forward"
        HookRegistry.register(target, before_forward, HookType.BEFORE)
