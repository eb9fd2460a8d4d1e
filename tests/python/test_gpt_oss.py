"""gpt-oss: its MoE as published (MXFP4, biases, gate and up in alternate rows), in floats and in GGUF, loaded as it is, against
transformers' own experts in float64 on weights that transformers' own decoder gives."""

from __future__ import annotations

import json

import numpy as np
import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 8, 4, 128, 96, 40
PREFIX = "model.layers.0.mlp.experts."
# Roundings to bf16, of hidden and of h: each moves its vector by at most 2^-9, the first moves g and u by as much on average and h
# by less than 1.1 times that twice. (2 * 1.1 + 1) * 2^-9, here with the room of 5 * 2^-9.
LIMIT = 5 * 2.0**-9


def relative_l2(actual, expected) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def stacks(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of the published names under `experts.`: sums of order 1 and biases of order 3, so that each bias counts and the
    limit of 7 is reached by some."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, rows, cols in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
        codes = torch.randint(0, 256, (EXPERTS, rows, cols // 32, 16), generator=g, dtype=torch.uint8)
        exponents = torch.randint(-7, -3, (EXPERTS, rows, cols // 32), generator=g)
        tensors[name + "_blocks"] = codes
        tensors[name + "_scales"] = (exponents + 127).to(torch.uint8)
        tensors[name + "_bias"] = (3 * torch.randn(EXPERTS, rows, generator=g)).to(torch.bfloat16)
    return tensors


def config_json(quantized: bool) -> str:
    config = dict(
        model_type="gpt_oss", architectures=["GptOssForCausalLM"], hidden_act="silu", hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE, num_hidden_layers=1, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K,
        experts_per_token=TOP_K, swiglu_limit=7.0,
    )  # fmt: skip
    if quantized:
        skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    return json.dumps(config)


def write(directory, tensors, *, quantized: bool):
    from safetensors.torch import save_file

    router = {"model.layers.0.mlp.router.weight": torch.zeros(EXPERTS, HIDDEN)}
    named = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named | router, directory / "model.safetensors")
    (directory / "config.json").write_text(config_json(quantized))
    return directory


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gpt_oss"), stacks(1), quantized=True)


@pytest.fixture(scope="module")
def twin():
    """transformers' experts in float64."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    from transformers import GptOssConfig
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    made = modeling.GptOssExperts(
        GptOssConfig(
            hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
        )
    ).double()
    tensors = stacks(1)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            weights = convert_moe_packed_tensors(
                tensors[name + "_blocks"], tensors[name + "_scales"], dtype=torch.float32
            )
            getattr(made, name).copy_(weights)
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
    layer = nv.MoeLayer.from_checkpoint(published, 0, backend=backend, activation_format="bf16", row_format="fp32")
    config = layer.config
    assert config.expert_biases and layer.describe()["expert_biases"]
    assert (config.activation, config.swiglu_limit, config.router_weight) == ("swiglu_oai", 7.0, "after_down")
    assert config.swiglu_alpha == pytest.approx(1.702, rel=2.0**-24)
    expected = expected_of(twin, batch)
    out = layer.run(*batch)
    assert relative_l2(out, expected) < LIMIT
    # A layer that forgets the biases, or one of the three, is far beyond it.
    for forgotten in range(3):
        for e in range(EXPERTS):
            expert = layer.expert(e)
            parts = [expert[p] for p in ("gate", "up", "down")]
            biases = [p["bias"] * (i != forgotten) for i, p in enumerate(parts)]
            matrices = [(p["codes"], p["scales"], p["tensor_scale"]) for p in parts]
            layer.replace_expert(e, *matrices, biases=tuple(biases))
        assert relative_l2(layer.run(*batch), expected) > 3 * LIMIT
        layer = nv.MoeLayer.from_checkpoint(published, 0, backend=backend, activation_format="bf16", row_format="fp32")


@pytest.mark.parametrize("activation_format", ["nvfp4", "int8_block", "fp8"])
def test_other_activations_agree_with_the_reference(published, batch, activation_format):
    options = dict(activation_format=activation_format, row_format="fp32")
    reference = nv.MoeLayer.from_checkpoint(published, 0, backend="reference", **options).run(*batch)
    out = nv.MoeLayer.from_checkpoint(published, 0, backend="cpu", **options).run(*batch)
    assert relative_l2(out, reference.double()) < 5e-2  # a flipped code; `judge` has the bound of each element


def test_the_bytes_of_each_expert(published):
    """Row 2 i of gate_up_proj is gate's i, row 2 i + 1 up's, of codes and biases alike."""
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


def test_slices_add_up_to_the_whole(published, batch):
    """Tensor parallel: the down bias is added by one rank alone."""
    options = dict(activation_format="bf16", row_format="fp32", backend="reference")
    whole = nv.MoeLayer.from_checkpoint(published, 0, **options).run(*batch)
    half = INTERMEDIATE // 2
    parts = [
        nv.MoeLayer.from_checkpoint(published, 0, intermediate_slice=s, **options).run(*batch)
        for s in ((0, half), (half, half))
    ]
    assert relative_l2(parts[0] + parts[1], whole.double()) < 1e-6


def test_the_packed_cache_keeps_biases(published, batch, tmp_path):
    options = dict(activation_format="bf16", cache_directory=tmp_path)
    first = nv.MoeLayer.from_checkpoint(published, 0, **options).run(*batch)
    assert len(list(tmp_path.glob("*.packed"))) == 1
    mapped = nv.MoeLayer.from_checkpoint(published, 0, **options)
    assert torch.equal(mapped.run(*batch), first)
    assert np.array_equal(mapped.expert(3)["down"]["bias"], stacks(1)["down_proj_bias"][3].float().numpy())


def test_inspect_finds_nothing_wrong(published):
    findings = nv.inspect(published)["findings"]
    assert [f for f in findings if f["severity"] != "note"] == []


def test_floats_as_transformers_writes_them(twin, batch, tmp_path):
    """(E, K, N), gate and up in alternate columns: quantized at load. Against the module on what was quantized."""
    import copy

    tensors = {name: p.detach().to(torch.bfloat16) for name, p in twin.named_parameters()}
    directory = write(tmp_path, tensors, quantized=False)
    loaded, rounded = nv.Checkpoint(str(directory)), copy.deepcopy(twin)
    import moe_reference as oracle

    with torch.no_grad():
        for e in range(EXPERTS):
            expert = loaded.expert(0, e)
            for name in ("gate", "up", "down"):
                matrix = expert[name]
                codes, scales = (torch.as_tensor(np.asarray(matrix[part]))[None] for part in ("codes", "scales"))
                weights = (oracle.decode((codes, scales), 0) * float(matrix["tensor_scale"])).T
                if name == "down":
                    rounded.down_proj[e] = weights
                else:
                    rounded.gate_up_proj[e][:, name == "up" :: 2] = weights
    layer = nv.MoeLayer.from_checkpoint(directory, 0, activation_format="bf16", row_format="fp32")
    out = layer.run(*batch)
    assert relative_l2(out, expected_of(rounded, batch)) < LIMIT
    assert relative_l2(out, expected_of(twin, batch)) < 0.2  # what quantizing costs, far from other weights


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
    directory = write(tmp_path, tensors, quantized=True)
    assert finding in [f["id"] for f in nv.inspect(directory)["findings"]]
    with pytest.raises((nv.BadInput, ValueError)):
        nv.MoeLayer.from_checkpoint(directory, 0)


def test_quantize_refuses_it(published, twin, tmp_path):
    tensors = {name: p.detach().to(torch.bfloat16) for name, p in twin.named_parameters()}
    (tmp_path / "in").mkdir()
    write(tmp_path / "in", tensors, quantized=False)
    with pytest.raises(nv.Unsupported, match="expected experts without biases"):
        nv.quantize_checkpoint(str(tmp_path / "in"), str(tmp_path / "out"))


@pytest.mark.parametrize("published_form", [False, True])
def test_transformers_loads_it(tmp_path, published_form):
    """from_pretrained of floats and of MXFP4 as published, through the adapter: transformers' own experts judge each call."""
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
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = json.loads(config_json(True))["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    options = adapter.Nvfp4MoeConfig(activation_format="bf16", row_format="fp32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=options)
    calls, _ = judge.record(model, tiny.logits)
    assert len(calls) == 2
    for name, call in calls.items():
        experts = judge.contract_experts(model.get_submodule(name).packed, twin.get_submodule(name))
        hidden, ids, weights = call.inputs
        assert relative_l2(call.output, experts(hidden.double(), ids, weights.double())) < LIMIT
        assert torch.equal(experts.down_proj_bias, twin.get_submodule(name).down_proj_bias.double())
