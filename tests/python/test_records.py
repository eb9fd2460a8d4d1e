"""Every record in bench/results is current and used, and the figures in the docs are those of their records."""

import json
import re
from pathlib import Path

import activation_accuracy
import pytest
import quantize_quality_table
import records

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()
NUMBER = r"(?<![\w.])\d+(?:\.\d+)?"


def record(name):
    return json.loads((ROOT / "bench/results" / f"{name}.json").read_text())


@pytest.mark.parametrize("path", sorted((ROOT / "bench/results").iterdir()), ids=lambda path: path.stem)
def test_a_record_is_current_and_claimed(path):
    """A record has one row per line and its commit in its name, and a page (not only a log) takes a figure from it."""
    text = path.read_text()
    assert text == records.text(json.loads(text))
    commit = re.fullmatch(r"[a-z0-9-]+-([0-9a-f]{7})\.json", path.name)[1]
    assert commit in text
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert any(path.name in page.read_text() for page in pages), "no page names it: history keeps superseded records"


def test_records_show_rows():
    rows = [{"us": 1, "of": [1, 2]}, {"us": 2}]
    assert records.text({"a": 1, "rows": rows}) == '{\n "a": 1,\n "rows": [{"us": 1, "of": [1, 2]}, {"us": 2}]\n}\n'
    many = records.text({"a": 1, "rows": 9 * rows}).splitlines()
    assert many[2:5] == [' "rows": [', '  {"us": 1, "of": [1, 2]},', '  {"us": 2},']


# ---- docs/benchmarks.md

PEERS_OR_LAYERS = "| | T = 1 | T = 8 | T = 64 | T = 512 |"
TABLES = [
    # The table's header, which of the tables with it, its columns with figures of the record, and the record.
    (PEERS_OR_LAYERS, 0, 5, "cpu-peers-2-cores-2aadaa0"),
    (PEERS_OR_LAYERS, 1, 5, "cpu-peers-16-threads-82392dd"),
    (PEERS_OR_LAYERS, 2, 5, "cpu-layers-2-cores-a749783"),
    ("| AVX2 | T = 1 | T = 8 | T = 64 | T = 512 |", 0, 5, "cpu-peers-avx2-c4e6093"),
    ("| AMX | T = 1 | T = 8 | T = 64 | T = 512 |", 0, 5, "cpu-peers-amx-2-cores-1a4cc21"),
    ("| | T = 1 | T = 64 | T = 512 |", 0, 4, "cpu-layers-16-threads-4dd05ff"),
    ("| | amx | avx512bf16 |", 0, 5, "cpu-instruction-sets-2-cores-55097bc"),
    ("| us: one launch / a launch per step |", 0, 5, "hopper-few-tokens-h200-a01f0e1"),
    ("| us under W4A8: one launch / a launch per step |", 0, 5, "hopper-few-tokens-fp8-h200-a01f0e1"),
    ("| us on an H100: one launch / a launch per step |", 0, 5, "hopper-few-tokens-h100-b8c4e90"),
    ("| tokens | one rank | own experts |", 0, 9, "exchange-2h200-39f28d9"),
    ("| tokens | routing | busiest rank over even |", 0, 8, "exchange-2h200-39f28d9"),
    ("| 48 layers | this library | Marlin |", 0, 3, "vllm-qwen-next-h200-307cfa0"),
    ("| MLPs | perplexity |", 0, 4, "perplexity-cpu-540e3d6"),
    ("| 52 layers | this library | Marlin |", 0, 3, "vllm-nemotron-h200-b61ebb1"),
    ("| us: this library, vLLM's kernel |", 0, 6, "router-h200-b61ebb1"),
    ("| | this library | Triton experts |", 0, 3, "vllm-serve-gpt-oss-h200-507f388"),
    ("| | this library | Marlin | Humming 0.1.20 |", 0, 4, "vllm-serve-nemotron-h200-49d9be9"),
    ("| of 440 positions | compared |", 0, 4, "vllm-tokens-minimax-m3-h200-49d9be9"),
    ("| us on an H200 at 49d9be9 |", 0, 5, "layers-and-peers-h200-49d9be9"),
    ("| | this library | Marlin, in SGLang |", 0, 3, "sglang-serve-h200-8c72429"),
    ("| | this library | bf16 `grouped_mm` |", 0, 3, "transformers-h200-781823d"),
]


def numbers(value):
    """Every number of a record without its sign; a share is also one in percent."""
    if isinstance(value, dict | list):
        return {number for one in (value.values() if isinstance(value, dict) else value) for number in numbers(one)}
    return {abs(value), 100 * value} if isinstance(value, int | float) else set()


def unknown(rows, columns, known):
    """Returns the figures of a table that no number of `known` rounds to, in the digits shown."""
    wrong = []
    for row in rows:
        for text in re.findall(NUMBER, " ".join(row.strip("|").split("|")[1:columns])):
            step = 10.0 ** -len(text.partition(".")[2])
            if not any(abs(float(text) - value) <= 0.501 * step for value in known):
                wrong.append((row, text))
    return wrong


@pytest.mark.parametrize(("header", "which", "columns", "name"), TABLES, ids=[name for *_, name in TABLES])
def test_the_figures_of_a_table_are_in_its_record(header, which, columns, name):
    table = BENCHMARKS.split("\n" + header)[1 + which].partition("\n\n")[0]
    rows, known = table.splitlines()[2:], numbers(record(name))
    assert unknown(rows, columns, known) == []
    other = [re.sub(NUMBER, lambda found: f"{found[0]}7", row) for row in rows]
    assert len(unknown(other, columns, known)) > len(rows), "other figures are seen"


# ---- whole tables, and the sentences about them


@pytest.mark.parametrize(
    ("name", "page", "script"),
    [
        ("quantize-quality-cpu-ac116c0", "benchmarks", quantize_quality_table),
        ("activation-accuracy-cpu-990086d", "explanation/numerics", activation_accuracy),
    ],
)
def test_a_page_has_the_table_of_its_bench(name, page, script):
    bench, text = record(name), (ROOT / f"docs/{page}.md").read_text()
    assert script.table(bench) in text and f"commit {bench['commit']}" in text and bench["device"] in text


def test_sweep_has_the_best_weights_and_with_calibration_the_best_outputs():
    results = record("quantize-quality-cpu-ac116c0")["results"]
    for weights in {row["weights"] for row in results}:
        rows = [row for row in results if row["weights"] == weights]
        best = [max(rows, key=lambda row: row[key])["method"] for key in ("weight_sqnr_db", "output_snr_db")]
        assert best == ["nvfp4-moe sweep", "nvfp4-moe sweep, calibration"]


def test_fp8_errs_two_fifths_of_nvfp4():
    results = record("activation-accuracy-cpu-990086d")["results"]
    errors = {
        (row["shape"], row["activations"], row["activation_format"]): row["relative_l2_to_w4a16"] for row in results
    }
    ratios = [error / errors[(*key[:2], "nvfp4")] for key, error in errors.items() if key[2] == "fp8"]
    assert 0.36 < min(ratios) and max(ratios) < 0.405
