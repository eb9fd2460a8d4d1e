"""Loading with the transformers adapter: tensors that stay torch's, sources of checkpoints, dtypes and forms."""

from __future__ import annotations

import gc
import logging
import re
import weakref

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import model_judge as judge  # noqa: E402
import nvfp4_moe.transformers as adapter  # noqa: E402
import tiny_models as tiny  # noqa: E402
from checkpoints import raw  # noqa: E402
from tiny_models import load, logits, packed  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def nbytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_experts_are_never_torchs(tmp_path, monkeypatch):
    """transformers reads the other tensors, each once. torch allocates only them, and the model holds no more."""
    from transformers import core_model_loading

    original, directory = tmp_path / "original", tmp_path / "quantized"
    tiny.write_original(original, "qwen3_moe", hidden_size=128, moe_intermediate_size=128, num_experts=16)
    nv.quantize_checkpoint(original, directory)
    rest = {key: tensor for key, tensor in raw(directory).items() if ".experts." not in key}
    experts = nbytes(raw(directory).values()) - nbytes(rest.values())
    assert experts > 2 * nbytes(rest.values())
    read = []
    stock = core_model_loading.spawn_materialize

    def materialize(pool, tensor, *args, **kwargs):
        read.append(tuple(tensor.get_shape()))
        return stock(None, tensor, *args, **kwargs)  # on this thread, which the profiler records

    monkeypatch.setattr(core_model_loading, "spawn_materialize", materialize)

    def peak(run):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = run()
        totals = [event.total_allocated for event in judge.memory_events(profile)]
        return result, max(totals) - totals[0]

    model, most = peak(lambda: load(directory))
    assert sorted(read) == sorted(tuple(tensor.shape) for tensor in rest.values())
    assert nbytes(model.parameters()) == nbytes(rest.values())
    assert nbytes(model.buffers()) < 1000  # rotary frequencies
    assert most < nbytes(rest.values()) + experts // 4
    read.clear()
    _, of_floats = peak(lambda: AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16))
    assert of_floats > nbytes(rest.values()) + 2 * experts  # the judge checks experts if there are any


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes_of_hidden(checkpoint, kind, dtype):
    if kind == "deepseek_v4" and dtype == torch.float16:
        pytest.skip("transformers' DeepSeek-V4 does not run in float16, quantized or not")
    _, directory = checkpoint(kind, "compressed-tensors")
    stems = tiny.quantize_linears(directory, "o_proj$|wo_b$", output_format="compressed-tensors")
    model = load(directory, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    calls, got = judge.judged(model, directory, tiny.paths_of(model, stems), logits)
    assert got.dtype == dtype and {call.output.dtype for call in calls.values()} == {dtype}


@pytest.mark.parametrize("kind", ["minimax_m2", "deepseek_v3", "deepseek_v4"])
def test_selection_biases_stay_in_float32(checkpoint, kind):
    """A bfloat16 bias would select other experts. transformers' own float models of MiniMax-M2 have such biases."""
    _, directory = checkpoint(kind)
    found = {k.rpartition("layers.")[2][0]: t for k, t in raw(directory).items() if re.search("gate.bias|bias$", k)}
    biases = [(n, b) for n, b in load(directory).named_buffers() if n.endswith("e_score_correction_bias")]
    assert biases and all(torch.equal(bias, found[name.split(".")[2]]) for name, bias in biases)
    assert {bias.dtype for _, bias in biases} == {torch.float32}


@pytest.mark.parametrize("activation_format", ["nvfp4", "bf16", "int8_block", "fp8"])
def test_activation_formats_of_experts_and_linears(checkpoint, activation_format):
    _, directory = checkpoint()
    stems = tiny.quantize_linears(directory, "q_proj$", output_format="modelopt")
    model = load(directory, activation_format=activation_format)
    calls, _ = judge.judged(model, directory, tiny.paths_of(model, stems), logits)
    formats = {model.get_submodule(path).packed.describe()["activation_format"] for path in calls}
    assert formats == {activation_format}


@pytest.mark.parametrize(("algorithm", "expected"), [("NVFP4", "int8_block"), ("W4A16_NVFP4", "bf16")])
def test_experts_run_in_what_the_checkpoint_declares_or_more_precisely(checkpoint, caplog, algorithm, expected):
    """And the log gives the reason once."""
    _, directory = checkpoint()
    tiny.change_config(directory, quantization_config={"quant_method": "modelopt", "quant_algo": algorithm})
    (directory / "hf_quant_config.json").unlink(missing_ok=True)
    tiny.quantize_linears(directory, "q_proj$", output_format="modelopt")  # auto is not a format of a linear
    for given in ({}, {"activation_format": "auto"}):
        caplog.clear()
        with caplog.at_level(logging.INFO, "nvfp4_moe.transformers"):
            model = load(directory, **given)
        formats = {layer.mlp.experts.packed.config.activation_format for layer in model.model.layers}
        assert formats == {expected}
        (line,) = [record.message for record in caplog.records if record.message.startswith("activations: ")]
        assert line.startswith(f"activations: {expected}, because ")


@pytest.mark.parametrize("output_format", ["modelopt", "compressed-tensors"])
def test_static_scales_are_the_files_and_linears_without_one_keep_their_activations(checkpoint, output_format):
    _, directory = checkpoint(output_format=output_format)
    tiny.quantize_linears(directory, "q_proj$", output_format=output_format, input_scale=0.011)
    tiny.quantize_linears(directory, "k_proj$", output_format=output_format, input_scale=None)
    layer = load(directory, activation_scale="static", static_headroom=4.0).model.layers[0]
    assert layer.mlp.experts.packed.describe()["activation_scale"]["hidden"] == 4.0  # 1.0, a placeholder, times 4
    assert layer.self_attn.q_proj.packed.describe()["activation_scale"] == 2.0**-6 * 4  # rounded up
    attention = load(directory).model.layers[0].self_attn
    formats = [linear.packed.describe()["activation_format"] for linear in (attention.k_proj, attention.q_proj)]
    assert formats == ["bf16", "nvfp4"]


def test_a_bias_next_to_an_nvfp4_weight(checkpoint):
    _, directory = checkpoint()
    tiny.quantize_linears(directory, "q_proj$", output_format="modelopt")
    plain = load(directory).model.layers[0].self_attn.q_proj
    bias = torch.linspace(-1, 1, 64).bfloat16()
    sizes = {"q": 64, "k": 32, "v": 32, "o": 64}
    biases = {f"model.layers.{n}.self_attn.{p}_proj.bias": bias[:s].clone() for n in (0, 1) for p, s in sizes.items()}
    tiny.rewrite(directory, lambda key, tensor: {key: tensor, **(biases if key == "lm_head.weight" else {})})
    tiny.change_config(directory, attention_bias=True)
    module = load(directory).model.layers[0].self_attn.q_proj
    x = torch.randn(2, 5, 64).bfloat16()
    assert plain.bias is None and torch.equal(module(x), plain(x) + bias)


def test_longer_batches_run_in_parts(checkpoint):
    _, directory = checkpoint()
    tiny.quantize_linears(directory, "o_proj$", output_format="modelopt")
    parted = load(directory, max_tokens=5)
    assert parted.model.layers[0].mlp.experts.max_tokens == 5
    assert torch.equal(logits(load(directory)), logits(parted))


@pytest.mark.parametrize("kind", ["qwen3_moe", "minimax_m2"])
def test_experts_that_a_producer_left_in_floats_stay_so(checkpoint, kind):
    original, directory = checkpoint(kind, layers=[1])
    model = load(directory)
    first, second = (layer.mlp.experts for layer in model.model.layers)
    stock = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16).model.layers[0].mlp.experts
    assert isinstance(second, adapter.Nvfp4Experts)
    assert torch.equal(first.gate_up_proj, stock.gate_up_proj) and torch.equal(first.down_proj, stock.down_proj)
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("leaf", ["scale", "weight_scale_inv"])
def test_the_fp8_hybrid_of_deepseek_v4(checkpoint, caplog, leaf):
    """FP8 weights outside the experts become bfloat16, with a line in the log."""
    original, directory = checkpoint("deepseek_v4")
    values = tiny.to_fp8(directory, r"(wq_a|wq_b|wkv|wo_a|wo_b|shared_experts\.w[123])$", leaf=leaf)
    declared = transformers.AutoConfig.from_pretrained(directory).quantization_config
    assert declared["quant_method"] == "fp8" and declared["moe_quant_algo"] == "NVFP4"
    with caplog.at_level(logging.WARNING, "nvfp4_moe.transformers"):
        model = load(directory)
    assert f"{len(values)} weights in FP8" in caplog.text and "torch.bfloat16" in caplog.text
    for path, stem in tiny.paths_of(model, values).items():
        assert torch.equal(model.get_submodule(path).weight.float(), values[stem].bfloat16().float()), path
    calls, got = judge.judged(model, directory, {}, logits)
    twin = tiny.stock_twin(original, model, set(tiny.paths_of(model, values)))
    assert torch.equal(judge.replayed(twin, calls, logits), got)


