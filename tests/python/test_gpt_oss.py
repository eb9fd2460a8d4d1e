"""gpt-oss: its MoE as published (MXFP4, biases, gate and up in alternate rows), loaded unchanged.

transformers' own experts in float64, on weights from transformers' own decoder, are the oracle. Its floats:
test_moe_classes.py; GGUF: test_gguf.py.
"""

from __future__ import annotations

import shutil

import numpy as np
import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_checks as family  # noqa: E402
import model_judge as judge  # noqa: E402
import nvfp4_moe.transformers as adapter  # noqa: E402
import tiny_models as tiny  # noqa: E402
from checkpoints import raw  # noqa: E402
from family_checks import LIMIT, W4A16, relative_l2  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERTS, HIDDEN, INTERMEDIATE = 4, 64, 96
PREFIX = "model.layers.0.mlp.experts."
SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Random blocks in the published form. Biases are as large as the sums, so that each bias counts."""
    directory = tmp_path_factory.mktemp("gpt_oss")
    tiny.gpt_oss(torch.bfloat16).save_pretrained(directory)
    g = torch.Generator().manual_seed(5)

    def change(key, tensor):
        if not key.endswith(("gate_up_proj", "down_proj")):
            return {key: tensor}
        experts, cols, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, cols // 32, 16), generator=g, dtype=torch.uint8)
        scales = torch.randint(120, 124, (experts, rows, cols // 32), generator=g).to(torch.uint8)
        return {key + "_blocks": blocks, key + "_scales": scales}

    tiny.rewrite(directory, change)
    tiny.change_config(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": SKIPPED})
    return directory


@pytest.fixture(scope="module")
def twin(published):
    """transformers' experts of layer 0 in float64."""
    made, tensors = tiny.gpt_oss().model.layers[0].mlp.experts.double(), raw(published)
    made.config._experts_implementation = "eager"  # grouped products take no float64
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            parts = tensors[f"{PREFIX}{name}_blocks"], tensors[f"{PREFIX}{name}_scales"]
            getattr(made, name).copy_(convert_moe_packed_tensors(*parts, dtype=torch.float32))
            getattr(made, name + "_bias").copy_(tensors[f"{PREFIX}{name}_bias"])
    return made


@pytest.fixture(scope="module")
def batch():
    g = torch.Generator().manual_seed(2)
    ids = torch.rand(40, EXPERTS, generator=g).topk(2).indices.int()
    return torch.randn(40, HIDDEN, generator=g), ids, torch.softmax(torch.randn(40, 2, generator=g), -1)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_is_published_computes_what_transformers_does(published, twin, batch, backend):
    layer = nv.MoeLayer.from_checkpoint(published, 0, backend=backend, **W4A16)
    config = layer.config
    assert (config.activation, config.swiglu_limit, config.router_weight) == ("swiglu_oai", 7.0, "after_down")
    assert config.swiglu_alpha == pytest.approx(1.702, rel=2.0**-24)
    hidden, ids, weights = batch
    with torch.no_grad():
        expected = twin(hidden.double(), ids.long(), weights.double())
    assert relative_l2(layer.run(*batch), expected) < LIMIT
    # A layer that forgets one of the three biases is far beyond it.
    experts = [layer.expert(e) for e in range(EXPERTS)]
    for forgotten in range(3):
        for e, expert in enumerate(experts):
            parts = [expert[p] for p in ("gate", "up", "down")]
            matrices = [(p["codes"], p["scales"], p["tensor_scale"]) for p in parts]
            layer.replace_expert(e, *matrices, biases=tuple(p["bias"] * (i != forgotten) for i, p in enumerate(parts)))
        assert relative_l2(layer.run(*batch), expected) > 3 * LIMIT


def test_slices_the_packed_cache_and_inspect(published, batch, tmp_path):
    family.check_slices_add_up(published, 0, batch, INTERMEDIATE // 3, INTERMEDIATE)
    _, mapped = family.from_cache(published, 0, batch, tmp_path, activation_format="bf16")
    assert np.array_equal(
        mapped.expert(3)["down"]["bias"], raw(published)[f"{PREFIX}down_proj_bias"][3].float().numpy()
    )
    assert family.warnings_of(published) == []


@pytest.mark.parametrize(
    ("name", "change", "finding"),
    [
        ("down_proj_bias", lambda t: None, "missing_bias"),
        ("gate_up_proj_bias", lambda t: t[:, 2:], "shape_mismatch"),
        ("down_proj_bias", lambda t: t.fill_(float("nan")), "bias_nonfinite"),
    ],
)
def test_what_is_wrong_is_found(published, tmp_path, name, change, finding):
    directory = shutil.copytree(published, tmp_path / "wrong")
    changed = {PREFIX + name: change(raw(published)[PREFIX + name])}
    kept = {key: value for key, value in changed.items() if value is not None}
    tiny.rewrite(directory, lambda key, tensor: kept if key in changed else {key: tensor})
    assert finding in [f["id"] for f in nv.inspect(directory)["findings"]]
    with pytest.raises((nv.BadInput, ValueError)):
        nv.MoeLayer.from_checkpoint(directory, 0)


def test_transformers_loads_it(published):
    options = adapter.Nvfp4MoeConfig(**W4A16)
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32, quantization_config=options)
    original = tiny.gpt_oss(torch.bfloat16)
    calls, _ = judge.record(model, tiny.logits)
    assert len(calls) == 2
    for name, call in calls.items():
        experts = judge.contract_experts(model.get_submodule(name).packed, original.get_submodule(name))
        hidden, ids, weights = call.inputs
        assert relative_l2(call.output, experts(hidden.double(), ids, weights.double())) < LIMIT
