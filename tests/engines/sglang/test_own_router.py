"""The plugin's routers against SGLang's own, and the routers that it leaves to SGLang.

Each router is a TopK with the arguments of a model of SGLang's. It is computed by SGLang's code for CPUs, and by its
code for GPUs, whose Triton kernel runs in Triton's interpreter. In float32 neither side is the truth, so a token is
compared if its choice is not a tie.
"""

from __future__ import annotations

import dataclasses
import types

import nvfp4_moe
import pytest
import torch
from layers import load, make_layer, pack, rank
from router_bounds import has_tie, in_their_order, numbers, plain_bound, same_experts

EXPERTS, TOP_K = 8, 2
SAID = "nvfp4_moe leaves the selection of experts in layer 3 and others to SGLang: "


@pytest.fixture
def module(sglang, configured, monkeypatch):
    """SGLang's module of routers. The plugin selects if it knows a router: conftest.py sets NVFP4_MOE_ROUTER=own."""
    from nvfp4_moe.sglang import router
    from sglang.srt.layers.moe import topk

    for name, value in {"_is_cuda": False, "_is_cpu": True}.items():
        monkeypatch.setattr(topk, name, value)
    router._said.clear()
    configured()
    with rank(sglang), torch.compiler.set_stance("force_eager"):
        yield topk


@pytest.fixture
def on(module, monkeypatch):
    """on(platform): SGLang selects as on a "CPU" or a "GPU"."""
    from sglang.kernels.ops.moe import moe_fused_gate, moe_route_radix

    def choose(platform: str) -> None:
        for name, value in {"_is_cuda": True, "_is_cpu": False, "fused_topk_deepseek": None}.items():
            if platform == "GPU":
                monkeypatch.setattr(module, name, value, raising=False)
        monkeypatch.setattr(moe_fused_gate, "is_arch_support_pdl", lambda: False)
        monkeypatch.setattr(moe_route_radix, "covered", lambda *inputs: False)  # compiled for a GPU

    return choose


@pytest.fixture
def said(caplog):
    """said() -> the plugin's lines about the selection so far."""
    caplog.set_level("INFO", "nvfp4_moe.sglang")
    return lambda: [line for line in caplog.messages if "layer 3 and others" in line]


def make(module, bias=None, backend="nvfp4_moe", **options):
    """Makes a TopK of SGLang's and associates it with a runner, as its models do."""
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    topk = module.TopK(**{"layer_id": 3, "top_k": TOP_K, "correction_bias": bias} | options)
    topk.bind_runner_backend(resolve_moe_runner_backend(backend))
    return topk


def select(module, topk, logits, platform="CPU", **named):
    """Returns (ids, weights) of a TopK."""
    forward = topk.forward_cuda if platform == "GPU" else topk.forward_native
    out = forward(torch.zeros(len(logits), 4), logits, **named)
    assert module.TopKOutputChecker.format_is_standard(out) and torch.equal(out.router_logits, logits)
    return out.topk_ids, out.topk_weights


GROUPS_OF_1 = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
GROUPS_OF_8 = {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 4}
SIGMOID, ON_OUTPUT = {"scoring_func": "sigmoid"}, {"apply_routed_scaling_factor_on_output": True}


def factor(value: float) -> dict:
    return {"routed_scaling_factor": value} | ON_OUTPUT


