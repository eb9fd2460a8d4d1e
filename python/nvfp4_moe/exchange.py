"""Exchanges over a caller's own communication: a Python function, or torch.distributed on host memory."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

from ._core import Exchange, connect_exchange

# How long ranks whose transfer failed wait for each other's word, to find out who is gone: failures of one transfer
# arrive on all ranks within a moment of each other, or all by the same timeout.
_ROLL_CALL_SECONDS = 3.0

AllToAll = Callable[[memoryview, "list[int]", memoryview, "list[int]", float], None]


def callback_exchange(all_to_all_v: AllToAll, rank: int, world: int, *, timeout: float = 30.0) -> Exchange:
    """This process as a rank over all_to_all_v(send, send_bytes, recv, recv_bytes, timeout).

    send and recv are memoryviews of bytes, a block for and from each rank in order, this one included; send_bytes and
    recv_bytes their sizes (if all are 0 the view has one byte, which means nothing). The function returns once recv is filled, within timeout seconds; what it raises ends the
    exchange with its text, so it names the rank that is missing if it knows it. It keeps neither view. It is called
    from the thread that calls a layer, one call at a time.

    The function reports a rank that died only in a call. Ranks of one host also poll each other's processes, so that such a
    rank is named within a second while others make no call and replay graphs. Nothing listens and nothing is connected for it.

    Waits for all ranks. Raises IoError with the function's failure, ValueError if ranks disagree who they are.
    """
    return connect_exchange(all_to_all_v, rank, world, timeout)


def torch_exchange(group: Any = None, *, timeout: float = 30.0) -> Exchange:
    """This process's rank of a torch.distributed group (None: all ranks), over a gloo group of its own.

    Collective: every rank of the group calls it; others need not. A transfer that fails or takes longer than timeout
    seconds (half an hour if ranks that open or rearrange a layer wait for the slowest to load) ends all ranks, and
    names the ranks that did not report in the seconds after. On one host ranks poll each other's processes, as in
    callback_exchange.
    """
    import torch
    from torch import distributed

    ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    own = distributed.new_group(
        ranks, backend="gloo", timeout=datetime.timedelta(seconds=timeout), use_local_synchronization=True
    )
    rank, world = distributed.get_rank(own), len(ranks)
    # By the group's name, which its ranks have alike and no other group has: the words of an exchange that failed stay there.
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
        except Exception as gone:  # the store's own process may be the one that is missing
            return f"; nor does the store of torch.distributed answer ({gone})"
        return f"; no word from rank {', '.join(map(str, silent))}" if silent else ""

    # The last transfer; nobody reads it. gloo's thread drops its references some time after wait() returns. If they were
    # the last ones, that thread would need Python's lock to free these views, and a process that is just ending aborts.
    kept: list[Any] = []

    def all_to_all_v(
        send: memoryview, send_bytes: list[int], recv: memoryview, recv_bytes: list[int], limit: float
    ) -> None:
        source = torch.frombuffer(send, dtype=torch.uint8)[: sum(send_bytes)]
        target = torch.frombuffer(recv, dtype=torch.uint8)[: sum(recv_bytes)]
        # The limit goes into the operation, which all_to_all_single has no argument for. Work.wait(limit) would not do: it
        # gives up while gloo may still write to recv, and does not lift the group's own timeout.
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
