"""examples/python/layer_from_checkpoint.py from end to end: its picture, its messages, and its numbers.

The oracle of the contract (moe_reference.py) checks the numbers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import layer_from_checkpoint as script
import numpy as np
import nvfp4_moe
import pytest

TOOL = shutil.which(os.environ.get("NVFP4_MOE_TOOL", "nvfp4-moe"))
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(TOOL is None, reason="NVFP4_MOE_TOOL names no command line tool"),
]


def example(*arguments, cwd, paths=(), check=True) -> subprocess.CompletedProcess:
    environment = {**os.environ, "MPLCONFIGDIR": str(cwd)}
    module = Path(nvfp4_moe.__file__).resolve().parents[1]  # the one under test, wherever the script runs
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, module]))
    done = subprocess.run(
        [sys.executable, script.__file__, "--tool", str(Path(TOOL).resolve()), *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def table(text: str) -> dict[tuple[str, str], dict[str, float]]:
    """{(format, against): {column: number}} of the printed table."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    columns = lines[0]
    rows = {}
    for cells in lines[2:]:
        form = {"W4A4": "nvfp4", "W4A16": "bf16"}[cells[0].split()[0]]
        rows[form, cells[1]] = {c: float(v.rstrip(" %")) for c, v in zip(columns[2:], cells[2:], strict=True)}
    return rows


def test_it_needs_nothing(tmp_path):
    """No argument: makes a checkpoint, runs it, prints the table and draws."""
    image = pytest.importorskip("matplotlib.image")
    done = example(cwd=tmp_path)
    assert set(table(done.stdout)) == {(f, a) for f in ("nvfp4", "bf16") for a in ("reference", "original weights")}
    pixels = image.imread(tmp_path / "layer_errors.png")
    assert 600 <= pixels.shape[1] <= 2000 and 400 <= pixels.shape[0] <= 1500
    # White paper, and enough ink in each format's colour.
    assert 0.3 < (pixels[..., :3] == 1).all(-1).mean() < 0.95
    red, blue = pixels[..., 0], pixels[..., 2]
    assert (blue > red + 0.2).sum() > 2000 and (red > blue + 0.2).sum() > 2000
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".safetensors" or p.is_dir() and "nvfp4" in p.name] == []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(NVFP4, original) directories: 6 experts, top-3, hidden 128, intermediate 64."""
    root = tmp_path_factory.mktemp("example")
    sizes = "--layers 2 --experts 6 --top-k 3 --hidden 128 --intermediate 64 --vocab 32 --quiet".split()
    for command in (
        ["synthesize", root / "original", *sizes],
        ["quantize", root / "original", root / "nvfp4", "--quiet"],
    ):
        subprocess.run([TOOL, *command], check=True, stdout=subprocess.DEVNULL)
    return root / "nvfp4", root / "original"


def oracle_errors(checkpoint, original, layer, experts, tokens):
    """{(format, against): relative L2}. Against the reference it is the largest that the contract allows."""
    import moe_reference as oracle
    import torch

    stacked = [nvfp4_moe.load_expert(checkpoint, layer, e) for e in experts]
    weights = oracle.Weights(
        *(
            tuple(torch.from_numpy(np.stack([np.asarray(e[m][part]) for e in stacked])) for part in ("codes", "scales"))
            + (torch.tensor([e[m]["tensor_scale"] for e in stacked]),)
            for m in ("gate", "up", "down")
        )
    )
    made = nvfp4_moe.MoeLayer.from_checkpoint(checkpoint, layer, backend="reference", max_tokens=1).config
    x, ids, router = (torch.from_numpy(a) for a in script.seeded_batch(made, tokens, 1))
    floats = [[torch.from_numpy(w).double() for w in script.FloatWeights(original, layer).expert(e)] for e in experts]
    truth = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(tokens):
        for k in range(made.top_k):
            if int(ids[t, k]) not in experts:
                continue
            gate, up, down = floats[list(experts).index(int(ids[t, k]))]
            g, u = gate @ x[t].double(), up @ x[t].double()
            assert made.activation == "swiglu_clamped"
            h = torch.nn.functional.silu(g.clamp(max=made.swiglu_limit)) * u.clamp(
                -made.swiglu_limit, made.swiglu_limit
            )
            truth[t] += router[t, k].double() * (down @ h)
    errors = {}
    for form in ("nvfp4", "bf16"):
        fields = {name: getattr(made, name) for name in oracle.Options.__dataclass_fields__}
        options = oracle.Options(**{**fields, "activation_format": form})
        point, open_ = (
            oracle.forward(options, weights, x, ids, router, first_expert=experts[0], accuracy=a)
            for a in (oracle.EXACT, oracle.CONTRACT)
        )
        room = torch.maximum((open_.hi - point.lo).abs(), (open_.lo - point.lo).abs())
        errors[form, "reference"] = float(room.norm() / point.lo.norm())
        errors[form, "original weights"] = float((point.lo - truth).norm() / truth.norm())
    return errors


def test_its_numbers_are_the_oracle_s(checkpoint, tmp_path):
    pytest.importorskip("matplotlib")
    nvfp4, original = checkpoint
    options = ("--against", original, "--layer", 1, "--tokens", 24, "--plot", "here.png", "--first-expert", 2)
    done = example(nvfp4, *options, "--experts", 3, cwd=tmp_path)
    assert (tmp_path / "here.png").exists()
    printed, expected = table(done.stdout), oracle_errors(nvfp4, original, 1, range(2, 5), 24)
    for form in ("nvfp4", "bf16"):
        room = expected[form, "reference"]
        # Intervals, so the numbers printed to four digits may exceed them by half of the last.
        assert printed[form, "reference"]["relative L2"] <= room * 1.0005
        assert printed[form, "reference"]["equal bits"] > 90
        # By the triangle inequality. room is relative to a norm that the error makes at most 1.5 times the truth's. The
        # script's float32 sums err by far less than its four digits show.
        error = expected[form, "original weights"]
        assert abs(printed[form, "original weights"]["relative L2"] - error) <= 1e-3 * error + room * 1.5
        assert 0.02 < error < 0.5  # something was quantized


def test_what_is_missing_is_said(checkpoint, tmp_path):
    stub = tmp_path / "stub" / "matplotlib"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ImportError('none here')\n")
    done = example(checkpoint[0], "--tokens", 4, cwd=tmp_path, paths=[stub.parent])
    assert "pip install matplotlib" in done.stderr and len(table(done.stdout)) == 2
    for arguments, words in (
        ((tmp_path / "nowhere",), "nowhere"),
        ((checkpoint[0], "--against", checkpoint[0]), "expected BF16, F16 or F32"),
        ((checkpoint[0], "--tokens", "4", "--plot", "x.png"), "pip install matplotlib"),
    ):
        done = example(*arguments, cwd=tmp_path, paths=[stub.parent], check=False)
        assert done.returncode != 0 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