def test_deepseek_v4_under_its_makers_names(checkpoint):
    """No "model." prefix; embed and head; hyper-connections and sinks in float32; a part for multi-token prediction,
    which transformers leaves out."""
    _, directory = checkpoint("deepseek_v4")
    wide = ("hc_", "attn_sink", ".ape", "gate.bias")
    tiny.rewrite(directory, lambda key, t: {key: t.float() if any(part in key for part in wide) else t})
    tiny.to_fp8(directory, r"(wq_a|wq_b|wkv|wo_b|shared_experts\.w[123])$")
    want = logits(load(directory))
    extra = {"mtp.0": "model.layers.1.", "mtp.1": "model.layers.0."}

    def renamed(key, tensor):
        short = key.removeprefix("model.")
        made = {{"embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight"}.get(short, short): tensor}
        for name, prefix in extra.items():
            if key.startswith(prefix):
                made[f"{name}.{key.removeprefix(prefix)}"] = tensor.clone()
        return made

    tiny.rewrite(directory, renamed)
    keys = set(raw(directory))
    assert {"embed.weight", "head.weight", "norm.weight", "mtp.0.attn.wq_a.scale"} <= keys
    model = load(directory)
    assert len(packed(model)) == 2 and torch.equal(logits(model), want)
    assert {p.dtype for n, p in model.named_parameters() if "_hc." in n or "sinks" in n} == {torch.float32}


