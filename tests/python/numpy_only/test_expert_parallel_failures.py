"""Errors and exits of one rank: the errors that the other ranks, each a thread, receive, and that a run can follow."""

from __future__ import annotations

import time

import numpy as np
import nvfp4_moe as nv
import pytest
import qwen3_moe
from layers import EXPERTS, batch, config, weights
from rank_threads import on_ranks, on_two, open_over


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"combine": "sum"}, "rank 1: combine: expected one of all_to_all, all_reduce"),
        ({"placement": [0, 1, 2, 3, 4, 9]}, "rank 1: placement: slot 5"),
        ({"capacity": 33}, "rank 1: capacity: expected at most max_tokens"),
        ({"activation_format": "bf16"}, 'config of rank 1: expected activation_format "nvfp4" as on rank 0'),
    ],
)
def test_what_one_rank_gets_wrong_all_raise(change, text):
    def run(exchange):
        with pytest.raises(ValueError, match=text.replace("[", r"\[")):
            open_over(exchange, **(change if exchange.rank == 1 else {}))
        return open_over(exchange)  # the failure breaks nothing

    on_two(run)


def test_a_run_that_one_rank_cannot_begin_ends_on_all_and_the_next_one_runs():
    hidden, ids, router_weights = batch(4)

    def run(exchange):
        mine = open_over(exchange)
        wrong = exchange.rank == 1
        with pytest.raises(ValueError, match=r"rank 1: topk_weights: expected \(4, 2\) float32"):
            mine.run(hidden, ids, router_weights.astype(np.float64) if wrong else router_weights)
        with pytest.raises(nv.Unsupported, match="calibrate"):
            mine.calibrate(hidden, ids, router_weights)
        return mine.run(hidden, ids, router_weights)

    on_two(run)


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


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ([[0, 1]] * 4, TypeError, "topk_ids: expected an array, got list"),
        (None, TypeError, "topk_ids: expected an array, got NoneType"),
        (Unreadable(), Exception, "its memory is elsewhere|topk_ids: expected an array, got .*Unreadable"),
    ],
)
def test_a_run_with_what_is_no_array_ends_on_all(wrong, kind, text):
    hidden, _, router_weights = batch(4)
    run_wrong = lambda mine, _: mine.run(hidden, wrong, router_weights)  # noqa: E731
    ends_on_all_at_once(lambda mine, _: mine.run(*batch(4)), run_wrong, kind, text, f"^rank 1: .*({text})")


@pytest.mark.parametrize("wrong", [np.zeros((4, EXPERTS - 1), np.float32), np.array(["a"])], ids=["short", "text"])
def test_logits_that_one_rank_cannot_select_from_end_the_run_on_all(wrong):
    """Over an exchange a run first selects experts. A rank that fails there must not leave the other ranks waiting."""
    logits = np.random.default_rng(2).standard_normal((4, EXPERTS), dtype=np.float32)

    def select(logits):
        return lambda mine, _: mine.run_logits(batch(4)[0], logits, nv.RouterConfig(EXPERTS, 2))

    ends_on_all_at_once(select(logits), select(wrong), (nv.Error, TypeError), None, None)


@pytest.mark.parametrize("change", [{"up": None}, {"down": (1, 2, 3)}, {"gate": "gate"}], ids=str)
@pytest.mark.parametrize("act", ["open", "rearrange"])
def test_weights_that_are_no_arrays_end_the_opening_on_all(act, change):
    def on(arrays):
        if act == "rearrange":
            return lambda mine, _: mine.rearrange_tensors(list(reversed(range(EXPERTS))), **arrays)
        return lambda _, exchange: nv.MoeLayer.from_tensors(config(), **arrays, max_tokens=32, exchange=exchange)

    raised = (nv.Error, TypeError, ValueError, RuntimeError)
    ends_on_all_at_once(on(weights()), on(weights() | change), raised, None, f"rank 1: .*{next(iter(change))}")


def test_what_python_refuses_before_an_opening_reaches_all_ranks(tmp_path):
    qwen3_moe.write_model(tmp_path)

    def run(exchange):
        def opened(arguments, **named):
            return nv.MoeLayer.from_tensors(config(), **weights(), **arguments, exchange=exchange, **named)

        for wrong, kind, text in (
            ({"biases": 3}, nv.InvalidArgument, "biases: expected None or"),
            ({"placement": ["first"] * EXPERTS}, ValueError, "invalid literal for int"),
            ({"input_scale": (object(), None)}, TypeError, "TypeError|argument must be"),
        ):
            mine = exchange.rank == 1
            own = isinstance(kind, type) and not issubclass(kind, nv.Error)
            with pytest.raises(kind if mine else ValueError, match=text) as error:
                opened(wrong if mine else {}, max_tokens=8)
            assert (mine and own) or str(error.value).startswith("rank 1: "), error.value
        with pytest.raises(nv.IoError, match="rank 1: IoError: .*nonesuch"):
            nv.MoeLayer.from_checkpoint(tmp_path / ("nonesuch" if exchange.rank == 1 else ""), 0, exchange=exchange)
        return opened({}, max_tokens=8)

    on_two(run)


def test_a_rank_that_leaves_is_named():
    def run(exchange):
        if exchange.rank == 1:
            raise RuntimeError("gone")
        exchange.barrier()

    stays, goes = on_ranks(2, run)
    assert str(goes) == "gone"
    assert isinstance(stays, nv.IoError) and "expected rank 1, got none: it has left" in str(stays)


def test_a_rank_that_aborts_ends_all_with_its_message():
    def run(exchange):
        if exchange.rank == 2:
            return exchange.abort("no disk left")
        with pytest.raises(nv.Cancelled, match="rank 2: no disk left"):
            open_over(exchange)

    for result in on_ranks(3, run):
        assert isinstance(result, nv.Cancelled), result  # raised by the barrier of on_ranks


def test_what_a_callers_function_raises_ends_the_exchange_with_its_text():
    def all_to_all_v(send, send_bytes, recv, recv_bytes, timeout):
        raise ConnectionError(f"rank 3 did not answer within {timeout} s")

    with pytest.raises(nv.IoError, match="handshake: ConnectionError: rank 3 did not answer within 2.5 s"):
        nv.callback_exchange(all_to_all_v, 0, 4, timeout=2.5)
    with pytest.raises(ValueError, match="timeout"):
        nv.callback_exchange(all_to_all_v, 0, 4, timeout=0)
    with pytest.raises(ValueError, match="rank: expected 0 to 3"):
        nv.callback_exchange(all_to_all_v, 4, 4)
