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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nvfp4",), ["2 layers of experts, 0 linears in NVFP4", "experts 0..3 of 4, top-2, swiglu, int8_block"]),
        (("nvfp4", "--activation-format", "bf16"), ["2 layers of experts", "experts 0..3 of 4, top-2, swiglu, bf16"]),
        (("original", "--quantize"), ["nvfp4_moe: 2 layers of experts in NVFP4, activations bf16"]),
    ],
)
def test_a_checkpoint_generates_text(made, capsys, words, said):
    directory, *options = words
    script.main([str(made / directory), *options, "--prompt", "w7 w8 w9", "--tokens", "5", "--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert all(text in line for text, line in zip(said, lines, strict=False))
    assert lines[-1].startswith("w7 w8 w9 ") and 4 <= len(lines[-1].split()) <= 8
