"""Activations that config.json declares for experts, and the format that from_checkpoint runs by default.

Both are compared: with compressed-tensors' own matching, and with a float64 oracle of the layer.
"""

from __future__ import annotations

import json
import re

import numpy as np
import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")
save_file = pytest.importorskip("safetensors.torch").save_file

pytestmark = pytest.mark.usefixtures("one_thread")
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 64, 48, 12, 2, 2
PROJECTIONS = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}
# Two roundings to bf16 on the way (hidden is bf16 already): 3.2 * 2^-9. The rest is room for the order of sums.
LIMIT = 5 * 2.0**-9


def names():
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for projection, shape in PROJECTIONS.items():
                yield f"model.layers.{layer}.mlp.experts.{expert}.{projection}", shape


def weights_of(name: str, shape) -> np.ndarray:
    rng = np.random.default_rng(list(name.encode()))
    return (rng.normal(0, 0.1, shape) * 2.0 ** rng.normal(0, 1, (shape[0], 1))).astype(np.float32)


def quantized_tensors() -> dict[str, torch.Tensor]:
    tensors = {}
    for name, shape in names():
        codes, scales, tensor_scale = nv.quantize(weights_of(name, shape))
        tensors[name + ".weight_packed"] = torch.from_numpy(codes)
        tensors[name + ".weight_global_scale"] = torch.tensor([1 / np.float64(tensor_scale)], dtype=torch.float32)
        tensors[name + ".weight_scale"] = torch.from_numpy(np.ascontiguousarray(scales)).view(torch.float8_e4m3fn)
    return tensors


def float_tensors() -> dict[str, torch.Tensor]:
    return {name + ".weight": torch.from_numpy(weights_of(name, shape)).bfloat16() for name, shape in names()}


def write_config(directory, quantization=None, hf_quantization=None):
    config = dict(
        model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], hidden_act="silu", hidden_size=HIDDEN,
        intermediate_size=96, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        num_hidden_layers=LAYERS, decoder_sparse_step=1, mlp_only_layers=[], vocab_size=64,
    )  # fmt: skip
    if quantization is not None:
        config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "hf_quant_config.json").unlink(missing_ok=True)
    if hf_quantization is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": hf_quantization}))
    return directory


def checkpoint(make):
    @pytest.fixture(scope="module")
    def directory(tmp_path_factory):
        made = tmp_path_factory.mktemp("declared")
        save_file(make(), made / "model.safetensors")
        return made

    return directory


compressed, floats = checkpoint(quantized_tensors), checkpoint(float_tensors)


def arguments(bits: int = 4) -> dict:
    return {"num_bits": bits, "type": "float", "group_size": 16, "strategy": "tensor_group", "symmetric": True}


def group(targets, bits: int | None) -> dict:
    return {
        "format": "nvfp4-pack-quantized",
        "targets": list(targets),
        "weights": arguments() | {"dynamic": False},
        "input_activations": None if bits is None else arguments(bits) | {"dynamic": "local"},
    }


def compressed_tensors(groups: dict, **others) -> dict:
    fields = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
    return fields | {"config_groups": groups} | others


def declared(directory) -> list[str]:
    checkpoint = nv.Checkpoint(str(directory))
    return [
        json.loads(nv._core.checkpoint_options(checkpoint, layer, None))["activation_format"] for layer in range(LAYERS)
    ]


