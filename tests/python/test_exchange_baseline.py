"""Tests of bench/exchange_baseline.py: two processes over gloo, their checked sums, and bytes counted by hand."""

from __future__ import annotations

import json

import exchange_baseline as bench_script
import pytest
from rank_environment import rank_environment

torch = pytest.importorskip("torch")
HIDDEN, TOP_K, TOKENS = 64, 2, 8


@pytest.fixture
def launch(fork_server, tmp_path):
    """launch(argument...) -> each rank's exit code, output and errors."""

    def run(*words: str) -> list[tuple[int, str, str]]:
        environment = rank_environment(2)
        command = [bench_script.__file__, "--device", "cpu", "--runs", "2", *words]
        files = [(tmp_path / f"{rank}.out", tmp_path / f"{rank}.err") for rank in range(2)]
        ranks = []
        for rank, (out, err) in enumerate(files):
            ranks.append(fork_server.start(*command, env=environment | {"RANK": str(rank)}, out=out, err=err))
        return [(rank.wait(120), *(file.read_text() for file in of)) for rank, of in zip(ranks, files, strict=True)]

    return run


def test_ranks_over_gloo(launch, tmp_path):
    out = tmp_path / "baseline.json"
    words = ["--hidden", str(HIDDEN), "--experts", "8", "--top-k", str(TOP_K), "--tokens", f"1,{TOKENS}"]
    ranks = launch(*words, "--routing", "uniform,zipf,hot", "--out", str(out))
    assert [code for code, _, _ in ranks] == [0, 0], ranks
    bench = json.loads(out.read_text())
    assert (bench["world"], bench["hidden"], bench["top_k"], bench["experts"]) == (2, HIDDEN, TOP_K, 8)
    assert [(row["tokens"], row["routing"]) for row in bench["results"]] == [
        (tokens, routing) for tokens in (1, TOKENS) for routing in ("uniform", "zipf", "hot")
    ]
    for row in bench["results"]:
        assert row["by_assignment_us"] > 0 and row["by_token_us"] > 0
        assert row["by_token_sent_bytes"] <= row["by_assignment_sent_bytes"]
        assert row["wire_by_token_us"] is None, "a host has no graph"
    # Half of the tokens are rank 1's. All of them go to rank 0, and their rows go back.
    hot = bench["results"][-1]
    assert hot["by_assignment_sent_bytes"] == TOKENS // 2 * TOP_K * HIDDEN * 2
    assert hot["by_token_sent_bytes"] == TOKENS // 2 * TOP_K * HIDDEN * 2
    assert ranks[0][1].strip() == bench_script.table(bench)
    assert ranks[1][1].strip() == ""


def test_a_wrong_sum_ends_it():
    bench = bench_script
    exchange = bench.Exchange.__new__(bench.Exchange)
    exchange.torch, exchange.sizes = torch, bench.Sizes(4, 2, 1)
    exchange.x, exchange.weights = torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(1, 1)
    exchange.by_assignment = lambda: torch.ones(1, 4)
    exchange.by_token = lambda make_rows: torch.tensor([[1.0, 1.0, 1.0, 1.0 + 2.0**-7]])
    with pytest.raises(AssertionError, match="by_token: "):
        exchange.check()


def test_it_says_what_it_needs(launch):
    ranks = launch("--experts", "7")
    assert [code for code, _, _ in ranks] == [2, 2]
    assert "--experts: expected a multiple of 2 ranks" in ranks[0][2]
