"""enable(): the experts of a loaded float model quantized in memory, one layer at a time."""

from __future__ import annotations

import sys
import weakref

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import model_judge as judge  # noqa: E402
import nvfp4_moe.transformers as adapter  # noqa: E402
import tiny_models as tiny  # noqa: E402
from family_checks import relative_l2  # noqa: E402
from tiny_models import fresh, logits  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


ACTIVATIONS = {"deepseek_v4": "swiglu_clamped", "nemotron_h": "relu2", "nemotron_h_latent": "relu2"}


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_the_model_around_the_experts_stays_as_it_is(kind):
    """In float32, in which all of these classes run. Their experts are judged in test_moe_classes.py."""
    model, twin = fresh(kind, torch.float32), fresh(kind, torch.float32)
    names = [name for name, module in model.named_modules() if hasattr(module, "has_gate")]
    done = adapter.enable(model)
    calls, got = judge.record(model, logits)
    assert [layer.name for layer in done.layers] == names == list(calls)
    assert {layer.activation for layer in done.layers} == {ACTIVATIONS.get(kind, "swiglu")}
    for name, call in calls.items():
        with torch.no_grad():
            own = twin.get_submodule(name)(*call.inputs)
        assert relative_l2(call.output, own.double()) < 0.4, "more than the error of quantization"
    assert torch.equal(judge.replayed(twin, calls, logits), got)
    assert adapter.enable(model).layers == (), "a second call finds nothing to do"


def test_its_report():
    model = fresh("qwen3_moe", torch.float16)
    done = adapter.enable(model, activation_format="nvfp4", max_tokens=4)
    assert len(done.layers) == 2 and done.activation_format == "nvfp4"
    one = done.layers[0]
    assert one.name == "model.layers.0.mlp.experts" and one.experts == 4 and one.device == "cpu"
    assert one.bytes_before == 4 * 3 * 64 * 32 * 2 and 0 < one.bytes_after < one.bytes_before
    assert all(words in str(done) for words in ("2 layers of experts", one.name, "activations nvfp4"))
    assert model.model.layers[0].mlp.experts.packed.config.activation_format == "nvfp4"
    assert logits(model).isfinite().all()


def test_its_peak_is_one_layer_more(monkeypatch):
    """When a layer is packed, the weights of earlier layers are gone, although their modules are still held here, and
    torch allocates less than a layer has."""
    model = fresh("qwen3_moe", num_hidden_layers=3, num_experts=16)
    experts = [layer.mlp.experts for layer in model.model.layers]
    stacks = [weakref.ref(module.gate_up_proj) for module in experts]
    bytes_of_layer = sum(p.numel() * p.element_size() for p in experts[0].parameters())
    alive = []
    stock = nv.MoeLayer.from_bf16

    def from_bf16(*args, **kwargs):
        alive.append([stack() is not None for stack in stacks])
        return stock(*args, **kwargs)

    monkeypatch.setattr(nv.MoeLayer, "from_bf16", from_bf16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        adapter.enable(model)
    assert alive == [[True, True, True], [False, True, True], [False, False, True]]
    totals = [event.total_allocated for event in judge.memory_events(profile)]
    assert max(totals) - totals[0] < bytes_of_layer


def test_such_a_model_is_neither_saved_nor_trained(tmp_path, caplog):
    """Trainer refuses it before a step, with a message that docs/how-to/transformers.md quotes."""
    from transformers.trainer_utils import validate_quantization_for_training

    model = fresh("mixtral")
    adapter.enable(model)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "out")
    assert "packed NVFP4 weights are not written back" in caplog.text and not (tmp_path / "out").exists()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="You cannot perform fine-tuning on purely quantized models"):
        validate_quantization_for_training(model)


def test_gradient_checkpointing_on_and_off_leaves_no_hook():
    """transformers makes inputs require gradients for it, and leaves that on."""
    model = fresh("qwen3_moe")
    adapter.enable(model)
    want, hooks = logits(model), model.get_input_embeddings()._forward_hooks
    for inner in (model, model.model):
        inner.gradient_checkpointing_enable()
        inner.gradient_checkpointing_enable()  # a second call must not lose the first one's hook
        assert len(hooks) == 1
        with pytest.raises(nv.Unsupported, match=r"experts: NVFP4 layers have no gradient"):
            model.train()(torch.tensor([[5, 6, 7]]))
        inner.gradient_checkpointing_disable()
        assert not hooks
    assert not model(torch.tensor([[5, 6, 7]])).logits.requires_grad
    assert torch.equal(logits(model.eval()), want)