# name -> (experts, top_k, has a bias, the arguments of SGLang's model, whether SGLang's code for GPUs runs here). The
# sizes are those of published models.
ROUTERS = {
    "qwen3": (128, 8, False, {"use_grouped_topk": False}, True),
    "qwen2": (60, 4, False, {"renormalize": False}, True),
    "mixtral": (8, 2, False, {}, True),
    "gpt_oss": (128, 4, False, {"renormalize": True}, True),
    "deepseek_v2": (
        160, 6, False,
        {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 3, "renormalize": False} | factor(16.0), True,
    ),
    "deepseek_v2_lite": (64, 6, False, GROUPS_OF_1 | {"renormalize": False, "routed_scaling_factor": 1.0}, True),
    "grouped softmax": (64, 6, False, GROUPS_OF_8, True),
    "grouped sigmoid": (64, 6, False, GROUPS_OF_8 | SIGMOID, True),
    "deepseek_v3": (256, 8, True, GROUPS_OF_8 | SIGMOID | factor(2.5), True),
    "deepseek_v3, factor in the layer": (256, 8, True, GROUPS_OF_8 | SIGMOID | {"routed_scaling_factor": 2.5}, True),
    "bailing, as it is": (256, 8, True, GROUPS_OF_8 | SIGMOID | {"renormalize": False}, True),
    "kimi_k2": (384, 8, True, GROUPS_OF_1 | SIGMOID | factor(2.827), True),
    "kimi_linear": (256, 8, True, GROUPS_OF_1 | factor(2.446), True),  # sigmoid, though nothing names it
    "kimi_k3": (896, 16, True, GROUPS_OF_1 | SIGMOID | factor(2.827), True),
    "glm4_moe": (160, 8, True, GROUPS_OF_1 | factor(2.5) | {"fused_shared_experts_scaling_factor": 1}, True),
    "glm4_moe_lite": (64, 4, True, GROUPS_OF_1 | factor(1.8), True),
    "nemotron_3_nano": (128, 6, True, GROUPS_OF_1 | SIGMOID | factor(2.5), True),
    "nemotron_3_super": (512, 22, True, GROUPS_OF_1 | SIGMOID | factor(5.0), True),
    "minimax_m2": (256, 8, True, SIGMOID | {"routed_scaling_factor": 1.0}, True),
    "minimax_m3": (128, 4, True, SIGMOID | factor(2.0), True),
    "step3p5": (288, 8, True, SIGMOID, True),
    "sigmoid": (64, 6, False, SIGMOID, False),  # SGLang's kernel needs a bias
    "deepseek_v4": (256, 6, True, {"scoring_func": "sqrtsoftplus"} | factor(1.5), True),
    "deepseek_v41": (  # Triton's interpreter has no log1p
        384, 6, True, {"scoring_func": "sqrtsoftplus", "sqrtsoftplus_log1p": True} | factor(1.5), False,
    ),
}  # fmt: skip
CASES = [(name, platform) for name in ROUTERS for platform in ("CPU", "GPU") if platform == "CPU" or ROUTERS[name][4]]


def as_scores(config, bias):
    """The router and its bias as has_tie judges SGLang's code, which compares scores. Ours compares logits if it can,
    and so also those whose sigmoid is 1 in float32."""
    if bias is None and config.scoring == "sigmoid":
        return dataclasses.replace(config, correction_bias=True), torch.zeros(config.num_experts)
    return config, None if bias is None else bias.data


@pytest.mark.parametrize(("name", "platform"), CASES)
def test_chosen_experts_and_weights_are_sglangs(module, on, said, name, platform):
    experts, top_k, biased, options, _ = ROUTERS[name]
    on(platform)
    tokens = 400 if platform == "CPU" else 64  # the interpreter is slow
    logits = numbers(tokens, experts, torch.float32, seed=len(name))
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(2)) * 0.1 if biased else None
    bias = None if bias is None else torch.nn.Parameter(bias)
    ids, weights = select(module, make(module, bias, "triton", top_k=top_k, **options), logits, platform)
    assert said() == []
    topk = make(module, bias, top_k=top_k, **options)
    our_ids, our_weights = select(module, topk, logits, platform)
    (line,) = said()
    assert line.startswith("nvfp4_moe selects the experts of layer 3 and others: ")
    assert (our_ids.dtype, our_weights.dtype) == (torch.int32, torch.float32)
    config = topk.topk_config.nvfp4_moe_router.view(logits).router
    assert (config.num_experts, config.top_k, config.correction_bias) == (experts, top_k, biased)
    judged, judged_bias = as_scores(config, bias)
    unclear = has_tie(judged, logits, judged_bias)
    same = same_experts(ids, our_ids)
    print(f"\n{name}: {int((~same).sum())} of {tokens} tokens differ, {int(unclear.sum())} have a tie")
    assert (same | unclear).all()
    assert int(unclear.sum()) < tokens / 4, "too many ties to say anything"
    ours = in_their_order(ids, our_ids, our_weights)
    off = ((weights.double() - ours).abs() > plain_bound(config, logits, ids, ours))[same]
    assert not off.any(), f"{int(off.sum())} weights beyond the bound"
    assert torch.equal(our_ids, select(module, topk, logits.double().float(), platform)[0])


