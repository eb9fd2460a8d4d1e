"""Errors and exits of one rank: the errors that the other ranks, each a thread, receive, and that a run can follow."""

from __future__ import annotations

import time

import numpy as np
import nvfp4_moe as nv
import pytest
import qwen3_moe
from layers import EXPERTS, batch, config, weights
from rank_threads import on_ranks, on_two, open_over


class Unreadable:
    """An array whose export fails."""

    def __dlpack__(self, **options):
        raise RuntimeError("its memory is elsewhere")

    def __dlpack_device__(self):
        return 1, 0


def ends_on_all_at_once(run_right, run_wrong, kind, text, of_others):
    """Checks that run_wrong on rank 1 raises kind with text and ends the run of the other ranks with of_others, long
    before their timeout. A run can follow. Both functions take a layer and its exchange."""

    def run(exchange):
        mine = open_over(exchange)
        before = mine.run(*batch(4))
        began = time.monotonic()
        is_wrong = exchange.rank == 1
        with pytest.raises(kind if is_wrong else nv.Error, match=text if is_wrong else of_others):
            (run_wrong if is_wrong else run_right)(mine, exchange)
        assert time.monotonic() - began < 30, "half of what ranks wait for each other"
        np.testing.assert_array_equal(mine.run(*batch(4)), before)

    on_two(run)


HIDDEN_STATES, IDS, ROUTER_WEIGHTS = batch(4)
LIST = "topk_ids: expected an array, got list"
UNREADABLE = "its memory is elsewhere|topk_ids: expected an array, got .*Unreadable"


@pytest.mark.parametrize(
    ("arrays", "kind", "text"),
    [
        ({"topk_ids": [[0, 1]] * 4}, TypeError, LIST),
        ({"topk_ids": Unreadable()}, Exception, UNREADABLE),
        ({"topk_weights": ROUTER_WEIGHTS.astype("d")}, ValueError, r"topk_weights: expected \(4, 2\) float32"),
    ],
    ids=["a list", "unreadable", "double"],
)
def test_a_run_that_one_rank_cannot_begin_ends_on_all(arrays, kind, text):
    given = {"hidden": HIDDEN_STATES, "topk_ids": IDS, "topk_weights": ROUTER_WEIGHTS}
    run_wrong = lambda mine, _: mine.run(**{**given, **arrays})  # noqa: E731
    ends_on_all_at_once(lambda mine, _: mine.run(**given), run_wrong, kind, text, f"^rank 1: .*({text})")


def test_logits_that_one_rank_cannot_select_from_end_the_run_on_all():
    """Over an exchange a run first selects experts. A rank that fails there must not leave the other ranks waiting."""
    logits = np.random.default_rng(2).standard_normal((4, EXPERTS), dtype=np.float32)

    def select(logits):
        return lambda mine, _: mine.run_logits(HIDDEN_STATES, logits, nv.RouterConfig(EXPERTS, 2))

    ends_on_all_at_once(select(logits), select(np.array(["a"])), (nv.Error, TypeError), None, None)


@pytest.mark.parametrize("change", [{"down": (1, 2, 3)}, {"gate": "gate"}], ids=str)
def test_a_rearrangement_from_no_arrays_ends_on_all(change):
    def on(arrays):
        return lambda mine, _: mine.rearrange_tensors(list(reversed(range(EXPERTS))), **arrays)

    raised = (nv.Error, TypeError, ValueError, RuntimeError)
    ends_on_all_at_once(on(weights()), on(weights() | change), raised, None, f"rank 1: .*{next(iter(change))}")


# Arguments of one rank's opening, the error that this rank raises, and its text. The other ranks raise an error of the
# library with the text and the rank.
WRONG_OPENINGS = [
    ({"combine": "sum"}, nv.InvalidArgument, "combine: expected one of all_to_all, all_reduce"),
    ({"placement": [0, 1, 2, 3, 4, 9]}, nv.InvalidArgument, "placement: slot 5"),
    ({"placement": ["first"] * EXPERTS}, ValueError, "invalid literal for int"),
    ({"biases": 3}, nv.InvalidArgument, "biases: expected None or"),
    ({"input_scale": (object(), None)}, TypeError, "TypeError|argument must be"),
    ({"up": None}, (nv.Error, TypeError), "up"),
    (
        {"config": config(activation_format="bf16")},
        nv.InvalidArgument,
        'config of rank 1: expected activation_format "nvfp4" as on rank 0',
    ),
]


def test_an_opening_that_one_rank_gets_wrong_fails_on_all_and_the_next_one_succeeds(tmp_path):
    qwen3_moe.write_model(tmp_path)

    def run(exchange):
        def opened(**wrong):
            arguments = {"config": config(), **weights(), "max_tokens": 8, "exchange": exchange, **wrong}
            return nv.MoeLayer.from_tensors(**arguments)

        for wrong, kind, text in WRONG_OPENINGS:
            is_wrong = exchange.rank == 1
            with pytest.raises(kind if is_wrong else nv.Error, match=text) as error:
                opened(**(wrong if is_wrong else {}))
            of_the_library = isinstance(error.value, nv.Error)
            assert (is_wrong and not of_the_library) or "rank 1: " in str(error.value), error.value
        with pytest.raises(nv.IoError, match="rank 1: IoError: .*nonesuch"):
            nv.MoeLayer.from_checkpoint(tmp_path / ("nonesuch" if exchange.rank == 1 else ""), 0, exchange=exchange)
        return opened()

    on_two(run)


def test_a_rank_that_leaves_or_aborts_is_named():
    def leave(exchange):
        if exchange.rank == 1:
            raise RuntimeError("gone")
        exchange.barrier()

    stays, goes = on_ranks(2, leave)
    assert str(goes) == "gone"
    assert isinstance(stays, nv.IoError) and "expected rank 1, got none: it has left" in str(stays)

    def abort(exchange):
        if exchange.rank == 2:
            return exchange.abort("no disk left")
        with pytest.raises(nv.Cancelled, match="rank 2: no disk left"):
            open_over(exchange)

    for result in on_ranks(3, abort):
        assert isinstance(result, nv.Cancelled), result  # raised by the barrier of on_ranks


def test_what_a_callers_function_raises_ends_the_exchange_with_its_text():
    def all_to_all_v(send, send_bytes, recv, recv_bytes, timeout):
        raise ConnectionError(f"rank 3 did not answer within {timeout} s")

    with pytest.raises(nv.IoError, match="handshake: ConnectionError: rank 3 did not answer within 2.5 s"):
        nv.callback_exchange(all_to_all_v, 0, 4, timeout=2.5)
    with pytest.raises(ValueError, match="rank: expected 0 to 3"):
        nv.callback_exchange(all_to_all_v, 4, 4)
