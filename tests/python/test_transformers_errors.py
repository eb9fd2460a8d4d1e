"""Refusals of the transformers adapter, and their messages."""

from __future__ import annotations

import copy
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import nvfp4_moe.transformers as adapter  # noqa: E402
import tiny_models as tiny  # noqa: E402
from tiny_models import load, logits  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

Q_PROJ = "model.layers.0.self_attn.q_proj"
EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A Qwen3-MoE whose experts and q_proj are NVFP4."""
    root = tmp_path_factory.mktemp("errors")
    tiny.write_original(root / "original", "qwen3_moe")
    nv.quantize_checkpoint(root / "original", root / "quantized")
    tiny.quantize_linears(root / "quantized", "q_proj$", output_format="modelopt")
    return root


@pytest.fixture
def directory(made, tmp_path):
    return Path(shutil.copytree(made / "quantized", tmp_path / "quantized"))


@pytest.fixture(scope="module")
def model(made):
    return load(made / "quantized")


def drop(*keys):
    return lambda key, tensor: {} if key in keys else {key: tensor}


def replace(name, tensor_of):
    return lambda key, tensor: {key: tensor_of(tensor) if key == name else tensor}


def awq(key, tensor):
    """Adds a scale that changes the input, as in ModelOpt's AWQ."""
    return {key: tensor, **({f"{Q_PROJ}.pre_quant_scale": torch.ones(64)} if key == "lm_head.weight" else {})}


EMBEDDING, WEIGHT, SCALE = "model.embed_tokens.weight", f"{Q_PROJ}.weight", f"{Q_PROJ}.weight_scale"
NORMS = ("model.layers.0.mlp.gate.weight", "model.norm.weight")
DAMAGE = [
    (drop(f"{EXPERT}.weight_scale"), nv.BadInput, r"layer 1.*expert 3.*up_proj"),
    (drop(*NORMS), nv.BadInput, r"gate.weight, model.norm.*: missing"),
    (drop(SCALE), nv.BadInput, rf"{SCALE}: missing.*F8_E4M3 \(64, 4\)"),
    (drop(f"{SCALE}_2"), nv.BadInput, rf"{SCALE}_2: missing"),
    (replace(WEIGHT, lambda t: t[:32]), nv.BadInput, rf"{WEIGHT}: .*\(64, 32\), got U8 \(32, 32\)"),
    (replace(SCALE, lambda t: t.float()), nv.BadInput, "expected F8_E4M3.*got F32"),
    (replace(SCALE, lambda t: t[:, :2].view(torch.uint8)), nv.Unsupported, "MXFP4"),
    (replace(f"{SCALE}_2", lambda t: -t), nv.BadInput, f"{Q_PROJ}: "),
    (replace(EMBEDDING, lambda t: t.to(torch.float8_e4m3fn)), nv.Unsupported, "expected a linear.*Embedding"),
    (awq, nv.Unsupported, f"{Q_PROJ}.pre_quant_scale: expected codes and scales alone"),
]


@pytest.mark.parametrize(("change", "error", "says"), DAMAGE, ids=[says for _, _, says in DAMAGE])
def test_damaged_tensors_are_named(directory, change, error, says):
    tiny.rewrite(directory, change)
    with pytest.raises(error, match=says) as refused:
        load(directory)
    if says.startswith("layer 1"):
        assert refused.value.finding == "missing_scale", "errors keep the finding's id"


def test_a_truncated_shard(directory):
    (file,) = directory.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(nv.BadInput, match=re.escape(str(file))):
        load(directory)


def clamped(self, gate_up):
    """Another activation than the checkpoint's."""
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=7.0)) * up


def apart(config):
    """Experts as models of remote code keep them: a list of modules instead of stacks."""
    return torch.nn.ModuleList(modeling.Qwen3MoeMLP(config, 32) for _ in range(4))


@pytest.mark.parametrize(
    ("owner", "name", "other", "says"),
    [
        (modeling.Qwen3MoeExperts, "_apply_gate", clamped, r"layers.0.mlp.experts \(Qwen3MoeExperts\).*swiglu"),
        (modeling, "Qwen3MoeExperts", apart, "Qwen3MoeForCausalLM: expected a class .* with stacked experts"),
    ],
)
def test_a_class_that_does_not_fit(directory, monkeypatch, owner, name, other, says):
    monkeypatch.setattr(owner, name, other)
    with pytest.raises(nv.Unsupported, match=says):
        load(directory)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"hidden_act": "gelu"}, "gelu"),  # not an activation of the library
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "FP8"),
        ({"tie_word_embeddings": True}, "lm_head.weight: expected a float weight.*ties"),
    ],
)
def test_a_config_that_cannot_be_loaded(directory, config, says):
    if "tie_word_embeddings" in config:
        tiny.quantize_linears(directory, "lm_head$", output_format="modelopt")
    tiny.change_config(directory, **config)
    if "quantization_config" in config:
        (directory / "hf_quant_config.json").unlink()
    with pytest.raises(nv.Error, match=says):
        load(directory)


