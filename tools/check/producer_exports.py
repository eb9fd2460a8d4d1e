#!/usr/bin/env python3
"""Quantizes tiny models of transformers' classes to NVFP4 with the producers' own code, called as their users call it.

usage: producer_exports.py PRODUCER MODEL_TYPE OUT [MODEL_TYPE OUT ...]
  PRODUCER: modelopt or llm-compressor. Writes OUT/original in bf16 and OUT/export of each class, in a process of its
  own that is forked after the imports. Prints a line of JSON for each: the versions, or why it exported nothing.

llm-compressor needs another compressed-tensors than the tests' environment, so it has its own: a virtual environment
with the same torch, in which `pip install llmcompressor==0.14.0.1` ran. That release takes transformers up to 5.17.0.
This script does not use this library.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import logging
import os
import pathlib
import signal
import sys
import traceback
import warnings
from typing import Any

import moe_classes
import torch
import transformers

LIMIT_S = 1200  # of one export
PACKAGES = {
    "modelopt": ("nvidia-modelopt", "transformers", "torch"),
    "llm-compressor": ("llmcompressor", "compressed-tensors", "transformers", "torch"),
}


def versions(producer: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name).split("+")[0] for name in PACKAGES[producer]}


def sequences(count: int) -> torch.Tensor:
    return torch.randint(3, 150, (count, 16), generator=torch.Generator().manual_seed(7))


def import_producer(producer: str) -> None:
    if producer == "modelopt":
        import modelopt.torch.export
        import modelopt.torch.quantization  # noqa: F401
    else:
        import llmcompressor.modifiers.quantization  # noqa: F401


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
    model_class = next((one for one in moe_classes.model_classes() if one.model_type == model_type), None)
    if model_class is None:
        sys.exit(f"transformers {transformers.__version__} does not have it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moe_classes.tiny_model(model_class).to(torch.bfloat16).save_pretrained(out / "original")
        model = model_class.model.from_pretrained(out / "original", dtype=torch.bfloat16).eval()
        EXPORTERS[producer](model, out / "export")


def forked(producer: str, model_type: str, out: pathlib.Path) -> dict[str, str]:
    """Exports in a child process: a producer changes classes of transformers."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(LIMIT_S)
        done = {}
        try:
            export(producer, model_type, out)
            done = versions(producer)
        except SystemExit as error:
            done = {"error": str(error)}
        except BaseException as error:
            raised = "".join(traceback.format_exception_only(error)).splitlines()
            done = {"error": [line for line in raised if line and not line.startswith(" ")][-1]}
        with os.fdopen(writing, "w") as pipe:
            json.dump(done, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(answer) if answer else {"error": f"the process ended with {os.waitstatus_to_exitcode(status)}"}


def main(producer: str, *pairs: str) -> None:
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    import_producer(producer)
    for model_type, out in zip(pairs[::2], pairs[1::2], strict=True):
        print(json.dumps(forked(producer, model_type, pathlib.Path(out))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
