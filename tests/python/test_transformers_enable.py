"""enable(): the experts of a loaded float model quantized in memory, one layer at a time."""

from __future__ import annotations

import gc
import sys
import weakref

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import model_judge as judge  # noqa: E402
import moe_reference as oracle  # noqa: E402
import nvfp4_moe.transformers as adapter  # noqa: E402
import tiny_models as tiny  # noqa: E402
from tiny_models import fresh, logits  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def quantized(weights):
    """oracle matrices (codes, scales, tensor scale) of float weights (E, rows, K), by the library's quantizer."""
    parts = [nv.quantize(weight.float()) for weight in weights]
    codes, scales = (torch.stack([part[index] for part in parts]) for index in (0, 1))
    return codes, scales, torch.tensor([part[2] for part in parts], dtype=torch.float32)


ACTIVATIONS = {"deepseek_v4": "swiglu_clamped", "nemotron_h": "relu2", "nemotron_h_latent": "relu2"}


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_every_class_at_equal_router_decisions(kind):
    """in float32, in which all of these classes run"""
    model, twin = fresh(kind, torch.float32), fresh(kind, torch.float32)
    stacks = {}
    for name, module in model.named_modules():
        if hasattr(module, "down_proj") and hasattr(module, "has_gate"):
            first = module.gate_up_proj if module.has_gate else module.up_proj
            stacks[name] = first.detach().clone(), module.down_proj.detach().clone()
    done = adapter.enable(model)
    assert [layer.name for layer in done.layers] == list(stacks)
    calls, got = judge.record(model, logits)
    assert set(calls) == set(stacks)
    activation = ACTIVATIONS.get(kind, "swiglu")
    for name, (first, down) in stacks.items():
        gate, up = (first, first) if activation == "relu2" else first.chunk(2, 1)
        weights = oracle.Weights(quantized(gate), quantized(up), quantized(down))
        module = model.get_submodule(name)
        assert module.packed.config.activation == activation
        assert not judge.experts_outside(module, calls[name], weights).any()
    assert torch.equal(judge.replayed(twin, calls, logits), got)
    assert adapter.enable(model).layers == (), "a second call finds nothing to do"
    assert torch.equal(logits(model), got)


def test_what_it_says_and_frees():
    model = fresh("qwen3_moe", torch.float16)
    experts = [layer.mlp.experts for layer in model.model.layers]
    stacks = [weakref.ref(module.gate_up_proj) for module in experts]
    done = adapter.enable(model, activation_format="nvfp4", max_tokens=4)
    gc.collect()
    assert [stack() for stack in stacks] == [None, None]  # although the modules themselves are still held here
    assert len(done.layers) == 2 and done.activation_format == "nvfp4"
    one = done.layers[0]
    assert one.name == "model.layers.0.mlp.experts" and one.experts == 4 and one.device == "cpu"
    assert one.bytes_before == 4 * 3 * 64 * 32 * 2 and 0 < one.bytes_after < one.bytes_before
    for words in ("2 layers of experts", one.name, "activations nvfp4"):
        assert words in str(done)
    assert model.model.layers[0].mlp.experts.packed.config.activation_format == "nvfp4"
    assert logits(model).isfinite().all()


def test_its_peak_is_one_layer_more(monkeypatch):
    """When a layer is packed, the weights of earlier layers are gone, and torch allocates less than a layer has."""
    model = fresh("qwen3_moe", num_hidden_layers=3, num_experts=16)
    stacks = [weakref.ref(layer.mlp.experts.gate_up_proj) for layer in model.model.layers]
    bytes_of_layer = sum(p.numel() * p.element_size() for p in model.model.layers[0].mlp.experts.parameters())
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
    assert transformers.AutoConfig.for_model("mixtral").to_dict().get("quantization_config") is None
    with pytest.raises(ValueError, match="You cannot perform fine-tuning on purely quantized models"):
        validate_quantization_for_training(model)
    model._hf_peft_config_loaded = True
    assert not model.hf_quantizer.is_trainable


def embedding_hooks(model):
    return len(model.get_input_embeddings()._forward_hooks)