def test_logits_in_bfloat16_are_scored_in_float32(module):
    logits, bias = torch.randn(40, 64).bfloat16(), torch.randn(64) * 0.1
    topk = make(module, bias, top_k=6, **GROUPS_OF_8)
    for mine, exact in zip(select(module, topk, logits), select(module, topk, logits.float()), strict=True):
        assert torch.equal(mine, exact)


def test_a_bias_chooses_experts_and_does_not_weigh_them(module):
    """The cases above would not notice a bias of zeros on both sides. Later values of the bias are used, too."""
    bias = torch.nn.Parameter(torch.zeros(EXPERTS))
    bias.data[5] = 10
    topk, logits = make(module, bias, **GROUPS_OF_1), torch.linspace(1, 0, EXPERTS)[None]
    ids, weights = select(module, topk, logits)
    assert ids.tolist() == [[5, 0]]
    scores = torch.sigmoid(logits[0, [5, 0]])
    torch.testing.assert_close(weights[0], scores / scores.sum())
    bias.data.copy_(-bias.data)  # a reload
    assert select(module, topk, logits)[0].tolist() == [[0, 1]]
    topk.topk_config.correction_bias = torch.eye(EXPERTS)[7] * 9  # as a model does whose weights are on the host
    assert select(module, topk, logits)[0].tolist() == [[7, 0]]


@pytest.mark.parametrize("platform", ["CPU", "GPU"])
def test_scores_that_are_all_zero_weigh_nothing(module, on, platform):
    on(platform)
    logits, bias = torch.full((3, EXPERTS), -200.0), torch.zeros(EXPERTS)
    for backend in ("triton", "nvfp4_moe"):
        weights = select(module, make(module, bias, backend, **GROUPS_OF_1), logits, platform)[1]
        assert torch.equal(weights, torch.zeros(3, TOP_K)), backend


# ---- what SGLang does after the selection


@pytest.mark.parametrize("platform", ["CPU", "GPU"])
@pytest.mark.parametrize("options", [{}, GROUPS_OF_1 | factor(2.5)], ids=["softmax", "biased"])
def test_padded_rows_recorders_and_no_tokens(module, on, monkeypatch, options, platform):
    on(platform)
    recorded, captured = [], []
    named = types.SimpleNamespace
    recorder = named(on_select_experts=lambda topk_ids: recorded.append(topk_ids.clone()))
    capturer = named(capture=lambda layer_id, topk_indices: captured.append((layer_id, topk_indices.clone())))
    monkeypatch.setattr(module, "get_global_expert_distribution_recorder", lambda: recorder)
    monkeypatch.setattr(module, "get_global_experts_capturer", lambda: capturer)
    topk = make(module, torch.zeros(EXPERTS) if options else None, **options)
    logits = torch.randn(5, EXPERTS)
    whole, weights = select(module, topk, logits, platform)
    ids, again = select(module, topk, logits, platform, num_token_non_padded=torch.tensor(3))
    assert torch.equal(ids[:3], whole[:3]) and (ids[3:] == -1).all() and (whole >= 0).all()
    assert torch.equal(weights, again)
    assert torch.equal(recorded[0], whole) and torch.equal(recorded[1], ids)
    assert captured[0][0] == 3 and torch.equal(captured[0][1], whole)
    topk.topk_config.allow_routed_experts_capture = False  # SGLang does so for draft models, late
    select(module, topk, logits, platform)
    assert len(captured) == 2 and len(recorded) == 3
    for part in select(module, topk, logits[:0], platform):
        assert part.shape == (0, TOP_K)


