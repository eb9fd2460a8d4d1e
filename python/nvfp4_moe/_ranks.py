"""Ranks of torchrun and their batches, for `python -m nvfp4_moe.verify` and `python -m nvfp4_moe.bench`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

import torch
from torch import distributed

from . import Checkpoint, Error, Exchange, MoeLayer, torch_exchange

Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def parser(module: str, what: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"torchrun --nproc-per-node N -m nvfp4_moe.{module}", description=what)
    made.add_argument("checkpoint", help="a checkpoint directory, one safetensors file or a GGUF file")
    made.add_argument("--layer", type=int, action="append", help="a MoE layer; may be repeated (default: see above)")
    made.add_argument("--combine", choices=("all_to_all", "all_reduce"), default="all_to_all")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: each rank uses GPU LOCAL_RANK")
    made.add_argument("--over", choices=("nccl", "peers"), default="nccl", help="how GPUs exchange (default: nccl)")
    made.add_argument("--backend", default="auto", help="a backend that `nvfp4-moe explain` lists (default: auto)")
    made.add_argument("--activation-format", default="auto", help="default: what the checkpoint declares, or better")
    made.add_argument("--timeout", type=float, default=30.0, help="seconds a rank waits for the others (default: 30)")
    made.add_argument("--seed", type=int, default=1, help="seed of the random batches (default: 1)")
    return made


class Ranks:
    """This process as a rank of torchrun, or as the only rank if torchrun did not start it."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
            os.environ.setdefault(name, value)
        if "MASTER_PORT" not in os.environ:  # not started by torchrun
            store = f"file://{tempfile.mkdtemp()}/store"
            distributed.init_process_group("gloo", store, rank=0, world_size=1)
        elif not distributed.is_initialized():
            distributed.init_process_group("gloo")
        self.device = "cpu"
        self.exchange: Exchange = torch_exchange(timeout=asked.timeout)
        if asked.device == "cuda":
            self.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(self.device)
            {"nccl": self.exchange.use_nccl, "peers": self.exchange.use_peers}[asked.over](self.device)

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def world(self) -> int:
        return self.exchange.world

    def title(self) -> str:
        over = self.asked.over if self.asked.device == "cuda" else "torch.distributed"
        return f"{self.world} ranks, {self.asked.combine} over {over}"

    def open(self, checkpoint: Checkpoint, layer: int, tokens: int, capacity: int = 0) -> MoeLayer:
        """Opens this rank's part of a layer. On GPUs the result has the bits of one rank only with batch_invariant."""
        options = self.common()
        if self.device != "cpu" and self.asked.combine == "all_to_all":
            options["batch_invariant"] = True
        return MoeLayer.from_checkpoint(
            checkpoint,
            layer,
            max_tokens=tokens,
            exchange=self.exchange,
            combine=self.asked.combine,
            capacity=capacity,
            **options,
        )

    def common(self) -> dict[str, Any]:
        asked = self.asked
        return {"device": self.device, "backend": asked.backend, "activation_format": asked.activation_format}

    def batch(self, config: Any, tokens: int) -> Arrays:
        """Makes hidden (T, H) bf16, topk_ids (T, k) int32 and topk_weights (T, k) fp32, the same on all ranks."""
        random = torch.Generator().manual_seed(self.asked.seed)
        hidden = torch.randn(tokens, config.hidden_size, generator=random).bfloat16()
        ids = torch.rand(tokens, config.num_experts, generator=random).topk(config.top_k, dim=1).indices.int()
        weights = torch.softmax(torch.randn(tokens, config.top_k, generator=random), dim=1)
        return hidden, ids, weights

    def mine(self, arrays: Arrays) -> Arrays:
        """Returns this rank's tokens: a share with all_to_all, all tokens with all_reduce."""
        tokens = arrays[0].shape[0]
        part = slice(tokens * self.rank // self.world, tokens * (self.rank + 1) // self.world)
        if self.asked.combine == "all_reduce":
            part = slice(None)
        hidden, ids, weights = (array[part].contiguous().to(self.device) for array in arrays)
        return hidden, ids, weights

    def gather(self, mine: Any) -> list[Any]:
        """Gathers each rank's value on every rank."""
        parts: list[Any] = [None] * self.world
        distributed.all_gather_object(parts, mine)
        return parts

    def close(self) -> None:
        """Ends torch.distributed and waits for its threads.

        A thread still running while Python exits would abort it.
        """
        del self.exchange
        distributed.destroy_process_group()


def print_table(rows: list[dict[str, str]]) -> None:
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    for row in [{name: name for name in widths}, *rows]:
        print("  ".join(row[name].rjust(width) for name, width in widths.items()))


def main(verb: Any, asked: argparse.Namespace) -> None:
    """Runs the verb and exits, with status 1 if it returns False or fails. The failing rank prints one line."""
    try:
        ranks = Ranks(asked)
        passed = verb(ranks)
        ranks.close()
    except Error as error:
        print(f"rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        passed = False
    sys.exit(0 if passed else 1)
