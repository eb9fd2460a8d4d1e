"""Tensors of a checkpoint's safetensors files: names, dtypes and shapes from the headers, and contents on request."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from .. import _core


class StoredTensor(NamedTuple):
    """One tensor of a file's header. dtype is safetensors' name, such as BF16, U8, F8_E4M3."""

    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]

    def read(self, device: str) -> Any:
        """Reads the tensor to "cpu" or "cuda:N"."""
        try:
            with safe_open(self.file, framework="pt", device=device) as opened:
                return opened.get_tensor(self.key)
        except (SafetensorError, OSError) as error:
            raise _core.IoError(f"{self.file}: {self.key} could not be read: {error}") from error

    def __str__(self) -> str:
        return f"{self.key} {self.dtype} {self.shape}"


def stored_tensors(files: Iterable[str]) -> dict[str, StoredTensor]:
    """Returns every tensor of the files by its key.

    Raises BadInput, with the file's name, for a truncated or bad file.
    """
    tensors = {}
    shards: dict[str, str] | None = None  # from the model's index; other copies and leftovers are not read
    for file in files:
        index = os.path.join(os.path.dirname(file), "model.safetensors.index.json")
        if shards is None and os.path.exists(index):
            with open(index, encoding="utf-8") as text:
                shards = json.load(text)["weight_map"]
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118
                    if shards is not None and shards.get(key) != os.path.basename(file):
                        continue
                    part = opened.get_slice(key)
                    tensors[key] = StoredTensor(file, key, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise _core.BadInput(f"{file}: expected a whole safetensors file: {error}") from error
    return tensors
