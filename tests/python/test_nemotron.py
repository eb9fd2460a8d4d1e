"""Nemotron-H: experts of two matrices (relu2, no gate), of the model's width or after a latent projection.

In floats, NVFP4 and ModelOpt's mixed precision, against transformers' own block in float64 on the weights of the files,
at equal router decisions. Whole models of both kinds: test_transformers_models.py, test_transformers_enable.py.
"""

from __future__ import annotations

import copy
import json

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")

import family_checks as family  # noqa: E402
import model_judge as judge  # noqa: E402
import moe_reference as oracle  # noqa: E402
from checkpoints import raw  # noqa: E402
from family_checks import LIMIT, W4A16, decoded, relative_l2  # noqa: E402
from transformers import NemotronHConfig  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERTS, TOP_K, HIDDEN, LATENT, INTERMEDIATE, SHARED, TOKENS = 8, 3, 128, 96, 80, 112, 40
MIXER = "backbone.layers.1.mixer."
KINDS = {"nano": None, "super": LATENT}


def fields(latent: int | None) -> dict:
    return dict(
        hidden_size=HIDDEN, mlp_hidden_act="relu2", n_routed_experts=EXPERTS, n_shared_experts=1, num_experts_per_tok=TOP_K,
        moe_intermediate_size=INTERMEDIATE, moe_shared_expert_intermediate_size=SHARED, moe_latent_size=latent,
        n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip


def make_block(latent: int | None):
    """transformers' block in float64, with weights that bf16 holds."""
    torch.manual_seed(11)
    config = NemotronHConfig(**fields(latent), layers_block_type=["linear_attention", "moe"])
    block = modeling.NemotronHMoE(config).double()
    with torch.no_grad():
        for parameter in block.parameters():
            drawn = torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5
            parameter.copy_(drawn.bfloat16())
        block.gate.e_score_correction_bias.copy_(torch.rand(EXPERTS) * 0.1)
    return block


def files_of(block) -> dict[str, torch.Tensor]:
    """The block's tensors under the published names, one per expert."""
    tensors = {"backbone.layers.0.mixer.in_proj.weight": torch.randn(16, HIDDEN).bfloat16()}
    for name, parameter in (*block.named_parameters(), *block.named_buffers()):
        wide = name.endswith("e_score_correction_bias")
        value = parameter.detach().float() if wide else parameter.detach().bfloat16()
        if name.startswith("experts."):
            for e in range(EXPERTS):
                tensors[f"{MIXER}experts.{e}.{name.removeprefix('experts.')}.weight"] = value[e].clone()
        else:
            tensors[MIXER + name] = value
    return tensors


def write(directory, tensors, latent: int | None, **config):
    whole = fields(latent) | dict(
        model_type="nemotron_h",
        architectures=["NemotronHForCausalLM"],
        hybrid_override_pattern="ME",
        num_hidden_layers=2,
    )
    return family.write(directory, tensors, **whole | config)


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    """(latent width or None, the block, its float checkpoint, that quantized)."""
    latent = KINDS[request.param]
    block = make_block(latent)
    directory = tmp_path_factory.mktemp(request.param)
    floats = write(directory / "floats", files_of(block), latent)
    nv.quantize_checkpoint(floats, directory / "nvfp4")
    return latent, block, floats, directory / "nvfp4"


def twin_of(block, directory, *, shared: bool = False):
    """The block with the routed experts' weights (and the shared one's) as this library reads them from the files."""
    twin, loaded = copy.deepcopy(block), nv.Checkpoint(str(directory))
    with torch.no_grad():
        for e in range(EXPERTS):
            expert = loaded.expert(1, e)
            assert expert["gate"] is None
            twin.experts.up_proj[e], twin.experts.down_proj[e] = decoded(expert["up"]), decoded(expert["down"])
        if shared:
            expert = loaded.shared_expert(1)
            twin.shared_experts.up_proj.weight.copy_(decoded(expert["up"]))
            twin.shared_experts.down_proj.weight.copy_(decoded(expert["down"]))
    return twin


@pytest.fixture(scope="module")
def hidden():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16().double()


@pytest.fixture(scope="module")
def batch(made, hidden):
    """The inputs of the routed experts (T, their width), and the router's decisions, from transformers' own modules."""
    block = made[1]
    with torch.no_grad():
        _, weights, ids = block.gate(hidden)
        return block.fc1_latent_proj(hidden).float(), ids.int(), weights.float()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_quantized_experts_compute_what_transformers_does(made, hidden, batch, backend):
    latent, block, _, directory = made
    layer = nv.MoeLayer.from_checkpoint(directory, 1, backend=backend, **W4A16)
    config = layer.config
    assert (config.activation, config.swiglu_limit, config.router_weight) == ("relu2", None, "after_down")
    assert (config.hidden_size, config.intermediate_size) == (latent or HIDDEN, INTERMEDIATE)
    assert config.shared_intermediate_size == 0  # a shared expert in floats, or of another width, stays with the caller
    twin = twin_of(block, directory)
    x, ids, weights = batch
    with torch.no_grad():
        expected = twin.experts(x.double(), ids.long(), weights.double())
        out = layer.run(*batch)
        assert relative_l2(out, expected) < LIMIT
        # The whole block: the host projects, and adds the shared expert.
        whole = twin.fc2_latent_proj(out.double()) + twin.shared_experts(hidden)
        assert relative_l2(whole, twin(hidden)) < LIMIT
    # Another expert's matrix, or relu instead of its square, is far beyond the limit.
    matrices = layer.expert(1)["up"], layer.expert(0)["down"]
    layer.replace_expert(0, None, *((m["codes"], m["scales"], m["tensor_scale"]) for m in matrices))
    assert relative_l2(layer.run(*batch), expected) > 3 * LIMIT


@pytest.mark.parametrize("activation_format", ["nvfp4", "int8_block", "fp8"])
def test_other_activations_agree_with_the_contract(made, batch, activation_format):
    """Each element within the interval that the numeric contract leaves (moe_reference.py, in float64)."""
    directory, x = made[3], batch[0].bfloat16()
    matrices = judge.expert_weights(directory, 1, EXPERTS)
    options = oracle.Options(
        EXPERTS, TOP_K, x.shape[1], INTERMEDIATE, activation="relu2", activation_format=activation_format
    )
    for backend, accuracy in (("reference", oracle.EXACT), ("cpu", oracle.CONTRACT)):
        layer = nv.MoeLayer.from_checkpoint(directory, 1, backend=backend, activation_format=activation_format)
        want = oracle.forward(options, matrices, x, *batch[1:], accuracy=accuracy)
        assert not oracle.outside(want, layer.run(x, *batch[1:])).any()
        assert float((want.lo == want.hi).double().mean()) > 0.75  # wide intervals would not test anything


def test_floats_load_with_the_shared_expert_where_it_has_their_width(made, hidden, batch):
    latent, block, floats, _ = made
    layer = nv.MoeLayer.from_checkpoint(floats, 1, **W4A16)
    assert layer.config.shared_intermediate_size == (0 if latent else SHARED)
    twin = twin_of(block, floats, shared=not latent)
    x, ids, weights = batch
    with torch.no_grad():
        expected = twin.experts(x.double(), ids.long(), weights.double())
        if not latent:
            expected = expected + twin.shared_experts(hidden)
    assert relative_l2(layer.run(*batch), expected) < LIMIT
    found = {finding["id"] for finding in nv.inspect(floats)["findings"]}
    assert ("shared_expert_of_other_width" in found) == (latent is not None)


def test_from_bf16_gives_the_checkpoints_bits(made, batch):
    latent, block, floats, _ = made
    layer = nv.MoeLayer.from_checkpoint(floats, 1, shared_intermediate_size=0, **W4A16)
    up, down = (p.detach().bfloat16() for p in (block.experts.up_proj, block.experts.down_proj))
    same = nv.MoeLayer.from_bf16(layer.config, up=up, down=down)
    assert torch.equal(same.run(*batch), layer.run(*batch))
    gated = nv.MoeConfig(EXPERTS, TOP_K, latent or HIDDEN, INTERMEDIATE)
    for config, stacks, words in (
        (layer.config, dict(gate=up, up=up, down=down), "gate: expected None with activation relu2"),
        (gated, dict(up=up, down=down), "gate"),
        (layer.config, dict(up=up, down=down[:7]), "up, down: expected as many experts in each, got 8, 7"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            nv.MoeLayer.from_bf16(config, **stacks)


def test_slices_the_packed_cache_and_inspect(made, batch, tmp_path):
    latent, _, floats, directory = made
    family.check_slices_add_up(directory, 1, batch, 48, INTERMEDIATE)
    first, mapped = family.from_cache(directory, 1, batch, tmp_path, activation_format="fp8")
    assert mapped.describe()["fp8_weights"] == first.describe()["fp8_weights"]
    assert first.describe()["fp8_weights"]["weights"] == EXPERTS * 2 * batch[0].shape[1] * INTERMEDIATE
    assert mapped.expert(2)["gate"] is None
    for path in (floats, directory):
        assert family.warnings_of(path) == []
        said = " ".join(finding["text"] for finding in nv.inspect(path)["findings"])
        assert ("projection between the model's width and the experts'" in said) == (latent is not None)


def mixed(directory, into, latent, algo: str = "NVFP4"):
    """Rewrites a checkpoint as ModelOpt exports Nemotron-3: the routed experts in NVFP4, Mamba's projections and the
    shared expert in FP8."""
    tensors, layers = {}, {}
    for key, tensor in raw(directory).items():
        stem = key.removesuffix(".weight")
        if ".experts." in key:
            if algo == "W4A16_NVFP4" and key.endswith("input_scale"):
                continue
            tensors[key] = tensor
            if stem != key:
                layers[stem] = {"quant_algo": algo, "group_size": 16}
        elif stem != key and ("in_proj" in key or "shared_experts" in key):
            scale = tensor.float().abs().amax() / 448
            tensors[key] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            tensors |= {f"{stem}.weight_scale": scale, f"{stem}.input_scale": torch.tensor(0.5)}
            layers[stem] = {"quant_algo": "FP8"}
        else:
            tensors[key] = tensor
    declared = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return write(into, tensors, latent, quantization_config=declared)


def assert_same_codes(one, other):
    for e in range(EXPERTS):
        for matrix in ("up", "down"):
            mine, theirs = one.expert(e)[matrix], other.expert(e)[matrix]
            assert (mine["codes"] == theirs["codes"]).all() and (mine["scales"] == theirs["scales"]).all()


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4"])
def test_mixed_precision_has_the_same_experts(made, tmp_path, algo):
    latent, block, _, directory = made
    both = mixed(directory, tmp_path / "mixed", latent, algo)
    layer, plain = (nv.MoeLayer.from_checkpoint(d, 1) for d in (both, directory))
    assert layer.describe()["activations"]["declared"] == ("nvfp4" if algo == "NVFP4" else "bf16")
    assert layer.config.shared_intermediate_size == 0
    assert_same_codes(layer, plain)
    findings = {finding["id"]: finding for finding in nv.inspect(both)["findings"]}
    assert ("shared_expert_of_other_width" if latent else "shared_expert_not_loaded") in findings
    assert not [f for f in findings.values() if f["severity"] == "error"]


def test_stacks_as_transformers_keeps_them(made, tmp_path):
    latent, block, floats, _ = made
    tensors = {key: tensor for key, tensor in raw(floats).items() if ".experts." not in key}
    for name in ("up_proj", "down_proj"):
        tensors[f"{MIXER}experts.{name}"] = getattr(block.experts, name).detach().bfloat16()
    stacked = write(tmp_path / "stacked", tensors, latent)
    assert_same_codes(*(nv.MoeLayer.from_checkpoint(d, 1, **W4A16) for d in (stacked, floats)))


def test_compressed_tensors_and_static_scales(made, tmp_path):
    """quantize's other format, and calibrated input scales: of hidden on up, of the intermediate on down."""
    floats, out = made[2], tmp_path / "ct"
    nv.quantize_checkpoint(floats, out, output_format="compressed-tensors", input_scales={1: (0.25, 0.5)})
    names = {key for key in raw(out) if ".experts.0." in key}
    parts = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    assert names == {f"{MIXER}experts.0.{m}.{p}" for m in ("up_proj", "down_proj") for p in parts}
    layer = nv.MoeLayer.from_checkpoint(out, 1, activation_scale="static", intermediate_scale="fixed")
    assert layer.describe()["activation_scale"] == {"hidden": 0.25, "intermediate": 8.0}


def gate_too(tensors):
    tensors[f"{MIXER}experts.1.gate_proj.weight"] = tensors[f"{MIXER}experts.1.up_proj.weight"].clone()


def cut(tensors):
    tensors[f"{MIXER}experts.2.up_proj.weight"] = tensors[f"{MIXER}experts.2.up_proj.weight"][:64]


def bias_too(tensors):
    tensors[f"{MIXER}experts.2.up_proj.bias"] = torch.zeros(INTERMEDIATE)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda t: t.pop(f"{MIXER}experts.3.up_proj.weight"), nv.BadInput, "experts.3.up_proj.weight"),
        (lambda t: t.pop(f"{MIXER}experts.5.down_proj.weight_scale"), nv.BadInput, "experts.5.down_proj.weight_scale"),
        (gate_too, nv.Unsupported, "a gate, which experts of nemotron_h have not"),
        (cut, nv.BadInput, "experts.2.up_proj.weight"),
        (bias_too, nv.Unsupported, "bias"),
    ],
)
def test_what_is_wrong_is_told(made, tmp_path, change, error, words):
    latent, _, _, directory = made
    tensors = raw(directory)
    change(tensors)
    quantization = json.loads((directory / "config.json").read_text())["quantization_config"]
    broken = write(tmp_path / "broken", tensors, latent, quantization_config=quantization)
    with pytest.raises(error, match=words):
        nv.MoeLayer.from_checkpoint(broken, 1)