def test_options(directory):
    for options, says in (
        ({"activation_fromat": "bf16"}, "activation_format.*got activation_fromat"),
        ({"hidden_size": 64}, "got hidden_size"),
        ({"max_tokens": 0}, "max_tokens: expected 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=says):
            adapter.Nvfp4MoeConfig(**options)
    with pytest.raises(nv.Error, match="model.layers.0.*experts: "):  # one that a layer refuses names the module
        load(directory, activation_format="fp6")


# ---- devices


def quantizer():
    return adapter.Nvfp4MoeQuantizer(adapter.Nvfp4MoeConfig())


def test_device_maps(monkeypatch):
    """Refused are maps that offload, and several GPUs, which accelerate would balance without counting the experts."""
    one = quantizer()
    assert one.update_device_map(None) is None and one._device_of("model.layers.1") == torch.device("cpu")
    gpu = {"": 0, "model.layers.1": "cuda:1", "model.layers.12": torch.device("cuda:2")}
    assert one.update_device_map(gpu) == gpu
    for layer, device in ((1, "cuda:1"), (12, "cuda:2"), (0, "cuda:0")):
        assert one._device_of(f"model.layers.{layer}.mlp.experts") == torch.device(device)
    for gpus, device in ((0, "cpu"), (1, "cuda:0")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert quantizer().update_device_map("auto") == {"": torch.device(device)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device_map, says in (
        ({"model": "cuda:0", "lm_head": "cpu"}, "got cpu, cuda:0"),
        ({"model": 0, "lm_head": "disk"}, "got cuda:0, disk"),
        ({"": "meta"}, "expected cpu or cuda, got meta"),
        ("balanced", "device_map 'balanced'.*2 GPUs"),
    ):
        with pytest.raises(nv.Unsupported, match=says):
            quantizer().update_device_map(device_map)


def test_one_device_through_accelerate(made, model):
    pytest.importorskip("accelerate")
    for device_map in ("cpu", {"": "cpu"}):
        mapped = AutoModelForCausalLM.from_pretrained(made / "quantized", dtype=torch.bfloat16, device_map=device_map)
        assert torch.equal(logits(mapped), logits(model))
    with pytest.raises(nv.Unsupported, match="disk"):
        AutoModelForCausalLM.from_pretrained(made / "quantized", device_map={"model": "cpu", "lm_head": "disk"})


def test_ranks_are_refused(directory):
    config = transformers.AutoConfig.from_pretrained(directory)
    config.distributed_config = object()  # set by tp_plan and distributed_config of from_pretrained
    with pytest.raises(nv.Unsupported, match="tp_plan.*MoeLayer.from_checkpoint"):
        AutoModelForCausalLM.from_pretrained(directory, config=config)


def test_moving_a_model(made):
    """A move to a device without kernels is refused. A cast leaves packed weights unchanged. A move to another device
    opens the layer again."""
    moved = load(made / "quantized")
    experts, q_proj = moved.model.layers[0].mlp.experts, moved.model.layers[0].self_attn.q_proj
    want, handle = logits(moved), experts.handle
    with pytest.raises(nv.Unsupported, match="device: expected cpu or cuda, got meta"):
        experts.to("meta")
    moved.to("cpu")
    assert experts.handle == handle
    for module in (experts, q_proj):
        before = module.handle
        module.place(torch.device("cpu"))
        assert module.handle != before
    assert torch.equal(logits(moved), want)
    handle = experts.handle
    assert logits(moved.to(torch.float32)).dtype == torch.float32 and experts.handle == experts.packed.handle == handle


# ---- unsupported uses of such a model


def test_its_config_is_saved_as_the_checkpoint_has_it(made, model, tmp_path):
    model.config.save_pretrained(tmp_path)
    read = transformers.AutoConfig.from_pretrained
    assert read(tmp_path).quantization_config == read(made / "quantized").quantization_config
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(nv.Unsupported, match="neither pickled nor copied; load the checkpoint once more"):
            duplicate(model)


def test_gradients(model):
    assert not any(parameter.requires_grad for parameter in model.parameters()) and not model.hf_quantizer.is_trainable
    assert not model(torch.tensor([[5, 6, 7]])).logits.requires_grad  # no torch.no_grad() is needed
    hidden = torch.randn(1, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    for module, call in (("q_proj", lambda: model(inputs_embeds=hidden)), ("experts", model.model.layers[0].mlp)):
        with pytest.raises(nv.Unsupported, match=rf"{module}: NVFP4 layers have no gradient.*torch.no_grad"):
            call(hidden) if module == "experts" else call()
    with torch.inference_mode():
        model(inputs_embeds=hidden)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj(hidden)


# ---- versions


def test_imports():
    """nvfp4_moe imports neither torch nor transformers, and without transformers the adapter names a remedy."""
    code = "import sys, nvfp4_moe; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'safetensors')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    code = "import sys; sys.modules['transformers'] = None\nimport nvfp4_moe.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("ImportError: nvfp4_moe.transformers: expected transformers 5.16 to 5.24, found none")
    assert "pip install" in said


def test_a_transformers_that_lacks_something(monkeypatch):
    from nvfp4_moe.transformers import requirements
    from transformers import core_model_loading
    from transformers.quantizers.auto import AutoHfQuantizer
    from transformers.quantizers.base import HfQuantizer

    requirements.check()
    with monkeypatch.context() as newer:  # from 5.23 on
        newer.setattr(HfQuantizer, "update_weight_conversions", lambda self, weight_conversions, model: [])
        requirements.check()
    monkeypatch.delattr(core_model_loading, "WeightConverter")
    monkeypatch.setattr(AutoHfQuantizer, "merge_quantization_configs", lambda quantization_config: None)
    with pytest.raises(ImportError) as refused:
        requirements.check()
    said = str(refused.value)
    assert "transformers.core_model_loading:WeightConverter does not exist; " in said
    assert "merge_quantization_configs takes (quantization_config), expected quantization_config_from_args too" in said
    assert said.endswith("pip install 'transformers>=5.16,<5.25'")
