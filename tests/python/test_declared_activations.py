"""Activations that config.json declares for experts, and the format that from_checkpoint runs by default.

Both are compared: with compressed-tensors' own matching, and with a float64 oracle of the layer. tests/checkpoint has
the declarations one by one (declarations_test, module_regex_test).
"""

from __future__ import annotations

import json
import re

import nvfp4_moe as nv
import pytest
from fused_layers import layers

torch = pytest.importorskip("torch")

import qwen3_moe  # noqa: E402  from numpy_only, whose folder fused_layers adds

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS, EXPERTS = qwen3_moe.LAYERS, qwen3_moe.EXPERTS
NAMES = [
    (layer, f"model.layers.{layer}.mlp.experts.{expert}.{projection}")
    for layer in range(LAYERS)
    for expert in range(EXPERTS)
    for projection in qwen3_moe.SHAPES
]
# Two roundings to bf16 on the way (hidden is bf16 already): 3.2 * 2^-9. The rest is room for the order of sums.
LIMIT = 5 * 2.0**-9


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    directory = tmp_path_factory.mktemp("floats")
    qwen3_moe.write_model(directory)
    return directory


@pytest.fixture(scope="module")
def compressed(floats, tmp_path_factory):
    directory = tmp_path_factory.mktemp("declared") / "compressed"
    write_config(floats)
    nv.quantize_checkpoint(floats, directory, output_format="compressed-tensors")
    return directory


def write_config(directory, quantization=None, hf_quantization=None):
    quantized = {} if quantization is None else {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(qwen3_moe.CONFIG | quantized))
    (directory / "hf_quant_config.json").unlink(missing_ok=True)
    if hf_quantization is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": hf_quantization}))


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
    options = [json.loads(nv._core.checkpoint_options(checkpoint, layer, None)) for layer in range(LAYERS)]
    return [of_layer["activation_format"] for of_layer in options]


def relative_error(directory, layer: int, **options) -> tuple[float, dict]:
    """Returns the error against the layer in float64 on the stored weights and unquantized activations, which is the
    definition of W4A16, and describe()["activations"]."""
    hidden, ids, weights = layers.batch(16, seed=5)
    hidden, ids = layers.from_bf16(layers.bf16(hidden)), ids % EXPERTS
    opened = nv.MoeLayer.from_checkpoint(directory, layer, row_format="fp32", **options)
    stacks = layers.stacked([nv.load_expert(directory, layer, expert) for expert in range(EXPERTS)])
    expected = layers.plain_layer(stacks, hidden, ids, weights)
    return layers.relative_l2(opened.run(hidden, ids, weights), expected), opened.describe()["activations"]


W4A4 = compressed_tensors({"group_0": group(["Linear"], 4)})
WEIGHT_ONLY = compressed_tensors({"group_0": group(["Linear"], None)})


@pytest.mark.parametrize(
    "quantization",
    [
        WEIGHT_ONLY,
        # gate and up W4A4, down W4A16: the layer runs both as W4A16
        compressed_tensors(
            {"a": group(["re:.*experts.*(gate|up)_proj"], 4), "b": group(["re:.*experts.*down_proj"], None)}
        ),
        compressed_tensors({"a": group(["Linear"], 4)}, ignore=["re:.*experts.*"]),  # the config does not name them
    ],
)
def test_weight_only_experts_run_with_unquantized_activations(compressed, quantization):
    write_config(compressed, quantization)
    assert declared(compressed) == ["bf16"] * LAYERS
    error, activations = relative_error(compressed, 0)
    assert error < LIMIT
    assert (activations["format"], activations["declared"]) == ("bf16", "bf16")
    assert "no quantization of activations is declared (" in activations["because"]


@pytest.mark.parametrize(
    ("quantization", "options", "expected", "least", "most"),
    [
        (W4A4, {}, ("int8_block", "nvfp4"), 0, 0.02),  # more precise than declared, on hosts
        (W4A4, {"activation_format": "nvfp4"}, ("nvfp4", "nvfp4"), 0.02, 0.3),
        (WEIGHT_ONLY, {"activation_format": "nvfp4"}, ("nvfp4", "bf16"), 0.02, 0.3),
        (compressed_tensors({"g": group(["Linear"], 8)}), {}, ("fp8", "fp8"), 0, 0.1),
        # An explicitly set scale keeps the declared format.
        (W4A4, {"intermediate_scale": "fixed", "intermediate_fixed": 1.0}, ("nvfp4", "nvfp4"), 0, 1),
    ],
)
def test_what_is_declared_or_asked_for(compressed, quantization, options, expected, least, most):
    write_config(compressed, quantization)
    error, activations = relative_error(compressed, 0, **options)
    assert (activations["format"], activations["declared"]) == expected and least <= error < most
    if expected == ("nvfp4", "bf16"):
        assert activations["because"] == (
            "it was asked for, less precise than declared: bf16 (config_groups group_0: input_activations is null)"
        )


