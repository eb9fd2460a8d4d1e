"""Routers against transformers' own classes, run in float64: the selection and the weights of each model type that
RouterConfig.from_model_config knows, within the bounds of docs/explanation/numerics.md, section 12."""

from __future__ import annotations

from typing import Any

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from router_bounds import masked_by_groups, numbers, selection_scores, weight_bound  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402


class Float64(TorchFunctionMode):
    """Runs code that casts to float32 in float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        args = tuple(wide(a) for a in args)
        kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.float:
            return args[0].double()
        return function(*args, **kwargs)


def router_class(module: str, name: str):
    try:
        found = getattr(__import__(f"transformers.models.{module}.modeling_{module}", fromlist=[name]), name, None)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return found


class Config(dict):
    """A config.json as a dict, and as an object for transformers' router classes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def plain(model_type: str, experts: int, top_k: int, **more: Any) -> Config:
    sizes = dict(num_experts=experts, num_local_experts=experts, num_experts_per_tok=top_k)
    return Config(model_type=model_type, **sizes, **more)


def deepseek(model_type: str, experts: int, top_k: int, groups: int, kept: int, factor: float = 2.5, norm: bool = True):
    more = dict(n_group=groups, topk_group=kept, norm_topk_prob=norm, routed_scaling_factor=factor)
    return plain(model_type, experts, top_k, n_routed_experts=experts, **more)


def v2(experts: int, top_k: int, groups: int, kept: int, factor: float, method: str) -> Config:
    return Config(deepseek("deepseek_v2", experts, top_k, groups, kept, factor, False), topk_method=method)


def gemma(model_type: str) -> Config:
    return Config(model_type=model_type, num_experts=128, top_k_experts=8, rms_norm_eps=1e-6)


# Kimi-K3 has its own names for V3's fields. transformers has no class of it; SGLang 0.5.23 selects by the same code.
K3 = dict(num_experts_per_token=16, moe_renormalize=True, moe_router_activation_func="sigmoid", num_expert_group=1)
V4_CONFIG = plain(
    "deepseek_v4", 256, 6, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5, vocab_size=97, num_hash_layers=3
)


