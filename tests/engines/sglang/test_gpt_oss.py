"""gpt-oss' experts in SGLang: its own block, loader and runner, on any rank, against the library and transformers' block.

Not the whole model: SGLang serves gpt-oss with attention backends that know sinks and sliding windows, and that of CPUs
(intel_amx) needs AMX and sgl_kernel.
"""

import types

import gpt_oss
import nvfp4_moe
import pytest
import torch
from gpt_oss import batch, exact, library
from layers import rank

NAME = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def model():
    return gpt_oss.make(5)


class Holder(torch.nn.Module):
    """What of SGLang's model its loader of experts reads: parameters by name, and sizes."""

    def __init__(self, experts, inner):
        super().__init__()
        self.config = types.SimpleNamespace(intermediate_size=inner, num_local_experts=gpt_oss.EXPERTS)
        self.layer = experts

    def named_parameters(self, *args, **named):
        return [(f"{NAME}.{name}", parameter) for name, parameter in self.layer.named_parameters()]

    def get_submodule(self, target):
        assert target == NAME
        return self.layer


def tensors(model):
    """(name, tensor) of the first layer's experts, as published."""
    for name in ("gate_up", "down"):
        yield from gpt_oss.expert_tensors("gpt_oss", NAME, name, model.experts[0, name]).items()
        yield f"{NAME}.{name}_proj_bias", model.dense[f"{NAME}.{name}_proj_bias"]


def make_layer(prefix=NAME, **options):
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

    options = {
        "gemm1_alpha": 1.702,
        "gemm1_clamp_limit": 7.0,
        "with_bias": True,
        "intermediate_size": gpt_oss.INNER,
    } | options
    return FusedMoE(
        num_experts=gpt_oss.EXPERTS,
        top_k=gpt_oss.TOP_K,
        layer_id=0,
        hidden_size=gpt_oss.HIDDEN,
        quant_config=Mxfp4Config.from_config({"quant_method": "mxfp4"}),
        activation="silu",
        params_dtype=torch.bfloat16,
        prefix=prefix,
        **options,
    )


def load(layer, model, inner=gpt_oss.INNER):
    """The published tensors through SGLang's own loader of gpt-oss."""
    from sglang.srt.models.gpt_oss import GptOssForCausalLM

    loaded = GptOssForCausalLM._load_mxfp4_experts_weights(Holder(layer, inner), tensors(model))
    assert len(loaded) == 6


def run(layer, hidden, ids, weights):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    logits = torch.zeros(len(hidden), gpt_oss.EXPERTS)
    return layer(hidden.clone(), StandardTopKOutput(topk_weights=weights, topk_ids=ids, router_logits=logits))


def served(sglang, model, inputs, *, ep=(1, 0), tp=(1, 0), inner=gpt_oss.INNER, **options):
    with rank(sglang, ep=ep, tp=tp):
        layer = make_layer(intermediate_size=inner, **options)
        load(layer, model, inner)
        layer.quant_method.process_weights_after_loading(layer)
        assert sum(parameter.numel() for parameter in layer.parameters()) == 0
        return run(layer, *inputs)


def test_published_experts_are_the_librarys_layer_and_transformers_own(sglang, configured, model):
    configured()
    inputs = batch()
    out = served(sglang, model, inputs)
    assert torch.equal(out, library(model, inputs))
    expected, off = exact(model, *inputs)
    error = (out.double() - expected).abs()
    print(f"\nlargest error {float(error.max()):.4f}, of what is allowed {float((error / off).max()):.2f}")
    assert (error <= off).all()


def test_biases_that_are_lost_or_counted_twice_are_beyond_that_bound(sglang, configured, model):
    configured()
    inputs = batch()
    expected, off = exact(model, *inputs)
    for change in (lambda name, bias: bias * 0, lambda name, bias: bias * (2 if "down" in name else 1)):
        out = served(sglang, gpt_oss.with_biases(model, change), inputs)
        assert ((out.double() - expected).abs() > off).float().mean() > 0.5


