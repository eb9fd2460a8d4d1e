"""Allocates workspaces from torch's caching allocator for the compiled module, which imports this at the first request.

Only a run without a large enough workspace calls it: once per stream and larger size, and during graph capture if the
run's stream is not torch's current one.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch


def stream_of(device: int, stream: int) -> AbstractContextManager[None]:
    """Makes the stream at that address torch's current stream. Allocations inside the context belong to it."""
    named = torch.cuda.ExternalStream(stream, device=device) if stream != 0 else torch.cuda.default_stream(device)
    current: AbstractContextManager[None] = torch.cuda.stream(named)
    return current


def captured(size_bytes: int, device: int, stream: int) -> torch.Tensor:
    """Allocates uint8 (size_bytes,) on the stream; during capture, from the graph's pool.

    Raises MemoryError with the requested and the free size.
    """
    try:
        with stream_of(device, stream):
            return torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{device}")
    except torch.OutOfMemoryError:
        text = _refusal(size_bytes, device)
    raise MemoryError(text)


def kept(size_bytes: int, device: int, stream: int) -> torch.Tensor:
    """Like captured(), for a tensor that is kept: never from a pool that this thread temporarily allocates from.

    Such pools (torch.cuda.use_mem_pool, the warm-up of torch.compile's graphs) belong to a thread, and their memory is
    freed or reused with the pool. A new thread allocates outside of them.
    """
    made: list[torch.Tensor] = []
    failed: list[BaseException] = []

    def make() -> None:
        try:
            made.append(captured(size_bytes, device, stream))
        except BaseException as error:
            failed.append(error)

    try:
        thread = threading.Thread(target=make, name="nvfp4_moe workspace")
        thread.start()
    except RuntimeError:  # the interpreter is ending and starts no more threads; no pool will start either
        make()
    else:
        thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _refusal(size_bytes: int, device: int) -> str:
    try:
        free, total = torch.cuda.mem_get_info(device)
        room = f"{free} of {total} bytes are free"
    except RuntimeError as error:
        room = f"the free memory is not known ({error})"
    return (
        f"expected {size_bytes} bytes on cuda:{device}, got none from torch: {room}, torch has reserved "
        f"{torch.cuda.memory_reserved(device)} bytes and its tensors take {torch.cuda.memory_allocated(device)}"
    )
