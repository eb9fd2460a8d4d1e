"""A layer over several ranks, each a thread: MoeLayer's exchange, combine, capacity and placement."""

from __future__ import annotations

import threading

import numpy as np
import nvfp4_moe as nv
import pytest
import qwen3_moe
from layers import EXPERTS, batch, biases, config, floats, layer, weights
from rank_threads import on_ranks, on_two, open_over, split, whole

BACKWARDS = list(reversed(range(EXPERTS)))
REDUNDANT = [0, 5, 2, 3, 4, 1, 0, 2]


class Mailboxes:
    """all_to_all_v between threads of this test, as a caller's own communication."""

    def __init__(self, world):
        self.world, self.barrier, self.boxes = world, threading.Barrier(world), {}

    def connect(self, rank):
        def all_to_all_v(send, send_bytes, recv, recv_bytes, timeout):
            ends = np.cumsum([0, *send_bytes])
            for other in range(self.world):
                self.boxes[rank, other] = bytes(send[ends[other] : ends[other + 1]])
            self.barrier.wait(timeout)
            got = b"".join(self.boxes[other, rank] for other in range(self.world))
            assert len(got) == sum(recv_bytes)
            recv[: len(got)] = got
            self.barrier.wait(timeout)

        return nv.callback_exchange(all_to_all_v, rank, self.world, timeout=60)


@pytest.mark.parametrize(
    ("over", "options"),
    [("threads", {}), ("callbacks", {"capacity": 7}), ("callbacks", {"placement": REDUNDANT})],
)
def test_all_to_all_gives_the_bits_of_one_rank(over, options):
    arrays = batch(13)

    def run(exchange):
        mine = open_over(exchange, **options)
        assert (exchange.rank, exchange.world) == (mine.describe()["expert_parallel"]["rank"], 2)
        assert mine.config.num_experts == EXPERTS and mine.max_tokens == 32
        out = mine.run(*split(arrays, exchange.rank))
        load = mine.expert_load()
        mine.reset_expert_load()
        assert sum(mine.expert_load()) == 0
        return out, load, mine.status()

    outs, loads, states = zip(*on_two(run, Mailboxes(2).connect if over == "callbacks" else None), strict=True)
    one = layer()
    np.testing.assert_array_equal(np.concatenate(outs), one.run(*arrays))
    assert list(loads) == [np.bincount(arrays[1].ravel(), minlength=EXPERTS).tolist()] * 2
    for name, count in one.status().items():
        assert sum(status[name] for status in states) == count, name


def test_all_reduce_gives_all_ranks_the_same():
    arrays = batch(9)
    outs = whole(on_ranks(3, lambda exchange: open_over(exchange, combine="all_reduce").run(*arrays)))
    for out in outs:
        np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_allclose(outs[0], layer().run(*arrays), rtol=1e-5, atol=1e-6)


def test_from_checkpoint(tmp_path):
    qwen3_moe.write_model(tmp_path)
    hidden, ids, router_weights = batch(8)
    arrays = hidden, ids % qwen3_moe.EXPERTS, router_weights

    def run(exchange):
        mine = nv.MoeLayer.from_checkpoint(tmp_path, 0, max_tokens=8, exchange=exchange)
        return mine.run(*split(arrays, exchange.rank))

    one = nv.MoeLayer.from_checkpoint(tmp_path, 0, max_tokens=8)
    np.testing.assert_array_equal(np.concatenate(on_two(run)), one.run(*arrays))


def arrays_of(kind):
    """Returns (config, function that opens a layer, arrays of all experts, biases)."""
    chosen = config(expert_biases=kind == "biased tensors")
    if kind == "bf16":
        return chosen, nv.MoeLayer.from_bf16, floats(), {}
    return chosen, nv.MoeLayer.from_tensors, weights(), {"biases": biases()} if kind == "biased tensors" else {}


def taken(arrays, which):
    """Returns the chosen experts of each stack, or of each bias."""
    if isinstance(arrays, tuple):
        return tuple(part[which] for part in arrays)
    return {name: taken(a, which) if isinstance(a, tuple) else a[which] for name, a in arrays.items()}