def oracle(directory, layer: int, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The layer in float64 on the stored weights and unquantized activations: the definition of W4A16."""
    out = np.zeros(x.shape)
    loaded = [nv.load_expert(directory, layer, e) for e in range(EXPERTS)]

    def matrix(expert, name):
        part = loaded[expert][name]
        return nv.dequantize(part["codes"], part["scales"], part["tensor_scale"]).astype(np.float64)

    for t, (chosen, of_token) in enumerate(zip(ids, weights, strict=True)):
        for e, weight in zip(chosen, of_token, strict=True):
            g, u = matrix(e, "gate") @ x[t], matrix(e, "up") @ x[t]
            out[t] += weight * (matrix(e, "down") @ (g / (1 + np.exp(-g)) * u))
    return out


def relative_error(directory, layer: int, **options) -> tuple[float, dict]:
    rng = np.random.default_rng(5)
    x = rng.normal(0, 1, (16, HIDDEN)).astype(ml_dtypes.bfloat16).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(len(x))]).astype(np.int32)
    weights = rng.random(ids.shape).astype(np.float32)
    opened = nv.MoeLayer.from_checkpoint(directory, layer, row_format="fp32", **options)
    out = np.asarray(opened.run(x, ids, weights), np.float64)
    expected = oracle(directory, layer, x.astype(np.float64), ids, weights)
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected)), opened.describe()["activations"]


WEIGHT_ONLY = [
    compressed_tensors({"group_0": group(["Linear"], None)}),
    {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    # gate and up W4A4, down W4A16: the layer runs both as W4A16
    compressed_tensors(
        {"a": group(["re:.*experts.*(gate|up)_proj"], 4), "b": group(["re:.*experts.*down_proj"], None)}
    ),
    compressed_tensors({"a": group(["re:^(?!.*experts).*_proj$"], 4), "b": group(["Linear"], None)}),
    compressed_tensors({"a": group(["re:.*self_attn.*"], 4), "b": group(["re:^(?!.*attn).*$"], None)}),
    compressed_tensors({"a": group(["Linear"], 4)}, ignore=["re:.*experts.*"]),  # the config does not name them
]
W4A4 = [
    compressed_tensors({"group_0": group(["Linear"], 4)}),
    compressed_tensors({"a": group(["re:^(?!.*experts).*_proj$"], None), "b": group(["Linear"], 4)}),
    compressed_tensors({"a": group(["re:.*self_attn.*experts.*"], None), "b": group(["re:.*mlp.*"], 4)}),
]


@pytest.mark.parametrize("quantization", WEIGHT_ONLY)
def test_weight_only_experts_run_with_unquantized_activations(compressed, quantization):
    write_config(compressed, quantization)
    assert declared(compressed) == ["bf16"] * LAYERS
    error, activations = relative_error(compressed, 0)
    assert error < LIMIT
    assert (activations["format"], activations["declared"]) == ("bf16", "bf16")
    assert "no quantization of activations is declared (" in activations["because"]


@pytest.mark.parametrize("quantization", W4A4)
def test_w4a4_experts_run_in_a_more_precise_format_on_hosts(compressed, quantization):
    write_config(compressed, quantization)
    assert declared(compressed) == ["nvfp4"] * LAYERS
    error, activations = relative_error(compressed, 1)
    assert (activations["format"], activations["declared"]) == ("int8_block", "nvfp4")
    asked, why = relative_error(compressed, 1, activation_format="nvfp4")
    assert error < 0.02 < asked  # W4A4 has an error of some 10 %
    assert why["because"].startswith("it was asked for; declared: nvfp4 (config_groups ")


@pytest.mark.parametrize(
    ("quantization", "options", "expected", "least", "most"),
    [
        (WEIGHT_ONLY[0], {"activation_format": "nvfp4"}, ("nvfp4", "bf16"), 0.02, 1),
        (compressed_tensors({"g": group(["Linear"], 8)}), {}, ("fp8", "fp8"), 0, 0.1),
        # An explicitly set scale keeps the declared format.
        (W4A4[0], {"intermediate_scale": "fixed", "intermediate_fixed": 1.0}, ("nvfp4", "nvfp4"), 0, 1),
    ],
)
def test_what_is_asked_for_and_fp8(compressed, quantization, options, expected, least, most):
    write_config(compressed, quantization)
    error, activations = relative_error(compressed, 0, **options)
    assert (activations["format"], activations["declared"]) == expected and least <= error < most
    if expected == ("nvfp4", "bf16"):
        assert activations["because"] == (
            "it was asked for, less precise than declared: bf16 (config_groups group_0: input_activations is null)"
        )


def test_layers_that_differ_are_read_one_by_one(compressed):
    groups = {"a": group(["re:.*layers\\.0\\..*"], None), "b": group(["re:.*layers\\.[1-9]\\d*\\..*"], 4)}
    write_config(compressed, compressed_tensors(groups))
    assert declared(compressed) == ["bf16", "nvfp4"]
    groups["c"] = group(["model.layers.1.mlp.experts.7.down_proj"], None)  # one matrix of one expert
    write_config(compressed, compressed_tensors(groups))
    assert declared(compressed) == ["bf16", "bf16"]
    report = nv.Checkpoint(str(compressed)).inspect([1])
    assert "experts.7.down_proj', the most precise" in report["statistics"][1]["activations"]["why"]


def test_matrices_of_a_layer_in_two_formats_are_refused_by_name(compressed):
    fp8 = {"targets": ["re:.*layers.0.*down_proj"], "weights": {"num_bits": 8, "type": "float"}}
    write_config(compressed, compressed_tensors({"a": fp8, "b": group(["Linear"], 4)}, format="mixed-precision"))
    checkpoint = nv.Checkpoint(str(compressed))
    assert checkpoint.model()["layers"] == [1]
    with pytest.raises(nv.Unsupported, match="two formats, NVFP4 for '.*gate_proj' and FP8 for '.*down_proj'"):
        checkpoint.expert(0, 0)


FRAGMENTS = [
    "re:.*experts.*", "re:.*mlp.*", "re:.*", "re:^(?!.*experts).*_proj$", "re:.*self_attn.*", "re:.*down_proj$", "Linear",
    "re:.*layers\\.0\\..*", "re:.*layers\\.[1-9].*", "re:.*(gate|up)_proj", "re:model\\.layers\\.\\d+\\.mlp\\.experts\\.\\d\\.",
    "re:experts", "model.layers.0.mlp.experts.3.down_proj", "model.layers.1.mlp.experts.11.up_proj", "lm_head", "Embedding",
    "re:.*experts\\.1\\d\\..*", "re:.*(?<!shared_)experts\\..*", "re:(?=.*layers\\.1)(?!.*down).*", "re:.*experts\\.[^0-9]",
]  # fmt: skip


def test_targets_are_matched_as_compressed_tensors_does(compressed):
    hypothesis = pytest.importorskip("hypothesis")
    match = pytest.importorskip("compressed_tensors.utils.match")
    st = hypothesis.strategies
    linear = torch.nn.Linear(1, 1, device="meta")
    target = st.one_of(
        st.sampled_from(FRAGMENTS),
        st.lists(st.sampled_from([".*", "experts", "\\.", "\\d", "down", "(a|e)", "layers", "1?", "[0-4]", "_proj", "$", "(?!x)", "mlp"]),
                 min_size=1, max_size=6).map(lambda parts: "re:" + "".join(parts)),
    )  # fmt: skip
    targets = st.lists(target, max_size=3, unique=True)

    def expected(weight_only, quantized, ignore) -> list[str]:
        scheme = {one: None for one in weight_only} | {one: 4 for one in quantized}
        formats = [set() for _ in range(LAYERS)]
        for name, _ in names():
            matched = (
                match.match_targets(name, linear, list(scheme)) if not match.is_match(name, linear, ignore) else []
            )
            layer = int(re.search(r"layers\.(\d+)", name)[1])
            formats[layer].add("nvfp4" if matched and scheme[matched[0]] == 4 else "bf16")
        return ["bf16" if "bf16" in one else "nvfp4" for one in formats]

    @hypothesis.given(targets, targets, targets)
    @hypothesis.settings(max_examples=80, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    def agrees(weight_only, quantized, ignore):
        hypothesis.assume(not set(weight_only) & set(quantized))
        for one in weight_only + quantized + ignore:
            try:
                re.compile(one.removeprefix("re:"))
            except re.error:
                hypothesis.reject()
        groups = {"a": group(weight_only, None), "b": group(quantized, 4)}
        write_config(compressed, compressed_tensors(groups, ignore=ignore))
        assert declared(compressed) == expected(weight_only, quantized, ignore)

    agrees()


KV_CACHE = {"num_bits": 8, "type": "float", "dynamic": False}
FP8_GROUP = {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}, "input_activations": None}


@pytest.mark.parametrize(
    ("quantization", "hf_quantization", "ignored"),
    [
        (None, None, False),
        ({}, None, False),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": KV_CACHE}, None, False),
        (None, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, False),
        ({"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": KV_CACHE}, None, False),
        (compressed_tensors({"g": FP8_GROUP}, format="float-quantized"), None, False),
        ({"quant_method": "fp8", "modules_to_not_convert": [f"model.layers.{i}.mlp.experts" for i in range(LAYERS)]}, None, False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None, True),  # the config of a copy's source
        ({"quant_method": "bitsandbytes"}, None, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, None, True),
        ({"quant_method": 7}, None, True),
    ],
)  # fmt: skip
def test_experts_in_floats_load_whatever_else_is_quantized(floats, quantization, hf_quantization, ignored):
    write_config(floats, quantization, hf_quantization)
    findings = {finding["id"]: finding for finding in nv.inspect(floats)["findings"]}
    assert ("declaration_ignored" in findings) is ignored
    if ignored:
        assert (
            "floats, which load without it: config.json quantization_config: "
            in findings["declaration_ignored"]["text"]
        )
    error, activations = relative_error(floats, 1)
    assert error < LIMIT
    assert activations["because"] == "no quantization of activations is declared (the experts are floats)"


def test_what_cannot_be_computed_is_refused_when_it_is_opened(compressed):
    """tests/checkpoint tests the rotations and expressions that are understood: Quantization and ModuleRegex."""
    rotation = {"location": "input", "targets": ["re:.*down_proj$"]}
    transforms = {"config_groups": {"R": {"type": "hadamard", "apply": [rotation]}}}
    for config, words in (
        (
            compressed_tensors({"g": group(["Linear"], 4)}, transform_config=transforms),
            "transform_config R: activations must be rotated .* at the input first",
        ),
        (
            compressed_tensors({"g": group(["re:(.)\\1"], 4)}),
            "config_groups g targets: regular expression .* is not understood here",
        ),
    ):
        write_config(compressed, config)
        with pytest.raises(nv.Unsupported, match=words):
            nv.Checkpoint(str(compressed))


def test_quantize_declares_w4a4_and_reads_it_back(floats, tmp_path):
    write_config(floats)
    for output_format in ("modelopt", "compressed-tensors"):
        out = tmp_path / output_format
        nv.quantize_checkpoint(floats, out, output_format=output_format)
        assert declared(out) == ["nvfp4"] * LAYERS
