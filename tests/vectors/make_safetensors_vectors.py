"""Writes tests/vectors/safetensors/: a file made by the safetensors package, and what is in it.

python.safetensors     every dtype that the package and this library share, an empty tensor, a scalar, an odd name
python.expected.json   the package's version; per tensor, in file order: name, dtype, shape, bytes in hex
tests/checkpoint_files reads the first against the second, and writes it again: the same bytes must come out.

usage: make_safetensors_vectors.py [OUTPUT_DIRECTORY]      needs torch and safetensors
"""

import json
import struct
import sys
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}


def pattern(count: int, seed: int) -> torch.Tensor:
    """Bytes of a small generator; below 2, so that they are legal booleans, if seed is 0."""
    value, out = seed + 1, []
    for _ in range(count):
        value = (value * 1664525 + 1013904223) % 2**32
        out.append(value >> 31 if seed == 0 else value >> 24)
    return torch.tensor(out, dtype=torch.uint8)


def tensors() -> dict[str, torch.Tensor]:
    result = {}
    for seed, (name, dtype) in enumerate(DTYPES.items()):
        size = torch.empty(0, dtype=dtype).element_size()
        result[f"all.{name.lower()}"] = pattern(3 * 4 * size, seed).view(dtype).reshape(3, 4)
    result["scalar"] = torch.tensor(0.25)
    result["empty"] = torch.empty(0, 5, dtype=torch.bfloat16)
    result['odd "name" \\ \n é 名'] = pattern(5, 99)
    result["layers.0.experts.1.up_proj.weight_scale"] = pattern(2 * 3, 7).view(torch.float8_e4m3fn).reshape(2, 3)
    return result


def expected(path: Path) -> dict:
    """Read back by hand, so that the description does not rest on the package's own reader."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    body = data[8 + length :]
    listed = [
        {"name": n, "dtype": t["dtype"], "shape": t["shape"], "bytes": body[slice(*t["data_offsets"])].hex()}
        for n, t in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    ]
    return {"safetensors": safetensors.__version__, "metadata": metadata, "tensors": listed}


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else root / "tests" / "vectors" / "safetensors"
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors(), out / "python.safetensors", metadata={"format": "pt"})
    text = json.dumps(expected(out / "python.safetensors"), indent=1, ensure_ascii=False)
    (out / "python.expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