def test_weights_and_biases_move_bit_for_bit():
    """Does what a move to another device does, here to the same one."""
    model = fresh("deepseek_v4", torch.float32)
    adapter.enable(model, max_tokens=7)
    want = logits(model)
    for layer in model.model.layers:
        before = layer.mlp.experts.handle
        layer.mlp.experts.place(torch.device("cpu"))
        assert layer.mlp.experts.handle != before and layer.mlp.experts.max_tokens == 7
    assert torch.equal(logits(model), want)
    # gpt-oss: biases, and gate and up in alternate columns. Its experts are judged in test_cuda_transformers_blocks.py.
    model, twin = tiny.gpt_oss(), tiny.gpt_oss()
    adapter.enable(model)
    biases, experts = twin.model.layers[0].mlp.experts.gate_up_proj_bias, model.model.layers[0].mlp.experts
    for first, name in enumerate(("gate", "up")):
        assert torch.equal(torch.as_tensor(experts.packed.expert(1)[name]["bias"]), biases[1, first::2])
    calls, got = judge.record(model, logits)
    assert torch.equal(judge.replayed(twin, calls, logits), got)
    experts.place(torch.device("cpu"))
    assert torch.equal(logits(model), got)


# ---- models that it refuses before it changes anything


def refuses(model, says, error=nv.Unsupported, **options):
    before = [type(module) for module in model.modules()]
    with pytest.raises(error, match=says):
        adapter.enable(model, **options)
    assert [type(module) for module in model.modules()] == before
    assert getattr(model, "hf_quantizer", None) is None or type(model.hf_quantizer) is object


def llama(kind, **sizes):
    sizes |= dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    return AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes))


def test_models_that_are_refused(monkeypatch):
    path, experts = r"^model\.layers\.0\.mlp\.experts", r"layers.1.mlp.experts.*"
    few = dict(intermediate_size_mlp=64, num_local_experts=4, num_key_value_heads=2, head_dim=16, pad_token_id=0)
    taken, meta, double = fresh("mixtral"), fresh("mixtral"), fresh("mixtral")
    taken.hf_quantizer = object()
    meta.model.layers[1].mlp.experts.to("meta")
    weight = double.model.layers[1].mlp.experts.down_proj
    double.model.layers[1].mlp.experts.down_proj = torch.nn.Parameter(weight.to(torch.float64))
    nan = tiny.gpt_oss()
    nan.model.layers[0].mlp.experts.down_proj_bias.data[2, 5] = torch.nan
    for model, says, error in (
        (llama("Llama4TextConfig", **few), r"\(Llama4TextExperts\): expected experts of transformers", nv.Unsupported),
        (llama("LlamaConfig"), "LlamaForCausalLM: expected modules with stacked experts", nv.Unsupported),
        (fresh("qwen3_moe", hidden_act="quick_gelu"), rf"{path} \(Qwen3MoeExperts\): .*QuickGELU", nv.Unsupported),
        (taken, "got a model of object", nv.Unsupported),
        (meta, rf"{experts}gate_up_proj: expected weights on cpu or cuda, got meta", nv.Unsupported),
        (double, rf"{experts}down_proj: expected bfloat16.*got torch.float64", nv.Unsupported),
        (nan, rf"{path}: .*down bias: expected finite numbers, got nan at row 5", nv.BadInput),
        (fresh("mixtral", intermediate_size=40), rf"{path} \(MixtralExperts\): intermediate_size", nv.Error),
    ):
        refuses(model, says, error)
    refuses(fresh("mixtral"), rf"{path} .*activation_format", nv.Error, activation_format="fp6")
    with monkeypatch.context() as without:
        without.setattr(sys.modules["nvfp4_moe.transformers.enable"], "_TOP_K", ("top",))
        refuses(fresh("mixtral"), rf"{path} \(MixtralExperts\): expected one of top in MixtralConfig, found none")


def test_a_first_call_that_fails_names_the_module(monkeypatch):
    def warmup(self):
        raise nv.OutOfMemory("cuda:0: no memory for the workspace")

    monkeypatch.setattr(nv.MoeLayer, "warmup", warmup)
    monkeypatch.setattr(nv.MoeLayer, "device", "cuda:0")
    with pytest.raises(nv.OutOfMemory, match=r"^model\.layers\.0\.mlp\.experts: cuda:0: no memory"):
        adapter.enable(fresh("mixtral"))


def test_a_nan_weight_leaves_a_model_that_runs():
    model = fresh("mixtral")
    model.model.layers[1].mlp.experts.down_proj.data[2, 3, 4] = torch.nan
    with pytest.raises(nv.BadInput, match="model.layers.1.mlp.experts: "):
        adapter.enable(model)
    kinds = [type(layer.mlp.experts) for layer in model.model.layers]
    assert kinds[0] is adapter.Nvfp4Experts and kinds[1] is not adapter.Nvfp4Experts
    assert logits(model).shape == (2, 11, 160)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained("nowhere")
