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

import pytest

VERBS = ("inspect", "verify", "bench")


class Page(html.parser.HTMLParser):
    """Shapes by figure, cells of tables, scripts and elements of a page or of a dumped DOM."""

    def __init__(self, text: str):
        super().__init__()
        self.shapes: Counter = Counter()  # (figure's id, shape) -> count
        self.elements: Counter = Counter()
        self.texts: dict[str, list[str]] = {"script": [], "td": [], "th": []}
        self.cells: list[str] = []
        self.policy = self.figure = self.opened = ""
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
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.cells.append(self.texts[tag][-1])
        self.opened = ""

    def handle_data(self, data):
        if self.opened in self.texts:
            self.texts[self.opened][-1] += data

    @property
    def report(self) -> dict:
        return json.loads(self.texts["script"][0])


@pytest.fixture(scope="module")
def made(tool, tmp_path_factory):
    """made[verb]: stdout of a run of the verb, and its page's file."""
    folder = tmp_path_factory.mktemp("pages")

    def run(*words):
        done = tool(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    sizes = "--layers 3 --experts 8 --top-k 2 --hidden 128 --intermediate 64 --vocab 64".split()
    run("synthesize", folder / "floats", *sizes)
    run("quantize", folder / "floats", folder / "packed")
    options = {
        "inspect": (),
        "verify": ("--against", folder / "floats"),
        "bench": ("--tokens", "1,2,5", "--activation-format", "nvfp4,bf16", "--seconds", "0"),
    }
    files = {verb: folder / f"{verb}.html" for verb in VERBS}
    return {v: (run(v, folder / "packed", *options[v], "--html", file), file) for v, file in files.items()}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """chromium(file): the page as a browser has it once its script has run."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(names)} is installed")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--dump-dom")
    command = [path, *options, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]
    run = dict(capture_output=True, text=True, timeout=120, check=True)
    return lambda file: Page(subprocess.run([*command, file.as_uri()], **run).stdout)


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_has_the_tables_of_stdout_one_script_and_no_request(made, verb):
    stdout, file = made[verb]
    page = Page(file.read_text(encoding="utf-8"))
    rows = [line for line in stdout.splitlines() if line.startswith("|") and not set(line) <= set("|-: ")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    assert len(cells) > 10 and page.cells == cells
    _, script = page.texts["script"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page.policy, f"kPageScriptHash should be {digest}"
    assert page.policy.startswith("default-src 'none'")
    assert not re.search(r"""(src|href)=|url\(|@import|fetch\(|innerHTML|eval\(""", file.read_text())


def drawn(report: dict) -> dict:
    """(figure, shape) -> how many there should be for this report."""
    if report["verb"] == "inspect":
        read, fit = report["layer_statistics"], report["fit"] or []  # null if there are errors
        cells = len(read) * (report["num_experts"] + 1)
        return {("parts", "bar"): 4 if fit else 3, ("experts", "cell"): cells, ("fit", "bar"): 3 * len(fit)}
    if report["verb"] == "verify":
        layers = report["details"]["layers"]
        return {
            ("errors", "dot"): 2 * sum(layer["run"] is not None for layer in layers),
            ("errors", "path"): 4,
            ("sqnr", "cell"): 4 * sum(layer["original"] is not None for layer in layers),
            ("saturation", "cell"): 4 * len(report["saturation"]),
            ("faults", "cell"): sum(layer["num_experts"] for layer in layers),
        }
    times, lines = len(report["timings"]), len(report["configurations"])
    return {("times", "dot"): times, ("times", "path"): 2 * lines, ("shares", "bar"): times}


@pytest.mark.parametrize("verb", VERBS)
def test_a_browser_draws_what_the_json_has(made, chromium, verb):
    page = chromium(made[verb][1])
    expected = drawn(page.report)
    assert min(expected.values()) > 0 and page.shapes == expected


@pytest.mark.attack("hostile names")
def test_a_browser_sees_no_element_in_a_name(made, tool, chromium, tmp_path, attacked):
    names = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!--<script>", "\u2028&lt;b&gt;")
    model = shutil.copytree(made["inspect"][1].parent / "packed", tmp_path / "<b>packed")
    tensors = [f"layers.0.ffn.experts.{i}.w1.{name}" for i, name in enumerate(names)]
    header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, name in enumerate(tensors)}
    head = json.dumps(header).encode()
    (model / "more.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(len(names)))
    (model / "model.safetensors.index.json").unlink()  # which would leave that file out
    done = tool("inspect", model, "--html", tmp_path / "page.html")
    assert done.returncode == 1, done.stderr  # tensors of an expert that no format has are errors
    page = chromium(tmp_path / "page.html")
    found = {name for finding in page.report["findings"] for name in (finding["tensor"], *finding["examples"])}
    for name in tensors:
        assert name in found
        attacked()
    assert page.elements["script"] == 2 and not page.elements["img"]
