"""The quantization methods over vLLM's own classes, a layer at a time: placements of experts, reloads, and failures."""

from __future__ import annotations

import layers
import nvfp4_moe
import pytest
import torch
from layers import EXPERTS, HIDDEN, INNER, NAME, TOP_K, Layer, moe_config, weights

TOKENS = 11


def loaded(methods, kind="modelopt", local=None, expert_map=None, on_input=False, top_k=TOP_K, seed=0):
    """Returns a method and its layer in vLLM's runner, with weights loaded but not processed.

    local: the rank's global ids.
    """
    here = list(range(EXPERTS)) if local is None else local
    layer = layers.with_runner(Layer(moe_config(len(here), top_k), expert_map, on_input))
    method = layers.with_parameters(methods, kind, layer)
    assert all(
        not p.view(torch.uint8).any() for p in layer.parameters() if p.dtype in (torch.uint8, torch.float8_e4m3fn)
    )
    load(layer, kind, here, seed)
    return method, layer


def made(methods, **options):
    """The same, processed."""
    method, layer = loaded(methods, **options)
    method.process_weights_after_loading(layer)
    return method, layer


def load(layer, kind: str = "modelopt", here=None, seed: int = 0) -> None:
    here = list(range(EXPERTS)) if here is None else here
    for name, tensor in weights(seed).items():
        value = tensor.view(torch.uint8)[here].view(tensor.dtype) if tensor.element_size() == 1 else tensor[here]
        if kind == "compressed-tensors":
            if name.endswith("_scale_2"):
                name, value = name.replace("weight_scale_2", "weight_global_scale"), (1.0 / value.double()).float()
            elif name.endswith("weight"):
                name += "_packed"
        parameter = getattr(layer, name)
        parameter.data = value.clone()  # as a reload does: a new tensor in place of the emptied one


def batch(top_k: int = TOP_K):
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16()
    ids = torch.rand(TOKENS, EXPERTS, generator=random).argsort(-1)[:, :top_k].int()
    return hidden, torch.rand(TOKENS, top_k, generator=random), ids


def run(method, layer, hidden, router_weights, ids):
    return method.apply(layer, hidden, router_weights, ids, None, None)


def reference(seed: int = 0, top_k: int = TOP_K):
    config = nvfp4_moe.MoeConfig(EXPERTS, top_k, HIDDEN, INNER, activation_format="bf16")
    return layers.library(config, seed)


def is_reference(method, layer, seed: int = 0) -> bool:
    hidden, router_weights, ids = batch()
    out = run(method, layer, hidden, router_weights, ids)
    return torch.equal(out, reference(seed).run(hidden, ids, router_weights))


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors"])
def test_a_method_runs_the_library_s_layer(methods, kind):
    method, layer = loaded(methods, kind)
    names = set(dict(layer.named_parameters()))
    method.process_weights_after_loading(layer)
    assert set(dict(layer.named_parameters())) == names, "the state keeps the checkpoint's names"
    held = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert held < 16 * EXPERTS * 4, "codes and block scales are given back"
    hidden, router_weights, ids = batch()
    out = run(method, layer, hidden, router_weights, ids)
    if kind == "compressed-tensors":  # the reciprocal of its reciprocal may differ from the number
        expected = reference().run(hidden, ids, router_weights)
        assert (out - expected).norm() <= 2.0**-8 * expected.norm()
    else:
        assert torch.equal(out, reference().run(hidden, ids, router_weights))
    assert torch.equal(out, run(method, layer, hidden, router_weights, ids))
    assert not method.supports_eplb and not method.is_monolithic and method.topk_indices_dtype is None


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_ranks_of_vllm_s_placements_add_up(methods, placement):
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    hidden, router_weights, ids = batch(top_k=1)
    total = torch.zeros_like(hidden)
    for rank in range(2):
        local, expert_map, _ = determine_expert_map(2, rank, EXPERTS, expert_placement_strategy=placement)
        here = sorted(expert_map.argsort()[-local:].tolist(), key=lambda expert: int(expert_map[expert]))
        method, layer = made(methods, local=here, expert_map=expert_map, top_k=1)
        buffers = dict(layer.named_buffers())
        assert ("nvfp4_moe_lookup" in buffers) == (placement == "round_robin")
        if placement == "round_robin":
            # Level 2 of sleep mode writes buffers back to their old addresses.
            assert buffers["nvfp4_moe_lookup"].data_ptr() == method.fused.placement.lookup.data_ptr()
        total += run(method, layer, hidden, router_weights, ids)
    assert torch.equal(total, reference(top_k=1).run(hidden, ids, router_weights))


