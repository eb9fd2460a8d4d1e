"""GGUF files written by the gguf package load to the values that the gguf package decodes."""

from __future__ import annotations

import json

import numpy as np
import nvfp4_moe as nv
import pytest

gguf = pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Type  # noqa: E402
from gguf_files import (  # noqa: E402
    ARCHITECTURES,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    PROJECTIONS,
    Model,
    check,
    differing,
    random_tensor,
    refused,
    values,
)

FP4 = (Type.NVFP4, Type.MXFP4)


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("kind", FP4, ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture, kind, fused, tmp_path, count):
    row = ARCHITECTURES[architecture]
    if fused and "gate" not in row.projections:
        pytest.skip("no gate to fuse")
    model = Model(architecture, kind, fused=fused)
    path = model.write(tmp_path / "model.gguf")
    info = nv.inspect(path)
    assert (info["family"], info["architecture"], info["quant_method"]) == (row.family, architecture, "gguf")
    assert info["format"] == ("gguf-nvfp4" if kind == Type.NVFP4 else "mxfp4") and info["quant_algo"] == kind.name
    assert info["layers"] == list(row.layers)
    options = info["options"]
    assert (options["hidden_size"], options["intermediate_size"]) == (HIDDEN, INTERMEDIATE)
    assert (options["num_experts"], options["top_k"]) == (EXPERTS, row.top_k)
    assert (options["activation"], options["router_weight"]) == (row.activation, row.router_weight)
    assert options.get("swiglu_limit") == (10.0 if architecture == "deepseek4" else None)
    assert not [finding for finding in info["findings"] if finding["severity"] == "error"]
    check(path, model, count, f"{kind.name} {architecture}")


def test_without_tensor_scales_they_are_one(tmp_path, count):
    """llama-quantize writes NVFP4 without them."""
    model = Model(scales=False)
    path = model.write(tmp_path / "model.gguf")
    check(path, model, count, "no tensor scales")
    assert nv.load_expert(path, 0, 0)["gate"]["tensor_scale"] == 1
    ids = {finding["id"] for finding in nv.inspect(path)["findings"]}
    assert "tensor_scale_absent" in ids and "input_scale_missing" not in ids


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_floats_are_quantized_as_quantize_does(kind, tmp_path):
    model = Model(kind=kind)
    path = model.write(tmp_path / "model.gguf")
    assert nv.inspect(path)["format"] == "float"
    for p in PROJECTIONS:
        weights = np.ascontiguousarray(model.values[1, p][3])
        codes, scales, _ = nv.quantize(weights, tensor_scale=float(np.float32(np.abs(weights).max() / 2688)))
        ours = nv.load_expert(path, 1, 3)[p]
        assert (ours["codes"] == codes).all() and (ours["scales"] == scales).all()


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("qwen3next", Type.NVFP4), ("glm4moe", Type.MXFP4), ("glm-dsa", Type.NVFP4), ("nemotron_h_moe", Type.MXFP4)]
    + [("glm4moe", Type.Q8_0), ("glm4moe", Type.BF16)],
)
def test_shared_experts(architecture, kind, tmp_path):
    """A shared expert of another type is left to the host."""
    model = Model(architecture, shared_kind=kind)
    path = model.write(tmp_path / "model.gguf")
    info = nv.inspect(path)
    assert info["options"]["shared_intermediate_size"] == (model.row.shared if kind in FP4 else 0)
    if kind not in FP4:
        found = [f for f in info["findings"] if f["id"] in ("shared_expert_not_loaded", "shared_expert_in_floats")]
        assert len(found) == 1 and "_shexp.weight" in found[0]["tensor"]
        return
    layer = model.row.layers[-1]
    shared = nv.Checkpoint(str(path)).shared_expert(layer, 0, 0)
    for p in model.row.projections:
        assert differing(values(shared[p]), model.values[layer, "shared " + p]) == 0


def test_splits(tmp_path, count):
    """A split file is opened by the directory, or by the name of any part. The first part may have no tensors."""
    for small_first in (False, True):
        model, folder = Model(), tmp_path / f"small {small_first}"
        folder.mkdir()
        model.write(folder / "model.gguf", split_max_tensors=3, small_first_shard=small_first)
        parts = sorted(folder.iterdir())
        assert len(parts) > 3 and parts[0].name == f"model-00001-of-{len(parts):05}.gguf"
        (folder / "mmproj-model-f16.gguf").write_bytes(b"not read")
        for path in (folder, parts[0], parts[-1]):
            check(path, model, count, "split")
    parts[1].rename(folder / "away")
    with pytest.raises(nv.BadInput, match=parts[1].name):
        nv.inspect(folder)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(nv.BadInput, match=r"split\.no"):
        nv.inspect(folder)