def test_gradient_checkpointing_on_and_off_leaves_no_hook():
    """transformers makes inputs require gradients for it, and leaves that on."""
    model = fresh("qwen3_moe")
    adapter.enable(model)
    want = logits(model)
    for inner in (model, model.model):
        inner.gradient_checkpointing_enable()
        inner.gradient_checkpointing_enable()  # a second call must not lose the first one's hook
        assert embedding_hooks(model) == 1
        with pytest.raises(nv.Unsupported, match=r"experts: NVFP4 layers have no gradient"):
            model.train()(torch.tensor([[5, 6, 7]]))
        inner.gradient_checkpointing_disable()
        assert embedding_hooks(model) == 0
    assert not model(torch.tensor([[5, 6, 7]])).logits.requires_grad
    assert torch.equal(logits(model.eval()), want)


def test_a_dropped_model_is_freed_at_once():
    """It does not wait for Python's collector, because a packed layer may hold a GPU's memory."""
    model = fresh("mixtral")
    adapter.enable(model)
    layers = [weakref.ref(layer.mlp.experts) for layer in model.model.layers]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [layer() for layer in layers] == [None, None]
    finally:
        gc.enable()


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
    biases, held = (
        twin.model.layers[0].mlp.experts.gate_up_proj_bias,
        model.model.layers[0].mlp.experts.packed.expert(1),
    )
    assert torch.equal(torch.as_tensor(held["gate"]["bias"]), biases[1, 0::2])
    assert torch.equal(torch.as_tensor(held["up"]["bias"]), biases[1, 1::2])
    calls, got = judge.record(model, logits)
    assert torch.equal(judge.replayed(twin, calls, logits), got)
    model.model.layers[0].mlp.experts.place(torch.device("cpu"))
    assert torch.equal(logits(model), got)


# ---- models that it refuses before it changes anything


def refuses(model, says, error=nv.Unsupported, **options):
    before = [type(module) for module in model.modules()]
    with pytest.raises(error, match=says):
        adapter.enable(model, **options)
    assert [type(module) for module in model.modules()] == before
    assert getattr(model, "hf_quantizer", None) is None or type(model.hf_quantizer) is object


def test_models_that_are_refused():
    llama4 = transformers.Llama4TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=1,
        num_local_experts=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    refuses(
        AutoModelForCausalLM.from_config(llama4), r"experts \(Llama4TextExperts\): expected experts of transformers"
    )
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes))
    refuses(model, "LlamaForCausalLM: expected modules with stacked experts")
    refuses(fresh("qwen3_moe", hidden_act="gelu"), r"layers.0.mlp.experts \(Qwen3MoeExperts\): .*GELU")
    model = fresh("mixtral")
    model.hf_quantizer = object()
    refuses(model, "got a model of object")


def test_weights_that_are_not_floats_or_not_there_or_not_finite():
    model = fresh("mixtral")
    model.model.layers[1].mlp.experts.to("meta")
    refuses(model, r"layers.1.mlp.experts.*gate_up_proj: expected weights on cpu or cuda, got meta")
    model = fresh("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.to(torch.float64))
    refuses(model, r"layers.1.mlp.experts.*down_proj: expected bfloat16.*got torch.float64")
    model = tiny.gpt_oss()
    model.model.layers[0].mlp.experts.down_proj_bias.data[2, 5] = torch.nan
    refuses(model, r"layers.0.mlp.experts: .*down bias: expected finite numbers, got nan at row 5", nv.BadInput)


def test_errors_of_enable_carry_the_module_s_path(monkeypatch):
    """Sizes and options that are illegal for a layer, a config without top_k, and a first call that fails."""
    path = r"^model\.layers\.0\.mlp\.experts"
    refuses(fresh("mixtral", intermediate_size=40), rf"{path} \(MixtralExperts\): intermediate_size", nv.Error)
    refuses(fresh("mixtral"), rf"{path} .*activation_format", nv.Error, activation_format="fp6")
    refuses(fresh("mixtral"), rf"{path} .*max_router_weight", nv.Error, max_router_weight=-1.0)
    with monkeypatch.context() as without:
        without.setattr(sys.modules["nvfp4_moe.transformers.enable"], "_TOP_K", ("top",))
        refuses(fresh("mixtral"), rf"{path} \(MixtralExperts\): expected one of top in MixtralConfig, found none")

    def warmup(self):
        raise nv.OutOfMemory("cuda:0: no memory for the workspace")

    monkeypatch.setattr(nv.MoeLayer, "warmup", warmup)
    monkeypatch.setattr(nv.MoeLayer, "device", "cuda:0")
    with pytest.raises(nv.OutOfMemory, match=rf"{path}: cuda:0: no memory"):
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
