"""gpt-oss: its MoE as published (MXFP4, biases, gate and up in alternate rows), in floats and in GGUF, loaded
unchanged.

transformers' own experts in float64, on weights from transformers' own decoder, are the oracle.
"""

from __future__ import annotations

import copy

import numpy as np
import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")

import family_checks as family  # noqa: E402
from family_checks import LIMIT, W4A16, decoded, relative_l2  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 8, 4, 128, 96, 40
PREFIX = "model.layers.0.mlp.experts."


def stacks(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of the published names under `experts.`. Sums are of order 1 and biases of order 3, so that each bias
    counts and some values reach the limit of 7."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, rows, cols in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
        codes = torch.randint(0, 256, (EXPERTS, rows, cols // 32, 16), generator=g, dtype=torch.uint8)
        exponents = torch.randint(-7, -3, (EXPERTS, rows, cols // 32), generator=g)
        tensors[name + "_blocks"] = codes
        tensors[name + "_scales"] = (exponents + 127).to(torch.uint8)
        tensors[name + "_bias"] = (3 * torch.randn(EXPERTS, rows, generator=g)).to(torch.bfloat16)
    return tensors


SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": SKIPPED}


def write(directory, tensors, quantization=MXFP4):
    config = dict(
        model_type="gpt_oss", architectures=["GptOssForCausalLM"], hidden_act="silu", hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE, num_hidden_layers=1, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K,
        experts_per_token=TOP_K, swiglu_limit=7.0,
    )  # fmt: skip
    named = {PREFIX + name: tensor for name, tensor in tensors.items()}
    named["model.layers.0.mlp.router.weight"] = torch.zeros(EXPERTS, HIDDEN)
    return family.write(directory, named, **config, **({"quantization_config": quantization} if quantization else {}))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gpt_oss"), stacks(1))


@pytest.fixture(scope="module")
def twin():
    """Runs transformers' experts in float64."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    from transformers import GptOssConfig
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = dict(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS)
    made = modeling.GptOssExperts(GptOssConfig(**sizes, num_experts_per_tok=TOP_K)).double()
    tensors = stacks(1)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            parts = tensors[name + "_blocks"], tensors[name + "_scales"]
            getattr(made, name).copy_(convert_moe_packed_tensors(*parts, dtype=torch.float32))
            getattr(made, name + "_bias").copy_(tensors[name + "_bias"])
    return made


@pytest.fixture(scope="module")
def batch():
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g)
    ids = torch.rand(TOKENS, EXPERTS, generator=g).topk(TOP_K).indices.int()
    return hidden, ids, torch.softmax(torch.randn(TOKENS, TOP_K, generator=g), -1)


def expected_of(twin, batch):
    hidden, ids, weights = batch
    with torch.no_grad():
        return twin(hidden.double(), ids.long(), weights.double())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_is_published_computes_what_transformers_does(published, twin, batch, backend):
    layer = nv.MoeLayer.from_checkpoint(published, 0, backend=backend, **W4A16)
    config = layer.config
    assert config.expert_biases and layer.describe()["expert_biases"]
    assert (config.activation, config.swiglu_limit, config.router_weight) == ("swiglu_oai", 7.0, "after_down")
    assert config.swiglu_alpha == pytest.approx(1.702, rel=2.0**-24)
    expected = expected_of(twin, batch)
    assert relative_l2(layer.run(*batch), expected) < LIMIT
    # A layer that forgets the biases, or one of the three, is far beyond it.
    for forgotten in range(3):
        for e in range(EXPERTS):
            expert = layer.expert(e)
            parts = [expert[p] for p in ("gate", "up", "down")]
            biases = [p["bias"] * (i != forgotten) for i, p in enumerate(parts)]
            matrices = [(p["codes"], p["scales"], p["tensor_scale"]) for p in parts]
            layer.replace_expert(e, *matrices, biases=tuple(biases))
        assert relative_l2(layer.run(*batch), expected) > 3 * LIMIT
        layer = nv.MoeLayer.from_checkpoint(published, 0, backend=backend, **W4A16)


@pytest.mark.parametrize("activation_format", ["nvfp4", "int8_block", "fp8"])
def test_other_activations_agree_with_the_reference(published, batch, activation_format):
    options = dict(activation_format=activation_format, row_format="fp32")
    reference = nv.MoeLayer.from_checkpoint(published, 0, backend="reference", **options).run(*batch)
    out = nv.MoeLayer.from_checkpoint(published, 0, backend="cpu", **options).run(*batch)
    assert relative_l2(out, reference.double()) < 5e-2  # a flipped code; `judge` has the bound of each element


def test_the_bytes_of_each_expert(published):
    """Row 2 i of gate_up_proj is gate's i, row 2 i + 1 up's, in codes and in biases."""
    loaded, tensors = nv.Checkpoint(str(published)), stacks(1)
    for e in (0, EXPERTS - 1):
        expert = loaded.expert(0, e)
        blocks = tensors["gate_up_proj_blocks"][e].reshape(2 * INTERMEDIATE, HIDDEN // 2).numpy()
        for first, name in enumerate(("gate", "up")):
            assert np.array_equal(expert[name]["codes"], blocks[first::2])
            assert np.array_equal(expert[name]["bias"], tensors["gate_up_proj_bias"][e, first::2].float().numpy())
        down = tensors["down_proj_blocks"][e].reshape(HIDDEN, INTERMEDIATE // 2).numpy()
        assert np.array_equal(expert["down"]["codes"], down)
        assert np.array_equal(expert["down"]["bias"], tensors["down_proj_bias"][e].float().numpy())


def test_slices_the_packed_cache_and_inspect(published, batch, tmp_path):
    family.check_slices_add_up(published, 0, batch, INTERMEDIATE // 2, INTERMEDIATE)
    _, mapped = family.from_cache(published, 0, batch, tmp_path, activation_format="bf16")
    assert np.array_equal(mapped.expert(3)["down"]["bias"], stacks(1)["down_proj_bias"][3].float().numpy())
    assert family.warnings_of(published) == []


def floats_of(twin) -> dict[str, torch.Tensor]:
    return {name: parameter.to(torch.bfloat16) for name, parameter in twin.named_parameters()}


def test_floats_as_transformers_writes_them(twin, batch, tmp_path):
    """(E, K, N), gate and up in alternate columns, quantized at load. The oracle has the quantized weights."""
    directory = write(tmp_path, floats_of(twin), quantization=None)
    loaded, rounded = nv.Checkpoint(str(directory)), copy.deepcopy(twin)
    with torch.no_grad():
        for e in range(EXPERTS):
            gate, up, down = (decoded(loaded.expert(0, e)[name]).T for name in ("gate", "up", "down"))
            rounded.gate_up_proj[e][:, ::2], rounded.gate_up_proj[e][:, 1::2], rounded.down_proj[e] = gate, up, down
    out = nv.MoeLayer.from_checkpoint(directory, 0, **W4A16).run(*batch)
    assert relative_l2(out, expected_of(rounded, batch)) < LIMIT
    assert relative_l2(out, expected_of(twin, batch)) < 0.2  # the error of quantization, far below other weights'


def test_biases_of_arrays(published, batch):
    """from_tensors with slices of one (E, 2 I) array, as the checkpoint's layer, bit for bit."""
    layer = nv.MoeLayer.from_checkpoint(published, 0, activation_format="bf16")
    experts = [layer.expert(e) for e in range(EXPERTS)]

    def stack(name):
        parts = [e[name] for e in experts]
        codes, scales = (np.stack([np.asarray(p[part]) for p in parts]) for part in ("codes", "scales"))
        return codes, scales, np.array([p["tensor_scale"] for p in parts], np.float32)

    gate_up = stacks(1)["gate_up_proj_bias"]
    biases = (gate_up[:, ::2], gate_up[:, 1::2], stacks(1)["down_proj_bias"])
    arrays = {name: stack(name) for name in ("gate", "up", "down")}
    made = nv.MoeLayer.from_tensors(layer.config, **arrays, biases=biases)
    assert torch.equal(made.run(*batch), layer.run(*batch))
    with pytest.raises(ValueError, match=r"gate bias: expected one \(expert_biases\), got none"):
        nv.MoeLayer.from_tensors(layer.config, **arrays)
    with pytest.raises(ValueError, match=r"down bias: expected \(8, 128\)"):
        nv.MoeLayer.from_tensors(layer.config, **arrays, biases=(*biases[:2], biases[0]))
    with pytest.raises(ValueError, match="biases: expected None or"):
        nv.MoeLayer.from_tensors(layer.config, **arrays, biases=biases[:2])


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda t: t.pop("down_proj_bias"), "missing_bias"),
        (lambda t: t.update(gate_up_proj_bias=t["gate_up_proj_bias"][:, 2:]), "shape_mismatch"),
        (lambda t: t["down_proj_bias"].__setitem__((2, 5), float("nan")), "bias_nonfinite"),
        (lambda t: t.update(down_proj_blocks=t["down_proj_blocks"][:, :, :, :8]), "shape_mismatch"),
        (lambda t: t.pop("gate_up_proj_scales"), "missing_scale"),
    ],
)
def test_what_is_wrong_is_found(tmp_path, change, finding):
    tensors = stacks(3)
    change(tensors)
    directory = write(tmp_path, tensors)
    assert finding in [f["id"] for f in nv.inspect(directory)["findings"]]
    with pytest.raises((nv.BadInput, ValueError)):
        nv.MoeLayer.from_checkpoint(directory, 0)


def test_quantize_refuses_it(twin, tmp_path):
    floats = write(tmp_path / "in", floats_of(twin), quantization=None)
    with pytest.raises(nv.Unsupported, match="expected experts without biases"):
        nv.quantize_checkpoint(floats, tmp_path / "out")


@pytest.mark.parametrize("published_form", [False, True])
def test_transformers_loads_it(tmp_path, published_form):
    """from_pretrained of floats and of published MXFP4, through the adapter; transformers' own experts judge it."""
    pytest.importorskip("transformers")
    import model_judge as judge
    import nvfp4_moe.transformers as adapter
    import tiny_models as tiny
    from transformers import AutoModelForCausalLM

    twin = tiny.gpt_oss(torch.bfloat16)
    twin.save_pretrained(tmp_path)
    if published_form:
        g = torch.Generator().manual_seed(5)

        def change(key, tensor):
            if not key.endswith(("gate_up_proj", "down_proj")):
                return {key: tensor}
            experts, cols, rows = tensor.shape
            blocks = torch.randint(0, 256, (experts, rows, cols // 32, 16), generator=g, dtype=torch.uint8)
            scales = torch.randint(120, 124, (experts, rows, cols // 32), generator=g).to(torch.uint8)
            return {key + "_blocks": blocks, key + "_scales": scales}

        tiny.rewrite(tmp_path, change)
        tiny.change_config(tmp_path, quantization_config=MXFP4)
    options = adapter.Nvfp4MoeConfig(**W4A16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=options)
    calls, _ = judge.record(model, tiny.logits)
    assert len(calls) == 2
    for name, call in calls.items():
        experts = judge.contract_experts(model.get_submodule(name).packed, twin.get_submodule(name))
        hidden, ids, weights = call.inputs
        assert relative_l2(call.output, experts(hidden.double(), ids, weights.double())) < LIMIT
        assert torch.equal(experts.down_proj_bias, twin.get_submodule(name).down_proj_bias.double())
