"""python3 -m bench.moe_bench.plot RECORD... > docs/images/layer-times.svg: layer times of all libraries, a panel per
card.

A bar is the geometric mean over a record's layers of a library's time, relative to this library's W4A16.
"""

from __future__ import annotations

import sys
from html import escape

from .record import HEADLINE_TOKENS, OURS, Record, geometric_mean

WIDTH, PANEL, TOP, LEFT, PLOT = 760, 172, 58, 40, 104  # heights and widths in pixels
BAR, GAP = 32, 5
NUMBERS = {4: "four", 6: "six"}
# light and dark colour of each series
COLOURS = [("#1b66c9", "#5aa2ff"), ("#7fb2f0", "#2f6fbd"), ("#e08a2c", "#e59a4a"), ("#9a9a9a", "#8b8f96")]
TEXT, GRID, PAPER = ("#1f2328", "#e6edf3"), ("#d0d7de", "#3d444d"), ("#ffffff", "#0d1117")


def series(record: Record) -> dict[str, list[str]]:
    """Returns {label with version: layers of the record, the fastest of which counts}, this library's first."""
    found = {f"nvfp4-moe {OURS[name]}": [name] for name in ("nvfp4_moe_bf16", "nvfp4_moe_fp8")}
    for name in record.peers():
        versions = dict(part.split(" ") for part in record.layers[name]["version"].split(", "))
        label = f"Marlin of vLLM {versions['vllm']}"
        if "humming-kernels" in versions:
            label = f"Humming {versions['humming-kernels']} as in vLLM {versions['vllm']}"
        found.setdefault(label, []).append(name)
    return found


def relative_times(record: Record, names: list[str]) -> list[float]:
    """Returns (fastest of names) / (our W4A16) of each headline token count, a geometric mean over all layers."""
    means = []
    for tokens in HEADLINE_TOKENS:
        ratios = [
            min(record.rows[shape, tokens, name]["us"] for name in names)
            / record.rows[shape, tokens, "nvfp4_moe_bf16"]["us"]
            for shape in record.shapes
        ]
        means.append(geometric_mean(ratios))
    return means


def style() -> str:
    def rules(which: int) -> str:
        bars = "".join(f".s{number}{{fill:{colour[which]}}}" for number, colour in enumerate(COLOURS))
        return f"text{{fill:{TEXT[which]}}}.grid{{stroke:{GRID[which]}}}.paper{{fill:{PAPER[which]}}}{bars}"

    font = 'text{font:12px -apple-system,"Segoe UI",Helvetica,Arial,sans-serif}.strong{font-weight:600}'
    return (
        f"<style>{font}.m{{text-anchor:middle}}.n{{font-size:11px}}{rules(0)}"
        f"@media(prefers-color-scheme:dark){{{rules(1)}}}</style>"
    )


def panel(record: Record, top: int, highest: float) -> list[str]:
    bottom, scale = top + 34 + PLOT, PLOT / highest
    card = record.device.removeprefix("NVIDIA ").split(" ")[0]
    out = [f'<text x="{LEFT}" y="{top + 14}" class="strong">{escape(card)}</text>']
    for value in range(0, int(highest) + 1):
        y = bottom - value * scale
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" class="n">{value}</text>')
    group = (WIDTH - LEFT - 20) / len(HEADLINE_TOKENS)
    bars = {label: relative_times(record, names) for label, names in series(record).items()}
    for at, tokens in enumerate(HEADLINE_TOKENS):
        start = LEFT + at * group + (group - len(bars) * (BAR + GAP) + GAP) / 2
        for number, (label, means) in enumerate(bars.items()):
            x, height = start + number * (BAR + GAP), means[at] * scale
            out.append(
                f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{BAR}" height="{height:.1f}" class="s{number}">'
                f"<title>{escape(label)}, {tokens} tokens: {means[at]:.2f}</title></rect>"
            )
            out.append(f'<text x="{x + BAR / 2:.1f}" y="{bottom - height - 4:.1f}" class="m n">{means[at]:.2f}</text>')
        count = "1 token" if tokens == 1 else f"{tokens} tokens"
        out.append(f'<text x="{LEFT + (at + 0.5) * group:.1f}" y="{bottom + 17}" class="m">{count}</text>')
    return out


def plot(records: list[Record]) -> str:
    highest = max(max(relative_times(record, names)) for record in records for names in series(record).values()) * 1.08
    layers = len(records[0].shapes)
    height = TOP + PANEL * len(records)
    title = (
        "Time of a layer relative to nvfp4-moe W4A16, "
        f"geometric mean of {NUMBERS.get(layers, layers)} layers: shorter is faster"
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">',
        style(),
        f'<rect width="{WIDTH}" height="{height}" rx="6" class="paper"/>',
        f'<text x="{LEFT}" y="22" class="strong">{title}</text>',
    ]
    for number, label in enumerate(series(records[0])):
        x = LEFT + (0, 142, 276, 520)[number]
        out.append(
            f'<rect x="{x}" y="36" width="11" height="11" class="s{number}"/>'
            f'<text x="{x + 17}" y="46">{escape(label)}</text>'
        )
    for number, record in enumerate(records):
        out += panel(record, TOP + number * PANEL, highest)
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    print(plot([Record(path) for path in sys.argv[1:]]), end="")
