"""gpt-oss' experts in SGLang: its own block, loader and runner, on any rank, against the library and transformers'
block.

The whole model is not run: SGLang serves gpt-oss with attention backends that handle sinks and sliding windows, and the
one for CPUs (intel_amx) needs AMX and sgl_kernel.
"""

import types

import gpt_oss
import nvfp4_moe
import pytest
import torch
from expert_layer import of_experts
from gpt_oss import batch, exact, library
from layers import NAME, ask, pack, rank, run


@pytest.fixture(scope="module")
def model():
    return gpt_oss.make(5)


class Holder(torch.nn.Module):
    """The part of SGLang's model that its loader of experts reads: parameters by name, and sizes."""

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
    """Loads the published tensors through SGLang's own loader of gpt-oss."""
    from sglang.srt.models.gpt_oss import GptOssForCausalLM

    loaded = GptOssForCausalLM._load_mxfp4_experts_weights(Holder(layer, inner), tensors(model))
    assert len(loaded) == 6


def served(sglang, model, inputs, *, ep=(1, 0), tp=(1, 0), **options):
    inner = model.experts[0, "down"][0].shape[2] * 2
    with rank(sglang, ep=ep, tp=tp):
        layer = make_layer(intermediate_size=inner, **options)
        load(layer, model, inner)
        pack(layer)
        return run(layer, *inputs)


def test_published_experts_are_the_librarys_layer_and_transformers_own(sglang, configured, model):
    configured()
    inputs = batch()
    gpt_oss.check_exact(model, inputs, lambda model: served(sglang, model, inputs))


def test_experts_of_two_ranks_add_up(sglang, configured, model):
    configured()
    inputs, half = batch(1), gpt_oss.EXPERTS // 2
    for number in range(2):
        part = served(sglang, model, inputs, ep=(2, number))
        here = of_experts(inputs, range(number * half, (number + 1) * half))
        assert part.abs().max() > 0 and torch.equal(part, library(model, here))


@pytest.mark.parametrize("sliced", [gpt_oss.make(5), gpt_oss.of_three_blocks(9)], ids=["halves", "three blocks"])
def test_ranks_get_whole_blocks_and_the_last_what_is_left_and_count_down_s_bias_once(sglang, configured, sliced):
    configured()
    inputs = batch(2)
    parts = gpt_oss.check_slices(sliced, inputs, lambda number: served(sglang, sliced, inputs, tp=(2, number)))
    expected, off = exact(sliced, *inputs)
    # Each rank rounds its own rows and sums, which differ in size from those of the whole.
    allowed = off + sum(2.0**-8 * part.double().abs() for part in parts) + 2.0**-8 * off.max()
    assert ((sum(part.double() for part in parts) - expected).abs() <= allowed).all()


@pytest.mark.parametrize("activation_format", ["nvfp4", "fp8", "int8_block"])
def test_activations_in_the_format_that_the_user_asks_for(sglang, configured, model, monkeypatch, activation_format):
    configured()
    ask(monkeypatch, activation_format)
    inputs = batch(4)
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
        pack(layer)
        handle = layer.quant_method.nvfp4_moe_state.ready().layer.handle
        with packing_follows():
            load(layer, other)
        pack(layer)
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
            pack(layer)


def test_the_models_own_block_selects_and_computes(sglang, configured, model):
    """SGLang's GptOssSparseMoeBlock, including its router's bias, against transformers' experts at its decisions."""
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
        pack(block.experts)
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
def test_other_mxfp4_experts_are_sglangs_with_one_line_that_says_why(
    sglang, configured, refusals, caplog, options, words
):
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


def test_a_backend_that_sglang_chose_for_the_model_is_no_users_choice(sglang, configured, refusals, model, caplog):
    """SGLang gives gpt-oss and Nemotron-H runner backends of its own if the user names none."""
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
                pack(layer)
                assert torch.equal(run(layer, *inputs), library(model, inputs))
    assert "--moe-runner-backend is triton" in caplog.text
