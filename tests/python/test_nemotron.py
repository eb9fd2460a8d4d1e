"""Nemotron-H: experts of two matrices (relu2, no gate), of the model's width or after a latent projection.

ModelOpt's mixed precision, slices and the packed cache. transformers' own classes judge the experts in
test_moe_classes.py, test_transformers_models.py and test_transformers_enable.py; refusals:
tests/checkpoint/nemotron_test.cpp.
"""

from __future__ import annotations

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_checks as family  # noqa: E402
import tiny_models as tiny  # noqa: E402
from family_checks import W4A16  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
LAYER, EXPERTS, WIDTH, INTERMEDIATE = 1, 4, {"nemotron_h": 64, "nemotron_h_latent": 32}, 32


@pytest.fixture(params=WIDTH)
def made(request, checkpoint):
    """(its experts' width, or None if it is the model's; a float checkpoint; that quantized; a batch of the experts)"""
    original, directory = checkpoint(request.param)
    width = WIDTH[request.param]
    hidden = torch.randn(9, width, generator=torch.Generator().manual_seed(2))
    ids = torch.rand(9, EXPERTS, generator=torch.Generator().manual_seed(3)).topk(2).indices.int()
    return None if width == 64 else width, original, directory, (hidden, ids, torch.rand(9, 2))


def test_slices_the_packed_cache_and_inspect(made, tmp_path):
    latent, original, directory, batch = made
    family.check_slices_add_up(directory, LAYER, batch, 16, INTERMEDIATE)
    first, mapped = family.from_cache(directory, LAYER, batch, tmp_path / "cache", activation_format="fp8")
    assert (first.config.activation, first.config.hidden_size) == ("relu2", latent or 64)
    assert mapped.describe()["fp8_weights"] == first.describe()["fp8_weights"]
    assert first.describe()["fp8_weights"]["weights"] == EXPERTS * 2 * batch[0].shape[1] * INTERMEDIATE
    assert mapped.expert(2)["gate"] is None
    for path in (original, directory):
        assert family.warnings_of(path) == []
        said = " ".join(finding["text"] for finding in nv.inspect(path)["findings"])
        assert ("projection between the model's width and the experts'" in said) == (latent is not None)


def test_mixed_precision_has_the_same_experts(made):
    """As ModelOpt exports Nemotron-3: routed experts in NVFP4 without input scales, Mamba's projections and the shared
    expert in FP8."""
    latent, _, directory, batch = made
    plain = nv.MoeLayer.from_checkpoint(directory, LAYER, **W4A16).run(*batch)
    layers = {}

    def mixed(key, tensor):
        stem = key.removesuffix(".weight")
        if ".experts." in key:
            if stem != key:
                layers[stem] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
            return {} if key.endswith("input_scale") else {key: tensor}
        if stem == key or not ("in_proj" in key or "shared_experts" in key):
            return {key: tensor}
        layers[stem] = {"quant_algo": "FP8"}
        scale = tensor.float().abs().amax() / 448
        scales = {f"{stem}.weight_scale": scale, f"{stem}.input_scale": torch.tensor(0.5)}
        return {key: (tensor.float() / scale).to(torch.float8_e4m3fn), **scales}

    tiny.rewrite(directory, mixed)
    declared = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    tiny.change_config(directory, quantization_config=declared)
    (directory / "hf_quant_config.json").unlink()
    layer = nv.MoeLayer.from_checkpoint(directory, LAYER)
    assert layer.describe()["activations"]["declared"] == "bf16" and layer.config.shared_intermediate_size == 0
    assert torch.equal(nv.MoeLayer.from_checkpoint(directory, LAYER, **W4A16).run(*batch), plain)
    findings = {finding["id"]: finding for finding in nv.inspect(directory)["findings"]}
    assert ("shared_expert_of_other_width" if latent else "shared_expert_not_loaded") in findings
    assert not [finding for finding in findings.values() if finding["severity"] == "error"]
