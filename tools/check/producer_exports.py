#!/usr/bin/env python3
"""Quantizes tiny models of transformers' classes to NVFP4 with the producers' own code, called as their users call it.

usage: producer_exports.py PRODUCER MODEL_TYPE OUT
  PRODUCER: modelopt or llm-compressor. Writes OUT/original in bf16 and OUT/export, and prints the versions as JSON.

llm-compressor needs another compressed-tensors than the tests' environment, so it has its own: a virtual environment
with the same torch and transformers, in which `pip install llmcompressor==0.14.0` ran. This script does not use this
library.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import logging
import pathlib
import sys
import warnings
from typing import Any

import moe_classes
import torch
import transformers

PACKAGES = {
    "modelopt": ("nvidia-modelopt", "transformers", "torch"),
    "llm-compressor": ("llmcompressor", "compressed-tensors", "transformers", "torch"),
}


def versions(producer: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name).split("+")[0] for name in PACKAGES[producer]}


def sequences(count: int) -> torch.Tensor:
    return torch.randint(3, 150, (count, 16), generator=torch.Generator().manual_seed(7))


def export_modelopt(model: Any, out: pathlib.Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def calibrate(quantized: Any) -> None:
        with torch.no_grad():
            getattr(quantized, "thinker", quantized)(sequences(16), use_cache=False)

    model = mtq.quantize(model, copy.deepcopy(mtq.NVFP4_DEFAULT_CFG), calibrate)
    with torch.no_grad():
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(out))


def export_llm_compressor(model: Any, out: pathlib.Path) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    processor = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a")
    ids = sequences(8).tolist()
    dataset = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 16] * len(ids)})
    ignore = ["lm_head", "re:.*gate$", "re:.*router.*", "re:.*vision.*", "re:.*visual.*"]
    recipe = QuantizationModifier(targets="Linear", scheme="NVFP4", ignore=ignore)
    oneshot(
        model=model, recipe=recipe, dataset=dataset, processor=processor, pipeline="basic",
        num_calibration_samples=len(ids), max_seq_length=16,
    )  # fmt: skip
    model.save_pretrained(out, save_compressed=True)


EXPORTERS = {"modelopt": export_modelopt, "llm-compressor": export_llm_compressor}


def export(producer: str, model_type: str, out: pathlib.Path) -> None:
    """Writes out/original and out/export. Passes the producer's exceptions on."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    model_class = next(one for one in moe_classes.model_classes() if one.model_type == model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moe_classes.tiny_model(model_class).to(torch.bfloat16).save_pretrained(out / "original")
        model = model_class.model.from_pretrained(out / "original", dtype=torch.bfloat16).eval()
        EXPORTERS[producer](model, out / "export")


if __name__ == "__main__":
    export(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))
    print(json.dumps(versions(sys.argv[1])))