# (module and class in transformers, config). The sizes are those of published models.
ROUTERS = {
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeTopKRouter", plain("qwen3_moe", 128, 8, norm_topk_prob=True)),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeTopKRouter", plain("qwen2_moe", 60, 4, norm_topk_prob=False)),
    "qwen3_next": ("qwen3_next", "Qwen3NextTopKRouter", plain("qwen3_next", 512, 10, norm_topk_prob=True)),
    "qwen3_5": ("qwen3_5_moe", "Qwen3_5MoeTopKRouter", plain("qwen3_5_moe_text", 256, 8)),
    "qwen3_vl": ("qwen3_vl_moe", "Qwen3VLMoeTextTopKRouter", plain("qwen3_vl_moe_text", 128, 8)),
    "mixtral": ("mixtral", "MixtralTopKRouter", plain("mixtral", 8, 2)),
    "gpt_oss": ("gpt_oss", "GptOssTopKRouter", plain("gpt_oss", 128, 4)),
    "llama4": ("llama4", "Llama4Router", plain("llama4_text", 128, 1)),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2TopkRouter", v2(160, 6, 8, 3, 16.0, "group_limited_greedy")),
    "deepseek_v2_lite": ("deepseek_v2", "DeepseekV2TopkRouter", v2(64, 6, 1, 1, 1.0, "greedy")),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3TopkRouter", deepseek("deepseek_v3", 256, 8, 8, 4)),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32TopkRouter", deepseek("deepseek_v32", 256, 8, 8, 4)),
    "kimi_k2": ("deepseek_v3", "DeepseekV3TopkRouter", deepseek("kimi_k2", 384, 8, 1, 1, 2.827)),
    "kimi_linear": ("kimi_linear", "KimiLinearTopkRouter", deepseek("kimi_linear", 256, 8, 1, 1, 2.446)),
    "odd_groups": ("deepseek_v3", "DeepseekV3TopkRouter", deepseek("deepseek_v3", 90, 5, 6, 2, norm=False)),
    "glm4_moe": ("glm4_moe", "Glm4MoeTopkRouter", deepseek("glm4_moe", 160, 8, 1, 1)),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteTopkRouter", deepseek("glm4_moe_lite", 64, 4, 1, 1, 1.8)),
    "glm4v_moe": ("glm4v_moe", "Glm4vMoeTextTopkRouter", deepseek("glm4v_moe_text", 128, 8, 1, 1, 1.0)),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsaTopkRouter", deepseek("glm_moe_dsa", 256, 8, 1, 1)),
    "glm5_next": ("glm5_next", "Glm5NextTextTopkRouter", deepseek("glm5_next_text", 256, 8, 1, 1)),
    "kimi_k3": ("kimi_linear", "KimiLinearTopkRouter", Config(deepseek("kimi_k3", 896, 16, 1, 1, 2.446), **K3)),
    "gemma4": ("gemma4", "Gemma4TextRouter", gemma("gemma4_text")),
    "diffusion_gemma": ("diffusion_gemma", "DiffusionGemmaTextRouter", gemma("diffusion_gemma_text")),
    "nemotron_3_nano": ("nemotron_h", "NemotronHTopkRouter", deepseek("nemotron_h", 128, 6, 1, 1)),
    "nemotron_3_super": ("nemotron_h", "NemotronHTopkRouter", deepseek("nemotron_h", 512, 22, 1, 1, 5.0)),
    "nemotron_groups": ("nemotron_h", "NemotronHTopkRouter", deepseek("nemotron_h", 64, 6, 8, 3, 2.5)),
    "minimax_m2": ("minimax_m2", "MiniMaxM2TopKRouter", plain("minimax_m2", 256, 8)),
    "minimax_m3": ("minimax_m3_vl", "MiniMaxM3VLTopKRouter", plain("minimax_m3_vl", 128, 4, routed_scaling_factor=2.0)),
    "deepseek_v4": ("deepseek_v4", "DeepseekV4TopKRouter", V4_CONFIG),
    "ling_3": ("bailing_hybrid", "BailingHybridTopkRouter", deepseek("bailing_hybrid", 512, 8, 8, 4)),
    "beam": ("beam", "BeamTopKRouter", deepseek("beam", 256, 8, 8, 4)),
    "dots3": ("dots3_note", "Dots3NoteTextTopkRouter", deepseek("dots3_note_text", 256, 8, 1, 1, 1.0)),
    "hy_v4_vl": ("hy_v4_vl", "HYV4VLTopkRouter", deepseek("hy_v4_vl_text", 256, 8, 1, 1, 2.827)),
    "sarvam_moe": ("glm4_moe", "Glm4MoeTopkRouter", deepseek("sarvam_moe", 128, 6, 1, 1)),
    "sarvam_mla": ("deepseek_v3", "DeepseekV3TopkRouter", deepseek("sarvam_mla", 128, 8, 1, 1)),
    "unlimited_ocr": (
        "unlimited_ocr",
        "UnlimitedOcrTextTopkRouter",
        Config(v2(64, 6, 1, 1, 1.0, "greedy"), model_type="unlimited_ocr_text"),
    ),
    "mistral_large4": (
        "mistral_large4",
        "MistralLarge4TextTopkRouter",
        deepseek("mistral_large4_text", 128, 4, 4, 2, 1.5),
    ),
    "lara": ("lara_mini", "LaraMiniTopKRouter", plain("lara_mini", 128, 8, norm_topk_prob=True)),
    "flint": ("flint", "FlintTopKRouter", plain("flint", 256, 6, norm_topk_prob=True)),
    # transformers has no class of it. Its fields name V4's scoring, and it has no hash layers.
    "deepseek_v41": ("deepseek_v4", "DeepseekV4TopKRouter", Config(V4_CONFIG, model_type="deepseek_v41_text")),
    "deepseek_v4_hash": ("deepseek_v4", "DeepseekV4HashRouter", V4_CONFIG),
}