def test_rows_that_nobody_would_add_up_are_an_error(methods):
    """Second line of defence after the refusal of --all2all-backend passthrough: refuses any object of vLLM's that
    takes a rank's rows for the sum."""
    expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
    expert_map[: EXPERTS // 2] = torch.arange(EXPERTS // 2)
    method, layer = loaded(methods, local=list(range(EXPERTS // 2)), expert_map=expert_map)
    method.moe.moe_parallel_config.all2all_backend = "passthrough"
    words = "of --all2all-backend passthrough would take one rank's rows for the sum over 2 ranks"
    with pytest.raises(RuntimeError, match=f"PassThroughPrepareAndFinalize {words}"):
        method.process_weights_after_loading(layer)
    assert method.moe_kernel is None
    method, layer = loaded(methods)
    method.moe.moe_parallel_config.all2all_backend = "passthrough"
    method.process_weights_after_loading(layer)  # one rank has all rows


def test_router_weights_on_the_input_are_applied_once(methods):
    method, layer = made(methods, on_input=True, top_k=1)
    hidden, router_weights, ids = batch(top_k=1)
    scaled = hidden * router_weights.bfloat16()
    expected = reference(top_k=1).run(scaled, ids, torch.ones_like(router_weights))
    assert torch.equal(run(method, layer, hidden, router_weights, ids), expected)


def test_ids_and_weights_of_other_dtypes_and_strides(methods):
    method, layer = made(methods)
    hidden, router_weights, ids = batch()
    expected = run(method, layer, hidden, router_weights, ids)
    assert torch.equal(run(method, layer, hidden, router_weights, ids.long()), expected)
    apart = torch.stack([ids, ids], -1)[..., 0]
    assert not apart.is_contiguous() and torch.equal(run(method, layer, hidden, router_weights, apart), expected)
    coarse = router_weights.bfloat16()
    assert torch.equal(run(method, layer, hidden, coarse, ids), run(method, layer, hidden, coarse.float(), ids))


def test_the_layer_and_its_kernel_stay_whether_or_not_there_are_new_weights(methods):
    method, layer = made(methods)
    kernel, packed, handle = method.moe_kernel, method.fused.layer, method.fused.layer.handle
    method.process_weights_after_loading(layer)
    assert method.moe_kernel is kernel and method.fused.layer is packed and is_reference(method, layer)
    load(layer, seed=1)
    method.process_weights_after_loading(layer)
    assert method.moe_kernel is kernel and method.fused.layer.handle == handle
    assert is_reference(method, layer, 1)


def test_weights_that_are_wrong_are_an_error_and_can_be_loaded_again(methods):
    method, layer = loaded(methods)
    layer.w13_weight_scale.data.view(torch.uint8)[3, 7, 1] = 0x7F
    with pytest.raises(nvfp4_moe.BadInput, match="expert 3"):
        method.process_weights_after_loading(layer)
    assert method.fused is None and layer.w13_weight.numel() > 0
    load(layer)
    method.process_weights_after_loading(layer)
    assert is_reference(method, layer)


def test_a_layer_does_not_run_after_a_reload_that_failed(methods, monkeypatch):
    """Its weights are part old, part new. Compiled, the layer is an operator and fails too. Good weights end that."""
    method, layer = made(methods)
    compiled = torch.compile(lambda *inputs: run(method, layer, *inputs), fullgraph=True, backend="aot_eager")
    hidden, router_weights, ids = batch()
    before = compiled(hidden, router_weights, ids)
    reset = []

    class Graph:
        def reset(self):
            reset.append(self)

    graph = Graph()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    load(layer, seed=1)
    layer.w13_weight_scale.data.view(torch.uint8)[5, 7, 1] = 0x7F
    with pytest.raises(nvfp4_moe.BadInput, match=f"^{NAME}: .*expert 5"):
        method.process_weights_after_loading(layer)
    words = rf"nvfp4-moe: {NAME} does not run after its last reload: .*expert 5.*; reload weights"
    for call in (lambda *inputs: run(method, layer, *inputs), compiled):
        with pytest.raises(RuntimeError, match=words):
            call(hidden, router_weights, ids)
    assert reset == [], "there are no graphs of a layer on a CPU"
    methods.weights.refuse(-1, "of a GPU", True)
    assert reset == [graph], "a replay asks nobody"
    methods.weights.refuse(-1, None, True)
    load(layer)
    method.process_weights_after_loading(layer)
    assert torch.equal(run(method, layer, hidden, router_weights, ids), before)
    assert torch.equal(compiled(hidden, router_weights, ids), before)


def test_a_checkpoint_s_negative_scale_is_refused_where_a_dummy_s_is_not(methods, vllm_config, monkeypatch):
    method, layer = loaded(methods)
    layer.w2_weight_scale_2.data.neg_()
    with pytest.raises(nvfp4_moe.BadInput):
        method.process_weights_after_loading(layer)
    monkeypatch.setattr(vllm_config.load_config, "load_format", "dummy")
    method, layer = loaded(methods)
    layer.w2_weight_scale_2.data.neg_()
    method.process_weights_after_loading(layer)
    load(layer)
    layer.w2_weight_scale_2.data.neg_()
    with pytest.raises(nvfp4_moe.BadInput):  # weights loaded later must be a checkpoint's
        method.process_weights_after_loading(layer)


def test_compiled_the_layer_is_the_same_and_follows_its_handle(methods):
    """The graph takes the handle as a tensor, so another layer's tensor runs that layer."""
    method, layer = made(methods)
    other, other_layer = made(methods, seed=1)
    hidden, router_weights, ids = batch()

    compiled = torch.compile(
        lambda m, *inputs: run(m, layer, *inputs), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    assert torch.equal(compiled(method, hidden, router_weights, ids), run(method, layer, hidden, router_weights, ids))
    handle = method.moe_kernel.fused_experts.handle
    kept = handle.clone()
    handle.copy_(other.moe_kernel.fused_experts.handle)
    changed = compiled(method, hidden, router_weights, ids)
    handle.copy_(kept)
    assert torch.equal(changed, run(other, other_layer, hidden, router_weights, ids))
