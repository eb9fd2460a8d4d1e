"""python3 -m bench.moe_bench.table RECORD...: the tables of docs/benchmarks.md, one set per card."""

from __future__ import annotations

import sys

from .record import OURS, Record, geometric_mean
from .shapes import SHAPES

PHASES = {"1 to 8 tokens": (1, 8), "16 to 512": (16, 512), "1024 to 8192": (1024, 8192), "all": (1, 8192)}


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def summary(record: Record) -> str:
    """Tabulates the lead over each cell's best NVFP4 peer, by format and batch: geometric mean, minimum, maximum."""
    rows = [line([record.device, *(f"{OURS[name]}: lead | least | greatest | time / floor" for name in ours(record))])]
    rows.append("|---|" + "---:|" * 4 * len(ours(record)))
    for title, (first, last) in PHASES.items():
        if not any(first <= tokens <= last for tokens in record.tokens):
            continue
        cells = [title]
        for name in ours(record):
            leads = [lead for (_, tokens), lead in record.leads(name).items() if first <= tokens <= last]
            floors = [
                row["us"] / row["floor_us"]
                for (_, tokens, layer), row in record.rows.items()
                if layer == name and first <= tokens <= last
            ]
            cells += (
                [f"{value:.2f}" for value in (geometric_mean(leads), min(leads), max(leads), geometric_mean(floors))]
                if leads
                else ["-"] * 4
            )
        rows.append(line(cells))
    return "\n".join(rows)


def ours(record: Record) -> list[str]:
    return [name for name in OURS if name in record.layers]


def microseconds(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def cells(record: Record) -> str:
    """Tabulates the microseconds of every layer in every cell."""
    rows = [line(["shape", "layer", *(f"T = {tokens}" for tokens in record.tokens)])]
    rows.append("|---|---|" + "---:|" * len(record.tokens))
    for shape in record.shapes:
        title = SHAPES[shape].title
        for name in record.layers:
            found = [record.rows.get((shape, tokens, name), {}).get("us") for tokens in record.tokens]
            rows.append(line([title, OURS.get(name, name), *map(microseconds, found)]))
            title = ""
        floors = [record.rows[shape, tokens, ours(record)[0]]["floor_us"] for tokens in record.tokens]
        rows.append(line(["", "floor", *map(microseconds, floors)]))
    return "\n".join(rows)


def versions(record: Record) -> str:
    return "\n".join(f"- {OURS.get(name, name)}: {layer['version']}" for name, layer in record.layers.items())


def tables(record: Record) -> str:
    return f"{summary(record)}\n\n{versions(record)}\n\n{cells(record)}"


if __name__ == "__main__":
    print("\n\n".join(tables(Record(path)) for path in sys.argv[1:]))
