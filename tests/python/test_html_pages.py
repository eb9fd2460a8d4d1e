"""The pages of --html: the tables are those of stdout, and a browser draws a shape for each entry of the JSON."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
from collections import Counter
from typing import NamedTuple

import pytest

VERBS = ("inspect", "verify", "bench")


class Page(html.parser.HTMLParser):
    """Shapes by figure, cells of tables, and elements of a page or of a dumped DOM."""

    def __init__(self, text: str):
        super().__init__()
        self.shapes: Counter = Counter()  # (figure's id, shape) -> count
        self.elements: Counter = Counter()
        self.cells: list[str] = []
        self.scripts: list[str] = []
        self.policy = self.figure = ""
        self.opened = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.elements[tag] += 1
        self.opened = tag
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        if tag == "figure":
            self.figure = values["id"]
        kind = (values.get("class") or "").split(" ")[0]
        if kind in ("bar", "cell", "dot", "path"):
            self.shapes[self.figure, kind] += 1
        if tag == "script":
            self.scripts.append("")
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        self.opened = ""

    def handle_data(self, data):
        if self.opened == "script":
            self.scripts[-1] += data
        elif self.opened in ("td", "th"):
            self.cells[-1] += data

    @property
    def report(self) -> dict:
        return json.loads(self.scripts[0])


class Made(NamedTuple):
    stdout: str
    file: object  # its path
    page: Page


@pytest.fixture(scope="module")
def made(tool, tmp_path_factory):
    """made[verb]: a run of the verb and its page."""
    folder = tmp_path_factory.mktemp("pages")

    def run(*words):
        done = tool(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    sizes = "--layers 3 --experts 8 --top-k 2 --hidden 128 --intermediate 64 --vocab 64".split()
    run("synthesize", folder / "floats", *sizes)
    run("quantize", folder / "floats", folder / "packed")
    options = {
        "verify": ("--against", folder / "floats"),
        "bench": ("--tokens", "1,2,5", "--activation-format", "nvfp4,bf16", "--seconds", "0"),
    }
    pages = {}
    for verb in VERBS:
        file = folder / f"{verb}.html"
        stdout = run(verb, folder / "packed", *options.get(verb, ()), "--html", file)
        pages[verb] = Made(stdout, file, Page(file.read_text(encoding="utf-8")))
    return pages


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """chromium(file): the page as a browser has it once its script has run."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(names)} is installed")
    profile = tmp_path_factory.mktemp("profile")

    def dump(file) -> Page:
        options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom")
        command = [path, *options, file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return Page(done.stdout)

    return dump


@pytest.mark.parametrize("verb", VERBS)
def test_the_tables_are_those_of_stdout(made, verb):
    rows = [line for line in made[verb].stdout.splitlines() if line.startswith("|") and not set(line) <= set("|-: ")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    assert len(cells) > 10
    assert made[verb].page.cells == cells


@pytest.mark.parametrize("verb", VERBS)
def test_the_policy_admits_the_one_script_and_no_request(made, verb):
    page = made[verb].page
    assert len(page.scripts) == 2
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page.policy, f"kPageScriptHash should be {digest}"
    assert page.policy.startswith("default-src 'none'")
    assert not re.search(r"""(src|href)=|url\(|@import|fetch\(|innerHTML|eval\(""", made[verb].file.read_text())


def drawn(report: dict) -> dict:
    """(figure, shape) -> how many there should be for this report."""
    if report["verb"] == "inspect":
        read, fit = report["layer_statistics"], report["fit"] or []  # null if there are errors
        return {
            ("parts", "bar"): 4 if fit else 3,
            ("experts", "cell"): len(read) * (report["num_experts"] + 1),
            ("fit", "bar"): 3 * len(fit),
        }
    if report["verb"] == "verify":
        layers = report["details"]["layers"]
        return {
            ("errors", "dot"): 2 * sum(layer["run"] is not None for layer in layers),
            ("errors", "path"): 4,
            ("sqnr", "cell"): 4 * sum(layer["original"] is not None for layer in layers),
            ("saturation", "cell"): 4 * len(report["saturation"]),
            ("faults", "cell"): sum(layer["num_experts"] for layer in layers),
        }
    return {
        ("times", "dot"): len(report["timings"]),
        ("times", "path"): 2 * len(report["configurations"]),
        ("shares", "bar"): len(report["timings"]),
    }


@pytest.mark.parametrize("verb", VERBS)
def test_a_browser_draws_what_the_json_has(made, chromium, verb):
    expected = drawn(made[verb].page.report)
    assert min(expected.values()) > 0
    assert chromium(made[verb].file).shapes == expected


@pytest.mark.attack("hostile names")
def test_a_browser_sees_no_element_in_a_name(made, tool, chromium, tmp_path, attacked):
    names = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!--<script>", "\u2028&lt;b&gt;")
    model = shutil.copytree(made["inspect"].file.parent / "packed", tmp_path / "<b>packed")
    tensors = [f"layers.0.ffn.experts.{i}.w1.{name}" for i, name in enumerate(names)]
    header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, name in enumerate(tensors)}
    bytes_of_header = json.dumps(header).encode()
    head = len(bytes_of_header).to_bytes(8, "little")
    (model / "more.safetensors").write_bytes(head + bytes_of_header + bytes(len(names)))
    (model / "model.safetensors.index.json").unlink()  # which would leave that file out
    done = tool("inspect", model, "--html", tmp_path / "page.html")
    assert done.returncode == 1, done.stderr  # tensors of an expert that no format has are errors

    seen = chromium(tmp_path / "page.html")
    found = {name for finding in seen.report["findings"] for name in (finding["tensor"], *finding["examples"])}
    for name in tensors:
        assert name in found
        attacked()
    assert seen.elements["script"] == 2 and not seen.elements["img"]
    expected = drawn(seen.report)
    assert {key: seen.shapes[key] for key in expected} == expected