def test_layers_that_differ_are_read_one_by_one_and_matrices_that_differ_are_refused(compressed):
    groups = {"a": group(["re:.*layers\\.0\\..*"], None), "b": group(["re:.*layers\\.[1-9]\\d*\\..*"], 4)}
    write_config(compressed, compressed_tensors(groups))
    assert declared(compressed) == ["bf16", "nvfp4"]
    groups["c"] = group(["model.layers.1.mlp.experts.3.down_proj"], None)  # one matrix of one expert
    write_config(compressed, compressed_tensors(groups))
    assert declared(compressed) == ["bf16", "bf16"]
    report = nv.Checkpoint(str(compressed)).inspect([1])
    assert "experts.3.down_proj', the most precise" in report["statistics"][1]["activations"]["why"]
    fp8 = {"targets": ["re:.*layers.0.*down_proj"], "weights": {"num_bits": 8, "type": "float"}}
    write_config(compressed, compressed_tensors({"a": fp8, "b": group(["Linear"], 4)}, format="mixed-precision"))
    checkpoint = nv.Checkpoint(str(compressed))
    assert checkpoint.model()["layers"] == [1]
    with pytest.raises(nv.Unsupported, match="two formats, NVFP4 for '.*gate_proj' and FP8 for '.*down_proj'"):
        checkpoint.expert(0, 0)
    write_config(compressed, compressed_tensors({"g": group(["re:(.)\\1"], 4)}))
    with pytest.raises(nv.Unsupported, match="config_groups g targets: regular expression .* is not understood here"):
        nv.Checkpoint(str(compressed))


FRAGMENTS = [
    "re:.*experts.*", "re:.*mlp.*", "re:.*", "re:^(?!.*experts).*_proj$", "re:.*self_attn.*", "re:.*down_proj$", "Linear",
    "re:.*layers\\.0\\..*", "re:.*layers\\.[1-9].*", "re:.*(gate|up)_proj", "re:model\\.layers\\.\\d+\\.mlp\\.experts\\.\\d\\.",
    "re:experts", "model.layers.0.mlp.experts.3.down_proj", "model.layers.1.mlp.experts.2.up_proj", "lm_head", "Embedding",
    "re:.*experts\\.[1-3]\\..*", "re:.*(?<!shared_)experts\\..*", "re:(?=.*layers\\.1)(?!.*down).*", "re:.*experts\\.[^0-9]",
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
        for layer, name in NAMES:
            matched = (
                match.match_targets(name, linear, list(scheme)) if not match.is_match(name, linear, ignore) else []
            )
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
NOT_EXPERTS = [f"model.layers.{i}.mlp.experts" for i in range(LAYERS)]


@pytest.mark.parametrize(
    ("quantization", "hf_quantization", "ignored"),
    [
        (None, None, False),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": KV_CACHE}, None, False),
        (None, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, False),
        (compressed_tensors({"g": FP8_GROUP}, format="float-quantized"), None, False),
        ({"quant_method": "fp8", "modules_to_not_convert": NOT_EXPERTS}, None, False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None, True),  # the config of a copy's source
        ({"quant_method": 7}, None, True),
    ],
)
def test_experts_in_floats_load_whatever_else_is_quantized(floats, quantization, hf_quantization, ignored):
    write_config(floats, quantization, hf_quantization)
    findings = {finding["id"]: finding for finding in nv.inspect(floats)["findings"]}
    assert ("declaration_ignored" in findings) is ignored
    error, activations = relative_error(floats, 1)
    assert error < LIMIT
    assert activations["because"] == "no quantization of activations is declared (the experts are floats)"


def test_quantize_declares_w4a4_and_reads_it_back(floats, tmp_path):
    write_config(floats)
    for output_format in ("modelopt", "compressed-tensors"):
        out = tmp_path / output_format
        nv.quantize_checkpoint(floats, out, output_format=output_format)
        assert declared(out) == ["nvfp4"] * LAYERS
