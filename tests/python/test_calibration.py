"""Calibration files: GGUF imatrices of the gguf package, and the effect of weighted errors on a layer's output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import nvfp4_moe as nv
import pytest

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

EXPERTS, HIDDEN, INTERMEDIATE = 4, 64, 32
SIZES = dict(
    hidden_size=HIDDEN, intermediate_size=32, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, vocab_size=16,
    num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "model"
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SIZES)
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def moments() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    draw = lambda cols: np.exp(2 * rng.standard_normal((EXPERTS, cols))).astype(np.float32)  # noqa: E731
    return {
        f"layers.{layer}.{name}_moments": draw(cols)
        for layer in range(2)
        for name, cols in (("hidden", HIDDEN), ("intermediate", INTERMEDIATE))
    }


def write_own(path: Path, moments: dict[str, np.ndarray], rows: list[int]) -> Path:
    tensors = {name: torch.from_numpy(values) for name, values in moments.items()}
    tensors |= {f"layers.{layer}.rows": torch.tensor(rows) for layer in range(2)}
    safetensors.save_file(tensors, path)
    return path


def write_gguf(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "", use_temp_file=False)
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["wiki.train.raw"])
    writer.add_uint32("imatrix.chunk_count", 3)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_imatrix(path: Path, moments: dict[str, np.ndarray], rows: list[int], fused: bool = False) -> Path:
    """Writes sums of squares, and the number of rows of each expert, as llama.cpp's imatrix does."""
    counts = np.array(rows, np.float32).reshape(EXPERTS, 1)
    tensors = {}
    for layer in range(2):
        inputs = ("ffn_gate_up_exps",) if fused else ("ffn_up_exps", "ffn_gate_exps")
        for name in (*inputs, "ffn_down_exps"):
            values = moments[f"layers.{layer}.{'intermediate' if 'down' in name else 'hidden'}_moments"]
            tensors[f"blk.{layer}.{name}.weight.in_sum2"] = values * counts
            tensors[f"blk.{layer}.{name}.weight.counts"] = counts
        tensors[f"blk.{layer}.attn_q.weight.in_sum2"] = np.ones((1, HIDDEN), np.float32)
    return write_gguf(path, tensors)


def experts(path: Path) -> list[np.ndarray]:
    loaded = [nv.load_expert(path, layer, e) for layer in range(2) for e in range(EXPERTS)]
    return [expert[p][part] for expert in loaded for p in ("gate", "up", "down") for part in ("codes", "scales")]


@pytest.mark.parametrize(("rows", "fused"), [([8, 8, 8, 8], True), ([16, 0, 4, 2], False)])
def test_imatrix_in_gguf_gives_the_same_bytes(model, moments, tmp_path, rows, fused):
    of_seen = {name: values * (np.array(rows) > 0)[:, None].astype(np.float32) for name, values in moments.items()}
    own = write_own(tmp_path / "own.safetensors", of_seen, rows)
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", of_seen, rows, fused)
    results = {}
    for kind, file in (("own", own), ("imatrix", imatrix), ("none", None)):
        results[kind] = nv.quantize_checkpoint(model, tmp_path / kind, search="sweep", calibration=file)
    for a, b in zip(experts(tmp_path / "own"), experts(tmp_path / "imatrix"), strict=True):
        assert np.array_equal(a, b)
    same = [np.array_equal(a, b) for a, b in zip(experts(tmp_path / "own"), experts(tmp_path / "none"), strict=True)]
    unseen = rows.count(0)
    assert sum(same[6:12]) == 6 * (unseen > 0) and not all(same)
    noted = any(f"{2 * unseen} experts of 2 layers saw no rows" in note for note in results["imatrix"]["notes"])
    assert noted == (unseen > 0)


def test_weighted_errors_are_least_under_their_weights(model, moments, tmp_path):
    """sum h_c (w - decoded)^2 of every matrix is smaller than without the calibration."""
    own = write_own(tmp_path / "own.safetensors", moments, [1] * EXPERTS)
    stored = safetensors.load_file(model / "model.safetensors")

    def errors(search: str, calibration: Path | None) -> np.ndarray:
        out = tmp_path / f"{search}-{calibration is None}"
        nv.quantize_checkpoint(model, out, search=search, calibration=calibration)
        total = []
        for layer in range(2):
            for e in range(EXPERTS):
                for p, matrix in nv.load_expert(out, layer, e).items():
                    if p in ("gate", "up", "down"):
                        name = "intermediate" if p == "down" else "hidden"
                        h = moments[f"layers.{layer}.{name}_moments"][e].astype(np.float64)
                        w = stored[f"model.layers.{layer}.mlp.experts.{e}.{p}_proj.weight"].double().numpy()
                        y = nv.dequantize(matrix["codes"], matrix["scales"], matrix["tensor_scale"])
                        total.append((h * (w - y) ** 2).sum())
        return np.array(total)

    four_six, swept = errors("mse", own), errors("sweep", own)
    assert four_six.sum() < 0.97 * errors("mse", None).sum()
    plain = errors("sweep", None)
    assert swept.sum() < min(0.97 * plain.sum(), four_six.sum()) and (swept < plain).all()


SUMS, COUNTS = "blk.0.ffn_gate_exps.weight.in_sum2", "blk.0.ffn_gate_exps.weight.counts"
ONES, FOUR = np.ones((EXPERTS, HIDDEN), np.float32), np.ones((EXPERTS, 1), np.float32)
NEGATIVE = ONES.copy()
NEGATIVE[2, 5] = -3


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({COUNTS: FOUR}, f"expected a tensor {SUMS} or blk.0.ffn_gate_up_exps.weight.in_sum2 or .*, got none"),
        ({SUMS: ONES}, f"expected a tensor {COUNTS}, got none"),
        (
            {SUMS: ONES[:, :32], COUNTS: FOUR},
            r"expected \(4, 64\) F32 of 4 experts with 64 channels, got \(4, 32\) F32",
        ),
        ({SUMS: ONES.astype(np.float16), COUNTS: FOUR}, r"got \(4, 64\) F16"),
        ({SUMS: ONES, COUNTS: FOUR * np.nan}, "counts: expert 0: expected a number of rows, got nan"),
        ({SUMS: NEGATIVE, COUNTS: FOUR}, "expert 2 channel 5: expected a finite number of at least 0, got -3"),
    ],
)
def test_wrong_imatrices_are_refused_by_name(model, tmp_path, tensors, message):
    imatrix = write_gguf(tmp_path / "i.gguf", tensors)
    with pytest.raises(nv.BadInput, match=message):
        nv.quantize_checkpoint(model, tmp_path / "out", search="sweep", calibration=imatrix)
    assert not (tmp_path / "out").exists()
    with pytest.raises(nv.InvalidArgument, match="calibration: expected search mse or sweep"):
        nv.quantize_checkpoint(model, tmp_path / "out", calibration=imatrix)
