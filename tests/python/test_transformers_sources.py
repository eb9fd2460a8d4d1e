"""How the transformers adapter finds a checkpoint and its declaration, and how transformers finds the adapter."""

from __future__ import annotations

import shutil

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import nvfp4_moe.transformers as adapter  # noqa: E402
import tiny_models as tiny  # noqa: E402
from tiny_models import load, logits, packed  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def hub_cache(root, directory):
    """A cache with the checkpoint as someone/tiny, in the hub client's layout: a snapshot of links to blobs."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    root = root / "models--someone--tiny"
    snapshot = root / "snapshots" / revision
    for folder in (snapshot, root / "blobs", root / "refs"):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(revision)
    for number, file in enumerate(sorted(directory.iterdir())):
        shutil.copy(file, root / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def from_hub(cache, config=None):
    given = {"dtype": torch.bfloat16, "quantization_config": config or adapter.Nvfp4MoeConfig()}
    return AutoModelForCausalLM.from_pretrained("someone/tiny", cache_dir=cache, local_files_only=True, **given)


def test_a_hub_id(checkpoint, tmp_path):
    """Nothing is fetched."""
    _, directory = checkpoint(output_format="compressed-tensors")
    hub_cache(tmp_path / "cache", directory)
    config = adapter.Nvfp4MoeConfig()
    model = from_hub(tmp_path / "cache", config)
    assert len(packed(model)) == 2 and config.checkpoint is None  # the caller's config stays as it was
    assert torch.equal(logits(model), logits(load(directory)))


def test_a_hub_id_whose_declaration_is_a_file_of_its_own(checkpoint, tmp_path, monkeypatch):
    """hf_quant_config.json is requested, in the same revision and into the same cache, but not for float models."""
    from transformers.utils import hub

    original, directory = checkpoint()
    want = logits(load(directory))
    tiny.change_config(directory, quantization_config=None)
    declared = (directory / "hf_quant_config.json").read_bytes()
    (directory / "hf_quant_config.json").unlink()
    snapshot = hub_cache(tmp_path / "cache", directory)
    asked = []

    def cached_file(name, file, **options):
        asked.append((name, file, options["cache_dir"], options["revision"]))
        (snapshot / file).write_bytes(declared)

    monkeypatch.setattr(hub, "cached_file", cached_file)
    assert torch.equal(logits(from_hub(tmp_path / "cache")), want)
    assert asked == [("someone/tiny", "hf_quant_config.json", str(tmp_path / "cache"), snapshot.name)]
    hub_cache(tmp_path / "floats", original)
    assert len(packed(from_hub(tmp_path / "floats"))) == 2 and len(asked) == 1


def test_what_only_hf_quant_config_declares(checkpoint):
    _, directory = checkpoint()
    want = logits(load(directory))
    tiny.change_config(directory, quantization_config=None)
    given = {"dtype": torch.bfloat16, "quantization_config": adapter.Nvfp4MoeConfig()}
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(directory, **given)), want)


def test_a_float_checkpoint_is_quantized_as_it_is_read(checkpoint):
    """enable() makes the same layers of the loaded model."""
    original, _ = checkpoint()
    config = adapter.Nvfp4MoeConfig(activation_format="bf16")
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16, quantization_config=config)
    assert len(packed(model)) == 2
    enabled = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    adapter.enable(enabled)
    assert torch.equal(logits(model), logits(enabled))


def test_a_config_comes_back_as_it_was_written():
    config = adapter.Nvfp4MoeConfig(max_tokens=77, activation_format="bf16", cache_directory="/somewhere")
    again = adapter.Nvfp4MoeConfig.from_dict(config.to_dict())
    assert vars(again) == vars(config) and again.checkpoint is None
    read = adapter.Nvfp4MoeConfig.from_dict({"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert read.to_dict() == {"quant_method": "modelopt", "quant_algo": "NVFP4"} and read.quant_method == "nvfp4_moe"


MERGE = "merge_quantization_configs"


def test_a_second_registration_changes_nothing():
    before = AutoHfQuantizer.__dict__[MERGE].__func__.nvfp4_moe_stock
    adapter.register()
    after = AutoHfQuantizer.__dict__[MERGE].__func__.nvfp4_moe_stock
    assert before is after and not hasattr(after, "nvfp4_moe_stock")
    assert AUTO_QUANTIZER_MAPPING["modelopt"] is adapter.Nvfp4MoeQuantizer


def test_a_quantizer_of_transformers_own_stays(checkpoint, monkeypatch, caplog):
    """With a warning at registration, and another if it takes a checkpoint whose experts it would load wrongly."""
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "modelopt", AUTO_QUANTIZER_MAPPING["fp8"])
    adapter.register()
    assert AUTO_QUANTIZER_MAPPING["modelopt"] is AUTO_QUANTIZER_MAPPING["fp8"]
    assert "Nvfp4MoeConfig" in caplog.text
    _, directory = checkpoint(output_format="compressed-tensors")
    declared = transformers.AutoConfig.from_pretrained(directory).quantization_config
    AutoHfQuantizer.merge_quantization_configs(declared, None)
    assert "compressed-tensors" in caplog.text and "wrong scales" in caplog.text