KINDS = ["tensors", "biased tensors", "bf16"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", [None, REDUNDANT])
def test_arrays_of_all_experts_or_of_a_rank_s_own_will_do(kind, placement):
    tokens = batch(7)
    chosen, fresh, arrays, biased = arrays_of(kind)
    expected = fresh(chosen, **arrays, **biased, max_tokens=8).run(*tokens)

    def run(exchange):
        slots = list(range(EXPERTS)) if placement is None else placement
        here = slots[exchange.rank * len(slots) // 2 : (exchange.rank + 1) * len(slots) // 2]
        options = {"max_tokens": 8, "exchange": exchange, "placement": placement}
        own = taken({**arrays, **biased}, here)
        wrong = taken({**arrays, **biased}, here[1:]) if exchange.rank == 1 else own
        with pytest.raises(
            ValueError, match=f"rank 1: .*expected all {EXPERTS} experts .*, or the {len(here)} of this"
        ):
            fresh(chosen, **wrong, **options)
        return [fresh(chosen, **w, **options).run(*split(tokens, exchange.rank)) for w in (own, {**arrays, **biased})]

    for outs in zip(*on_two(run), strict=True):
        np.testing.assert_array_equal(np.concatenate(outs), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_given_other_experts_out_of_arrays(kind):
    """Slots of half of the experts, or of all: arrays of num_experts experts are read by global id then too."""
    tokens = batch(9)
    chosen, fresh, arrays, biased = arrays_of(kind)
    short = {**arrays, "up": arrays["up"][:-1] if kind == "bf16" else taken(arrays["up"], slice(-1))}
    expected = fresh(chosen, **arrays, **biased, max_tokens=9).run(*tokens)

    def run(exchange):
        for before, after in ((None, BACKWARDS), ([*range(EXPERTS), *BACKWARDS], [*BACKWARDS, *range(EXPERTS)])):
            options = {"max_tokens": 9, "exchange": exchange}
            mine = fresh(chosen, **arrays, **biased, **options, placement=before)
            rearrange = mine.rearrange_bf16 if kind == "bf16" else mine.rearrange_tensors
            rearrange(after, **arrays, **biased)
            np.testing.assert_array_equal(mine.run(*tokens), expected)
            moved = fresh(chosen, **arrays, **biased, **options, placement=after)
            for local in range(mine.expert_count):
                got, right = mine.expert(local), moved.expert(local)
                assert all(np.array_equal(got[name]["codes"], right[name]["codes"]) for name in ("gate", "up", "down"))
            for placement, wrong, text in (
                (
                    after,
                    short if exchange.rank == 1 else arrays,
                    "rank 1: .*up, down: expected as many experts in each",
                ),
                (after[:-1], arrays, "rank 0: placement"),
            ):
                with pytest.raises(ValueError, match=text):
                    rearrange(placement, **wrong, **biased)
            np.testing.assert_array_equal(mine.run(*tokens), expected)

    on_two(run)


def test_devices_that_a_rank_cannot_have_are_refused_on_all_and_the_exchange_goes_on():
    def run(exchange):
        other = exchange.rank == 1
        for use, device, options, error, text in (
            (exchange.use_nccl, "cpu", {}, nv.Unsupported, "rank 0: nccl: expected a device cuda:N, got cpu"),
            (exchange.use_nccl, "cpu" if other else "gpu", {}, ValueError, "rank 0: device: expected cpu or cuda:N"),
            (exchange.use_nccl, "cpu", {"communicator": 0}, ValueError, "rank 0: communicator: expected the address"),
            (exchange.use_nccl, "cpu", {"library": "libnccl.so.2"}, nv.Unsupported, "rank 0: nccl: expected a device"),
            (exchange.use_peers, "cpu", {}, nv.Unsupported, "rank 0: peers: expected a device cuda:N, got cpu"),
        ):
            with pytest.raises(error, match=text):
                use(device, **options)
        return open_over(exchange, combine="all_reduce").run(*batch(4))

    first, second = on_two(run)
    np.testing.assert_array_equal(first, second)


def test_a_proposal_from_the_load_evens_the_ranks_and_keeps_the_bits():
    hidden, ids, router_weights = batch(32)
    ids = ids % 3  # only experts of the first rank

    def run(exchange):
        first = open_over(exchange)
        mine = split((hidden, ids, router_weights), exchange.rank)
        out = first.run(*mine)
        placement = nv.propose_placement(first.expert_load(), exchange.world, 4)
        second = open_over(exchange, placement=placement)
        np.testing.assert_array_equal(second.run(*mine), out)
        return first.status()["intermediate_blocks"], second.status()["intermediate_blocks"]

    (before0, after0), (before1, after1) = on_two(run)
    assert before1 == 0 and before0 == after0 + after1
    assert max(after0, after1) <= 0.6 * before0


def test_options_beside_no_exchange_are_refused():
    for options in ({"combine": "all_reduce"}, {"capacity": 4}, {"placement": BACKWARDS}):
        with pytest.raises(ValueError, match="expected an exchange beside them"):
            open_over(None, **options)
    with pytest.raises(ValueError, match="expected an nvfp4_moe.Exchange"):
        open_over(object())
    for call in (layer().expert_load, lambda: layer().rearrange_tensors(BACKWARDS, **weights())):
        with pytest.raises(nv.Unsupported, match="expected a layer over an exchange"):
            call()
    with pytest.raises(TypeError):
        nv.ThreadGroup(1).join(0).use_nccl("cuda:0", 3)