def run_oracle(name: str, logits, bias, token_ids, table, scale):
    """(ids, weights) of transformers' class in float64, ids as it chose them, and the class."""
    module, class_name, config = ROUTERS[name]
    experts = logits.shape[1]
    config = Config(config, hidden_size=experts)
    router = router_class(module, class_name)(config).double()
    if hasattr(router, "per_expert_scale"):  # it makes its own logits, from hidden that it normalizes
        router.norm, router.proj, router.scalar_root_size = torch.nn.Identity(), torch.nn.Identity(), 1.0
        router.per_expert_scale.data = scale.double()
        with Float64(), torch.no_grad():
            return router(logits.double())[:0:-1]
    router.weight = torch.nn.Parameter(torch.eye(experts, dtype=torch.float64))
    arguments = []
    if hasattr(router, "e_score_correction_bias"):
        router.e_score_correction_bias = bias.double()
    elif class_name == "MiniMaxM2TopKRouter":
        arguments = [bias.double()]
    if hasattr(router, "tid2eid"):
        router.tid2eid = table
        arguments = [token_ids]
    with Float64(), torch.no_grad():
        result = router(logits.double(), *arguments)
    if class_name == "Llama4Router":
        scores, raw = result
        ids = torch.topk(raw, config.num_experts_per_tok, dim=1).indices
        return ids, scores.gather(1, ids)
    factor = config.routed_scaling_factor if name in ("minimax_m3", "beam") else 1.0  # the block applies it
    return result[2], result[1] * factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_against_transformers(name: str, dtype) -> None:
    is_hash = name.endswith("hash")
    config = nv.RouterConfig.from_model_config(ROUTERS[name][2], layer=0 if is_hash else 10)
    tokens, experts, k = 600, config.num_experts, config.top_k
    logits = numbers(tokens, experts, dtype, len(name))
    if name == "flint":  # it selects by sigmoid, which is 1 for large logits
        logits = (logits.float() / logits.float().abs().max() * 20).to(dtype)
    g = torch.Generator().manual_seed(7)
    bias = torch.randn(experts, generator=g) * 0.1
    token_ids = torch.randint(0, 97, (tokens,), generator=g)
    table = torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(97)])
    scale = torch.randn(experts, generator=g)
    options: dict[str, Any] = {"correction_bias": bias} if config.correction_bias else {}
    options |= {"expert_scale": scale} if config.expert_scale else {}
    if is_hash:
        options = {"token_ids": token_ids, "hash_table": table}
    ids, weights = nv.select_experts(logits, config, **options)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    oracle_ids, oracle_weights = run_oracle(name, logits, bias, token_ids, table, scale)
    assert oracle_weights.dtype == torch.float64

    if is_hash:
        assert torch.equal(ids.long(), oracle_ids)
        clear = torch.ones(tokens, dtype=torch.bool)
    else:
        scores, error = selection_scores(config, logits, bias)
        masked, unclear = masked_by_groups(config, scores, error)
        order = masked.topk(k + 1, dim=-1).values
        clear = ~unclear & (order[:, k - 1] - order[:, k] > 2 * error.amax(-1))
        assert torch.equal(ids[clear].long().sort(-1).values, oracle_ids[clear].sort(-1).values)
        # The others are ties: the chosen score is within the error of the best possible one.
        chosen = scores.gather(1, ids.long())
        floor = order[:, k - 1 : k] - 2 * error.amax(-1, keepdim=True)
        assert (chosen >= floor)[~unclear].all()
        assert clear.float().mean() > (0.9 if dtype == torch.float32 else 0.3), "hardly a token decides anything"
        assert (chosen.diff(dim=-1) <= 2 * error.amax(-1, keepdim=True)).all(), "best first"
    rows = torch.nonzero(clear)[:, 0]
    expected = torch.zeros(tokens, experts, dtype=torch.float64).scatter(1, oracle_ids, oracle_weights)
    expected = expected.gather(1, ids.long())[rows]
    bound = weight_bound(config, logits[rows], ids[rows], expected, scale if config.expert_scale else None)
    assert ((weights[rows].double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_gemmas_block_from_logits(backend: str, tmp_path) -> None:
    """transformers' router and experts in float64, with the layer's weights: one call from logits to output."""
    own_experts = pytest.importorskip("own_experts")
    found = router_class("gemma4", "Gemma4TextRouter"), router_class("gemma4", "Gemma4TextExperts")
    sizes = dict(hidden_size=own_experts.moe_classes.HIDDEN, moe_intermediate_size=48, num_experts=8, top_k_experts=2)
    config = transformers.Gemma4TextConfig(**sizes, hidden_activation="gelu_pytorch_tanh")
    router, experts = (one(config) for one in found)
    g = torch.Generator().manual_seed(5)
    for parameter in (router.proj.weight, experts.gate_up_proj, experts.down_proj):
        parameter.data = torch.randn(parameter.shape, generator=g) * parameter.shape[-1] ** -0.5
    router.per_expert_scale.data = torch.rand(8, generator=g) * 2
    hidden = torch.randn(16, config.hidden_size, generator=g).bfloat16().float()
    seen = []
    router.proj.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        _, weights, ids = router(hidden)
    options = nv.MoeConfig(
        8, 2, config.hidden_size, 48, activation="gelu_tanh", activation_format="bf16", row_format="fp32"
    )
    gate, up = experts.gate_up_proj.data.chunk(2, 1)
    layer = nv.MoeLayer.from_bf16(
        options, gate=gate, up=up, down=experts.down_proj.data, backend=backend, max_tokens=16
    )
    made = nv.RouterConfig.from_model_config({**config.to_dict(), "model_type": "gemma4_text"})
    topk = torch.empty(16, 2, dtype=torch.int64), torch.empty(16, 2)
    scale = router.per_expert_scale.data
    out = layer.run_logits(hidden, seen[0], made, expert_scale=scale, topk=topk)
    order, theirs = topk[0].argsort(-1), ids.argsort(-1)
    assert torch.equal(topk[0].gather(1, order), ids.gather(1, theirs))
    assert torch.allclose(topk[1].gather(1, order), weights.gather(1, theirs), rtol=2**-20, atol=0)
    twin = own_experts.twin_of(experts, lambda e: layer.expert(e), "gemma4")
    own_experts.check_output(out, twin, own_experts.Batch(hidden, ids, weights), "gemma4")
    without_scale = nv.RouterConfig(8, 2, renormalize=True)
    with pytest.raises(own_experts.Judged):
        plain_out = layer.run_logits(hidden, seen[0], without_scale)
        own_experts.check_output(plain_out, twin, own_experts.Batch(hidden, ids, weights), "without its scales")


# ---- config.json


V2, V3, V4 = (dict(ROUTERS[f"deepseek_v{version}"][2]) for version in (2, 3, 4))


def without(config: dict, name: str) -> dict:
    return {key: value for key, value in config.items() if key != name}


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({**V3, "model_type": "motif"}, nv.Unsupported, "model_type motif: its router is not known"),
        ({**V3, "model_type": "kolibri1"}, nv.Unsupported, "model_type kolibri1: its bias is added to the logits"),
        ({**V3, "model_type": "muse_spark"}, nv.Unsupported, "multiplied by output_multiplier"),
        (without(gemma("gemma4_text"), "top_k_experts"), nv.BadInput, "num_experts_per_tok: missing"),
        ({**V3, "model_type": "gpt2"}, nv.Unsupported, "expected a type whose router is known .*, got 'gpt2'"),
        (without(V3, "n_group"), nv.BadInput, "n_group: missing, and the router of deepseek_v3 needs it"),
        (without(V3, "routed_scaling_factor"), nv.BadInput, "routed_scaling_factor: missing"),
        ({**V3, "n_group": "8"}, nv.BadInput, "n_group: expected"),
        ({**V3, "n_group": True}, nv.BadInput, "n_group: expected"),
        ({**V3, "norm_topk_prob": 1}, nv.BadInput, "norm_topk_prob: expected"),
        ({**V3, "scoring_func": "softmax"}, nv.Unsupported, "scoring_func"),
        ({**V3, "topk_method": "greedy"}, nv.Unsupported, "topk_method"),
        ({**V2, "norm_topk_prob": True}, nv.Unsupported, "norm_topk_prob: expected False"),
        ({**V2, "topk_method": "noaux_tc"}, nv.Unsupported, "topk_method"),
        (V4, nv.InvalidArgument, "layer: expected one"),
    ],
)
def test_model_configs_that_are_declined(config, error, words) -> None:
    with pytest.raises(error, match=words):
        nv.RouterConfig.from_model_config(config)


def test_model_configs_in_wrappers_and_layers() -> None:
    from_config = nv.RouterConfig.from_model_config
    assert from_config({"model_type": "kimi_k25", "text_config": V3}) == from_config(V3)
    routers = [from_config(V4, layer) for layer in (0, 2, 3)]
    assert [(one.hash_routing, one.correction_bias) for one in routers] == [(True, False), (True, False), (False, True)]
    listed = {**without(V4, "num_hash_layers"), "mlp_layer_types": ["moe", "hash_moe"]}
    assert [from_config(listed, layer).hash_routing for layer in (0, 1)] == [False, True]
    with pytest.raises(nv.InvalidArgument, match="layer: expected 0 to 1, got 2"):
        from_config(listed, 2)
