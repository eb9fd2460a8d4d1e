"""A checkpoint written by quantize is read back to the same values by those who did not write it: compressed-tensors'
ModelCompressor, ModelOpt's NVFP4QTensor, and compressed-tensors' converter from the one format to the other.
"""

from __future__ import annotations

import json

import numpy as np
import nvfp4_moe as nv
import pytest
from checkpoints import experts, raw, same_values

INPUT_SCALES = {0: (0.0123, 0.0045), 1: (0.5, None)}  # None: not calibrated, 1.0


@pytest.fixture(scope="module")
def written(made, tmp_path_factory):
    """(original, {format: directory}) of the Qwen3-MoE model."""
    original = made("qwen3_moe") / "original"
    out = tmp_path_factory.mktemp("written")
    for name in ("modelopt", "compressed-tensors"):
        done = nv.quantize_checkpoint(original, out / name, output_format=name, input_scales=INPUT_SCALES)
        assert [layer["layer"] for layer in done["layers"]] == [0, 1] and done["quantized_tensors"] == 24
    return original, {name: out / name for name in ("modelopt", "compressed-tensors")}


def codes_of(tensors, name):
    return next(tensors[key] for key in (f"{name}.weight", f"{name}.weight_packed") if key in tensors)


@pytest.mark.parametrize("name", ["modelopt", "compressed-tensors"])
def test_codes_are_the_quantizers(written, name):
    """gate and up share the tensor scale of the larger amax; codes and scales are quantize's, of the original weights."""
    original, directories = written
    weights = raw(original)
    for expert, _, _ in experts(directories[name]):
        stem = {part: expert["names"][part].rsplit(".", 1)[0] for part in ("gate", "up", "down")}
        amax = {part: float(weights[f"{stem[part]}.weight"].abs().max()) for part in stem}
        shared = max(amax["gate"], amax["up"])
        for part, of in (("gate", shared), ("up", shared), ("down", amax["down"])):
            s = np.float32(of / 2688)
            if name == "compressed-tensors":  # the file holds G; a reader takes float32(1/G)
                s = np.float32(1 / np.float64(np.float32(1 / np.float64(s))))
            mine = expert[part]
            assert abs(mine["tensor_scale"] - float(s)) <= 2.0**-23 * float(s)
            codes, scales, _ = nv.quantize(weights[f"{stem[part]}.weight"], tensor_scale=float(np.float32(of / 2688)))
            assert (mine["codes"] == codes.numpy()).all() and (mine["scales"] == scales.numpy()).all()


def test_modelopt_reads_it(written):
    import torch
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    original, directories = written
    directory = directories["modelopt"]
    nested = json.loads((directory / "hf_quant_config.json").read_text())
    flat = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert convert_hf_quant_config_format(nested) == flat  # ModelOpt's own way from the one to the other
    tensors, weights = raw(directory), raw(original)
    for expert, layer, _ in experts(directory):
        for part in ("gate", "up", "down"):
            stem = expert["names"][part].removesuffix(".weight")
            codes, scales = tensors[f"{stem}.weight"], tensors[f"{stem}.weight_scale"]
            assert codes.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn
            s, input_scale = tensors[f"{stem}.weight_scale_2"], tensors[f"{stem}.input_scale"]
            assert s.shape == () and input_scale.shape == () and s.dtype == torch.float32
            expected = INPUT_SCALES[layer][1 if part == "down" else 0]
            assert input_scale == torch.tensor(1.0 if expected is None else expected)
            theirs = (
                NVFP4QTensor(weights[f"{stem}.weight"].shape, torch.bfloat16, codes)
                .dequantize(torch.float64, scale=scales.double(), double_scale=s.double(), block_sizes={-1: 16})
                .float()
            )
            assert same_values(torch.from_numpy(nv.dequantize(*expert[part].values())), theirs)
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name, tensor in kept.items():
        assert torch.equal(tensor, weights[name]), name
    assert set(kept) == {name for name in weights if ".experts." not in name}


def test_compressed_tensors_reads_it(written):
    """Its lifecycle of a compressed model: config applied to a model with nn.Linear experts, compressed parameters
    loaded by name, ModelCompressor.decompress_model."""
    import make_checkpoint_vectors as vectors
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    original, directories = written
    directory = directories["compressed-tensors"]
    written_config = json.loads((directory / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(written_config)
    assert config.format == "nvfp4-pack-quantized"
    tensors = raw(directory)
    with vectors.quiet():
        model = vectors.load(original)
        for layer in model.model.layers:
            layer.mlp.experts = vectors.linear_experts(layer.mlp.experts, ("gate_proj", "up_proj", "down_proj"))
        apply_quantization_config(model, config, show_progress=False)
        compressor = ModelCompressor(quantization_config=config)
        compressor.compress_model(model)  # gives the modules the parameters that a compressed checkpoint holds
        state = model.state_dict()
        assert set(state) == set(tensors)  # `ignore` leaves out exactly what was copied
        for name, parameter in state.items():
            assert parameter.dtype == tensors[name].dtype and parameter.shape == tensors[name].shape, name
        model.load_state_dict(tensors)
        compressor.decompress_model(model)
    modules = dict(model.named_modules())
    scheme = config.config_groups["group_0"].weights
    for expert, layer, _ in experts(directory):
        for part in ("gate", "up", "down"):
            stem = expert["names"][part].removesuffix(".weight_packed")
            mine = expert[part]
            ours = torch.from_numpy(nv.dequantize(*mine.values()))
            theirs = modules[stem].weight  # bfloat16(code * float32(v / G))
            assert theirs.dtype == torch.bfloat16
            bound = (2.0**-8 + 4 * 2.0**-24) * ours.abs() * (1 + 2.0**-20)
            assert ((theirs.float() - ours).abs() <= bound).all()
            values = unpack_fp4_from_uint8(tensors[f"{stem}.weight_packed"], *ours.shape, dtype=torch.float64)
            product = tensors[f"{stem}.weight_scale"].double() * mine["tensor_scale"]
            assert same_values(ours, dequantize(values, product, None, scheme, dtype=torch.float64).float())
            expected = INPUT_SCALES[layer][1 if part == "down" else 0]
            scale = tensors[f"{stem}.input_global_scale"]
            assert scale.shape == (1,) and float(scale) == np.float32(1 / np.float64(np.float32(expected or 1.0)))


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
    theirs, ours = raw(tmp_path / "converted"), raw(directories["compressed-tensors"])
    assert set(theirs) == set(ours)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        flat = (tensor.reshape(-1), theirs[name].reshape(-1))  # theirs leaves the globals (), both are legal
        if tensor.dtype == torch.float8_e4m3fn:
            flat = tuple(part.view(torch.uint8) for part in flat)
        assert torch.equal(*flat), name
    # And what their converter wrote loads here.
    converted = nv.inspect(tmp_path / "converted")
    assert [f["text"] for f in converted["findings"] if f["severity"] == "error"] == []
    for expert, layer, e in experts(directories["compressed-tensors"]):
        other = nv.load_expert(tmp_path / "converted", layer, e)
        for part in ("gate", "up", "down"):
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
