"""Checkpoints written by nvidia-modelopt's and compressed-tensors' own export code load, decode and verify.

They decode to the producers' own values, and the producers' own readers read the same values from one that quantize
writes. The exports run here, from transformers models with random weights (tests/vectors/make_checkpoint_vectors.py).
The Qwen3-MoE ones are also committed under tests/vectors, for hosts without the producers.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import nvfp4_moe as nv
import pytest
from checkpoints import experts, raw, same_values

VECTORS = Path(__file__).resolve().parents[2] / "tests" / "vectors"
PRODUCERS = ("modelopt", "compressed_tensors")
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")
NAMES = {"qwen3_moe": "qwen"}  # the family's name in nvfp4_moe, if it differs
CASES = [(family, producer) for family in FAMILIES for producer in PRODUCERS]
PARTS = ("gate", "up", "down")
WRITTEN = "written"  # by quantize, from the Qwen3-MoE model
INPUT_SCALES = {0: (0.0123, 0.0045), 1: (0.5, None)}  # None: not calibrated, 1.0


@pytest.fixture(scope="module")
def written(made, tmp_path_factory):
    """(original, {producer in whose format: directory})"""
    original = made("qwen3_moe") / "original"
    out = tmp_path_factory.mktemp("written")
    for name in PRODUCERS:
        done = nv.quantize_checkpoint(
            original, out / name, output_format=name.replace("_", "-"), input_scales=INPUT_SCALES
        )
        assert [layer["layer"] for layer in done["layers"]] == [0, 1] and done["quantized_tensors"] == 24
    return original, {name: out / name for name in PRODUCERS}


@pytest.fixture
def checkpoint_of(made, written):
    return lambda family, producer: written[1][producer] if family == WRITTEN else made(family) / producer


@pytest.mark.parametrize("producer", PRODUCERS)
def test_committed_checkpoints_are_what_the_producers_write(made, producer):
    import make_checkpoint_vectors as vectors
    import torch

    committed = json.loads((VECTORS / "checkpoints.json").read_text())
    if committed != {"seed": vectors.SEED, "versions": vectors.versions()}:
        pytest.skip(f"made with {committed['versions']}, installed are {vectors.versions()}")
    again, kept = made("qwen3_moe") / producer, VECTORS / f"{producer}_qwen3_moe"
    for file in kept.glob("*.json"):
        assert json.loads(file.read_text()) == json.loads((again / file.name).read_text()), file.name
    new, old = raw(again), raw(kept)
    assert set(new) == set(old)
    for name, tensor in new.items():
        assert tensor.dtype == old[name].dtype and tensor.shape == old[name].shape, name
        same = (one.view(torch.uint8) if one.dim() else one for one in (tensor, old[name]))
        assert torch.equal(*same), name


@pytest.mark.parametrize("producer", PRODUCERS)
def test_committed_checkpoints_load(producer):
    """Needs no producer, only the committed bytes."""
    check_inspect(VECTORS / f"{producer}_qwen3_moe", "qwen3_moe", producer)
    for expert, _, _ in experts(VECTORS / f"{producer}_qwen3_moe"):
        for part in PARTS:
            decoded = nv.dequantize(*expert[part].values())
            assert np.isfinite(decoded).all() and np.abs(decoded).max() > 0


def check_inspect(directory: Path, family: str, producer: str) -> None:
    info = nv.inspect(directory)
    assert [f["text"] for f in info["findings"] if f["severity"] != "note"] == []
    assert info["family"] == NAMES.get(family, family)
    assert info["format"] == producer.replace("_", "-")
    assert info["layers"] == ([1] if family == "deepseek_v3" else [0, 1])
    assert info["shared_experts"] == (1 if family == "deepseek_v3" else 0)
    expected = {"num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 48, "activation": "swiglu"}
    assert {key: info["options"][key] for key in expected} == expected
    for statistics in info["statistics"].values():
        assert statistics["experts"] == 4
        assert statistics["codes_bytes"] == 4 * 3 * 64 * 48 // 2
        assert statistics["scales_bytes"] == 4 * 3 * 64 * 48 // 16
        assert statistics["input_scale"]["hidden"] > 0 and statistics["input_scale"]["intermediate"] > 0


@pytest.mark.parametrize(("family", "producer"), CASES)
def test_loads_without_errors(made, family, producer):
    check_inspect(made(family) / producer, family, producer)


@pytest.mark.parametrize("family", [*FAMILIES, WRITTEN])
def test_decoded_weights_are_modelopts(checkpoint_of, family):
    """NVFP4QTensor.dequantize in double, which rounds nothing, then one rounding to float32."""
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    directory = checkpoint_of(family, "modelopt")
    tensors, seen = raw(directory), 0
    for expert, layer, _ in experts(directory):
        for part in PARTS:
            name, mine = expert["names"][part].removesuffix(".weight"), expert[part]
            codes, scales, s = (tensors[f"{name}.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2"))
            assert codes.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn
            assert s.shape == tensors[f"{name}.input_scale"].shape == () and s.dtype == torch.float32
            assert (mine["codes"] == codes.numpy()).all()
            assert (mine["scales"] == scales.view(torch.uint8).numpy()).all()
            assert mine["tensor_scale"] == float(s)
            shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
            theirs = NVFP4QTensor(shape, torch.bfloat16, codes).dequantize(
                torch.float64, scale=scales.double(), double_scale=s.double(), block_sizes={-1: 16}
            )
            assert same_values(torch.from_numpy(nv.dequantize(*mine.values())), theirs.float()), name
            seen += 1
        check_input_scales(expert, tensors, layer, "input_scale", lambda value: value)
    assert seen == 12 * len(nv.inspect(directory, layers=[])["layers"])


@pytest.mark.parametrize("family", [*FAMILIES, WRITTEN])
def test_decoded_weights_are_compressed_tensors(checkpoint_of, family, count):
    """Its files hold G, the reciprocal; a reader multiplies with s = float32(1/G). Its own dequantize with v*s as the
    scale gives our bits. With v/G, as in its decompress, the two differ only by the roundings of 1/G and v/G."""
    import torch
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    directory = checkpoint_of(family, "compressed_tensors")
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    tensors, differing, total = raw(directory), 0, 0
    for expert, layer, _ in experts(directory):
        for part in PARTS:
            name, mine = expert["names"][part].removesuffix(".weight_packed"), expert[part]
            stem = f"{name}."
            state = {key.removeprefix(stem): value for key, value in tensors.items() if key.startswith(stem)}
            codes, scales, g = state["weight_packed"], state["weight_scale"], state["weight_global_scale"]
            assert (mine["codes"] == codes.numpy()).all()
            assert (mine["scales"] == scales.view(torch.uint8).numpy()).all()
            assert mine["tensor_scale"] == float(np.float32(1 / np.float64(g)))
            values = unpack_fp4_from_uint8(codes, codes.shape[0], codes.shape[1] * 2, dtype=torch.float64)
            ours = torch.from_numpy(nv.dequantize(*mine.values()))
            product = scales.double() * mine["tensor_scale"]
            theirs = dequantize(values, product, None, scheme.weights, dtype=torch.float64).float()
            assert same_values(ours, theirs), name
            single = dequantize(
                values.float(), scales.float(), None, scheme.weights, dtype=torch.float32, global_scale=g
            )
            # Ours rounds 1/G and the product, theirs v/G and the product: at most four roundings of 2^-24 apart.
            assert ((ours - single).abs() <= 4 * 2.0**-24 * ours.abs() * (1 + 2.0**-20)).all()
            differing, total = differing + int((ours != single).sum()), total + ours.numel()
            check_bf16(NVFP4PackedCompressor.decompress(state, scheme)["weight"], ours)
        check_input_scales(
            expert, tensors, layer, "input_global_scale", lambda value: np.float32(1 / np.float64(value))
        )
    count("last bits against decompress in float32", differing, total)


def check_bf16(theirs, ours) -> None:
    """decompress itself rounds the product to bfloat16: 8 significant bits, so 2^-8 more."""
    import torch

    assert theirs.dtype == torch.bfloat16
    assert ((theirs.float() - ours).abs() <= (2.0**-8 + 4 * 2.0**-24) * ours.abs() * (1 + 2.0**-20)).all()


def check_input_scales(expert, tensors, layer, suffix, to_scale) -> None:
    """The layer's activation scales are the maximum over all experts, gate and up together."""
    values = {"hidden": [], "intermediate": []}
    for name, tensor in tensors.items():
        if f"layers.{layer}." in name and ".experts." in name and name.endswith(f".{suffix}"):
            projection = name.split(".")[-2]
            which = "intermediate" if projection in ("down_proj", "w2") else "hidden"
            values[which].append(np.float32(to_scale(tensor.reshape(()).numpy())))
    assert len(values["hidden"]) == 8 and len(values["intermediate"]) == 4
    for which, of in values.items():
        assert np.float32(expert["input_scale"][which]) == max(of)


