"""The environment in which processes find each other as ranks of torch.distributed on this host."""

from __future__ import annotations

import os
import socket


def rank_environment(world: int, **more: str) -> dict[str, str]:
    """RANK is the caller's to add."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **where, **more}
