"""python3 -m bench.plots: draws the pictures of docs/benchmarks.md, docs/images/bench-*.svg, from the records.

Each function returns one SVG. `RECORDS` names the record of each, and no figure comes from elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from .moe_bench.plot import GRID, PAPER, TEXT
from .moe_bench.record import OURS, Record, geometric_mean

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "bench/results", ROOT / "docs/images"
RECORDS = {
    "H100": "moe-layers-h100-f61f177.json",
    "H200": "moe-layers-h200-f61f177.json",
    "accuracy": "activation-accuracy-cpu-990086d.json",
    "two Zen 4 cores": "cpu-peers-2-cores-2aadaa0.json",
    "two Zen 3 cores, AVX2": "cpu-peers-avx2-c4e6093.json",
    "two cores of a Xeon with AMX": "cpu-peers-amx-2-cores-1a4cc21.json",
    "16 threads of a Xeon with AMX": "cpu-peers-16-threads-82392dd.json",
    "vLLM": "vllm-h200-781823d.json",
    "transformers": "transformers-h200-781823d.json",
}
CARDS = ("H100", "H200")
CPUS = ("two Zen 4 cores", "two Zen 3 cores, AVX2", "two cores of a Xeon with AMX", "16 threads of a Xeon with AMX")
RANGES = {"1 to 8 tokens": (1, 8), "16 to 512": (16, 512), "1024 to 8192": (1024, 8192)}

WIDTH, LEFT, RIGHT, TOP = 760, 44, 20, 58  # pixels
PANEL, GAP = 180, 46  # height of a panel's axes, and of the text between panels
# Light and dark colour of each series.
COLOURS = [("#1b66c9", "#5aa2ff"), ("#e08a2c", "#e59a4a"), ("#2b8a5e", "#4fb587"), ("#8a8a8a", "#9aa0a6")]


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / RECORDS[name]).read_text())
    return data


def style() -> str:
    def rules(which: int) -> str:
        series = "".join(
            f".s{number}{{fill:{colour[which]}}}.l{number}{{stroke:{colour[which]}}}"
            for number, colour in enumerate(COLOURS)
        )
        colours = f"text{{fill:{TEXT[which]}}}.grid{{stroke:{GRID[which]}}}.paper{{fill:{PAPER[which]}}}"
        return f"{colours}.one{{stroke:{TEXT[which]}}}{series}"

    font = 'text{font:12px -apple-system,"Segoe UI",Helvetica,Arial,sans-serif}.strong{font-weight:600}'
    rest = ".m{text-anchor:middle}.e{text-anchor:end}.n{font-size:11px}.line{fill:none;stroke-width:2}"
    return f"<style>{font}{rest}{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}</style>"


def picture(title: str, labels: list[str], panels: list[list[str]], height: int) -> str:
    """Puts the panels below a title and a legend."""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        style(),
        f'<rect width="{WIDTH}" height="{height}" rx="6" class="paper"/>',
        f'<text x="{LEFT}" y="22" class="strong">{escape(title)}</text>',
    ]
    x = float(LEFT)
    for number, label in enumerate(labels):
        out.append(f'<rect x="{x:.0f}" y="36" width="11" height="11" class="s{number}"/>')
        out.append(f'<text x="{x + 17:.0f}" y="46">{escape(label)}</text>')
        x += 40 + 6.4 * len(label)
    return "\n".join([*out, *(line for panel in panels for line in panel), "</svg>"]) + "\n"


def axes(name: str, top: float, left: float, right: float, ticks: Iterable[tuple[float, str]]) -> list[str]:
    """Draws a panel's name and its horizontal lines; a tick's place is from 0 at the bottom to 1 at the top."""
    out = [f'<text x="{left:.0f}" y="{top + 14:.0f}" class="strong">{escape(name)}</text>']
    for place, text in ticks:
        y = top + GAP - 22 + PANEL * (1 - place)
        out.append(f'<line x1="{left:.0f}" x2="{right:.0f}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        out.append(f'<text x="{left - 6:.0f}" y="{y + 4:.1f}" class="e n">{text}</text>')
    return out


def lines(
    title: str,
    panels: dict[str, dict[str, dict[int, float]]],
    highest: float,
    ticks: list[float],
    percent: bool = False,
) -> str:
    """Draws {panel: {series: {tokens: value}}} over the number of tokens, evenly spaced."""
    drawn = []
    labels = list(next(iter(panels.values())))
    for at, (name, series) in enumerate(panels.items()):
        top = TOP + at * (PANEL + GAP + 14)
        bottom, width = top + GAP - 22 + PANEL, WIDTH - LEFT - RIGHT
        texts = [f"{100 * tick:g} %" if percent else f"{tick:g}" for tick in ticks]
        out = axes(name, top, LEFT, WIDTH - RIGHT, [(v / highest, t) for v, t in zip(ticks, texts, strict=True)])
        if not percent:
            y = bottom - PANEL / highest
            out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="one"/>')
        counts = list(next(iter(series.values())))
        xs = {tokens: LEFT + (index + 0.5) * width / len(counts) for index, tokens in enumerate(counts)}
        out += [f'<text x="{x:.1f}" y="{bottom + 16}" class="m n">{tokens}</text>' for tokens, x in xs.items()]
        for number, (label, values) in enumerate(series.items()):
            points = {tokens: (xs[tokens], bottom - PANEL * value / highest) for tokens, value in values.items()}
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points.values())
            out.append(f'<polyline points="{path}" class="line l{number}"/>')
            for tokens, (x, y) in points.items():
                value = f"{100 * values[tokens]:.0f} %" if percent else f"{values[tokens]:.2f}"
                out.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="s{number}">'
                    f"<title>{escape(label)}, {tokens} tokens: {value}</title></circle>"
                )
        drawn.append(out)
    return picture(title, labels, drawn, TOP + len(panels) * (PANEL + GAP + 14))


def bars(
    title: str, panels: dict[str, dict[str, dict[str, float]]], ticks: list[float], form: str, labels: list[str]
) -> str:
    """Draws {panel: {group: {series: value}}}, a group of bars next to each other."""
    drawn, highest = [], ticks[-1] * 1.05
    for at, (name, groups) in enumerate(panels.items()):
        top = TOP + at * (PANEL + GAP + 14)
        bottom, width = top + GAP - 22 + PANEL, (WIDTH - LEFT - RIGHT) / len(groups)
        out = axes(name, top, LEFT, WIDTH - RIGHT, [(tick / highest, f"{tick:g}") for tick in ticks])
        for index, (group, values) in enumerate(groups.items()):
            middle = LEFT + (index + 0.5) * width
            start = middle - (len(values) * 39 - 5) / 2
            for place, (label, value) in enumerate(values.items()):
                x, height = start + 39 * place, PANEL * value / highest
                out.append(
                    f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="34" height="{height:.1f}" '
                    f'class="s{labels.index(label)}">'
                    f"<title>{escape(label)}, {escape(group)}: {value:{form}}</title></rect>"
                )
                out.append(f'<text x="{x + 17:.1f}" y="{bottom - height - 4:.1f}" class="m n">{value:{form}}</text>')
            out.append(f'<text x="{middle:.1f}" y="{bottom + 17}" class="m">{escape(group)}</text>')
        drawn.append(out)
    return picture(title, labels, drawn, TOP + len(panels) * (PANEL + GAP + 14))


# ---- GPU layers


def records() -> dict[str, Record]:
    return {card: Record(RESULTS / RECORDS[card]) for card in CARDS}


def mean_of_layers(record: Record, tokens: int, value: Callable[[str, int], float]) -> float:
    return geometric_mean(value(shape, tokens) for shape in record.shapes)


def best_us(record: Record, shape: str, tokens: int) -> float:
    best = record.best_peer(shape, tokens)
    assert best is not None
    return float(best["us"])


def speed() -> str:
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for card, record in records().items():
        panels[card] = {
            label: {
                tokens: mean_of_layers(
                    record, tokens, lambda s, t, name=name, r=record: best_us(r, s, t) / r.rows[s, t, name]["us"]
                )
                for tokens in record.tokens
            }
            for name, label in OURS.items()
        }
    title = "Time of the fastest other NVFP4 library over this library's, geometric mean of six layers, by tokens"
    return lines(title, panels, 2.0, [0, 0.5, 1, 1.5, 2])


def floor() -> str:
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for card, record in records().items():

        def share(us: Callable[[str, int], float], record: Record = record) -> dict[int, float]:
            floors = {
                (s, t): record.rows[s, t, "nvfp4_moe_bf16"]["floor_us"] for s in record.shapes for t in record.tokens
            }
            return {t: mean_of_layers(record, t, lambda s, t: floors[s, t] / us(s, t)) for t in record.tokens}

        panels[card] = {
            label: share(lambda s, t, name=name, r=record: r.rows[s, t, name]["us"]) for name, label in OURS.items()
        }
        panels[card]["fastest other NVFP4 library"] = share(lambda s, t, r=record: best_us(r, s, t))
    title = "Share of the floor that a layer reaches, geometric mean of six layers, by tokens: higher is faster"
    return lines(title, panels, 1.0, [0, 0.25, 0.5, 0.75, 1], percent=True)


def accuracy() -> str:
    results = load("accuracy")["results"]
    formats = {"W4A16": "bf16", "W4A8": "fp8", "W4A4": "nvfp4"}
    errors = {
        label: geometric_mean(row["relative_l2"] for row in results if row["activation_format"] == name)
        for label, name in formats.items()
    }
    drawn, highest, low, high = [], 0.25, 0.9, 1.3
    width = (WIDTH - 3 * LEFT - RIGHT) / 2
    shapes = ("circle", "square", "triangle")
    for at, (card, record) in enumerate(records().items()):
        left, bottom = LEFT + at * (width + 2 * LEFT), TOP + GAP - 22 + PANEL
        out = axes(card, TOP, left, left + width, [(v / highest, f"{v:g}") for v in (0, 0.05, 0.1, 0.15, 0.2, 0.25)])
        for tick in (0.9, 1.0, 1.1, 1.2, 1.3):
            x = left + width * (tick - low) / (high - low)
            out.append(f'<text x="{x:.1f}" y="{bottom + 16}" class="m n">{tick:g}</text>')
        for shape, (name, (first, last)) in zip(shapes, RANGES.items(), strict=True):
            for number, (label, layer) in enumerate((label, layer) for layer, label in OURS.items()):
                cells = [(s, t) for s in record.shapes for t in record.tokens if first <= t <= last]
                faster = geometric_mean(
                    record.rows[s, t, "nvfp4_moe_bf16"]["us"] / record.rows[s, t, layer]["us"] for s, t in cells
                )
                x = left + width * (faster - low) / (high - low)
                y = bottom - PANEL * errors[label] / highest
                out.append(
                    mark(shape, x, y, number, f"{label}, {name}: {faster:.2f} as fast, error {errors[label]:.3f}")
                )
        out.append(f'<text x="{left + width / 2:.0f}" y="{bottom + 36}" class="m">times as fast as W4A16</text>')
        drawn.append(out)
    key, x = [], 330.0
    for shape, name in zip(shapes, RANGES, strict=True):
        key.append(mark(shape, x, 41.5, 3, name))
        key.append(f'<text x="{x + 11:.0f}" y="46">{name}</text>')
        x += 32 + 7 * len(name)
    title = "Error of a layer's output (relative L2, against floats) and speed: lower is more accurate, right is faster"
    return picture(title, list(formats), [*drawn, key], TOP + PANEL + GAP + 24)


def mark(shape: str, x: float, y: float, number: int, text: str) -> str:
    rest = f'class="s{number}"><title>{escape(text)}</title></'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {rest}circle>'
    if shape == "square":
        return f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" {rest}rect>'
    return f'<path d="M{x:.1f} {y - 6:.1f}l6 11h-12z" {rest}path>'


# ---- CPUs, and memory


def cpu() -> str:
    compared = {
        "W4A8, int8_block": ("nvfp4-moe", "nvfp4", "int8_block"),
        "W4A16": ("nvfp4-moe", "nvfp4", "bf16"),
        "ik_llama.cpp, MXFP4": ("ik_llama.cpp", "mxfp4", None),
        "llama.cpp, MXFP4": ("ggml", "mxfp4", None),
    }
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for name in CPUS:
        rows = load(name)["sets"]["qwen3-30b-a3b"]["rows"]

        def us(library: str, weights: str, activations: str | None, tokens: int, rows: list[Any] = rows) -> float:
            (row,) = [
                row
                for row in rows
                if row["library"] == library
                and row["weights"].startswith(weights)
                and row["tokens"] == tokens
                and (activations is None or row["activations"] == activations)
            ]
            return float(row["median_us"])

        panels[name] = {
            "1 token" if tokens == 1 else f"{tokens} tokens": {
                label: us("ggml", "nvfp4", None, tokens) / us(*which, tokens) for label, which in compared.items()
            }
            for tokens in (1, 8, 64, 512)
        }
    title = "Qwen3-30B-A3B's layer, times as fast as llama.cpp with NVFP4: taller is faster"
    return bars(title, panels, [0, 5, 10, 15, 20], ".1f", list(compared))


def memory() -> str:
    labels = ["this library", "Marlin", "Humming", "bf16 by grouped_mm"]
    backends = dict(zip(labels, load("vLLM")["backends"], strict=False))
    experts = dict(zip((labels[0], labels[3]), load("transformers")["experts"], strict=True))
    assert [row["backend"] for row in backends.values()] == ["nvfp4_moe", "marlin", "humming"]
    assert [row["experts"] for row in experts.values()] == ["nvfp4_moe", "grouped_mm"]
    panels = {
        "one H200, Qwen3-30B-A3B's shape": {
            "vLLM, highest while loading": {label: row["peak_mib"] / 1024 for label, row in backends.items()},
            "vLLM, ready": {label: row["in_use_when_ready_mib"] / 1024 for label, row in backends.items()},
            "transformers, ready": {label: row["ready_device_mib"] / 1024 for label, row in experts.items()},
        }
    }
    title = "Memory in use on the device, GiB; 8 GiB of vLLM's are its KV cache"
    return bars(title, panels, [0, 20, 40, 60], ".1f", labels)


PICTURES = {
    "bench-speed.svg": speed,
    "bench-floor.svg": floor,
    "bench-accuracy.svg": accuracy,
    "bench-cpu.svg": cpu,
    "bench-memory.svg": memory,
}

if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (IMAGES / file).write_text(draw())