def test_names_of_files(tmp_path, count):
    """A directory must have one model. A file may have a hash for its name, as in a cache."""
    model = Model()
    path = model.write(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").symlink_to(path)
    with pytest.raises(nv.BadInput, match="name one of the files"):
        nv.inspect(tmp_path)
    check(path.rename(tmp_path / ("0" * 64)), model, count, "by content")


def test_the_packed_cache_knows_files_of_one_directory_apart(tmp_path):
    hidden = np.random.default_rng(5).normal(size=(3, HIDDEN)).astype(np.float32)
    batch = hidden, np.array([[0, 1], [2, 3], [1, 0]], np.int32), np.ones((3, 2), np.float32)
    files = [Model(seed=seed).write(tmp_path / f"{seed}.gguf") for seed in (1, 2)]
    cache, outputs, written = tmp_path / "cache", [], []
    for _ in ("packed", "mapped"):
        layers = [nv.MoeLayer.from_checkpoint(path, 0, cache_directory=cache) for path in files]
        outputs.append([np.array(layer.run(*batch)) for layer in layers])
        written.append({entry.name: entry.stat().st_ino for entry in cache.glob("*.packed")})
    assert len(written[0]) == 2 and written[0] == written[1]  # taken from the cache, not written again
    assert np.array_equal(outputs[0], outputs[1]) and not np.array_equal(*outputs[0])


def test_experts_after_a_latent_projection(tmp_path, count):
    """Nemotron-3 Super: the experts have a width of their own, the shared expert has the model's."""
    model = Model("nemotron_h_moe", shared_kind=Type.NVFP4)
    model.fields |= {"embedding_length": 2 * HIDDEN, "moe_latent_size": HIDDEN}
    for name, shape in (("down", (HIDDEN, 2 * HIDDEN)), ("up", (2 * HIDDEN, HIDDEN))):
        model.add(f"blk.1.ffn_latent_{name}.weight", np.zeros(shape, np.float32), Type.F32)
    path = model.write(tmp_path / "model.gguf")
    info = nv.inspect(path)
    assert info["options"]["hidden_size"] == HIDDEN and info["options"]["shared_intermediate_size"] == 0
    assert "shared_expert_of_other_width" in [finding["id"] for finding in info["findings"]]
    assert not [finding for finding in info["findings"] if finding["severity"] == "error"]
    check(path, model, count, "latent")


OTHERS = [
    kind
    for kind in Type
    if gguf.GGML_QUANT_SIZES[kind][0] > 1 and kind not in FP4 and kind not in (Type.Q8_1, Type.Q8_K)
]


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.name)
def test_other_types_are_refused_by_name(kind, tmp_path):
    """Every type of the gguf package has a size here. Without one, later tensors would be at wrong offsets."""
    model = Model()
    rng = np.random.default_rng(1)
    for p in PROJECTIONS:
        shape = (EXPERTS, *((256, 256) if gguf.GGML_QUANT_SIZES[kind][0] > 64 else (HIDDEN, HIDDEN)))
        model.add(f"blk.0.ffn_{p}_exps.weight", random_tensor(rng, kind, shape), kind)
        for scalar in ("scale", "input_scale"):
            del model.tensors[f"blk.0.ffn_{p}_exps.{scalar}"]
    path = model.write(tmp_path / "model.gguf")
    info = nv.inspect(path)
    assert info["layers"] == [1]
    (found,) = (f for f in info["findings"] if f["id"] == "layer_not_supported")
    assert f"{kind.name} experts are not NVFP4" in found["text"]
    with pytest.raises(nv.Unsupported, match=kind.name):
        nv.load_expert(path, 0, 0)
    assert differing(values(nv.load_expert(path, 1, 0)["gate"]), model.values[1, "gate"][0]) == 0


@pytest.mark.parametrize("kind", [Type.MXFP4, Type.NVFP4, Type.BF16], ids=lambda kind: kind.name)
def test_gpt_oss_has_biases(kind, tmp_path, count):
    model = Model(kind=kind)
    model.architecture = "gpt-oss"
    rng, biases = np.random.default_rng(3), {}
    for layer in model.row.layers:
        for p in PROJECTIONS:
            rows = HIDDEN if p == "down" else INTERMEDIATE
            biases[layer, p] = rng.standard_normal((EXPERTS, rows)).astype(np.float32)
            model.add(f"blk.{layer}.ffn_{p}_exps.bias", biases[layer, p], Type.F32)
    path = model.write(tmp_path / "model.gguf")
    options = nv.inspect(path)["options"]
    assert (options["activation"], options["swiglu_limit"], options["expert_biases"]) == ("swiglu_oai", 7.0, True)
    if kind in FP4:
        check(path, model, count, f"gpt-oss {kind.name}")
    for (layer, p), expected in biases.items():
        for expert in range(EXPERTS):
            assert np.array_equal(nv.load_expert(path, layer, expert)[p]["bias"], expected[expert])
    del model.tensors[f"blk.{model.row.layers[0]}.ffn_down_exps.bias"]
    refused(model, tmp_path, nv.BadInput, "ffn_down_exps.bias", "no such tensor")


