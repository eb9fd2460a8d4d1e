"""The plugin's routers against vLLM's own, and the routers that it leaves to vLLM.

vLLM makes each router, for CPUs and as it would for GPUs. Its plain torch code is the oracle, because the kernels of
the routers for GPUs need one. In float32 neither side is the truth, so a token is compared if its choice is not a tie.
"""

from __future__ import annotations

import dataclasses
import types

import layers
import nvfp4_moe
import pytest
import torch
from layers import EXPERTS, NAME, TOP_K, Layer, moe_config
from test_methods import TOKENS, batch, loaded, reference

FEW_UNITS = 2.0**-19  # 32 units in the last place of float32
SAID = "nvfp4-moe leaves the selection of the experts of layers such as model.layers.*.mlp.experts to vLLM: "


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    monkeypatch.setenv("NVFP4_MOE_ROUTER", "own")


@pytest.fixture
def on(monkeypatch):
    """on(platform): vLLM makes routers for "CPU" or "GPU", and computes those of GPUs in torch."""
    from vllm.model_executor.layers.fused_moe.router import fused_topk_bias_router, router_factory

    def choose(platform: str) -> None:
        if platform == "CPU":
            return
        named = types.SimpleNamespace
        monkeypatch.setattr(router_factory, "current_platform", named(is_cpu=lambda: False))
        # The branch for a GPU of AMD's ends in plain torch code.
        monkeypatch.setattr(fused_topk_bias_router, "rocm_aiter_ops", named(is_fused_moe_enabled=lambda: True))
        monkeypatch.setattr(fused_topk_bias_router, "_aiter_can_use_biased_grouped_topk", lambda *sizes: False)

    return choose


def own_router_of(layer):
    """Returns the plugin's router of a layer without parameters, or None, and vLLM's."""
    from nvfp4_moe.vllm.plan import plan_of
    from nvfp4_moe.vllm.router import own_router
    from vllm.config import get_current_vllm_config

    runner = get_current_vllm_config().compilation_config.static_forward_context.get(NAME)
    return own_router(layer, plan_of(layer, NAME)), getattr(runner, "router", None)


