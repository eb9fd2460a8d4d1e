"""Gemma-4's experts in SGLang: its own block in this process, around the adapter's layer.

The block selects experts by the top logits and multiplies each weight by the expert's per_expert_scale. SGLang calls
its activation "gelu", whether the model's config has gelu by tanh or exact gelu.
"""

import json
import types

import models
import nvfp4_moe
import pytest
import torch
from expert_layer import batch, is_outside, library
from layers import NAME, load, make_layer, pack, quantization_config, rank, served


@pytest.fixture(scope="module")
def model():
    return models.make(3)


@pytest.fixture
def configured_for(configured, tmp_path):
    """configured_for(config): sets a served model whose config.json has this content."""

    def configure(config, **arguments):
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return configured(model_path=str(folder), **arguments)

    return configure


def gemma(activation):
    return {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "hidden_activation": activation}}


@pytest.mark.parametrize("form", models.QUANTIZED)
def test_the_models_config_decides_which_gelu_it_is(sglang, configured_for, model, form):
    inputs, outs = batch(), {}
    for declared, computed in (("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu")):
        configured_for(gemma(declared))
        outs[computed] = served(sglang, form, model, inputs, activation="gelu")
        assert torch.equal(outs[computed], library(model, inputs, activation=computed))
        assert not is_outside(model, inputs, outs[computed], activation=computed)
    assert not torch.equal(outs["gelu"], outs["gelu_tanh"])
    configured_for(gemma("gelu")["text_config"], moe_runner_backend="nvfp4_moe")  # a language model's config
    assert torch.equal(served(sglang, form, model, inputs, activation="gelu"), outs["gelu"])
    # DiffusionGemma's block passes the exact name.
    assert torch.equal(served(sglang, form, model, inputs, activation="gelu_tanh"), outs["gelu_tanh"])


@pytest.mark.parametrize(
    ("config", "given", "words"),
    [
        ({"model_type": "grok"}, {}, "expected hidden_activation gelu_pytorch_tanh or gelu .*got None"),
        (gemma("quick_gelu"), {}, "got quick_gelu"),
        (gemma("gelu"), {"gemm1_clamp_limit": 7.0}, "expected no limit and no alpha"),
        (gemma("gelu"), {"is_gated": False}, "not gated"),
    ],
)
def test_a_gelu_that_is_not_known_is_refused(sglang, configured_for, config, given, words):
    configured_for(config, moe_runner_backend="nvfp4_moe")
    with rank(sglang), pytest.raises(nvfp4_moe.Unsupported, match=f"{NAME}: activation gelu.*{words}"):
        make_layer("modelopt", activation="gelu", **given)


@pytest.mark.parametrize("form", ["modelopt", "compressed_w4a4"])
def test_sglangs_own_block_scales_each_expert(sglang, configured_for, model, form):
    """Against transformers' own router, with its norm and scale left out: SGLang applies them before the block."""
    from sglang.srt.models.gemma4_causal import Gemma4MoE
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter

    configured_for(gemma("gelu_pytorch_tanh"))
    hidden = batch()[0]
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(len(hidden), models.EXPERTS, generator=generator)
    scale = torch.rand(models.EXPERTS, generator=generator) * 2
    sizes = {"num_experts": models.EXPERTS, "top_k_experts": models.TOP_K}
    sizes |= {"hidden_size": models.HIDDEN, "moe_intermediate_size": models.INNER, "rms_norm_eps": 1e-6}
    config = types.SimpleNamespace(**sizes)
    with rank(sglang), torch.no_grad():
        block = Gemma4MoE(models.HIDDEN, 0, config, quantization_config(form), "model.layers.0.moe")
        block.per_expert_scale.copy_(scale)
        load(block.experts, form, model)
        pack(block.experts)
        out = block(hidden.clone(), logits)
    router = Gemma4TextRouter(config)
    router.norm, router.proj = torch.nn.Identity(), torch.nn.Identity()
    router.scale = torch.nn.Parameter(torch.full((models.EXPERTS,), 1 / router.scalar_root_size))  # so they cancel
    router.per_expert_scale.data.copy_(scale)
    with torch.no_grad():
        _, weights, ids = router(logits)
    assert not is_outside(model, (hidden, ids.int(), weights), out, activation="gelu_tanh")
    assert is_outside(model, (hidden, ids.int(), weights / scale[ids]), out, activation="gelu_tanh")