def test_a_scale_for_each_row_block_or_the_whole_weight():
    """FP8 in the form of ModelOpt and compressed-tensors, and E8M0 exponents as bytes."""
    from nvfp4_moe.transformers.stored_linear import _dequantized_fp8

    weight = torch.linspace(-2, 2, 192 * 64).reshape(192, 64).to(torch.float8_e4m3fn)
    rows = torch.exp2(torch.arange(192) % 5 - 3.0).reshape(192, 1)
    blocks = torch.tensor([[2.0], [4.0]])  # of 128 rows and of 64
    for scale, factor in (
        (rows, rows),
        (rows.flatten(), rows),
        (torch.tensor(0.25), 0.25),
        (blocks, blocks.repeat_interleave(128, 0)[:192]),
        (torch.tensor([[130]], dtype=torch.uint8), 8),
    ):
        assert torch.equal(_dequantized_fp8(weight, scale), weight.float() * factor)


def test_nvfp4_weights_of_other_sizes_are_dequantized(checkpoint, caplog):
    """out_features without a kernel: 4, the projection of Qwen3-Next's gates."""
    _, directory = checkpoint("qwen3_next")
    (stem,) = tiny.quantize_linears(directory, "in_proj_ba$", output_format="modelopt")
    with caplog.at_level(logging.WARNING, "nvfp4_moe.transformers"):
        model = load(directory)
    assert "1 weights in NVFP4" in caplog.text and stem in caplog.text
    weight = model.get_submodule(stem).weight
    codes, scales, scale = judge.linear_weight(raw(directory), stem)
    want = torch.as_tensor(nv.dequantize(codes[0], scales[0], scale)).bfloat16()
    assert weight.shape[0] == 4 and torch.equal(weight, want)
    assert logits(model).isfinite().all()


def test_a_model_without_its_head_and_one_without_experts(checkpoint, tmp_path):
    _, directory = checkpoint()
    whole, body = load(directory), transformers.AutoModel.from_pretrained(directory, dtype=torch.bfloat16)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(body(ids).last_hidden_state, whole.model(ids).last_hidden_state) and len(packed(body)) == 2
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    dense = tmp_path / "dense"
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(dense)
    stems = tiny.quantize_linears(dense, "_proj$", output_format="modelopt")
    tiny.change_config(dense, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    model = load(dense)
    assert len(judge.judged(model, dense, tiny.paths_of(model, stems), logits)[0]) == 7


def test_what_is_dropped_is_freed(checkpoint):
    """Packed weights are too large to wait for the garbage collector, which does not see their size."""
    original, directory = checkpoint()
    enabled = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    adapter.enable(enabled)
    models = [load(directory), enabled]
    del enabled
    gc.collect()
    gc.disable()
    try:
        while models:
            model = models.pop()
            first, second = (weakref.ref(layer.mlp.experts.packed) for layer in model.model.layers)
            model.model.layers[0].mlp.experts = torch.nn.Identity()
            assert first() is None and second() is not None, "a module that the model replaces"
            del model
            assert second() is None, "the model"
    finally:
        gc.enable()
