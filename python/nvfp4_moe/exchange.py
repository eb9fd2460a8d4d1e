"""Exchanges over the caller's communication: a Python function, or torch.distributed on host memory."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

from ._core import Exchange, connect_exchange

__all__ = ["callback_exchange", "torch_exchange"]


def __dir__() -> list[str]:
    return __all__


# After a failed transfer, ranks wait this long for reports from the others to find out which rank is gone. All ranks
# see one failed transfer at nearly the same time, or time out together.
_ROLL_CALL_SECONDS = 3.0

AllToAll = Callable[[memoryview, "list[int]", memoryview, "list[int]", float], None]


def callback_exchange(all_to_all_v: AllToAll, rank: int, world: int, *, timeout: float = 30.0) -> Exchange:
    """Connects this process to the other ranks through a Python function that exchanges bytes. Waits for all ranks.

    Args:
        all_to_all_v: Called as all_to_all_v(send, send_bytes, recv, recv_bytes, timeout). send and recv are memoryviews
            with one block for (from) each rank in order, including this one; send_bytes and recv_bytes are the blocks'
            sizes. If all sizes are 0 the view still has one byte; ignore it. The function returns when recv is filled,
            within timeout seconds. It must not keep the views. An exception ends the exchange with the exception's
            text, so name the missing rank there if it is known. It is called one call at a time, from the thread that
            calls a layer.
        rank: This rank, from 0.
        world: The number of ranks.
        timeout: Seconds to wait for the other ranks.

    The function can report a dead rank only during a call. Ranks on one host also poll each other's processes, so a
    rank that dies while the others replay graphs is named within a second. This opens no connection.

    Raises:
        IoError: The function failed.
        ValueError: The ranks disagree on rank or world.
    """
    return connect_exchange(all_to_all_v, rank, world, timeout)


def torch_exchange(group: Any = None, *, timeout: float = 30.0) -> Exchange:
    """Connects the ranks of a torch.distributed group through a new gloo group.

    Collective: every rank of the group calls it; others need not. A transfer that fails or times out ends the exchange
    on all ranks, and the error names the ranks that did not report in the following seconds. Ranks on one host also
    poll each other's processes, as in callback_exchange.

    Args:
        group: The group; None for all ranks.
        timeout: Seconds that a transfer may take. While a layer is opened or rearranged, ranks wait half an hour for
            the slowest one to load.
    """
    import torch
    from torch import distributed

    ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    own = distributed.new_group(
        ranks, backend="gloo", timeout=datetime.timedelta(seconds=timeout), use_local_synchronization=True
    )
    rank, world = distributed.get_rank(own), len(ranks)
    # Keys are prefixed by the group's name, which is unique: reports of a failed exchange stay in the store.
    store = distributed.PrefixStore(
        f"nvfp4_moe_exchange/{own.group_name}", distributed.distributed_c10d._get_default_store()
    )

    def missing() -> str:
        try:
            store.set(f"failed/{rank}", b"1")
            deadline = time.monotonic() + _ROLL_CALL_SECONDS
            silent = [other for other in range(world) if other != rank]
            while silent and time.monotonic() < deadline:
                silent = [other for other in silent if not store.check([f"failed/{other}"])]
                time.sleep(0.05)
        except Exception as gone:  # the missing process may be the one that hosts the store
            return f"; nor does the store of torch.distributed answer ({gone})"
        return f"; no word from rank {', '.join(map(str, silent))}" if silent else ""

    # Keeps the last transfer alive; it is not read. gloo's thread drops its references some time after wait() returns.
    # If they were the last ones, that thread would need Python's lock to free these views, and a process that is just
    # ending would abort.
    kept: list[Any] = []

    def all_to_all_v(
        send: memoryview, send_bytes: list[int], recv: memoryview, recv_bytes: list[int], limit: float
    ) -> None:
        source = torch.frombuffer(send, dtype=torch.uint8)[: sum(send_bytes)]
        target = torch.frombuffer(recv, dtype=torch.uint8)[: sum(recv_bytes)]
        # The limit is an option of the operation, and all_to_all_single has no argument for it. Work.wait(limit) would
        # not do: it returns while gloo may still write to recv, and it does not extend the group's own timeout.
        options = distributed.AllToAllOptions()
        options.timeout = datetime.timedelta(seconds=limit)
        try:
            work = own.alltoall_base(target, source, recv_bytes, send_bytes, options)
            kept[:] = [work, source, target]
            work.wait()
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RuntimeError(text + missing()) from error

    return connect_exchange(all_to_all_v, rank, world, timeout)
