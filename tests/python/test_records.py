"""Every record in bench/results is current and used, and the figures in the docs are those of their records."""

import json
import re
from pathlib import Path

import activation_accuracy
import numpy as np
import pytest
import quantize_quality_table
import records

ROOT = Path(__file__).resolve().parents[2]


def record(name):
    return json.loads((ROOT / "bench/results" / f"{name}.json").read_text())


def tables(page, header):
    """Returns the rows of every table of a page whose header begins with `header`, as lists of cells."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    found = []
    for number, line in enumerate(lines):
        if line.startswith(header):
            rows = []
            for row in lines[number + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append([cell.strip() for cell in row.strip("|").split("|")])
            found.append(rows)
    return found


def check(cell, *values):
    """Checks that every number of a cell, in order, is one of `values`, rounded to the digits shown."""
    shown = re.findall(r"[-+]?\d+(?:\.\d+)?", cell.replace(" to ", " "))
    assert len(shown) == len(values), (cell, values)
    for text, value in zip(shown, values, strict=True):
        step = 10.0 ** -len(text.partition(".")[2])
        if abs(value) >= 99.5 and step < 1:
            step = 1
        assert abs(float(text) - value) <= 0.501 * step, (cell, values)


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
    value = {"what": "a", "rows": [{"us": 1, "of": [1, 2]}, {"us": 2}], "sizes": {"k": 1}, "long": ["x" * 200, "y"]}
    assert records.text(value) == (
        '{\n "what": "a",\n "rows": [{"us": 1, "of": [1, 2]}, {"us": 2}],\n "sizes": {"k": 1},\n'
        f' "long": ["{"x" * 200}", "y"]\n}}\n'
    )
    value["rows"] *= 9
    assert records.text(value).splitlines()[2:5] == [' "rows": [', '  {"us": 1, "of": [1, 2]},', '  {"us": 2},']


# ---- docs/benchmarks.md, "CPUs"

PEERS = {
    "W4A4": ("nvfp4-moe", "nvfp4", "nvfp4"),
    "W4A8, int8_block": ("nvfp4-moe", "nvfp4", "int8_block"),
    "W4A16": ("nvfp4-moe", "nvfp4", "bf16"),
    "ik_llama.cpp, MXFP4": ("ik_llama.cpp", "mxfp4_r8", None),
    "ggml, MXFP4": ("ggml", "mxfp4 (repacked)", None),
    "ggml, NVFP4": ("ggml", "nvfp4", None),
}


@pytest.mark.parametrize("number, name", enumerate(["cpu-peers-2-cores-2aadaa0", "cpu-peers-16-threads-82392dd"]))
def test_other_libraries_on_cpus(number, name):
    rows = {
        (row["library"], row["weights"], row.get("activations"), row["tokens"]): row
        for row in record(name)["sets"]["qwen3-30b-a3b"]["rows"]
    }
    shown = tables("benchmarks.md", "| | T = 1 | T = 8 | T = 64 | T = 512 |")
    shown = [table for table in shown if [row[0] for row in table] == list(PEERS)][number]
    for title, *cells in shown:
        for tokens, cell in zip((1, 8, 64, 512), cells, strict=True):
            row = rows[*PEERS[title], tokens]
            check(cell, row["median_us"], min(row["rounds_us"]))


FORMATS = {"W4A4": "nvfp4", "W4A16": "bf16", "W4A8": "int8_block"}


@pytest.mark.parametrize("name", ["cpu-layers-2-cores-a749783", "cpu-layers-16-threads-4dd05ff"])
def test_layers_on_cpus(name):
    """Gigabytes and shares for one token, GFLOP/s from 64 tokens on."""
    timings = {
        (layer["layer"][-1], row["activation_format"], row["tokens"]): row
        for layer in record(name)["sets"]["layers"]
        for row in layer["timings"]
    }
    columns = [1, 8, 64, 512] if "2-cores" in name else [1, 64, 512]
    shown = next(
        rows
        for rows in tables("benchmarks.md", "| | " + " | ".join(f"T = {tokens}" for tokens in columns))
        if rows[0][0] == "A W4A4"
    )
    assert len(shown) == (6 if "2-cores" in name else 4)
    for title, *cells in shown:
        shape, form = title.split()
        for tokens, cell in zip(columns, cells, strict=False):
            row = timings[shape, FORMATS[form], tokens]
            if gigabytes := re.match(r"[\d.]+ GB/s", cell):
                check(gigabytes[0], row["touched_gb_per_s"])
            if share := re.search(r"(\d+) % (?:\(|of reads)", cell):
                if tokens <= 8:
                    check(share[1], 100 * row["read_share"])
            if tokens >= 64:
                check(re.match(r"\d+", cell)[0], row["gflop_per_s"])


def test_instruction_sets():
    data = record("cpu-instruction-sets-2-cores-55097bc")["sets"]["instruction_sets"]
    rates = {
        (layer["layer"][-1], row["backend"].partition(":")[2], row["activation_format"]): row["gflop_per_s"]
        for layer in data
        for row in layer["timings"]
        if row["tokens"] == 512
    }
    (shown,) = tables("benchmarks.md", "| | amx | avx512bf16 |")
    for shape, *cells in shown:
        for name, cell in zip(("amx", "avx512bf16", "avx512vnni", "avx2"), cells, strict=True):
            check(cell, rates[shape, name, "nvfp4"], rates[shape, name, "bf16"])


# ---- docs/benchmarks.md, "Several ranks"


def test_ranks_on_two_gpus():
    data = record("exchange-2h200-39f28d9")
    times = {(row["tokens"], row["combine"], row["over"]): row for row in data["flash"]["timings"]}
    torch = {row["tokens"]: row for row in data["torch"]["results"]}
    (shown,) = tables("benchmarks.md", "| tokens | one rank | own experts |")
    assert len(shown) == 9
    for tokens, one, own, *cells in ([int(row[0]), *row[1:]] for row in shown):
        check(one, times[tokens, "one_rank", None]["median_us"])
        check(own, times[tokens, "own_experts", None]["median_us"])
        ways = [(how, over) for how in ("all_reduce", "all_to_all") for over in ("nccl", "peers")]
        for way, cell in zip(ways, cells, strict=False):
            check(cell, times[tokens, *way]["median_us"], times[tokens, *way]["exchange_us"])
        if tokens in torch:
            check(cells[4], torch[tokens]["by_assignment_us"], torch[tokens]["by_token_us"])
            check(cells[5], torch[tokens]["wire_by_assignment_us"], torch[tokens]["wire_by_token_us"])
        else:
            assert cells[4:] == ["", ""]


def test_balanced_ranks_on_two_gpus():
    hold = record("exchange-2h200-39f28d9")["other_holds"][0]
    assert hold["commit"] == "5241fe1" and hold["balance"]["slots_per_rank"] == 128
    rows = {
        (row["tokens"], row["routing"], row["combine"], row["placement"]): row for row in hold["balance"]["timings"]
    }
    (shown,) = tables("benchmarks.md", "| tokens | routing | busiest rank over even |")
    assert len(shown) == 4
    for tokens, routing, *cells in ([int(row[0]), *row[1:]] for row in shown):
        own = rows[tokens, routing, "own_experts", "contiguous"]
        before, after = (rows[tokens, routing, "all_to_all", which] for which in ("contiguous", "balanced"))
        even = rows[tokens, "uniform", "all_to_all", "contiguous"]["median_us"]
        values = [before["busiest_over_even"], own["median_us"], before["median_us"], after["busiest_over_even"]]
        values += [after["median_us"], even, after["median_us"] / even]
        for cell, value in zip(cells, values, strict=True):
            check(cell, value)


# ---- docs/benchmarks.md, transformers


def test_transformers_speed():
    ours, bf16 = record("transformers-h200-781823d")["experts"]
    (shown,) = tables("benchmarks.md", "| | this library | bf16 `grouped_mm` |")
    runs = list(zip(ours["runs"], bf16["runs"], strict=True))
    wanted = [(a["moe_ms_per_step"], b["moe_ms_per_step"], "time") for a, b in runs]
    wanted += [(a["tokens_per_s"], b["tokens_per_s"], "rate") for a, b in runs]
    wanted += [(one["ready_device_mib"], other["ready_device_mib"], "") for one, other in [(ours, bf16)]]
    wanted += [(one["load_peak_torch_mib"], other["load_peak_torch_mib"], "") for one, other in [(ours, bf16)]]
    for (_, first, second, ratio), (a, b, kind) in zip(shown, wanted, strict=True):
        check(first, a)
        check(second, b)
        if kind:
            check(ratio, b / a if kind == "time" else a / b)


# ---- docs/benchmarks.md and docs/explanation/numerics.md: whole tables, and the sentences about them


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
    bench = record("quantize-quality-cpu-ac116c0")
    assert (
        f"hidden {bench['hidden']}, intermediate {bench['intermediate']}" in (ROOT / "docs/benchmarks.md").read_text()
    )
    assert len(quantize_quality_table.table(bench).splitlines()) == 2 + len({row["method"] for row in bench["results"]})
    for weights in {row["weights"] for row in bench["results"]}:
        rows = {row["method"]: row for row in bench["results"] if row["weights"] == weights}
        best = {key: max(rows.values(), key=lambda row: row[key]) for key in ("weight_sqnr_db", "output_snr_db")}
        assert best["weight_sqnr_db"] is rows["nvfp4-moe sweep"]
        assert best["output_snr_db"] is rows["nvfp4-moe sweep, calibration"]


def test_fp8_errs_two_fifths_of_nvfp4():
    script, results = activation_accuracy, record("activation-accuracy-cpu-990086d")["results"]
    assert len(results) == len(script.SHAPES) * len(script.DISTRIBUTIONS) * len(script.FORMATS)
    errors = {
        (row["shape"], row["activations"], row["activation_format"]): row["relative_l2_to_w4a16"] for row in results
    }
    ratios = [error / errors[(*key[:2], "nvfp4")] for key, error in errors.items() if key[2] == "fp8"]
    assert 0.36 < min(ratios) and max(ratios) < 0.405


def test_the_bench_rounds_bf16_to_nearest_even():
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    assert np.array_equal(activation_accuracy.to_bf16(x), torch.from_numpy(x).to(torch.bfloat16).float().numpy())
