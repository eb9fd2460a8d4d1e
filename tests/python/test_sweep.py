"""Second tier: the oracles over many seeds and odd shapes, about a million elements each."""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv
import pytest

pytest.importorskip("ml_dtypes")
torch = pytest.importorskip("torch")

import judge  # noqa: E402

pytestmark = pytest.mark.long
SHAPES = [(64, 512), (3, 16), (1, 7168), (257, 48)]
SEEDS = range(1, 13)


def sweep(count, name, quantize, tensor_scale_of, **limits):
    total: dict[str, int] = {}
    for seed in SEEDS:
        rows, cols = SHAPES[seed % len(SHAPES)]
        for _, x in judge.samples(seed, rows, cols):
            if not x.any():  # the smallest shape leaves room for a block of zeros only
                continue
            s = tensor_scale_of(x)
            ours = nv.quantize(x, tensor_scale=s)
            counts = judge.compare(x, ours[:2], quantize(x, s), s, **limits)
            total = {key: total.get(key, 0) + value for key, value in counts.items()}
    judge.report(count, name, total)


def test_torchao(count):
    pytest.importorskip("torchao")
    import test_torchao as of

    sweep(
        count,
        "torchao",
        of.quantize,
        lambda x: float(np.float32(np.abs(x).max() / 2688)),
        scale_roundings=of.SCALE_ROUNDINGS,
        code_roundings=of.CODE_ROUNDINGS,
        guard=of.guard,
    )


def test_modelopt(count):
    pytest.importorskip("modelopt")
    import test_modelopt as of

    def quantize(x, s):
        tensor, scales = of.quantize(x, torch.tensor(s))
        return tensor._quantized_data.numpy(), scales.view(torch.uint8).numpy()

    sweep(
        count,
        "ModelOpt",
        quantize,
        lambda x: float(np.float32(np.abs(x).max() / 2688)),
        scale_roundings=of.SCALE_ROUNDINGS,
        code_roundings=of.CODE_ROUNDINGS,
        guard=of.guard,
    )


def test_compressed_tensors(count):
    pytest.importorskip("compressed_tensors")
    import test_compressed_tensors as of

    sweep(
        count,
        "compressed-tensors",
        lambda x, _: of.quantize(torch.from_numpy(x))[:2],
        lambda x: float(np.float32(1 / np.float64(of.quantize(torch.from_numpy(x))[2]))),
        scale_roundings=of.SCALE_ROUNDINGS + 1,
        code_roundings=of.CODE_ROUNDINGS + 1,
        guard=of.guard,
    )
