"""Llama-4's MoE: a checkpoint of it, loaded unchanged, against transformers' own module in float64.

Also the product of hidden and router weight, against torch's.
"""

from __future__ import annotations

import copy

import numpy as np
import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")

from family_checks import LIMIT, W4A16, decoded, relative_l2, write  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = dict(hidden_size=128, intermediate_size=96, num_local_experts=8, num_experts_per_tok=1)


@pytest.fixture(scope="module")
def module():
    """transformers' layer, float32, with weights of a usual size: outputs of both parts are of one order."""
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    from transformers import Llama4TextConfig

    made = llama4.Llama4TextMoe(Llama4TextConfig(**SIZES, num_hidden_layers=1, interleave_moe_layer_step=1))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            spread = (0.5 if name.startswith("router") else 1.5) / parameter.shape[1] ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return made


@pytest.fixture(scope="module")
def checkpoint(module, tmp_path_factory):
    tensors = {f"language_model.model.layers.0.feed_forward.{n}": p for n, p in module.named_parameters()}
    text = dict(SIZES, model_type="llama4_text", num_hidden_layers=1, interleave_moe_layer_step=1, hidden_act="silu")
    config = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    return write(tmp_path_factory.mktemp("llama4"), tensors, **config)


@pytest.fixture(scope="module")
def twin(module, checkpoint):
    """The module in float64 with the weights that the library holds."""
    made, loaded = copy.deepcopy(module).double(), nv.Checkpoint(str(checkpoint))
    with torch.no_grad():
        for e in range(SIZES["num_local_experts"]):
            gate, up, down = (decoded(loaded.expert(0, e)[m]) for m in ("gate", "up", "down"))
            made.experts.gate_up_proj[e] = torch.cat([gate, up]).T
            made.experts.down_proj[e] = down.T
        shared = loaded.shared_expert(0)
        for m in ("gate", "up", "down"):
            getattr(made.shared_expert, f"{m}_proj").weight.copy_(decoded(shared[m]))
    return made


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_checkpoint_computes_what_transformers_does(checkpoint, twin, backend):
    """Either wrong reading of the router weight is ten times beyond the limit."""
    options = dict(backend=backend, **W4A16)
    layer = nv.MoeLayer.from_checkpoint(checkpoint, 0, **options)
    assert layer.config.router_weight == "on_input" and layer.config.shared_intermediate_size > 0
    assert layer.describe()["router_weight"] == "on_input"
    assert "router_weight_on_input" not in [f["id"] for f in nv.inspect(checkpoint)["findings"]]
    hidden = torch.randn(50, SIZES["hidden_size"], generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected, logits = twin(hidden.double())
    scores, ids = torch.sigmoid(logits).max(-1, keepdim=True)
    assert scores.min() < 0.8 and scores.max() < 1
    ids, scores = ids.int(), scores.float()
    assert relative_l2(layer.run(hidden, ids, scores), expected) < LIMIT
    on_output = nv.MoeLayer.from_checkpoint(checkpoint, 0, router_weight="after_down", **options)
    assert relative_l2(on_output.run(hidden, ids, scores), expected) > 10 * LIMIT
    assert relative_l2(on_output.run(hidden * scores, ids, torch.ones_like(scores)), expected) > 10 * LIMIT


@pytest.mark.parametrize("activation_format", ["nvfp4", "bf16", "int8_block", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_product_is_torch_s(dtype, activation_format):
    """hidden * weight.to(hidden.dtype), as vLLM and transformers write it, bit for bit."""
    rng = np.random.default_rng(6)
    shapes = {"gate": (4, 48, 64), "up": (4, 48, 64), "down": (4, 64, 48)}
    weights = {name: torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for name, s in shapes.items()}
    layer, plain = (
        nv.MoeLayer.from_bf16(
            nv.MoeConfig(4, 1, 64, 48, router_weight=where, activation_format=activation_format),
            **weights,
            max_tokens=16,
        )
        for where in ("on_input", "after_down")
    )
    hidden = torch.from_numpy(rng.standard_normal((16, 64)).astype(np.float32)).to(dtype)
    ids = torch.from_numpy(rng.integers(-1, 4, (16, 1)).astype(np.int32))
    scores = torch.sigmoid(torch.from_numpy(rng.standard_normal((16, 1)).astype(np.float32)))
    expected = plain.run(hidden * scores.to(dtype), ids, torch.ones_like(scores))
    assert torch.equal(layer.run(hidden, ids, scores), expected)


def test_more_than_one_expert_a_token_is_refused():
    with pytest.raises(ValueError, match="top_k: expected 1 with router_weight on_input"):
        nv.MoeConfig(4, 2, 64, 48, router_weight="on_input")
    with pytest.raises(ValueError, match='router_weight.*on_input.*got "on_output"'):
        nv.MoeConfig(4, 1, 64, 48, router_weight="on_output")
