"""Workspaces out of torch's caching allocator, for the compiled module; imported with the first that it asks for.

Only a run that has no workspace large enough comes here: it asks once for each stream and each larger size, and while a
graph is captured where the run's stream is not torch's current one.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch


def stream_of(device: int, stream: int) -> AbstractContextManager[None]:
    """Makes the stream of that address torch's current one; what is allocated meanwhile belongs to it."""
    named = torch.cuda.ExternalStream(stream, device=device) if stream != 0 else torch.cuda.default_stream(device)
    current: AbstractContextManager[None] = torch.cuda.stream(named)
    return current


def captured(size_bytes: int, device: int, stream: int) -> torch.Tensor:
    """uint8 (size_bytes,) of the stream: while it is captured, out of the graph's pool.

    Raises MemoryError saying what was asked for and what was free."""
    try:
        with stream_of(device, stream):
            return torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{device}")
    except torch.OutOfMemoryError:
        text = _refusal(size_bytes, device)
    raise MemoryError(text)


def kept(size_bytes: int, device: int, stream: int) -> torch.Tensor:
    """As captured, for a tensor that stays: never out of a pool that this thread's allocations go to for now.

    Such pools (torch.cuda.use_mem_pool, the warm-up of torch.compile's graphs) are a thread's, and what lies in them
    goes, or is given to others, with the pool: a thread of its own is outside of all."""
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
    except RuntimeError:  # the interpreter ends and starts no more threads: neither will a pool begin
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