def test_the_layer_runs_on_the_selected_experts(module, sglang):
    """From logits to output, with SGLang's block around: its runner gets these ids and weights."""
    import models
    from expert_layer import library

    model = models.make(3)
    layer = make_layer("modelopt", routed_scaling_factor=2.5)
    load(layer, "modelopt", model)
    pack(layer)
    fused = layer.should_fuse_routed_scaling_factor_in_topk
    bias = torch.randn(models.EXPERTS) * 0.1
    topk = module.TopK(
        models.TOP_K, layer_id=0, correction_bias=bias, routed_scaling_factor=2.5,
        apply_routed_scaling_factor_on_output=fused, **GROUPS_OF_1,
    )  # fmt: skip
    topk.bind_runner_backend(layer.runner_backend, routing_method_type=layer.routing_method_type)
    hidden, logits = torch.randn(6, models.HIDDEN).bfloat16(), torch.randn(6, models.EXPERTS)
    config = nvfp4_moe.RouterConfig(
        models.EXPERTS, models.TOP_K, "sigmoid", True, 1e-20, 2.5, group_score="top2_sum", correction_bias=True
    )
    chosen = nvfp4_moe.select_experts(logits, config, correction_bias=bias)
    assert torch.equal(layer(hidden.clone(), topk(hidden, logits)), library(model, (hidden, *chosen)))


# ---- left to SGLang

FUSED_SHARED = {"num_fused_shared_experts": 1}
# name -> (fields of the config, the reason)
LEFT = {
    "a function": ({"custom_routing_function": print}, "TopK has a custom_routing_function"),
    "packed ids": ({"fused_gate_packed_ids": True}, "TopK has a fused_gate_packed_ids"),
    "a new field": ({"temperature": 2.0}, "TopKConfig has the unknown field temperature"),
    "other scores": ({"scoring_func": "tanh"}, "TopK has scores by tanh"),
    "softmax and a bias": (
        {"correction_bias": torch.zeros(EXPERTS)},
        "TopK has softmax and a bias, which only some of SGLang's kernels add",
    ),
    "other scores of groups": (
        GROUPS_OF_1 | {"scoring_func": "sqrtsoftplus"}, "TopK has no scores by sqrtsoftplus with groups",
    ),
    "groups of one": (GROUPS_OF_8, "TopK has 8 groups of 8 experts"),
    "groups that are not equal": (GROUPS_OF_8 | {"num_expert_group": 3}, "TopK has 3 groups of 8 experts"),
    "groups that are too few": (
        GROUPS_OF_8 | {"num_expert_group": 4, "topk_group": 0}, "TopK: topk_group: expected 1..4, got 0",
    ),
    "no number of groups": (GROUPS_OF_1 | {"num_expert_group": None}, "TopK: int() argument must be"),
    "too many experts": ({"top_k": 9}, "TopK: top_k: expected"),
    "a negative factor": (factor(-1.0), "TopK: routed_scaling_factor: expected finite and > 0, got -1"),
    "a bias in bfloat16": (
        SIGMOID | {"correction_bias": torch.zeros(EXPERTS).bfloat16()},
        "correction_bias: expected contiguous float32 (8,) on cpu",
    ),
    "a bias of each token": (
        SIGMOID | {"correction_bias": torch.zeros(5, EXPERTS)},
        "correction_bias: expected contiguous float32 (8,) on cpu",
    ),
}  # fmt: skip


