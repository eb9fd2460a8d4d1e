"""ModelOpt's and llm-compressor's exports of transformers' mixture-of-experts classes.

docs/producers.json records the result of each; the second tier exports and judges them again. llm-compressor needs an
environment of its own, whose interpreter NVFP4_MOE_LLM_COMPRESSOR names (tools/check/producer_exports.py).
"""

from __future__ import annotations

import json
import os
import sys

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import check_moe_classes as classes  # noqa: E402
import check_producers as check  # noqa: E402
import moe_classes  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
RECORD = json.loads(check.RECORD.read_text())


def test_the_page_is_made_of_the_record():
    text = classes.PAGE.read_text()
    assert check.page(text, RECORD) == text, "run tools/check/check_producers.py"
    assert {"llm-compressor", "modelopt"} == set(RECORD)
    assert all(list(found["classes"].values()).count("yes") >= 8 for found in RECORD.values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("producer", "model_type"), [(producer, name) for producer in RECORD for name in RECORD[producer]["classes"]]
)
def test_an_export_loads_as_it_did(producer, model_type):
    python = sys.executable if producer == "modelopt" else os.environ.get("NVFP4_MOE_LLM_COMPRESSOR", "")
    if not python:
        pytest.skip("NVFP4_MOE_LLM_COMPRESSOR names no interpreter that has llm-compressor")
    if producer == "modelopt":
        pytest.importorskip("modelopt")
    versions = RECORD[producer]["versions"]
    # llm-compressor's environment has a transformers of its own.
    if producer == "modelopt" and transformers.__version__ != versions["transformers"]:
        pytest.skip(f"judged with {versions}, installed is transformers {transformers.__version__}")
    model_class = next(one for one in moe_classes.model_classes() if one.model_type == model_type)
    made, verdict = check.judged(python, producer, model_class)
    if made and made != versions:
        pytest.skip(f"judged with {versions}, installed are {made}")
    assert verdict == RECORD[producer]["classes"][model_type]
