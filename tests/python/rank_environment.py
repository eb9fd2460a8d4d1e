"""The environment with which processes on this host become ranks of torch.distributed."""

from __future__ import annotations

import os
import socket


def rank_environment(world: int, **more: str) -> dict[str, str]:
    """The caller adds RANK."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **where, **more}
