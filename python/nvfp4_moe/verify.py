"""Compares MoE layers over the ranks of torchrun with the same layers on one rank.

    torchrun --nproc-per-node 2 -m nvfp4_moe.verify MODEL
    torchrun --nproc-per-node 2 -m nvfp4_moe.verify MODEL --device cuda --over peers

all_to_all must give the same bits as one rank. all_reduce adds the ranks' fp32 partial results and rounds once to bf16.
Its relative L2 difference must be at most 2^-8, one rounding to bf16 on either side. `nvfp4-moe verify --ep` does the
same for threads and MPI.
"""

from __future__ import annotations

import torch

from . import Checkpoint, MoeLayer
from ._ranks import Ranks, main, parser, print_table

__all__ = ["verify"]


def __dir__() -> list[str]:
    return __all__


ROUNDING = 2.0**-8


def verify(ranks: Ranks) -> bool:
    asked = ranks.asked
    checkpoint = Checkpoint(asked.checkpoint)
    rows, passed = [], True
    for number in asked.layer or checkpoint.model()["layers"]:
        layer = ranks.open(checkpoint, number, asked.tokens)
        arrays = ranks.batch(layer.config, asked.tokens)
        parts = ranks.gather(layer.run(*ranks.mine(arrays)).cpu())
        if ranks.rank != 0:
            continue
        exact = layer.config.batch_invariant
        options = {**ranks.common(), "batch_invariant": exact}
        alone = MoeLayer.from_checkpoint(checkpoint, number, max_tokens=asked.tokens, **options)
        expected = alone.run(*(array.to(ranks.device) for array in arrays)).cpu()
        together = torch.cat(parts) if asked.combine == "all_to_all" else parts[0]
        alike = all(torch.equal(part, parts[0]) for part in parts) or asked.combine == "all_to_all"
        same_bits = torch.equal(together, expected)
        difference = (together.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300)
        right = alike and (same_bits or (asked.combine == "all_reduce" and float(difference) <= ROUNDING))
        passed = passed and right
        rows.append(
            {
                "layer": str(number),
                "backend": layer.describe()["backend"],
                "tokens": str(asked.tokens),
                "bits of one rank": "equal" if same_bits else "others",
                "rel. L2": f"{float(difference):.1e}",
                "result": "passed" if right else "FAILED",
            }
        )
    if ranks.rank == 0:
        print(f"{asked.checkpoint}: {ranks.title()}")
        print_table(rows)
    return all(ranks.gather(passed))


if __name__ == "__main__":
    options = parser("verify", "Compares layers over ranks with the same layers on one rank (default: all layers).")
    options.add_argument("--tokens", type=int, default=32)
    main(verify, options.parse_args())
