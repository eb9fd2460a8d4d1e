"""examples/python/generate_with_transformers.py from end to end, on a tiny model with a tiny tokenizer."""

from __future__ import annotations

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import generate_with_transformers as script  # noqa: E402
import tiny_models as tiny  # noqa: E402


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """original/ and nvfp4/, each with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("example")
    tiny.write_original(root / "original", "mixtral")
    nv.quantize_checkpoint(root / "original", root / "nvfp4", output_format="compressed-tensors")
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(160)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for directory in (root / "original", root / "nvfp4"):
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    return root


@pytest.fixture
def example(capsys):
    """example(words) -> the lines that the script prints."""

    def run(*words):
        script.main([*map(str, words), "--prompt", "w7 w8 w9", "--tokens", "5", "--device", "cpu"])
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize(("words", "format_"), [((), "int8_block"), (("--activation-format", "bf16"), "bf16")])
def test_a_checkpoint_generates_text(made, example, words, format_):
    counts, experts, text = example(made / "nvfp4", *words)
    assert counts == "2 layers of experts, 0 linears in NVFP4"
    assert f"experts 0..3 of 4, top-2, swiglu, {format_}" in experts
    assert text.startswith("w7 w8 w9 ") and 4 <= len(text.split()) <= 8


def test_a_float_model_is_quantized_first(made, example):
    said = example(made / "original", "--quantize")
    assert said[0].startswith("nvfp4_moe: 2 layers of experts in NVFP4, activations bf16")
    assert said[-1].startswith("w7 w8 w9 ")
