"""Every model class that the transformers adapter names, loaded by AutoModelForCausalLM.from_pretrained from NVFP4
checkpoints of both formats, judged at equal router decisions (model_judge.py)."""

from __future__ import annotations

import shutil

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import model_judge as judge  # noqa: E402
import nvfp4_moe.transformers as adapter  # noqa: E402
import tiny_models as tiny  # noqa: E402
from tiny_models import load, logits, paths_of, stock_twin  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = ("modelopt", "compressed-tensors")
# Linears that producers quantize beside the experts: attention, shared experts, dense MLPs, the head.
LINEARS = r"(_proj|\.w[123]|wq_a|wq_b|wkv|wo_b|q_a_proj|lm_head|^head)$"


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize("kind", tiny.MODELS)
def test_experts_and_linears_at_equal_router_decisions(kind, output_format, checkpoint):
    original, directory = checkpoint(kind, output_format)
    stems = tiny.quantize_linears(directory, LINEARS, output_format=output_format)
    model = load(directory)
    calls, got = judge.record(model, logits)
    experts = [p for p in calls if isinstance(model.get_submodule(p), adapter.Nvfp4Experts)]
    assert len(experts) == (1 if kind in ("deepseek_v3", "glm4_moe") else 2)
    wrong = judge.outside(model, calls, directory, paths_of(model, stems))
    assert not any(wrong.values()), wrong
    twin = stock_twin(original, model)
    # Every linear that was quantized is packed, and was judged above.
    packed = {p for p, module in model.named_modules() if isinstance(module, adapter.Nvfp4LinearModule)}
    assert packed == set(paths_of(twin, stems)) and len(packed) >= 4
    assert packed == set(calls) - set(experts)
    again = judge.replayed(twin, calls, logits)
    assert torch.equal(got, again)
    assert got.isfinite().all() and got.std() > 0


def test_planted_faults_are_seen(checkpoint):
    """The files as they were are the judge; the model reads others: one expert's scale doubled, one code of a linear."""
    _, directory = checkpoint("qwen3_moe")
    (stem, *_) = tiny.quantize_linears(directory, "layers.1.self_attn.o_proj$", output_format="modelopt")
    truth = directory.with_name("truth")
    shutil.copytree(directory, truth)
    scale = "model.layers.0.mlp.experts.2.down_proj.weight_scale_2"

    def judged():
        model = load(directory)
        calls, _ = judge.record(model, logits)
        return judge.outside(model, calls, truth, {stem: stem})

    assert set(judged().values()) == {0}
    tiny.rewrite(directory, lambda key, tensor: {key: tensor * 2 if key == scale else tensor})
    wrong = judged()
    assert wrong.pop("model.layers.0.mlp.experts") > 0 and set(wrong.values()) == {0}
    shutil.rmtree(directory)
    shutil.copytree(truth, directory)

    def flip(key, tensor):
        if key == f"{stem}.weight":
            tensor[7, 3] ^= 0x80  # the sign of one element
        return {key: tensor}

    tiny.rewrite(directory, flip)
    wrong = judged()
    assert wrong.pop(stem) > 0 and set(wrong.values()) == {0}


def test_a_wrong_input_of_a_module_is_seen(checkpoint):
    """The judge of the model around the modules: another router weight, and nothing else."""
    original, directory = checkpoint("qwen3_moe")
    model = load(directory)
    calls, _ = judge.record(model, logits)
    twin = stock_twin(original, model)
    twin.model.layers[1].mlp.gate.weight.data[0] *= 1.5
    with pytest.raises(AssertionError, match="layers.1.mlp.experts: another input"):
        judge.replayed(twin, calls, logits)
