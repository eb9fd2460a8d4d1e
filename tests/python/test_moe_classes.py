"""transformers' mixture-of-experts classes: docs/moe-classes.json records the result of each.

The table of docs/reference/checkpoints.md is made from that record, and every row is judged again (a handful in the
quick tier).
"""

from __future__ import annotations

import json

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import check_moe_classes as check  # noqa: E402
import moe_classes  # noqa: E402
import own_experts as own  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
RECORD = json.loads(check.RECORD.read_text())
# One of each: names, stacks under other names, limits of single layers, a bias, a call of its own whose router weights
# multiply the input, experts without a gate, gelu, situ, a refusal.
QUICK = (
    "granitemoeshared",
    "step3p7",
    "inkling_mm_model",
    "laguna",
    "gpt_oss",
    "llama4_text",
    "mistral_large4",
    "nemotron_h",
    "gemma4_text",
    "inkling2_text",
    "doge",
)


@pytest.fixture(scope="module")
def classes():
    if transformers.__version__ != RECORD["transformers"]:
        pytest.skip(f"judged with transformers {RECORD['transformers']}, installed is {transformers.__version__}")
    return {one.model_type: one for one in moe_classes.model_classes()}


def test_the_page_is_made_of_the_record():
    text = check.PAGE.read_text()
    assert check.page(text, RECORD) == text, "run tools/check/check_moe_classes.py"


def test_the_record_has_every_class(classes):
    assert list(classes) == list(RECORD["classes"])
    assert sum(row["loads"] == "yes" for row in RECORD["classes"].values()) > 50


def test_the_engines_registries_are_read(tmp_path):
    vllm, sglang = (tmp_path / name / "lib/python3.11/site-packages" for name in ("vllm", "sglang"))
    for root, package, file, text in (
        (
            vllm,
            "vllm",
            "model_executor/models/registry.py",
            '_TEXT_MODELS = {"AForCausalLM": ("a", "A")}\n_OLD_MODELS = {"B": "0.9"}\nOTHER = {"C": ("c", "C")}\n',
        ),
        (sglang, "sglang", "srt/models/c.py", "EntryClass = [CForCausalLM, DForCausalLM]\nE = F\n"),
    ):
        (root / package / file).parent.mkdir(parents=True)
        (root / package / file).write_text(text)
        (root / f"{package}-1.2.3.dist-info").mkdir()
    assert check.registered(tmp_path) == {
        "vLLM 1.2.3": {"AForCausalLM"},
        "SGLang 1.2.3": {"CForCausalLM", "DForCausalLM"},
    }
    classes = {row["class"] for row in RECORD["classes"].values()}
    assert [name.split()[0] for name in RECORD["engines"]] == ["vLLM", "SGLang"]
    assert all(classes > set(names) for names in RECORD["engines"].values())


@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in RECORD["classes"]]
)
def test_a_verdict_is_what_it_was(classes, model_type, tmp_path):
    assert check.judge(classes[model_type], tmp_path) == RECORD["classes"][model_type]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A layer of a class with all inputs of its judgement: experts, twin, batch, the layer's output."""
    one = next(found for found in moe_classes.model_classes() if found.model_type == "qwen3_moe")
    model = moe_classes.tiny_model(one).to(torch.bfloat16)
    directory = tmp_path_factory.mktemp("judged")
    model.save_pretrained(directory)
    found = moe_classes.experts_of(model.float())
    seen = own.batches(model, found)
    experts, twin, layer = next(check.layers_of(directory, found, seen, "floats"))
    batch = seen[experts.path]
    return experts.module, twin, batch, layer.run(batch.hidden, batch.ids.int(), batch.weights), directory


def test_the_judge_allows_the_layer_and_little_else(judged):
    """The bound is a few roundings of h wide: it allows h without rounding, but not a row one percent larger."""
    _, twin, batch, out, _ = judged
    own.check_output(out, twin, batch, "as it is")
    own.check_output(own.call(twin, batch), twin, batch, "float64")
    with pytest.raises(own.Judged, match="outputs are not the model's own"):
        own.check_output(out * 1.02, twin, batch, "larger")


FAULTS = {
    "gate and up": lambda one, other: {**one, "gate": one["up"], "up": one["gate"]},
    "two experts": lambda one, other: other,
    "transposed": lambda one, other: {**one, "down": {**one["down"], "codes": one["down"]["codes"][::-1].copy()}},
    "doubled": lambda one, other: {**one, "down": {**one["down"], "tensor_scale": 2 * one["down"]["tensor_scale"]}},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_in_another_place_are_seen(judged, fault):
    loaded = nv.Checkpoint(str(judged[-1]))
    with pytest.raises(own.Judged, match="not the model's own weights"):
        own.twin_of(judged[0], lambda e: FAULTS[fault](loaded.expert(0, e), loaded.expert(0, e ^ 1)), "a fault")
