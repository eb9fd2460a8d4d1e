"""Records streams of CSF that published programs made: csf.json, for csf_vectors_test.cpp.

The encoder is b12x's (b12x/_lib/quant/csf_encode.py), whose rule for a row's base FlashInfer documents for
flashinfer.quantization.encode_csf_scales. Its Triton kernels run here in Triton's interpreter. They write the order in
which b12x keeps NVFP4 on GPUs, so FlashInfer's reader of checkpoints (flashinfer/experimental/b12x/_lib/quant/
nvfp4_csf.py) checks the streams: it must make the same bytes of them, exceptions included. That file is executed with
its GPU modules replaced by empty ones.

Recorded with flashinfer-python 0.7.2.post1, b12x at 778ca21f, triton 3.9.0 and torch 2.13.0:

    pip download --no-deps flashinfer-python==0.7.2.post1
    python make_csf_vectors.py UNPACKED_WHEEL/flashinfer/experimental/b12x CSF_ENCODE.PY

No GPU is needed. The result is the same on every run.
"""

import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402, F401


def load(path: Path):
    class Anything(types.ModuleType):
        def __getattr__(self, name: str):
            if name.startswith("__"):
                raise AttributeError(name)
            return mock.MagicMock(name=name)

    names = "cuda cuda.bindings cuda.bindings.driver cutlass cutlass.cute cutlass.cutlass_dsl b12x b12x._lib "
    names += "b12x._lib.compiler b12x._lib.program_cache b12x._lib.runtime_control b12x._lib.utils"
    with mock.patch.dict(sys.modules, {name: Anything(name) for name in names.split()}):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        with mock.patch.dict(sys.modules, {path.stem: module}):
            spec.loader.exec_module(module)
    return module


def encode(kernels, scales: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """One matrix through the published kernels, launched as their file launches them."""
    rows, cols = scales.shape
    source = torch.from_numpy(scales.copy()).reshape(-1)
    bases = torch.empty(rows, dtype=torch.uint8)
    counts = torch.empty(rows, dtype=torch.int64)
    sizes = {"R": rows, "C": cols, "W": window, "ROT": 0, "B": 1 << (cols - 1).bit_length()}
    kernels._choose_bases[(rows,)](source, bases, counts, **sizes)
    prefix = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    exceptions = torch.zeros(max(int(prefix[-1]), 1), dtype=torch.uint32)
    width = cols // 2 if window == 16 else (cols + 7) // 8
    fixed = torch.zeros(rows * (1 + width), dtype=torch.uint8)
    kernels._pack_rows[(rows,)](source, bases, prefix, fixed, exceptions, **sizes)
    return fixed.numpy(), exceptions.numpy()[: int(prefix[-1])]


def to_checkpoint_order(fixed: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Tiles of 128 rows in the order of GPU memory to tiles of 16 rows."""
    tiles = fixed.reshape(rows // 128, 128 * (1 + cols // 2))
    bases = tiles[:, :128].reshape(-1, 32, 4).transpose(0, 2, 1).reshape(rows // 16, 16)
    codes = np.empty((rows // 128, 128 * cols), np.uint8)
    codes[:, ::2], codes[:, 1::2] = tiles[:, 128:] & 15, tiles[:, 128:] >> 4
    codes = codes.reshape(rows // 128, cols // 4, 32, 4, 4).transpose(0, 3, 2, 1, 4).reshape(rows, cols)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return np.concatenate((bases, packed.reshape(rows // 16, -1)), 1).reshape(-1)


def matrices(rows: int, cols: int, window: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(43)
    centre = random.integers(window, 256 - 2 * window, (rows, 1))
    clustered = centre + np.rint(random.normal(0, window / 3, (rows, cols)))
    ties = np.tile(np.array([7, 7 + window, 240, 255] * cols)[:cols], (rows, 1))  # windows that cover the same number
    ties[::2] = ties[::2, ::-1]
    edges = random.choice([0, 1, window - 1, window, 127, 254, 255, 256 - window, 255 - window], (rows, cols))
    return {
        "random": random.integers(0, 256, (rows, cols)).astype(np.uint8),
        "clustered": clustered.clip(0, 255).astype(np.uint8),
        "ties": ties.astype(np.uint8),
        "edges": edges.astype(np.uint8),
        "one_value": np.full((rows, cols), 0x7E, np.uint8),
    }


def main() -> None:
    reader = load(Path(sys.argv[1]) / "_lib" / "quant" / "nvfp4_csf.py")
    reader.Nvfp4CsfBatch.validate = lambda self: None  # it requires tensors on a GPU
    kernels = load(Path(sys.argv[2]))
    cases = []
    for codec, rows, cols, window in (("nvfp4", 128, 4, 16), ("mxfp4", 64, 11, 2)):
        for name, scales in matrices(rows, cols, window).items():
            fixed, exceptions = encode(kernels, scales, window)
            if codec == "nvfp4":
                native = fixed
                fixed = to_checkpoint_order(native, rows, cols)
                read = reader.make_nvfp4_csf_batch([fixed], [exceptions], rows=rows, columns=cols, device="cpu")
                assert np.array_equal(read.fixed.numpy().reshape(-1), native), name
                assert read.exceptions.numpy().tobytes() == exceptions.tobytes(), name
            cases.append({"codec": codec, "data": name, "rows": rows, "cols": cols, "scales": scales.tobytes().hex(),
                          "fixed": fixed.tobytes().hex(), "exceptions": [int(word) for word in exceptions]})  # fmt: skip
    text = "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n"
    Path(__file__).with_name("csf.json").write_text(text)


if __name__ == "__main__":
    main()