def theirs(router, logits):
    """Returns vLLM's (ids, weights)."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias

    if type(router).__name__ == "FusedTopKRouter":  # kernels only
        weights, ids = fused_topk_bias(
            logits, logits, router.scoring_func, None, topk=router.top_k, renormalize=router.renormalize
        )
    elif router.scoring_func == "sqrtsoftplus":  # kernels only; dsv4_topk.py in words
        scores = torch.nn.functional.softplus(logits.double(), threshold=700).sqrt()
        ids = (scores + router.e_score_correction_bias).topk(router.top_k, -1).indices
        weights = scores.gather(1, ids)
        weights = (weights / weights.sum(-1, keepdim=True) * router.routed_scaling_factor).float()
    else:
        with torch.compiler.set_stance("force_eager"):
            weights, ids = router._compute_routing(logits, logits, None)
    return ids.long(), weights


def in_order(ids, weights):
    """Both by id."""
    order = ids.long().argsort(-1)
    return ids.long().gather(1, order), weights.gather(1, order)


GROUPS_OF_1 = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "scoring_func": "sigmoid"}
GROUPS_OF_8 = {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 4}
BIASED, GROUPED, PLAIN, CPU = "FusedTopKBiasRouter", "GroupedTopKRouter", "FusedTopKRouter", "CPURouter"
# name -> (experts, top_k, has a bias, options, the class for GPUs, whether vLLM's for CPUs computes it). The sizes are
# those of published models.
ROUTERS = {
    "qwen3": (128, 8, False, {}, PLAIN, True),
    "qwen2": (60, 4, False, {"renormalize": False}, PLAIN, True),
    "sigmoid": (64, 6, False, {"scoring_func": "sigmoid"}, PLAIN, False),
    "sigmoid as it is": (64, 6, False, {"scoring_func": "sigmoid", "renormalize": False}, PLAIN, False),
    "minimax_m2": (256, 8, True, {"scoring_func": "sigmoid"}, BIASED, False),
    "biased sigmoid": (
        160, 8, True, {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "renormalize": False}, BIASED, False,
    ),
    "biased softmax": (64, 6, True, {"routed_scaling_factor": 2.0}, BIASED, False),
    "biased softmax as it is": (64, 6, True, {"renormalize": False}, BIASED, False),
    "deepseek_v4": (256, 6, True, {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5}, BIASED, True),
    "deepseek_v2": (
        160, 6, False,
        {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 3, "renormalize": False,
         "routed_scaling_factor": 16.0}, GROUPED, True,
    ),
    "grouped softmax": (64, 6, False, GROUPS_OF_8, GROUPED, True),
    "grouped biased softmax": (64, 6, True, GROUPS_OF_8, GROUPED, True),
    "deepseek_v3": (
        256, 8, True, GROUPS_OF_8 | {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5}, GROUPED, True,
    ),
    "as it is": (256, 8, True, GROUPS_OF_8 | {"scoring_func": "sigmoid", "renormalize": False}, GROUPED, True),
    "kimi_k2": (384, 8, True, GROUPS_OF_1 | {"routed_scaling_factor": 2.827}, GROUPED, True),
    "nemotron_3_nano": (128, 6, True, GROUPS_OF_1, GROUPED, True),
    "nemotron_3_super": (512, 22, True, GROUPS_OF_1, GROUPED, True),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("platform", ["CPU", "GPU"])
@pytest.mark.parametrize("name", ROUTERS)
def test_chosen_experts_and_weights_are_vllms(vllm_config, log, on, name, platform, dtype):
    experts, top_k, biased, options, for_gpus, on_cpus = ROUTERS[name]
    random = torch.Generator().manual_seed(len(name))
    bias = torch.nn.Parameter(torch.randn(experts, generator=random) * 0.1) if biased else None
    on(platform)
    layer = Layer(moe_config(EXPERTS, top_k, num_experts=experts, num_logical_experts=experts))
    own, router = own_router_of(layers.with_runner(layer, **options, e_score_correction_bias=bias))
    assert type(router).__name__ == (CPU if platform == "CPU" else for_gpus)
    if platform == "CPU" and not on_cpus:
        assert own is None and log.lines == [f"{SAID}CPURouter ignores an option of the layer"]
        return
    assert own is not None and log.lines == [
        "nvfp4-moe selects the experts of layers such as model.layers.*.mlp.experts"
    ]
    logits = (2 * torch.randn(400, experts, generator=random)).to(dtype)
    their_ids, their_weights = in_order(*theirs(router, logits.float()))
    our_ids, our_weights = in_order(*own.select(logits))
    clear = is_clear(own, logits)
    print(f"\n{name}: {int((~clear).sum())} of {len(clear)} tokens have a tie")
    assert clear.float().mean() > (0.95 if dtype == torch.float32 else 0.2)
    assert torch.equal(our_ids[clear], their_ids[clear])
    torch.testing.assert_close(our_weights[clear], their_weights[clear], rtol=FEW_UNITS, atol=0)


def is_clear(own, logits):
    """bool (T,): the last chosen expert, and group, are ahead of the next by more than float32 rounds."""
    router, x = own.config, logits.double()
    scores = {"softmax": torch.softmax(x, -1), "sigmoid": torch.sigmoid(x), "sqrt_softplus": (1 + x.exp()).log().sqrt()}
    chosen = scores[router.scoring] + (own.correction_bias.double() if router.correction_bias else 0)
    margin, clear = 2.0**-20, torch.ones(len(x), dtype=torch.bool)
    if router.num_expert_group > 1:
        by_group = chosen.unflatten(-1, (router.num_expert_group, -1))
        of_groups = by_group.topk(2 if router.group_score == "top2_sum" else 1, -1).values.sum(-1)
        kept = of_groups.topk(router.topk_group + 1, -1)
        clear &= kept.values[:, -2] - kept.values[:, -1] > margin * kept.values[:, -2].abs()
        mask = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, kept.indices[:, :-1], True)
        chosen = by_group.masked_fill(~mask[:, :, None], -torch.inf).flatten(1)
    best = chosen.topk(router.top_k + 1, -1).values
    return clear & (best[:, -2] - best[:, -1] > margin * best[:, -2].abs())


def test_a_bias_chooses_experts_and_does_not_weigh_them(vllm_config, log):
    """The cases above would not notice a bias of zeros on both sides."""
    bias = torch.zeros(EXPERTS)
    bias[5] = 10
    layer = layers.with_runner(Layer(moe_config()), **GROUPS_OF_1, e_score_correction_bias=bias)
    ids, weights = own_router_of(layer)[0].select(torch.linspace(1, 0, EXPERTS)[None])
    assert ids.tolist() == [[5, 0]]
    scores = torch.sigmoid(torch.linspace(1, 0, EXPERTS))[[5, 0]]
    torch.testing.assert_close(weights[0], scores / scores.sum())


def test_vllm_selects_from_groups_unless_asked(vllm_config, log, on, monkeypatch):
    from nvfp4_moe.vllm.plan import plan_of
    from nvfp4_moe.vllm.router import own_router

    on("GPU")
    groups_of_2 = GROUPS_OF_1 | {"num_expert_group": EXPERTS // 2, "topk_group": 2}
    bias = torch.nn.Parameter(torch.zeros(EXPERTS))
    for asked, options in (("auto", groups_of_2), ("own", groups_of_2), ("auto", GROUPS_OF_1)):
        monkeypatch.setenv("NVFP4_MOE_ROUTER", asked)
        layer = layers.with_runner(Layer(moe_config()), **options, e_score_correction_bias=bias)
        plan = dataclasses.replace(plan_of(layer, NAME), own_router=True)  # on a CPU auto means vLLM
        assert (own_router(layer, plan) is None) == (asked == "auto" and options is groups_of_2)
    assert log.lines[0] == (
        f"{SAID}its kernel for groups of experts is faster; NVFP4_MOE_ROUTER=own has the library select"
    )


# ---- through the method


DEEPSEEK_V3 = {
    "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
}  # fmt: skip
AS_DEEPSEEK_V3 = nvfp4_moe.RouterConfig(
    EXPERTS, TOP_K, "sigmoid", True, 1e-20, 2.5, 4, 2, group_score="top2_sum", correction_bias=True
)
SOFTMAX = nvfp4_moe.RouterConfig(EXPERTS, TOP_K, renormalize=True)


def logits_of(seed: int = 7):
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["softmax", "deepseek_v3"])
def test_the_method_takes_logits_and_reads_the_bias_at_each_call(methods, kind):
    biased = kind == "deepseek_v3"
    bias = torch.nn.Parameter(torch.randn(EXPERTS) * 0.1) if biased else None
    config, options = (AS_DEEPSEEK_V3, DEEPSEEK_V3) if biased else (SOFTMAX, {})
    method, layer = loaded(methods)
    layers.with_runner(layer, **options, e_score_correction_bias=bias)
    assert not method.is_monolithic, "vLLM's routers until the layer is packed"
    method.process_weights_after_loading(layer)
    assert method.is_monolithic and method.router.config == config
    hidden, logits = batch()[0], logits_of().bfloat16()
    before = None
    for _ in range(2):
        ids, router_weights = nvfp4_moe.select_experts(
            logits, config, correction_bias=bias if bias is None else bias.data
        )
        expected = reference().run(hidden, ids, router_weights)
        out = method.apply_monolithic(layer, hidden, logits, input_ids=None)
        assert torch.equal(out, expected)
        # Rows of logits with a stride, as in a view of a wider array.
        wide = torch.cat([logits, logits], 1)[:, :EXPERTS]
        assert torch.equal(out, method.apply_monolithic(layer, hidden, wide))
        if not biased:
            return
        assert before is None or not torch.equal(out, before), "other values of the bias choose other experts"
        before = out
        bias.data.copy_(-3 * bias.data)  # a reload


def test_compiled_it_selects_the_same(methods):
    bias = torch.nn.Parameter(torch.randn(EXPERTS) * 0.1)
    method, layer = loaded(methods)
    layers.with_runner(layer, **DEEPSEEK_V3, e_score_correction_bias=bias)
    method.process_weights_after_loading(layer)
    run = torch.compile(
        lambda hidden, logits: method.apply_monolithic(layer, hidden, logits), fullgraph=True, backend="aot_eager"
    )
    hidden = batch()[0]
    for seed in (7, 8):
        with torch.no_grad():
            out = run(hidden, logits_of(seed))
        assert torch.equal(out, method.apply_monolithic(layer, hidden, logits_of(seed)))
        bias.data.copy_(-3 * bias.data)


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_ranks_select_the_same_experts(methods, placement):
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    bias, hidden, logits = torch.randn(EXPERTS) * 0.1, batch()[0], logits_of()
    total = torch.zeros_like(hidden, dtype=torch.float32)
    for rank in range(2):
        local, expert_map, _ = determine_expert_map(2, rank, EXPERTS, expert_placement_strategy=placement)
        here = sorted(expert_map.argsort()[-local:].tolist(), key=lambda expert: int(expert_map[expert]))
        method, layer = loaded(methods, local=here, expert_map=expert_map)
        layers.with_runner(layer, **DEEPSEEK_V3, e_score_correction_bias=bias)
        method.process_weights_after_loading(layer)
        total += method.apply_monolithic(layer, hidden, logits)
    ids, router_weights = nvfp4_moe.select_experts(logits, AS_DEEPSEEK_V3, correction_bias=bias)
    expected = reference().run(hidden, ids, router_weights).float()
    assert (total - expected).norm() <= 2.0**-7 * expected.norm(), "two roundings to bfloat16 instead of one"


# ---- left to vLLM


def _grouped(**options):
    return {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2} | options


def zeros(**options):
    return torch.zeros(EXPERTS, **options)


# name -> (platform, options of the layer and its router, options of the router only, the reason)
LEFT = {
    "a function": ("GPU", {"custom_routing_function": print}, {}, "the router is a CustomRoutingRouter"),
    "a function on CPUs": ("CPU", {"custom_routing_function": print}, {}, "CPURouter has a custom_routing_function"),
    "a hash table": (
        "GPU", {"scoring_func": "sqrtsoftplus"}, {"hash_indices_table": torch.zeros(9, TOP_K, dtype=torch.int32)},
        "FusedTopKBiasRouter has a _hash_indices_table",
    ),
    "another bias for images": (
        "GPU", {"scoring_func": "sqrtsoftplus", "e_score_correction_bias": zeros()}, {"bias_vl": zeros()},
        "FusedTopKBiasRouter has a bias_vl",
    ),
    "zero experts": (
        "GPU", {"e_score_correction_bias": zeros()}, {"zero_expert_type": "identity", "num_logical_experts": EXPERTS},
        "the router is a ZeroExpertRouter",
    ),
    "shared experts as experts": (
        "GPU", _grouped(), {"num_fused_shared_experts": 1}, "GroupedTopKRouter has a num_fused_shared_experts",
    ),
    "groups of one": ("GPU", _grouped(num_expert_group=8), {}, "GroupedTopKRouter has 8 groups of 8 experts"),
    "groups that are not equal": (
        "GPU", _grouped(num_expert_group=3), {}, "GroupedTopKRouter has 3 groups of 8 experts",
    ),
    "groups that are too few": (
        "GPU", _grouped(topk_group=0), {}, "GroupedTopKRouter: topk_group: expected 1..4, got 0",
    ),
    "a bias that CPUs ignore": (
        "CPU", {"e_score_correction_bias": zeros()}, {}, "CPURouter ignores an option of the layer",
    ),
    "a factor that CPUs ignore": (
        "CPU", {"routed_scaling_factor": 2.5}, {}, "CPURouter ignores an option of the layer",
    ),
    "a factor that GPUs ignore": (
        "GPU", {"routed_scaling_factor": 2.5}, {}, "FusedTopKRouter ignores the layer's routed_scaling_factor",
    ),
    "a negative factor": (
        "GPU", _grouped(routed_scaling_factor=-1.0), {},
        "GroupedTopKRouter: routed_scaling_factor: expected finite and > 0, got -1",
    ),
    "a bias in bfloat16": (
        "GPU", {"e_score_correction_bias": zeros(dtype=torch.bfloat16)}, {},
        "e_score_correction_bias: expected contiguous float32 (8,) on cpu",
    ),
    "a bias of more experts": (
        "GPU", {"e_score_correction_bias": torch.zeros(9)}, {},
        "e_score_correction_bias: expected contiguous float32 (8,) on cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_vllm_selects_what_the_library_does_not_compute(vllm_config, log, on, name):
    platform, options, more, why = LEFT[name]
    on(platform)
    own, _ = own_router_of(layers.with_runner(Layer(moe_config()), more, **options))
    assert own is None and log.lines == [SAID + why]


def test_vllm_selects_if_its_router_was_changed(vllm_config, log, on):
    """A new field of a later release, somebody who watches the router, and a class of a model's own."""
    on("GPU")

    def why(change) -> str:
        log.lines.clear()
        layer = layers.with_runner(Layer(moe_config()), **_grouped())
        change(layer, vllm_config.compilation_config.static_forward_context)
        own, _ = own_router_of(layer)
        return "" if own is not None else log.lines[-1].removeprefix(SAID)

    class Models(type(own_router_of(layers.with_runner(Layer(moe_config()), **_grouped()))[1])):
        pass

    class Runner(type(vllm_config.compilation_config.static_forward_context[NAME])):
        def _apply_quant_method(self, *inputs):
            raise NotImplementedError

    def router(**options):
        return lambda layer, runners: [setattr(runners[NAME].router, *option) for option in options.items()]

    assert why(lambda layer, runners: None) == ""
    assert why(router(temperature=2.0)) == "GroupedTopKRouter has the unknown attribute temperature"
    assert why(router(select_experts=print)) == "GroupedTopKRouter has the unknown attribute select_experts"
    assert why(router(capture_fn=print)) == "GroupedTopKRouter has a capture_fn"
    assert why(router(eplb_state=object())) == "GroupedTopKRouter has a eplb_state"
    assert why(router(renormalize=False)) == "GroupedTopKRouter has another renormalize than the layer"
    assert why(router(e_score_correction_bias=zeros())).endswith("another e_score_correction_bias than the layer")
    assert why(router(global_num_experts=16)) == "GroupedTopKRouter selects 2 of 16 experts, and the layer does not"
    assert why(router(__class__=Models)) == "the router is a Models"
    assert why(lambda layer, runners: runners.pop(NAME)) == "the layer has no runner of vLLM's"
    assert why(lambda layer, runners: setattr(runners[NAME], "__class__", Runner)).startswith("Runner is a runner of")
    assert why(lambda layer, runners: setattr(layer.moe_config, "require_decomposed_backend", True)) == (
        "vLLM's config requires it"
    )


@pytest.mark.parametrize("asked", ["own", "auto", "engine", "simulated", "reported", "unfit"])
def test_vllm_selects_if_somebody_reads_its_routers_and_on_cpus(methods, monkeypatch, vllm_config, asked):
    from nvfp4_moe.vllm import internals

    monkeypatch.setenv("NVFP4_MOE_ROUTER", asked if asked in ("auto", "engine") else "own")
    if asked == "simulated":
        monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    if asked == "unfit":
        monkeypatch.setattr(internals, "fitting", frozenset())
    if asked == "reported":
        holder = getattr(vllm_config, "aux_output_config", None) or vllm_config.model_config
        monkeypatch.setattr(holder, "enable_return_routed_experts", True)
    method, layer = loaded(methods)
    method.process_weights_after_loading(layer)
    assert method.is_monolithic == (asked == "own")
