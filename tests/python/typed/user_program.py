"""A user's program for mypy --strict (test_wheel.py): the package's exports have types that strict code can use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import nvfp4_moe as nv
from numpy.typing import NDArray


def round_trip(x: NDArray[np.float32]) -> float:
    codes, scales, tensor_scale = nv.quantize(x, mode="weights", search="mse")
    y: NDArray[np.float32] = nv.dequantize(codes, scales, tensor_scale)
    fp8, fp8_scale = nv.convert_to_fp8(codes, scales, tensor_scale, (128, 128))
    back = nv.unswizzle_scales(nv.swizzle_scales(scales), x.shape[0], x.shape[1] // 16)
    row: int = nv.expert_scale_row(0, 1)
    print(fp8.shape, fp8_scale, back.shape, row, nv.unpack_codes(codes).shape, nv.__version__)
    return float(np.abs(y - x).max())


def report(progress: dict[str, Any]) -> bool | None:
    print(progress["what"], progress["done"], progress["total"])
    return None


def convert(source: Path, out: Path) -> int:
    try:
        done = nv.quantize_checkpoint(source, out, input_scales={0: (0.01, None)}, progress=report)
        findings: list[dict[str, Any]] = nv.inspect(out, layers=[0])["findings"]
        expert = nv.load_expert(out, 0, 0)
        shared = nv.Checkpoint(str(out)).shared_expert(0, first=0, count=16)
    except (nv.BadInput, nv.Unsupported) as error:
        return error.status
    chosen = [choice["backend"] for choice in nv.explain({"num_experts": 8, "top_k": 2})]
    print(done["layers"], findings, expert["gate"], shared, chosen)
    return 0


def ranks(communicator: int) -> tuple[int, int]:
    exchange: nv.Exchange = nv.torch_exchange(timeout=10.0)
    exchange.use_peers("cuda:0")
    exchange.use_nccl("cuda:0", library="libnccl.so.2", communicator=communicator)
    return exchange.rank, exchange.world


if __name__ == "__main__":
    sys.exit(convert(Path(sys.argv[1]), Path(sys.argv[2])))
