"""What ModelOpt and compressed-tensors themselves export, loaded by the transformers adapter: experts and whatever else they
quantize, judged at equal router decisions (model_judge.py)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import model_judge as judge  # noqa: E402
import nvfp4_moe.transformers as adapter  # noqa: E402
from checkpoints import raw  # noqa: E402
from tiny_models import load, paths_of, stock_twin  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 3 + 22).reshape(2, 11) * 7 % 29 + 3, use_cache=False).logits


@pytest.mark.parametrize("producer", ["modelopt", "compressed_tensors"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_exports_of_real_producers(made, family, producer):
    directory = made(family) / producer
    model = load(directory)
    calls, got = judge.record(model, logits)
    kinds = {path: type(model.get_submodule(path)) for path in calls}
    leaves = (".weight_scale_2", ".weight_global_scale")
    quantized = {key.rpartition(".")[0] for key in raw(directory) if key.endswith(leaves)}
    stems = paths_of(model, {stem for stem in quantized if ".experts." not in stem})
    assert {path for path, kind in kinds.items() if kind is adapter.Nvfp4LinearModule} == set(stems)
    assert adapter.Nvfp4Experts in kinds.values()
    wrong = judge.outside(model, calls, directory, stems)
    assert not any(wrong.values()), wrong
    twin = stock_twin(made(family) / "original", model)
    assert torch.equal(judge.replayed(twin, calls, logits), got)
    if producer == "modelopt":  # which leaves out the head and the router alone
        assert len(stems) >= 8
