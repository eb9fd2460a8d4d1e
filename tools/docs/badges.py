#!/usr/bin/env python3
"""badges.py: writes README's badges, docs/images/badge-*.svg, from pyproject.toml and the list of wheels.

They are drawn here and not by a service, so that README needs no network.
"""

import pathlib
import re
import sys
from html import escape

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/images"
LETTER, PADDING, HEIGHT = 6.6, 8, 20  # mean width of a letter at 11 px, and pixels
STYLE = (
    '<style>text{font:11px -apple-system,"Segoe UI",Helvetica,Arial,sans-serif;text-anchor:middle}'
    ".name{fill:#e9ebee}.value{fill:#1b66c9}.n{fill:#1f2328}.v{fill:#ffffff}"
    "@media(prefers-color-scheme:dark){.name{fill:#30363d}.n{fill:#e6edf3}}</style>"
)


def facts():
    """Returns {name of the file: (left text, right text)}."""
    project = (ROOT / "pyproject.toml").read_text()
    wheels = (ROOT / "tools/release/build_wheels.py").read_text()
    versions = re.findall(r'"([\d.]+)"', re.search(r"^VERSIONS = \((.*)\)$", wheels, re.MULTILINE)[1])
    return {
        "ci": ("CI", ".ci/run"),
        "licence": ("licence", re.search(r'^license = "(.*)"$', project, re.MULTILINE)[1]),
        "python": ("Python", f"{versions[0]} to {versions[-1]}"),
        "docs": ("docs", "by reader"),
    }


def badge(name, value):
    left, right = (round(len(text) * LETTER + 2 * PADDING) for text in (name, value))
    text = f"{escape(name)}: {escape(value)}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{HEIGHT}" '
            f'viewBox="0 0 {left + right} {HEIGHT}" role="img" aria-label="{text}">',
            STYLE,
            f'<rect width="{left + right}" height="{HEIGHT}" rx="4" class="value"/>',
            f'<path d="M4 0H{left}V{HEIGHT}H4a4 4 0 0 1-4-4V4a4 4 0 0 1 4-4z" class="name"/>',
            f'<text x="{left / 2:g}" y="14" class="n">{escape(name)}</text>',
            f'<text x="{left + right / 2:g}" y="14" class="v">{escape(value)}</text>',
            "</svg>\n",
        ]
    )


def badges():
    return {f"badge-{key}.svg": badge(*texts) for key, texts in facts().items()}


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(__doc__)
    for file, drawn in badges().items():
        (FOLDER / file).write_text(drawn)
