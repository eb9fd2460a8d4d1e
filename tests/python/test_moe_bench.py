"""bench/moe_bench without a GPU: draws, floors, the reference, records, and their tables in docs and README."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bench.moe_bench import __main__ as command  # noqa: E402
from bench.moe_bench import layers, plot, reference, table  # noqa: E402
from bench.moe_bench.record import OURS, Record  # noqa: E402
from bench.moe_bench.roofline import BANDWIDTH, RATE, floor  # noqa: E402
from bench.moe_bench.shapes import SHAPES, TOKENS, Shape, steps  # noqa: E402
from bench.moe_bench.workload import hard_weights, make_hidden, make_routings, make_weights  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SMALL = Shape(12, 16, 4, 64, 32, 2, "one rank of a small layer")
RECORDS = sorted((ROOT / "bench/results").glob("moe-layers-*.json"))


# ---- draws and floors


@pytest.mark.parametrize("tokens", [1, 8, 200])
def test_routings_are_distinct_experts_with_weights_that_sum_to_one(tokens):
    for routing in make_routings(SMALL, tokens, 3, CPU):
        assert routing.ids.shape == routing.weights.shape == (tokens, SMALL.top_k)
        assert torch.allclose(routing.weights.sum(dim=1), torch.ones(tokens))
        here = routing.ids >= 0
        assert (routing.ids[here] < SMALL.local_experts).all()
        assert (routing.global_ids[~here] >= SMALL.local_experts).all()
        assert (routing.global_ids < SMALL.experts).all()
        assert (routing.global_ids[here] == routing.ids[here]).all()
        assert (routing.slots, routing.experts_hit) == (int(here.sum()), routing.ids[here].unique().numel())
        for row in routing.ids:
            assert len(set(row[row >= 0].tolist())) == int((row >= 0).sum())


def test_small_routings_cost_what_they_cost_on_average():
    shape = SHAPES["v4pro_ep8"]
    slots = [routing.slots for routing in make_routings(shape, 8, steps(8), CPU)]
    assert all(abs(count - 8 * shape.top_k / 8) <= 1 for count in slots)


def test_draws_are_seeded():
    first, second = (make_routings(SMALL, 16, 2, CPU) for _ in range(2))
    assert all(
        torch.equal(a.ids, b.ids) and torch.equal(a.weights, b.weights) for a, b in zip(first, second, strict=True)
    )
    one, other = make_weights(SMALL, 0, CPU), make_weights(SMALL, 1, CPU)
    assert torch.equal(one.down.codes, make_weights(SMALL, 0, CPU).down.codes)
    assert not torch.equal(one.down.codes, other.down.codes)


def test_floors_are_bytes_or_operations():
    shape = SHAPES["qwen30b"]
    few = floor(shape, 1, 8, 8)
    weights = 8 * 3 * 2048 * 768 * (0.5 + 1 / 16)
    assert few.bound == "memory"
    assert few.us == pytest.approx(1e6 * (weights + 2 * 2048 * 2 + 2 * 8 * 768 * 2) / BANDWIDTH)
    many = floor(shape, 8192, 8192 * 8, 128)
    assert many.bound == "math"
    assert many.us == pytest.approx(1e6 * 6 * 8192 * 8 * 2048 * 768 / RATE)


# ---- the reference, judged by the library's own CPU layers


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("limit", [None, 0.5])
def test_this_librarys_layers_agree_with_the_reference(name, limit):
    activations = layers.KINDS[name].activations
    weights = [hard_weights(make_weights(SMALL, number, CPU)) for number in range(SMALL.layers)]
    layer = layers.opener(name)(SMALL, weights, 64, limit)
    for tokens in (1, 33):
        routing, x = make_routings(SMALL, tokens, 1, CPU)[0], make_hidden(SMALL, tokens, CPU)
        layer.prepare(tokens)
        for number, each in enumerate(weights):
            out = torch.full_like(x, float("nan"))
            layer.run(number, x, routing, out)
            expected = reference.moe(each, x, routing, activations, limit)
            assert reference.within(reference.errors(out, expected), activations)
            wrong = reference.moe(weights[1 - number], x, routing, activations, limit)
            assert not reference.within(reference.errors(out, wrong), activations)


def test_grouped_mm_agrees_with_the_reference():
    weights = [make_weights(SMALL, number, CPU) for number in range(SMALL.layers)]
    layer = layers.opener("grouped_mm")(SMALL, weights, 64)
    routing, x = make_routings(SMALL, 33, 1, CPU)[0], make_hidden(SMALL, 33, CPU)
    out = torch.full_like(x, float("nan"))
    layer.run(1, x, routing, out)
    expected = reference.moe(weights[1], x, routing, "bf16", None)
    assert reference.within(reference.errors(out, expected), "bf16")


def test_an_output_fails_that_has_an_unwritten_or_a_lost_row():
    expected = torch.randn(6, 64)
    expected[3] = 0  # a token without a local expert
    assert reference.within(reference.errors(expected.bfloat16(), expected), "bf16")
    for row, value in ((0, float("nan")), (3, float("nan")), (3, 1e-6), (1, 0.0)):
        out = expected.clone()
        out[row] = value
        assert not reference.within(reference.errors(out, expected), "bf16"), (row, value)


# ---- the command line, and libraries that are not installed


def test_the_default_is_the_headline():
    options = command.parse([])
    assert options.shapes == list(SHAPES) and options.tokens == TOKENS and options.layers == list(layers.KINDS)
    assert options.passes == 2 and not options.check_only


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "qwen30b,qwen31b"], "got qwen31b"),
        (["--tokens", "1,0"], "expected token counts such as 1,64,1024, got 1,0"),
        (["--layers", "marlin,cutlass"], "got cutlass"),
        (["--passes", "0"], "expected at least 1, got 0"),
    ],
)
def test_a_wrong_option_is_named(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.parse(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_a_library_that_is_not_installed_is_skipped_by_name(monkeypatch, tmp_path):
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vllm is installed here")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    options = command.parse(["--layers", "nvfp4_moe_bf16,marlin,humming_indexed", "--json", str(tmp_path / "out.json")])
    run = command.Run(options, ["--layers", "..."])
    run.save()
    record = json.loads((tmp_path / "out.json").read_text())
    assert run.names == list(record["layers"]) == ["nvfp4_moe_bf16"]
    assert "vllm" in record["skipped"]["marlin"] and "humming" in record["skipped"]["humming_indexed"]
    assert record["command"].startswith("python3 -m bench.moe_bench --layers")


def test_without_a_gpu_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["moe_bench"])
    assert command.main() == 2
    assert "expected a CUDA GPU" in capsys.readouterr().err


# ---- records, and the pages made from them


def made_record(path, times):
    """A record with one shape and token count: {layer: us}."""
    kinds = {name: {"version": "library 1", "weights": layers.KINDS[name].weights} for name in times}
    rows = [{"shape": "qwen30b", "tokens": 64, "layer": name, "us": us, "floor_us": 10.0} for name, us in times.items()]
    path.write_text(json.dumps({"device": "a card", "layers": kinds, "rows": rows}))
    return Record(path)


def test_a_lead_is_over_the_fastest_peer_with_nvfp4_weights(tmp_path):
    times = {
        "nvfp4_moe_bf16": 20.0,
        "marlin": 50.0,
        "humming_indexed": 30.0,
        "humming_grouped": 40.0,
        "grouped_mm": 10.0,
    }
    record = made_record(tmp_path / "record.json", times)
    assert record.best_peer("qwen30b", 64)["layer"] == "humming_indexed"
    assert record.best_peer("qwen30b", 64, "bf16")["layer"] == "grouped_mm"
    assert record.lead("nvfp4_moe_bf16") == pytest.approx((1.5, 1.5, 1.5))


def test_each_card_has_one_record_and_each_cell_passed_its_check():
    assert [path.name for path in RECORDS] == ["moe-layers-h100-bba0682.json", "moe-layers-h200-bba0682.json"]
    for path in RECORDS:
        record = Record(path)
        assert record.data["command"].startswith("python3 -m bench.moe_bench ") and record.data["commit"]
        assert not record.data["errors"] and all(row["ok"] for row in record.data["rows"])
        assert record.shapes == list(SHAPES) and record.tokens == TOKENS
        for shape, name in ((shape, name) for shape in SHAPES for name in record.layers):
            assert all((shape, tokens, name) in record.rows for tokens in TOKENS), (path.name, shape, name)
        for row in record.data["rows"]:
            wanted = floor(SHAPES[row["shape"]], row["tokens"], row["slots"], row["experts_hit"]).us
            assert math.isclose(row["floor_us"], wanted, abs_tol=1e-3)


def test_a_records_command_is_one_that_the_benchmark_takes():
    for path in RECORDS:
        words = Record(path).data["command"].split()
        options = command.parse(words[3:])
        assert set(Record(path).layers) <= set(options.layers)


def test_the_benchmarks_page_has_the_records_tables():
    page = (ROOT / "docs/benchmarks.md").read_text()
    for path in RECORDS:
        assert table.summary(Record(path)) in page and table.cells(Record(path)) in page


def test_the_picture_is_what_the_script_draws_of_the_records():
    drawn = plot.plot([Record(path) for path in RECORDS])
    assert drawn == (ROOT / "docs/images/layer-times.svg").read_text()
    assert len(drawn) < 20000 and "prefers-color-scheme:dark" in drawn
