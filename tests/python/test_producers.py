"""Checkpoints written by nvidia-modelopt's and compressed-tensors' own export code load, decode and verify.

They decode to the producers' own values, and the producers' own readers read the same values from one that quantize
writes. The exports run here, from transformers models with random weights (tests/vectors/make_checkpoint_vectors.py).
The Qwen3-MoE ones are also committed under tests/vectors, for hosts without the producers.
"""

from __future__ import annotations

import copy
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
        nv.quantize_checkpoint(original, out / name, output_format=name.replace("_", "-"), input_scales=INPUT_SCALES)
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
        assert (statistics["experts"], statistics["codes_bytes"]) == (4, 4 * 3 * 64 * 48 // 2)
        assert min(statistics["input_scale"].values()) > 0


@pytest.mark.parametrize(("family", "producer"), CASES)
def test_loads_without_errors(made, family, producer):
    check_inspect(made(family) / producer, family, producer)


def matrices(directory: Path, weight: str):
    """Yields (a matrix as loaded, its tensors in the files by their last name) of each expert, whose codes are the
    tensor `weight`, after checks that codes and block scales are the files' bytes."""
    import torch

    tensors, seen = raw(directory), 0
    for expert, layer, _ in experts(directory):
        for part in PARTS:
            stem = expert["names"][part].removesuffix(weight)
            mine = expert[part]
            stored = {key.removeprefix(stem): value for key, value in tensors.items() if key.startswith(stem)}
            assert (mine["codes"] == stored[weight].numpy()).all()
            assert (mine["scales"] == stored["weight_scale"].view(torch.uint8).numpy()).all()
            yield mine, stored
            seen += 1
        check_input_scales(expert, tensors, layer)
    assert seen == 12 * len(nv.inspect(directory, layers=[])["layers"])


def check_input_scales(expert, tensors, layer) -> None:
    """The layer's activation scales are the maximum over all experts, gate and up together."""
    values = {"hidden": [], "intermediate": []}
    for name, tensor in tensors.items():
        if (
            f"layers.{layer}." in name
            and ".experts." in name
            and name.endswith((".input_scale", ".input_global_scale"))
        ):
            value = np.float64(tensor.reshape(()).numpy())
            which = "intermediate" if name.split(".")[-2] in ("down_proj", "w2") else "hidden"
            values[which].append(np.float32(1 / value if "global" in name else value))
    assert (len(values["hidden"]), len(values["intermediate"])) == (8, 4)
    assert all(np.float32(expert["input_scale"][which]) == max(of) for which, of in values.items())


@pytest.mark.parametrize("family", [*FAMILIES, WRITTEN])
def test_decoded_weights_are_modelopts(checkpoint_of, family):
    """NVFP4QTensor.dequantize in double, which rounds nothing, then one rounding to float32."""
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    for mine, stored in matrices(checkpoint_of(family, "modelopt"), "weight"):
        codes, scales, s = (stored[leaf] for leaf in ("weight", "weight_scale", "weight_scale_2"))
        assert codes.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn and s.dtype == torch.float32
        assert s.shape == stored["input_scale"].shape == () and mine["tensor_scale"] == float(s)
        shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
        theirs = NVFP4QTensor(shape, torch.bfloat16, codes).dequantize(
            torch.float64, scale=scales.double(), double_scale=s.double(), block_sizes={-1: 16}
        )
        assert same_values(torch.from_numpy(nv.dequantize(*mine.values())), theirs.float())


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
    differing = total = 0
    for mine, stored in matrices(directory, "weight_packed"):
        codes, scales, g = (stored[leaf] for leaf in ("weight_packed", "weight_scale", "weight_global_scale"))
        assert mine["tensor_scale"] == float(np.float32(1 / np.float64(g)))
        values = unpack_fp4_from_uint8(codes, codes.shape[0], codes.shape[1] * 2, dtype=torch.float64)
        ours = torch.from_numpy(nv.dequantize(*mine.values()))
        product = scales.double() * mine["tensor_scale"]
        assert same_values(ours, dequantize(values, product, None, scheme.weights, dtype=torch.float64).float())
        single = dequantize(values.float(), scales.float(), None, scheme.weights, dtype=torch.float32, global_scale=g)
        # Ours rounds 1/G and the product, theirs v/G and the product: at most four roundings of 2^-24 apart.
        assert ((ours - single).abs() <= 4 * 2.0**-24 * ours.abs() * (1 + 2.0**-20)).all()
        differing, total = differing + int((ours != single).sum()), total + ours.numel()
        check_bf16(NVFP4PackedCompressor.decompress(stored, scheme)["weight"], ours)
    count("last bits against decompress in float32", differing, total)


def check_bf16(theirs, ours) -> None:
    """decompress itself rounds the product to bfloat16: 8 significant bits, so 2^-8 more."""
    import torch

    assert theirs.dtype == torch.bfloat16
    assert ((theirs.float() - ours).abs() <= (2.0**-8 + 4 * 2.0**-24) * ours.abs() * (1 + 2.0**-20)).all()


def test_minimax_m31s_experts_are_compressed_tensors(tmp_path, one_thread):
    """MiniMax-M3.1 declares nvfp4-pack-quantized for its experts, a format of compressed-tensors: weights that its
    compressor packs, dequantized by its own code in double, in transformers' own experts of MiniMax-M3, against a layer
    of the files in the names of the release."""
    import moe_classes
    import own_experts
    import torch
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams
    from safetensors.torch import save_file

    scheme: QuantizationScheme = preset_name_to_scheme("NVFP4", ["Linear"])
    model_class = next(one for one in moe_classes.model_classes() if one.model_type == "minimax_m3_vl_text")
    model = moe_classes.tiny_model(model_class).to(torch.bfloat16).float()
    found = moe_classes.experts_of(model)[0]
    twin = copy.deepcopy(found.module).double()
    twin.config = copy.deepcopy(found.module.config)
    twin.config._experts_implementation = "eager"
    tensors = {}
    for e, matrices_of in enumerate(zip(*own_experts.stacks(found.module)[:3], strict=True)):
        for word, matrix, place in zip(("w1", "w3", "w2"), matrices_of, own_experts.stacks(twin), strict=False):
            # A power of two, so that readers may multiply with its reciprocal.
            amax = float(matrix.abs().max())
            g = torch.tensor([2.0 ** float(np.floor(np.log2(2688 / amax)))], dtype=torch.float32)
            blocks = matrix.unflatten(-1, (-1, 16))
            scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=g)
            packed = NVFP4PackedCompressor.compress(
                {"weight": matrix.contiguous(), "weight_scale": scale, "weight_global_scale": g}, scheme
            )
            stem = f"language_model.model.layers.{found.layer}.block_sparse_moe.experts.{e}.{word}"
            tensors |= {f"{stem}.{part}": value.clone() for part, value in packed.items()}
            values = unpack_fp4_from_uint8(packed["weight_packed"], *matrix.shape, dtype=torch.float64)
            scales = packed["weight_scale"].double()
            place[e].copy_(
                dequantize(values, scales, None, scheme.weights, dtype=torch.float64, global_scale=g.double())
            )
            own_experts.check_weights(matrix, place[e], stem)
    save_file(tensors, str(tmp_path / "model.safetensors"))
    vectors = json.loads((VECTORS / "configurations.json").read_text())["repositories"]
    config = next(one for one in vectors if one["repository"] == "MiniMaxAI/MiniMax-M3.1")["config"]
    config["text_config"] |= {
        "hidden_size": moe_classes.HIDDEN,
        "intermediate_size": found.module.config.intermediate_size,
        "num_hidden_layers": found.layer + 1,
        "moe_layer_freq": [0] * found.layer + [1],
        "num_local_experts": moe_classes.EXPERTS,
        "num_experts_per_tok": moe_classes.TOP_K,
        "shared_intermediate_size": 0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch = own_experts.batches(model, [found])[found.path]
    layer = nv.MoeLayer.from_checkpoint(tmp_path, found.layer, activation_format="bf16", row_format="fp32")
    assert layer.config.activation == "swiglu_oai"
    out = layer.run(batch.hidden.numpy(), batch.ids.numpy().astype(np.int32), batch.weights.numpy())
    own_experts.check_output(torch.as_tensor(out), twin, batch, "MiniMax-M3.1")
    twin.down_proj.data *= 2  # the bound sees a scale that is off by two
    with pytest.raises(own_experts.Judged):
        own_experts.check_output(torch.as_tensor(out), twin, batch, "MiniMax-M3.1")


@pytest.mark.parametrize(("family", "producer"), CASES)
def test_verify_passes(made, tool, family, producer):
    """verify compares packed weights with the file's bytes, kernels with the reference, and weights with the original,
    which may differ by half a step of the block."""
    directory = made(family)
    result = tool("verify", directory / producer, "--against", directory / "original", "--tokens", "8")
    assert result.returncode == 0, result.stdout + result.stderr


# ---- output of quantize


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