@pytest.mark.parametrize(("family", "producer"), CASES)
def test_verify_passes(made, tool, family, producer):
    """verify compares packed weights with the file's bytes, kernels with the reference, and weights with the original,
    which may differ by half a step of the block."""
    directory = made(family)
    for against in ((), ("--against", directory / "original")):
        result = tool("verify", directory / producer, *against, "--tokens", "8")
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("producer", PRODUCERS)
def test_verify_passes_on_the_committed_checkpoints(tool, producer):
    result = tool("verify", VECTORS / f"{producer}_qwen3_moe", "--tokens", "8", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    json.loads(result.stdout)


# ---- output of quantize


@pytest.mark.parametrize("producer", PRODUCERS)
def test_codes_are_the_quantizers(written, producer):
    """gate and up share the larger amax's tensor scale. Codes and scales are quantize's for the original weights."""
    original, directories = written
    weights = raw(original)
    for expert, _, _ in experts(directories[producer]):
        stem = {part: expert["names"][part].rsplit(".", 1)[0] for part in PARTS}
        amax = {part: float(weights[f"{stem[part]}.weight"].abs().max()) for part in stem}
        shared = max(amax["gate"], amax["up"])
        for part, of in (("gate", shared), ("up", shared), ("down", amax["down"])):
            s = np.float32(of / 2688)
            if producer == "compressed_tensors":  # the file holds G; a reader takes float32(1/G)
                s = np.float32(1 / np.float64(np.float32(1 / np.float64(s))))
            mine = expert[part]
            assert abs(mine["tensor_scale"] - float(s)) <= 2.0**-23 * float(s)
            codes, scales, _ = nv.quantize(weights[f"{stem[part]}.weight"], tensor_scale=float(np.float32(of / 2688)))
            assert (mine["codes"] == codes.numpy()).all() and (mine["scales"] == scales.numpy()).all()


@pytest.mark.parametrize(
    ("producer", "leaf"), [("modelopt", "input_scale"), ("compressed_tensors", "input_global_scale")]
)
def test_input_scales_are_those_given_and_other_tensors_are_copied(written, producer, leaf):
    import torch

    original, directories = written
    tensors, weights = raw(directories[producer]), raw(original)
    for expert, layer, _ in experts(directories[producer]):
        for part in PARTS:
            scale = tensors[f"{expert['names'][part].rpartition('.')[0]}.{leaf}"]
            expected = np.float32(INPUT_SCALES[layer][1 if part == "down" else 0] or 1.0)
            if producer == "compressed_tensors":
                assert scale.shape == (1,)
                expected = np.float32(1 / np.float64(expected))
            assert float(scale) == expected
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in kept.items())
    assert set(kept) == {name for name in weights if ".experts." not in name}


