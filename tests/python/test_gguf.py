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


def test_every_code_under_every_scale(tmp_path, count):
    """Each of the 16 codes at each place of a block, under each legal E4M3 scale: 16 * 126 rows of one block."""
    model = Model()
    stored, kind = model.tensors["blk.0.ffn_gate_exps.weight"]
    blocks = stored.reshape(-1, 36)
    index = np.arange(len(blocks))
    blocks[:, :4] = 1 + (index[:, None] * 4 + np.arange(4)) % 0x7E
    place = np.arange(32)
    blocks[:, 4:] = (index[:, None] + place) % 16 | (index[:, None] // 16 + place) % 16 << 4
    model.values[0, "gate"] = gguf.quants.dequantize(stored, kind).astype(np.float32)
    model.values[0, "gate"] *= model.tensors["blk.0.ffn_gate_exps.scale"][0][:, None, None]
    assert len(np.unique(blocks[:, :4])) == 0x7E
    check(model.write(tmp_path / "model.gguf"), model, count, "every code and scale")


def test_without_tensor_scales_they_are_one(tmp_path, count):
    """llama-quantize writes NVFP4 without them."""
    model = Model(scales=False)
    path = model.write(tmp_path / "model.gguf")
    check(path, model, count, "no tensor scales")
    assert nv.load_expert(path, 0, 0)["gate"]["tensor_scale"] == 1
    ids = {finding["id"] for finding in nv.inspect(path)["findings"]}
    assert "tensor_scale_absent" in ids and "input_scale_missing" not in ids


@pytest.mark.parametrize("kind", FP4, ids=lambda kind: kind.name)
def test_slices_are_parts_of_the_whole(kind, tmp_path, count):
    """Slices of blocks of 64 and 32 elements begin and end at any multiple of 16."""
    model = Model(kind=kind)
    path = model.write(tmp_path / "model.gguf")
    wrong = total = 0
    for first in range(0, INTERMEDIATE, 16):
        for rows in range(16, INTERMEDIATE - first + 1, 16):
            loaded = nv.load_expert(path, 1, 2, first=first, count=rows)
            for p in PROJECTIONS:
                theirs = model.values[1, p][2]
                theirs = theirs[:, first : first + rows] if p == "down" else theirs[first : first + rows]
                wrong += differing(values(loaded[p]), np.ascontiguousarray(theirs))
                total += theirs.size
    count(f"slices {kind.name}", wrong, total)
    assert wrong == 0


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
    [(name, kind) for name in ("qwen3next", "glm4moe", "glm-dsa", "nemotron_h_moe") for kind in FP4]
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
    """A split file is opened by the directory, or by the name of any part."""
    model = Model()
    model.write(tmp_path / "model.gguf", split_max_tensors=3)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 3 and parts[0].name == f"model-00001-of-{len(parts):05}.gguf"
    (tmp_path / "mmproj-model-f16.gguf").write_bytes(b"not read")
    for path in (tmp_path, parts[0], parts[-1]):
        check(path, model, count, "split")
        assert nv.inspect(path, layers=[])["files"] == len(parts)
    parts[1].rename(tmp_path / "away")
    with pytest.raises(nv.BadInput, match=parts[1].name):
        nv.inspect(tmp_path)
    (tmp_path / "away").rename(parts[1])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(nv.BadInput, match=r"split\.no"):
        nv.inspect(tmp_path)


def test_names_of_files(tmp_path, count):
    """A first part without tensors, two files in one directory, a cache's name, a hash."""
    model = Model()
    model.write(tmp_path / "split.gguf", split_max_tensors=4, small_first_shard=True)
    check(tmp_path, model, count, "small first shard")
    (tmp_path / "two").mkdir()
    path = model.write(tmp_path / "two/a.gguf")
    (tmp_path / "two/b.gguf").symlink_to(path)
    with pytest.raises(nv.BadInput, match="name one of the files"):
        nv.inspect(tmp_path / "two")
    assert nv.inspect(path)["layers"] == nv.inspect(tmp_path / "two/b.gguf")["layers"] == [0, 1]
    check(path.rename(tmp_path / ("0" * 64)), model, count, "by content")


def test_a_layer_runs_as_the_same_weights_do(tmp_path):
    """The file's layer against one of arrays that this test packed from the values that the gguf package decodes."""
    model = Model()
    path = model.write(tmp_path / "model.gguf")
    rng = np.random.default_rng(5)
    hidden = rng.normal(size=(5, HIDDEN)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(5)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, (5, 2)).astype(np.float32)
    arrays = {}
    for p in PROJECTIONS:
        stored, _ = model.tensors[f"blk.1.ffn_{p}_exps.weight"]
        blocks = stored.reshape(EXPERTS, stored.shape[1], -1, 36)
        scales = np.ascontiguousarray(blocks[..., :4]).reshape(EXPERTS, stored.shape[1], -1)
        factor = model.tensors[f"blk.1.ffn_{p}_exps.scale"][0]
        decoded = model.values[1, p] / factor[:, None, None]
        codes = nv.encode_e2m1(decoded / np.repeat(nv.decode_e4m3(scales), 16, axis=-1))
        arrays[p] = (nv.pack_codes(codes), scales, factor)
    stored_layer = nv.MoeLayer.from_checkpoint(path, 1)
    packed_layer = nv.MoeLayer.from_tensors(stored_layer.config, **arrays)
    outputs = [np.array(layer.run(hidden, ids, weights)) for layer in (stored_layer, packed_layer)]
    assert np.isfinite(outputs[0]).all() and (outputs[0] != 0).any()
    assert (outputs[0].view(np.uint32) == outputs[1].view(np.uint32)).all()


def test_the_packed_cache_knows_files_of_one_directory_apart(tmp_path):
    hidden = np.random.default_rng(5).normal(size=(3, HIDDEN)).astype(np.float32)
    ids = np.array([[0, 1], [2, 3], [1, 0]], np.int32)
    weights = np.ones((3, 2), np.float32)
    cache = tmp_path / "cache"
    outputs = {1: [], 2: []}
    written = []
    for _ in range(2):  # packed, and then mapped
        for seed in (1, 2):
            path = tmp_path / f"{seed}.gguf"
            if not path.exists():
                Model(seed=seed).write(path)
            out = nv.MoeLayer.from_checkpoint(path, 0, cache_directory=cache).run(hidden, ids, weights)
            outputs[seed].append(np.array(out))
        written.append({entry.name: entry.stat().st_ino for entry in cache.glob("*.packed")})
    assert len(written[0]) == 2 and written[0] == written[1]  # taken from the cache, not written again
    assert (outputs[1][0] == outputs[1][1]).all() and (outputs[2][0] == outputs[2][1]).all()
    assert (outputs[1][0] != outputs[2][0]).any()


def test_experts_behind_a_latent_projection(tmp_path, count):
    """Nemotron-3 Super: the experts have a width of their own, the shared expert has the model's."""
    model = Model("nemotron_h_moe", shared_kind=Type.NVFP4)
    model.fields |= {"embedding_length": 2 * HIDDEN, "moe_latent_size": HIDDEN}
    for name, shape in (("down", (HIDDEN, 2 * HIDDEN)), ("up", (2 * HIDDEN, HIDDEN))):
        model.add(f"blk.1.ffn_latent_{name}.weight", np.zeros(shape, np.float32), Type.F32)
    path = model.write(tmp_path / "model.gguf")
    info = nv.inspect(path)
    assert info["options"]["hidden_size"] == HIDDEN and info["options"]["shared_intermediate_size"] == 0
    found = {finding["id"]: finding for finding in info["findings"]}
    assert "shared_expert_of_other_width" in found
    assert not [finding for finding in info["findings"] if finding["severity"] == "error"]
    assert "projection between the model's width and the experts'" in " ".join(f["text"] for f in info["findings"])
    check(path, model, count, "latent")
    layer = nv.MoeLayer.from_checkpoint(path, 1, activation_format="bf16", row_format="fp32")
    assert layer.config.activation == "relu2"
    x = np.random.default_rng(0).normal(size=(5, HIDDEN)).astype(np.float32)
    ids, weights = np.array([[0, 1], [2, 3], [3, 0], [1, 2], [0, 3]], np.int32), np.full((5, 2), 0.5, np.float32)
    expected = np.zeros((5, HIDDEN))
    for token in range(5):
        for k, expert in enumerate(ids[token]):
            up, down = (model.values[1, p][expert].astype(np.float64) for p in ("up", "down"))
            expected[token] += weights[token, k] * (down @ np.square(np.maximum(up @ x[token], 0)))
    error = np.linalg.norm(layer.run(x, ids, weights) - expected) / np.linalg.norm(expected)
    assert error < 5 * 2.0**-9  # hidden and h rounded to bf16: 2^-9 and the square's twice that, as in family_checks.py


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
    layer = nv.MoeLayer.from_checkpoint(path, model.row.layers[0], activation_format="bf16")
    assert np.array_equal(layer.expert(1)["up"]["bias"], biases[model.row.layers[0], "up"][1])
    del model.tensors[f"blk.{model.row.layers[0]}.ffn_down_exps.bias"]
    refused(model, tmp_path, nv.BadInput, "ffn_down_exps.bias", "no such tensor")


def field(name, value=None):
    """Changes a field of the metadata, or leaves it out."""

    def change(model):
        model.fields[name] = value
        if value is None:
            del model.fields[name]

    return change


def architecture(name):
    return lambda model: setattr(model, "architecture", name)


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


FIELDS = ("expert_count", "expert_used_count", "embedding_length", "block_count", "expert_feed_forward_length")
CONTRADICTIONS = [
    ("expert_count", EXPERTS + 1), ("expert_count", 1 << 20), ("expert_used_count", EXPERTS + 1), ("block_count", 0),
    ("embedding_length", HIDDEN // 2), ("expert_feed_forward_length", INTERMEDIATE + 16),
    ("expert_feed_forward_length", "many"),
]  # fmt: skip
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
    *((architecture(name), nv.Unsupported, name) for name in ("grok", "llama5")),
    *((field(name), nv.BadInput, f"qwen3moe.{name}", "missing") for name in FIELDS),
    *((field(name, value), nv.BadInput) for name, value in CONTRADICTIONS),
    (field("hidden_activation", "gelu"), nv.Unsupported),
    (field("swiglu_clamp_exp", [7.0, 7.0]), nv.Unsupported),
]
NEMOTRON = [
    (a_gate, nv.Unsupported, "blk.1.ffn_gate_exps.weight", "a gate"),
    (field("feed_forward_length"), nv.BadInput, "missing"),
    (field("feed_forward_length", 64), nv.BadInput, "an array of 2 integers"),
    (field("feed_forward_length", [64]), nv.BadInput, "an array of 2 integers"),
    (field("feed_forward_length", [0, 0]), nv.BadInput, "no layer of the model"),
    (field("expert_used_count", [2, 2]), nv.BadInput, "an integer"),  # a width for each layer, as Puzzle's models have
    (field("expert_feed_forward_length", [INTERMEDIATE] * 2), nv.BadInput, "an integer"),
    (field("moe_latent_size", 0), nv.BadInput, "an integer"),
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


def test_quantize_wants_safetensors(tmp_path):
    path = Model(kind=Type.F16).write(tmp_path / "model.gguf")
    with pytest.raises(nv.Unsupported, match="GGUF"):
        nv.quantize_checkpoint(path, tmp_path / "out")


@pytest.mark.parametrize("kind", FP4, ids=lambda kind: kind.name)
def test_inspect_and_verify(kind, tool, tmp_path):
    model = Model(kind=kind)
    model.write(tmp_path / "model.gguf", split_max_tensors=5)
    for path in (tmp_path, min(tmp_path.iterdir())):
        done = tool("inspect", path, "--json")
        assert done.returncode == 0, done.stderr + done.stdout
        report = json.loads(done.stdout)
        assert report["format"] == ("gguf-nvfp4" if kind == Type.NVFP4 else "mxfp4") and report["layers"] == [0, 1]
        elems = EXPERTS * 3 * HIDDEN * INTERMEDIATE
        for row in report["layer_statistics"]:
            assert row["codes_bytes"] == elems // 2
            assert row["scales_bytes"] == elems // (16 if kind == Type.NVFP4 else 32)
        done = tool("verify", path, "--layers", "1", "--json")
        assert done.returncode == 0, done.stderr + done.stdout