def test_experts_of_two_ranks_add_up(sglang, configured, model):
    configured()
    inputs = batch(1)
    half = gpt_oss.EXPERTS // 2
    for number in range(2):
        part = served(sglang, model, inputs, ep=(2, number))
        ids = torch.where(inputs[1] // half == number, inputs[1], -1)
        assert part.abs().max() > 0 and torch.equal(part, library(model, (inputs[0], ids, inputs[2])))


def test_slices_of_two_ranks_count_down_s_bias_once(sglang, configured, model):
    configured()
    inputs = batch(2)
    half = gpt_oss.INNER // 2
    parts = [served(sglang, model, inputs, tp=(2, number)) for number in range(2)]
    for number, part in enumerate(parts):
        columns = slice(number * half, (number + 1) * half)
        assert torch.equal(part, library(model, inputs, columns, down_bias=1 - number))
    expected, off = exact(model, *inputs)
    # Each rank rounds rows and sums of its own, whose sizes are not the whole's.
    allowed = off + sum(2.0**-8 * part.double().abs() for part in parts) + 2.0**-8 * off.max()
    assert ((sum(part.double() for part in parts) - expected).abs() <= allowed).all()


def test_ranks_get_whole_blocks_and_the_last_what_is_left(sglang, configured, model):
    """gpt-oss on four ranks: 90 blocks of 32, of which three ranks have 23 and the last 21. Here 3 blocks on two ranks."""
    configured()
    inner, inputs, random = 96, batch(3), torch.Generator().manual_seed(9)
    experts = {
        (0, name): (
            torch.randint(0, 256, (gpt_oss.EXPERTS, rows, columns // 2), generator=random, dtype=torch.uint8),
            torch.randint(120, 124, (gpt_oss.EXPERTS, rows, columns // 32), generator=random, dtype=torch.uint8),
        )
        for name, rows, columns in (("gate_up", 2 * inner, gpt_oss.HIDDEN), ("down", gpt_oss.HIDDEN, inner))
    }
    bias = torch.randn(gpt_oss.EXPERTS, 2 * inner, generator=random).bfloat16()
    wider = gpt_oss.Model(experts, model.dense | {f"{NAME}.gate_up_proj_bias": bias})
    for number, columns in enumerate((slice(0, 64), slice(64, 96))):
        part = served(sglang, wider, inputs, tp=(2, number), inner=inner)
        assert torch.equal(part, library(wider, inputs, columns, down_bias=1 - number))


@pytest.mark.parametrize("activation_format", ["nvfp4", "fp8", "int8_block"])
def test_activations_in_the_format_that_the_user_asks_for(sglang, configured, model, monkeypatch, activation_format):
    import dataclasses

    from nvfp4_moe.sglang import hooks

    configured()
    inputs, asked = batch(4), hooks.layer_options

    def layer_options(layer, hidden, inner, settings, *rest):
        return asked(layer, hidden, inner, dataclasses.replace(settings, activation_format=activation_format), *rest)

    monkeypatch.setattr(hooks, "layer_options", layer_options)
    out = served(sglang, model, inputs)
    assert torch.equal(out, library(model, inputs, activation_format=activation_format))
    assert not torch.equal(out, library(model, inputs))


def test_weights_and_biases_are_updated_in_place(sglang, configured, model):
    from nvfp4_moe.sglang.experts import packing_follows

    configured()
    inputs, other = batch(5), gpt_oss.make(6)
    with rank(sglang):
        layer = make_layer()
        load(layer, model)
        layer.quant_method.process_weights_after_loading(layer)
        handle = layer.quant_method.nvfp4_moe_state.ready().layer.handle
        with packing_follows():
            load(layer, other)
        layer.quant_method.process_weights_after_loading(layer)
        assert torch.equal(run(layer, *inputs), library(other, inputs))
        assert layer.quant_method.nvfp4_moe_state.ready().layer.handle == handle


@pytest.mark.parametrize("lost", ["gate_up_proj_scales", "down_proj_scales", "gate_up_proj_bias", "down_proj_bias"])
def test_what_no_file_brings_is_an_error(sglang, configured, model, lost):
    from sglang.srt.models.gpt_oss import GptOssForCausalLM

    configured()
    with rank(sglang):
        layer = make_layer()
        some = [(name, tensor) for name, tensor in tensors(model) if not name.endswith(lost)]
        GptOssForCausalLM._load_mxfp4_experts_weights(Holder(layer, gpt_oss.INNER), some)
        with pytest.raises(nvfp4_moe.Error, match=NAME):
            layer.quant_method.process_weights_after_loading(layer)


def test_the_models_own_block_selects_and_computes(sglang, configured, model):
    """SGLang's GptOssSparseMoeBlock, its router with a bias and all, against transformers' experts of its decisions."""
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.models.gpt_oss import GptOssSparseMoeBlock

    configured()
    config = types.SimpleNamespace(**gpt_oss.config("gpt_oss"))
    config.dtype = torch.bfloat16
    with rank(sglang):
        block = GptOssSparseMoeBlock(
            0, config, Mxfp4Config.from_config({"quant_method": "mxfp4"}), "model.layers.0.mlp"
        )
        load(block.experts, model)
        block.experts.quant_method.process_weights_after_loading(block.experts)
        with torch.no_grad():
            for name in ("weight", "bias"):
                getattr(block.router, name).copy_(model.dense[f"model.layers.0.mlp.router.{name}"])
            hidden = batch(7)[0]
            topk = block.topk(hidden, block.router(hidden)[0])
            out = block(hidden)
    assert type(topk).__name__ == "StandardTopKOutput"
    expected, off = exact(model, hidden, topk.topk_ids, topk.topk_weights)
    assert torch.equal(out, library(model, (hidden, topk.topk_ids.int(), topk.topk_weights)))
    assert ((out.double() - expected).abs() <= off).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gemm1_alpha": None, "gemm1_clamp_limit": None}, "of another form than gpt-oss'"),
        ({"gate_up_interleaved": False}, "of another form than gpt-oss'"),
        ({"gemm1_clamp_limit": None}, "expected a clamp limit"),
    ],
)
def test_other_mxfp4_experts_are_sglangs_with_one_line_that_says_why(sglang, configured, caplog, options, words):
    from nvfp4_moe.sglang import refusals

    refusals._said.clear()
    configured()
    with rank(sglang), caplog.at_level("WARNING", "nvfp4_moe.sglang"):
        layer = make_layer(**options)
    assert type(layer.quant_method).__name__ == "Mxfp4MoEMethod" and not hasattr(layer.quant_method, "nvfp4_moe_state")
    assert layer.w13_weight_scale.shape == (gpt_oss.EXPERTS, 2 * gpt_oss.INNER, gpt_oss.HIDDEN // 32)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "nvfp4_moe.sglang"]
    assert words in said and "left to SGLang" in said


def test_a_hidden_size_that_sglang_pads_is_refused(sglang):
    from nvfp4_moe.sglang.mxfp4 import Mxfp4Hooks
    from nvfp4_moe.sglang.refusals import Refused

    layer = types.SimpleNamespace(moe_runner_config=types.SimpleNamespace(gemm1_alpha=1.702, gate_up_interleaved=True))
    layer.hidden_size, layer.hidden_size_unpadded = 2880, 2880
    Mxfp4Hooks(None).check(None, layer)
    layer.hidden_size = 3072
    with pytest.raises(Refused, match="hidden size 2880 padded to 3072"):
        Mxfp4Hooks(None).check(None, layer)


def test_a_backend_that_sglang_chose_for_the_model_is_no_users_choice(sglang, configured, model, caplog):
    """SGLang gives gpt-oss and Nemotron-H runner backends of its own where the user names none."""
    from nvfp4_moe.sglang import refusals

    inputs = batch(8)
    for asked, taken in (("auto", True), ("triton", False)):
        refusals._said.clear()
        arguments = configured(moe_runner_backend="triton")
        arguments._raw_input = {"moe_runner_backend": asked}
        with rank(sglang):
            layer = make_layer()
            assert hasattr(layer.quant_method, "nvfp4_moe_state") == taken
            if taken:
                load(layer, model)
                layer.quant_method.process_weights_after_loading(layer)
                assert torch.equal(run(layer, *inputs), library(model, inputs))
    assert "--moe-runner-backend is triton" in caplog.text