@pytest.fixture
def calls(module, monkeypatch):
    """The configs of calls of select_experts that reach SGLang's code."""
    seen = []
    own = module.select_experts.__wrapped__
    cell = next(cell for cell in module.select_experts.__closure__ if cell.cell_contents is own)

    def watch(**named):
        seen.append(named["topk_config"])
        return "selected by SGLang"

    cell.cell_contents = watch
    yield seen
    cell.cell_contents = own


@pytest.mark.parametrize("name", LEFT)
def test_sglang_selects_what_the_library_does_not_compute(module, said, calls, name):
    fields, why = LEFT[name]
    topk = make(module)
    for field, value in fields.items():
        setattr(topk.topk_config, field, value)
    for _ in range(2):
        out = topk.forward_native(torch.zeros(5, 4), torch.randn(5, EXPERTS))
        assert out == "selected by SGLang" and calls.pop() is topk.topk_config
    (line,) = said()
    assert line.startswith(SAID + why)


def test_sglang_selects_fused_shared_experts(module, said, calls):
    from sglang.srt.configs.shared_experts import SharedExpertsConfig

    for shared in (SharedExpertsConfig(num_fused_shared_experts=1), SharedExpertsConfig(use_waterfill=True)):
        topk = make(module)
        topk.topk_config.shared_experts = shared
        topk.forward_native(torch.zeros(5, 4), torch.randn(5, EXPERTS))
        assert calls.pop() is topk.topk_config
    assert said() == [f"{SAID}TopK also selects fused shared experts"]


@pytest.mark.parametrize("argument", ["expert_location_dispatch_info", "dynamic_expert_bias"])
def test_sglang_selects_for_calls_with_more_arguments(module, said, calls, argument):
    topk = make(module)
    topk.forward_native(torch.zeros(5, 4), torch.randn(5, EXPERTS), **{argument: object()})
    assert calls.pop() is topk.topk_config and said() == [f"{SAID}select_experts gets {argument}"]


def test_sglang_selects_if_it_ignores_the_routing_function(module, said, calls):
    """As a later release may."""
    topk = make(module)
    topk.forward_native(torch.zeros(5, 4), torch.randn(5, EXPERTS))
    assert calls[1] is topk.topk_config and calls[0] is not topk.topk_config
    assert said()[1:] == [f"{SAID}select_experts does not call the config's custom_routing_function"]


def test_a_config_that_changes_is_judged_again(module, said):
    topk, logits = make(module, torch.zeros(EXPERTS), **GROUPS_OF_1), torch.randn(5, EXPERTS)
    plain = select(module, topk, logits)[1]
    for field, value in factor(2.5).items():
        setattr(topk.topk_config, field, value)
    torch.testing.assert_close(select(module, topk, logits)[1], 2.5 * plain)
    topk.topk_config.correction_bias = torch.zeros(EXPERTS).bfloat16()
    torch.testing.assert_close(select(module, topk, logits)[1].sum(-1), torch.full((5,), 2.5))
    assert said()[-1].startswith(f"{SAID}correction_bias: ")


def test_sglang_selects_in_graphs_that_torch_compiles(module, said):
    topk, logits = make(module), torch.randn(5, EXPERTS)
    with torch.compiler.set_stance("default"):
        compiled = torch.compile(topk.forward_native, backend="eager")
        out = compiled(torch.zeros(5, 4), logits)
    assert said() == []
    eager, _ = select(module, topk, logits)
    assert torch.equal(out.topk_ids.sort(-1).values, eager.long().sort(-1).values) and len(said()) == 1


def test_routers_of_other_runners_are_sglangs(module):
    for backend in ("nvfp4_moe", "triton"):
        taken = hasattr(make(module, backend=backend).topk_config, "nvfp4_moe_router")
        assert taken == (backend == "nvfp4_moe")
