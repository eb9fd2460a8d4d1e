"""The pages of --html: the tables are those of stdout, and a browser draws a shape for each entry of the JSON."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import shutil
import struct
import subprocess
from collections import Counter

import pytest

PAGES = {  # page -> the figures that it draws
    "inspect": {"parts", "experts", "fit"},
    "verify": {"errors", "sqnr", "expert-errors", "saturation", "faults"},
    "verify --input": {"errors", "load", "saturation", "faults"},
    "bench": {"times", "shares"},
}
IDS = [0, 1, 7, 0, 0, -1, 5, 0, 1, 0]  # of 5 tokens, for top_k 2


class Page(html.parser.HTMLParser):
    """Shapes by figure, cells of tables, scripts and elements of a page or of a dumped DOM."""

    def __init__(self, text: str):
        super().__init__()
        self.shapes: Counter = Counter()  # (figure's id, shape) -> count
        self.elements: Counter = Counter()
        self.texts: dict[str, list[str]] = {"script": [], "td": [], "th": [], "p": [], "title": []}
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


def write_states(file, hidden):
    """A file of --input whose tokens chose the experts IDS."""
    ids, states = struct.pack(f"<{len(IDS)}i", *IDS), struct.pack(f"<{5 * hidden}f", *[0.5] * 5 * hidden)
    header = {
        "topk_ids": {"dtype": "I32", "shape": [5, 2], "data_offsets": [0, len(ids)]},
        "hidden": {"dtype": "F32", "shape": [5, hidden], "data_offsets": [len(ids), len(ids) + len(states)]},
    }
    head = json.dumps(header).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + ids + states)


@pytest.fixture(scope="module")
def made(tool, tmp_path_factory):
    """made[page]: stdout of a run of its verb, and the page's file."""
    folder = tmp_path_factory.mktemp("pages")

    def run(*words):
        done = tool(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    sizes = "--layers 3 --experts 8 --top-k 2 --hidden 128 --intermediate 64 --vocab 64".split()
    run("synthesize", folder / "floats", *sizes)
    run("quantize", folder / "floats", folder / "packed")
    write_states(folder / "states.safetensors", hidden=128)
    options = {
        "inspect": (),
        "verify --input": (folder / "states.safetensors",),
        "verify": ("--against", folder / "floats"),
        "bench": ("--tokens", "1,2,5", "--activation-format", "nvfp4,bf16", "--seconds", "0"),
    }
    files = {page: folder / f"{page}.html" for page in PAGES}
    return {
        page: (run(verb, folder / "packed", *more, *options[page], "--html", file), file)
        for page, file in files.items()
        for verb, *more in [page.split()]
    }


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


@pytest.mark.parametrize("page_of", PAGES)
def test_a_page_has_the_tables_of_stdout_one_script_and_no_request(made, page_of):
    stdout, file = made[page_of]
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
            ("expert-errors", "cell"): sum(len(layer["original"]["experts"]) for layer in layers if layer["original"]),
            ("load", "cell"): sum(len(layer["run"]["expert_load"] or []) for layer in layers),
        }
    times, lines = len(report["timings"]), len(report["configurations"])
    return {("times", "dot"): times, ("times", "path"): 2 * lines, ("shares", "bar"): times}


@pytest.mark.parametrize("page_of", PAGES)
def test_a_browser_draws_what_the_json_has(made, chromium, page_of):
    page = chromium(made[page_of][1])
    expected = {key: count for key, count in drawn(page.report).items() if count}
    assert {figure for figure, _ in expected} == PAGES[page_of] and page.shapes == expected


def test_expert_load_is_that_of_given_ids_only(made, chromium):
    report = Page(made["verify --input"][1].read_text()).report
    load = [IDS.count(expert) for expert in range(8)]
    assert [layer["run"]["expert_load"] for layer in report["details"]["layers"]] == [load] * 3
    page = chromium(made["verify --input"][1])
    assert any(report["input"] in note for note in page.texts["p"])
    for layer in range(3):
        for expert, some in enumerate(load):
            mean = f"{some * 8 / 9:.3g}"
            tip = f"layer {layer}, expert {expert}: {some} of 9 assignments of 5 tokens, {mean} times the mean"
            assert tip in page.texts["title"]
    assert any("needs --against" in note for note in page.texts["p"])

    seeded = chromium(made["verify"][1])
    assert {layer["run"]["expert_load"] for layer in seeded.report["details"]["layers"]} == {None}
    assert any("drawn from the seed" in note for note in seeded.texts["p"])


def test_the_error_of_an_expert_is_that_of_its_weights(made, chromium):
    page = chromium(made["verify"][1])
    for layer in page.report["details"]["layers"]:
        whole, own = layer["original"]["relative_l2"], layer["original"]["experts"]
        assert [one["expert"] for one in own] == list(range(8)) and len({one["relative_l2"] for one in own}) > 1
        # Every expert has as many weights, of the same distribution.
        assert whole == pytest.approx(sum(one["relative_l2"] ** 2 / 8 for one in own) ** 0.5, rel=1e-2)
        for one in own:
            tip = f"layer {layer['layer']}, expert {one['expert']}: {one['relative_l2']:.3g}"
            assert tip in page.texts["title"]


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