def test_modelopts_two_declarations_agree(written):
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    directory = written[1]["modelopt"]
    nested = json.loads((directory / "hf_quant_config.json").read_text())
    flat = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert convert_hf_quant_config_format(nested) == flat  # ModelOpt's own conversion from one to the other


def test_compressed_tensors_loads_it_as_a_compressed_model(written):
    """Its lifecycle: apply the config to a model with nn.Linear experts, load compressed parameters by name, then
    ModelCompressor.decompress_model."""
    import make_checkpoint_vectors as vectors
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    original, directories = written
    directory = directories["compressed_tensors"]
    declared = json.loads((directory / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(declared)
    assert config.format == "nvfp4-pack-quantized"
    tensors = raw(directory)
    with vectors.quiet():
        model = vectors.load(original)
        for layer in model.model.layers:
            layer.mlp.experts = vectors.linear_experts(layer.mlp.experts, [f"{part}_proj" for part in PARTS])
        apply_quantization_config(model, config, show_progress=False)
        compressor = ModelCompressor(quantization_config=config)
        compressor.compress_model(model)  # gives the modules the parameters that a compressed checkpoint holds
        state = model.state_dict()
        assert set(state) == set(tensors)  # `ignore` lists exactly the copied modules
        for name, parameter in state.items():
            assert parameter.dtype == tensors[name].dtype and parameter.shape == tensors[name].shape, name
        model.load_state_dict(tensors)
        compressor.decompress_model(model)
    modules = dict(model.named_modules())
    for expert, _, _ in experts(directory):
        for part in PARTS:
            ours = torch.from_numpy(nv.dequantize(*expert[part].values()))
            check_bf16(modules[expert["names"][part].removesuffix(".weight_packed")].weight, ours)


def test_their_converter_gives_what_we_write(written, tmp_path):
    """compressed-tensors' converter of a ModelOpt checkpoint against our own compressed-tensors output."""
    import make_checkpoint_vectors as vectors
    import torch
    from compressed_tensors.entrypoints.convert import convert_checkpoint
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter

    _, directories = written
    with vectors.quiet():
        convert_checkpoint(
            directories["modelopt"],
            tmp_path / "converted",
            ModelOptNvfp4Converter(targets=[r"re:.*mlp\.experts\.\d+\..*_proj$"]),
            max_workers=1,
        )
    theirs, ours = raw(tmp_path / "converted"), raw(directories["compressed_tensors"])
    assert set(theirs) == set(ours)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        flat = (tensor.reshape(-1), theirs[name].reshape(-1))  # theirs leaves the globals (), both are legal
        if tensor.dtype == torch.float8_e4m3fn:
            flat = tuple(part.view(torch.uint8) for part in flat)
        assert torch.equal(*flat), name
    # Checkpoints written by their converter load here too.
    converted = nv.inspect(tmp_path / "converted")
    assert [f["text"] for f in converted["findings"] if f["severity"] == "error"] == []
    for expert, layer, e in experts(directories["compressed_tensors"]):
        other = nv.load_expert(tmp_path / "converted", layer, e)
        for part in PARTS:
            assert (other[part]["codes"] == expert[part]["codes"]).all()
            assert other[part]["tensor_scale"] == expert[part]["tensor_scale"]


def test_quantizing_again_gives_the_same_bytes(written, tmp_path):
    original, directories = written
    nv.quantize_checkpoint(original, tmp_path / "again", output_format="modelopt", input_scales=INPUT_SCALES, threads=2)
    for file in directories["modelopt"].iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_progress_and_its_errors(made, tmp_path):
    original = made("qwen3_moe") / "original"
    told = []
    nv.quantize_checkpoint(original, tmp_path / "told", progress=told.append)
    assert told[-1]["done"] == told[-1]["total"] and told[-1]["done_bytes"] == told[-1]["total_bytes"]
    assert any(line["item"] == "layer 1 expert 3" for line in told)
    with pytest.raises(nv.Cancelled, match="quantize"):
        nv.quantize_checkpoint(original, tmp_path / "cancelled", progress=lambda _: False)
    assert not (tmp_path / "cancelled" / "config.json").exists()
    with pytest.raises(ZeroDivisionError):
        nv.quantize_checkpoint(original, tmp_path / "raised", progress=lambda _: 1 / 0)
    with pytest.raises(ValueError, match="told"):
        nv.quantize_checkpoint(original, tmp_path / "told", output_format="compressed-tensors")
    with pytest.raises(ValueError, match="output_format: expected one of modelopt, compressed-tensors"):
        nv.quantize_checkpoint(original, tmp_path / "x", output_format="gguf")
    with pytest.raises(nv.Error):
        nv.quantize_checkpoint(tmp_path / "nowhere", tmp_path / "x")
