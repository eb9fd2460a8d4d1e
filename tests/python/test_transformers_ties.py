"""DiffusionGemma in transformers: its encoder and its decoder have the same experts, and so one packed layer each."""

from __future__ import annotations

import weakref

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"):
    pytest.skip("this release of transformers does not have DiffusionGemma", allow_module_level=True)

import moe_classes  # noqa: E402
import nvfp4_moe.transformers as adapter  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
DiffusionGemma = transformers.DiffusionGemmaForBlockDiffusion


def logits(model):
    prompt, canvas = torch.arange(3, 25).reshape(2, 11), torch.arange(5, 37).reshape(2, 16)
    with torch.no_grad():
        return model(prompt, decoder_input_ids=canvas).logits


def pairs(model):
    """The experts of each layer: the encoder's, and the decoder's."""
    encoder, decoder = model.model.encoder.language_model.layers, model.model.decoder.layers
    return [(one.experts, other.experts) for one, other in zip(encoder, decoder, strict=True)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with a model in floats and quantized."""
    directory = tmp_path_factory.mktemp("ties")
    one = next(found for found in moe_classes.model_classes() if found.model_type == "diffusion_gemma")
    moe_classes.tiny_model(one).to(torch.bfloat16).save_pretrained(directory / "floats")
    nv.quantize_checkpoint(directory / "floats", directory / "quantized")
    return directory


def packed(directory):
    config = adapter.Nvfp4MoeConfig(max_tokens=64, activation_format="bf16")
    return DiffusionGemma.from_pretrained(directory, dtype=torch.float32, quantization_config=config).eval()


def test_the_two_modules_have_one_packed_layer(made, monkeypatch):
    opened = []
    for name in ("from_checkpoint", "from_bf16"):
        stock = getattr(nv.MoeLayer, name)

        def counted(*args, stock=stock, **kwargs):
            layer = stock(*args, **kwargs)
            opened.append(layer.describe()["packed_bytes"])
            return layer

        monkeypatch.setattr(nv.MoeLayer, name, counted)
    loaded = packed(made / "quantized")
    files, opened = opened, []
    model = DiffusionGemma.from_pretrained(made / "floats", dtype=torch.float32).eval()
    before = pairs(model)
    assert all(one is not other and one.down_proj is other.down_proj for one, other in before)
    in_floats = sum(one.gate_up_proj.nbytes + one.down_proj.nbytes for one, _ in before)
    alive = [weakref.ref(weight) for one, _ in before for weight in (one.gate_up_proj, one.down_proj)]
    report = adapter.enable(model, max_tokens=64)
    assert not any(weight() is not None for weight in alive), "the modules that were replaced are still held here"
    assert [layer.name for layer in report.layers] == [
        f"model.encoder.language_model.layers.{number}.experts" for number in range(len(before))
    ]
    assert report.layers[1].shared_with == ("model.decoder.layers.1.experts",)
    assert "layers.1.experts and model.decoder.layers.1.experts: 8 experts" in str(report)
    assert sum(layer.bytes_before for layer in report.layers) == in_floats
    assert [layer.bytes_after for layer in report.layers] == opened == files and len(files) == len(before)
    # Floats that are quantized while they are read have the bits of enable().
    read = packed(made / "floats")
    for one in (loaded, model, read):
        assert all(encoder is decoder and isinstance(encoder, adapter.Nvfp4Experts) for encoder, decoder in pairs(one))
        assert sum(isinstance(module, adapter.Nvfp4Experts) for module in one.modules()) == len(before)
    assert torch.equal(logits(model), logits(read)) and logits(loaded).isfinite().all()


@pytest.mark.parametrize("make", ["from_pretrained", "enable"])
def test_the_other_ties_stay(made, make):
    """tie_weights(), which resizing embeddings calls, ties what is not packed and reads nothing else."""
    if make == "enable":
        model = DiffusionGemma.from_pretrained(made / "floats", dtype=torch.float32)
        adapter.enable(model, max_tokens=64)
    else:
        model = packed(made / "quantized")
    want = logits(model)
    model.resize_token_embeddings(176, mean_resizing=False)
    encoder, decoder = model.model.encoder.language_model, model.model.decoder
    assert encoder.embed_tokens.weight is decoder.embed_tokens.weight is model.lm_head.weight
    assert encoder.layers[1].mlp.down_proj.weight is decoder.layers[1].mlp.down_proj.weight
    assert encoder.layers[1].router.per_expert_scale is decoder.layers[1].router.per_expert_scale
    assert torch.equal(logits(model)[..., :160], want)
    # The class itself keeps its patterns: another model of it is tied as before.
    assert any("gate_up_proj" in pattern for pattern in type(model.model)._tied_weights_keys)


def test_a_layer_is_on_one_device(made):
    quantizer = adapter.Nvfp4MoeQuantizer(adapter.Nvfp4MoeConfig())
    quantizer.update_device_map({"": "cuda:0", "model.decoder.layers.2": "cuda:1"})
    model = DiffusionGemma(transformers.AutoConfig.from_pretrained(made / "quantized"))
    shards = sorted((made / "quantized").glob("*.safetensors"))
    with pytest.raises(nv.Unsupported, match=r"device_map: .*encoder.*layers\.2\.experts and model\.decoder.*cuda:1"):
        quantizer._process_model_before_weight_loading(model, [str(file) for file in shards])


def test_a_module_with_its_own_activation_is_not_shared(made):
    """If the two computed different numbers, enable() would pack two layers, and from_pretrained refuses the file."""
    model = DiffusionGemma.from_pretrained(made / "floats", dtype=torch.float32)
    pairs(model)[1][1].act_fn = torch.nn.SiLU()
    report = adapter.enable(model, max_tokens=64)
    assert [layer.activation for layer in report.layers].count("swiglu") == 1 and len(report.layers) == 5
    assert not report.layers[1].shared_with
