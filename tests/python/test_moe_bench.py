"""bench/moe_bench without a GPU: the reference, records, and their tables in docs and README."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bench.moe_bench import __main__ as command  # noqa: E402
from bench.moe_bench import layers, plot, reference, table  # noqa: E402
from bench.moe_bench.record import OURS, Record  # noqa: E402
from bench.moe_bench.roofline import floor  # noqa: E402
from bench.moe_bench.shapes import SHAPES, TOKENS, Shape  # noqa: E402
from bench.moe_bench.workload import hard_weights, make_hidden, make_routings, make_weights  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SMALL = Shape(12, 16, 4, 64, 32, 2, "one rank of a small layer")
RECORDS = sorted((ROOT / "bench/results").glob("moe-layers-*.json"))


# ---- the reference, judged by the library's own CPU layers


@pytest.mark.parametrize("name", [*OURS, "grouped_mm"])
def test_layers_agree_with_the_reference(name):
    kind, ours = layers.KINDS[name], name in OURS
    weights = [make_weights(SMALL, number, CPU) for number in range(SMALL.layers)]
    weights = [hard_weights(one) for one in weights] if ours else weights
    for limit in (None, 0.5) if ours else (None,):
        layer = layers.opener(name)(SMALL, weights, 64, *([limit] if ours else []))
        routing, x = make_routings(SMALL, 33, 1, CPU)[0], make_hidden(SMALL, 33, CPU)
        layer.prepare(33)
        for number, each in enumerate(weights):
            out = torch.full_like(x, float("nan"))
            layer.run(number, x, routing, out)
            for judged in weights:
                expected = reference.moe(judged, x, routing, kind.activations, limit)
                assert reference.within(reference.errors(out, expected), kind.activations) == (judged is each)


def test_an_output_fails_that_has_an_unwritten_or_a_lost_row():
    expected = torch.randn(6, 64)
    expected[3] = 0  # a token without a local expert
    assert reference.within(reference.errors(expected.bfloat16(), expected), "bf16")
    for row, value in ((0, float("nan")), (3, float("nan")), (3, 1e-6), (1, 0.0)):
        out = expected.clone()
        out[row] = value
        assert not reference.within(reference.errors(out, expected), "bf16"), (row, value)


# ---- records, and the pages made from them


def test_a_lead_is_over_the_fastest_peer_with_nvfp4_weights(tmp_path):
    times = {"nvfp4_moe_bf16": 20.0, "marlin": 50.0, "humming_indexed": 30.0, "grouped_mm": 10.0}
    kinds = {name: {"version": "library 1", "weights": layers.KINDS[name].weights} for name in times}
    rows = [{"shape": "qwen30b", "tokens": 64, "layer": name, "us": us, "floor_us": 10.0} for name, us in times.items()]
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"device": "a card", "layers": kinds, "rows": rows}))
    record = Record(path)
    assert record.best_peer("qwen30b", 64)["layer"] == "humming_indexed"
    assert record.best_peer("qwen30b", 64, "bf16")["layer"] == "grouped_mm"
    assert record.lead("nvfp4_moe_bf16") == pytest.approx((1.5, 1.5, 1.5))


def test_each_card_has_one_record_and_each_cell_passed_its_check():
    assert [path.name for path in RECORDS] == ["moe-layers-h100-f61f177.json", "moe-layers-h200-f61f177.json"]
    for path in RECORDS:
        record = Record(path)
        assert record.data["command"].startswith("python3 -m bench.moe_bench ") and record.data["commit"]
        assert set(record.layers) <= set(command.parse(record.data["command"].split()[3:]).layers)
        assert not record.data["errors"] and all(row["ok"] for row in record.data["rows"])
        assert record.shapes == list(SHAPES) and record.tokens == TOKENS
        for shape, name in ((shape, name) for shape in SHAPES for name in record.layers):
            assert all((shape, tokens, name) in record.rows for tokens in TOKENS), (path.name, shape, name)
        for row in record.data["rows"]:
            wanted = floor(SHAPES[row["shape"]], row["tokens"], row["slots"], row["experts_hit"]).us
            assert math.isclose(row["floor_us"], wanted, abs_tol=1e-3)


def test_the_pages_are_made_of_the_records():
    records = [Record(path) for path in RECORDS]
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert all(table.summary(record) in page and table.cells(record) in page for record in records)
    assert plot.plot(records) == (ROOT / "docs/images/layer-times.svg").read_text()