def field(name, value=None):
    """Changes a field of the metadata, or leaves it out."""

    def change(model):
        model.fields[name] = value
        if value is None:
            del model.fields[name]

    return change


def one_projection_in_another_type(model):
    stored = random_tensor(np.random.default_rng(1), Type.Q8_0, (EXPERTS, HIDDEN, INTERMEDIATE))
    model.add("blk.0.ffn_down_exps.weight", stored, Type.Q8_0)


def biases(model):
    model.add("blk.0.ffn_gate_exps.bias", np.zeros((EXPERTS, INTERMEDIATE), np.float32), Type.F32)


def scales_under_another_name(model):  # unread, they would leave the weights wrong by a factor
    for p in PROJECTIONS:
        model.tensors[f"blk.0.ffn_{p}_exps.weight.scale"] = model.tensors.pop(f"blk.0.ffn_{p}_exps.scale")


def scales_of_some_projections(model):
    del model.tensors["blk.0.ffn_up_exps.scale"]


def a_gate(model):
    model.tensors["blk.1.ffn_gate_exps.weight"] = model.tensors["blk.1.ffn_up_exps.weight"]


QWEN3 = [
    (
        one_projection_in_another_type,
        nv.Unsupported,
        "two formats, gguf-nvfp4 and",
        "ffn_down_exps",
        "Q8_0 experts are not",
    ),
    (biases, nv.Unsupported, "biases", "blk.0.ffn_gate_exps.bias"),
    (scales_under_another_name, nv.Unsupported, "weight.scale"),
    (scales_of_some_projections, nv.BadInput, "blk.0.ffn_up_exps.scale", "no such tensor"),
    (lambda model: setattr(model, "architecture", "grok"), nv.Unsupported, "grok"),
    (field("expert_used_count"), nv.BadInput, "qwen3moe.expert_used_count", "missing"),
    (field("expert_count", 1 << 20), nv.BadInput),
    (field("expert_feed_forward_length", "many"), nv.BadInput),
    (field("hidden_activation", "gelu"), nv.Unsupported),
    (field("swiglu_clamp_exp", [7.0, 7.0]), nv.Unsupported),
]
NEMOTRON = [
    (a_gate, nv.Unsupported, "blk.1.ffn_gate_exps.weight", "a gate"),
    (field("feed_forward_length", [64]), nv.BadInput, "an array of 2 integers"),
    (field("expert_used_count", [2, 2]), nv.BadInput, "an integer"),  # a width for each layer, as Puzzle's models have
]


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [(n, c, e, w) for n, rows in (("qwen3moe", QWEN3), ("nemotron_h_moe", NEMOTRON)) for c, e, *w in rows],
)
def test_what_is_wrong_is_told(name, change, error, words, tmp_path):
    model = Model(name)
    change(model)
    refused(model, tmp_path, error, *words)


def test_prediction_blocks_are_not_layers(tmp_path, count):
    model = Model("glm4moe")
    model.fields |= {"block_count": 3, "nextn_predict_layers": 1}
    model.add("blk.2.nextn.enorm.weight", np.ones(HIDDEN, np.float32), Type.F32)
    for p in PROJECTIONS:
        model.tensors[f"blk.2.ffn_{p}_exps.weight"] = model.tensors[f"blk.1.ffn_{p}_exps.weight"]
    path = model.write(tmp_path / "model.gguf")
    info = nv.inspect(path)
    assert info["layers"] == [1]
    assert any("multi-token prediction" in f["text"] for f in info["findings"])
    check(path, model, count, "with a prediction block")


def test_inspect_and_verify(tool, tmp_path):
    Model().write(tmp_path / "model.gguf", split_max_tensors=5)
    with pytest.raises(nv.Unsupported, match="GGUF"):
        nv.quantize_checkpoint(min(tmp_path.iterdir()), tmp_path / "out")
    done = tool("inspect", tmp_path, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["format"] == "gguf-nvfp4" and report["layers"] == [0, 1]
    done = tool("verify", tmp_path, "--layers", "1", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
