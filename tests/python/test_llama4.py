"""Llama-4's MoE: a checkpoint of it, loaded as it is, against transformers' own module in float64, and the product of
hidden and router weight against torch's."""

from __future__ import annotations

import json

import numpy as np
import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")

import moe_reference as oracle  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = dict(hidden_size=128, intermediate_size=96, num_local_experts=8, num_experts_per_tok=1)
PREFIX = "language_model.model.layers.0.feed_forward."


@pytest.fixture(scope="module")
def module():
    """transformers' layer, float32, with weights of a usual size: outputs of both parts are of one order."""
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    from transformers import Llama4TextConfig

    made = llama4.Llama4TextMoe(Llama4TextConfig(**SIZES, num_hidden_layers=1, interleave_moe_layer_step=1))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            fan_in = parameter.shape[1]
            spread = (0.5 if name.startswith("router") else 1.5) / fan_in**0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return made


@pytest.fixture(scope="module")
def checkpoint(module, tmp_path_factory):
    from safetensors.torch import save_file

    directory = tmp_path_factory.mktemp("llama4")
    save_file(
        {PREFIX + n: p.detach().contiguous() for n, p in module.named_parameters()}, directory / "model.safetensors"
    )
    text = dict(SIZES, model_type="llama4_text", num_hidden_layers=1, interleave_moe_layer_step=1, hidden_act="silu")
    config = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def decoded(matrix) -> torch.Tensor:
    """(rows, K) float64 of an expert's matrix as it was quantized at load."""
    codes, scales = (torch.as_tensor(np.asarray(matrix[part]))[None] for part in ("codes", "scales"))
    return oracle.decode((codes, scales), 0) * float(matrix["tensor_scale"])


@pytest.fixture(scope="module")
def twin(module, checkpoint):
    """The module in float64 with the weights that the library holds."""
    import copy

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


def relative_l2(actual, expected) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_checkpoint_computes_what_transformers_does(checkpoint, twin, backend):
    """Roundings to bf16, of what gate and up multiply and of h, are all that differs: each moves its vector by at most
    2^-9. The first moves g and u by as much on average, and h by less than 1.1 times that twice: (2 * 1.1 + 1) * 2^-9,
    for either part, here with the room of 5 * 2^-9 = 1e-2. Either wrong reading of the weight is ten times beyond it."""
    layer = nv.MoeLayer.from_checkpoint(checkpoint, 0, backend=backend, activation_format="bf16", row_format="fp32")
    assert layer.config.router_weight == "on_input" and layer.config.shared_intermediate_size > 0
    assert layer.describe()["router_weight"] == "on_input"
    assert "router_weight_on_input" not in [f["id"] for f in nv.inspect(checkpoint)["findings"]]
    hidden = torch.randn(50, SIZES["hidden_size"], generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected, logits = twin(hidden.double())
    scores, ids = torch.sigmoid(logits).max(-1, keepdim=True)
    assert scores.min() < 0.8 and scores.max() < 1
    batch = ids.int(), scores.float()
    limit = 5 * 2.0**-9
    assert relative_l2(layer.run(hidden, *batch), expected) < limit
    on_output = nv.MoeLayer.from_checkpoint(
        checkpoint, 0, backend=backend, activation_format="bf16", row_format="fp32", router_weight="after_down"
    )
    ones = torch.ones_like(scores, dtype=torch.float32)
    assert relative_l2(on_output.run(hidden, *batch), expected) > 10 * limit
    assert relative_l2(on_output.run(hidden * scores.float(), batch[0], ones), expected) > 10 * limit


@pytest.mark.parametrize("activation_format", ["nvfp4", "bf16", "int8_block", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_product_is_torch_s(dtype, activation_format):
    """hidden * weight.to(hidden.dtype), as vLLM and transformers write it, bit for bit."""
    rng = np.random.default_rng(6)
    config = nv.MoeConfig(4, 1, 64, 48, router_weight="on_input", activation_format=activation_format)
    stacks = [torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in [(4, 48, 64)] * 2 + [(4, 64, 48)]]
    weights = dict(zip(("gate", "up", "down"), stacks, strict=True))
    layer = nv.MoeLayer.from_bf16(config, **weights, max_tokens=16)
    plain = nv.MoeLayer.from_bf16(
        nv.MoeConfig(4, 1, 64, 48, activation_format=activation_format), **weights, max_tokens=16
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
