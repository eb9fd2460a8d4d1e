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


def assert_whole(body, expected):
    """Checks that the two ranks' results, concatenated, have the bits of expected."""
    np.testing.assert_array_equal(np.concatenate(on_two(body)), expected)


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


@pytest.mark.parametrize("over", ["threads", "callbacks"])
@pytest.mark.parametrize("options", [{}, {"capacity": 7}, {"placement": [0, 5, 2, 3, 4, 1, 0, 2]}])
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
    one = nv.MoeLayer.from_checkpoint(tmp_path, 0, max_tokens=8)
    random = np.random.default_rng(5)
    arrays = (
        random.standard_normal((8, one.config.hidden_size), dtype=np.float32),
        random.integers(0, one.config.num_experts, (8, one.config.top_k)),
        random.random((8, one.config.top_k), dtype=np.float32),
    )

    def run(exchange):
        mine = nv.MoeLayer.from_checkpoint(tmp_path, 0, max_tokens=8, exchange=exchange)
        return mine.run(*split(arrays, exchange.rank))

    assert_whole(run, one.run(*arrays))


@pytest.mark.parametrize("placement", [None, [5, 0, 2, 3, 4, 1], [0, 5, 2, 3, 4, 1, 0, 2]])
def test_arrays_of_all_experts_or_of_a_rank_s_own_will_do(placement):
    tokens, biased = batch(7), config(expert_biases=True)
    expected = nv.MoeLayer.from_tensors(biased, **weights(), biases=biases(), max_tokens=8).run(*tokens)
    expected_floats = nv.MoeLayer.from_bf16(config(), **floats(), max_tokens=8).run(*tokens)

    def run(exchange):
        slots = list(range(EXPERTS)) if placement is None else placement
        here = slots[exchange.rank * len(slots) // 2 : (exchange.rank + 1) * len(slots) // 2]
        own = {name: tuple(part[here] for part in stack) for name, stack in weights().items()}
        own_floats = {name: array[here] for name, array in floats().items()}
        options = {"max_tokens": 8, "exchange": exchange, "placement": placement}
        short = {name: tuple(part[1:] for part in stack) for name, stack in own.items()}
        text = rf"rank 1: up, down: expected all {EXPERTS} experts .*, or the {len(here)} of this rank, got {len(here) - 1}"
        with pytest.raises(ValueError, match=text):
            nv.MoeLayer.from_tensors(config(), **(short if exchange.rank == 1 else own), **options)
        made = nv.MoeLayer.from_tensors(biased, **own, biases=tuple(bias[here] for bias in biases()), **options)
        layers = [made, *(nv.MoeLayer.from_bf16(config(), **w, **options) for w in (floats(), own_floats))]
        return [mine.run(*split(tokens, exchange.rank)) for mine in layers]

    of_tensors, *of_floats = (np.concatenate(outs) for outs in zip(*on_two(run), strict=True))
    np.testing.assert_array_equal(of_tensors, expected)
    for out in of_floats:
        np.testing.assert_array_equal(out, expected_floats)


def test_arrays_of_all_experts_are_read_by_global_id_where_a_rank_has_as_many_slots():
    tokens = batch(7)

    def run(exchange):
        mine = open_over(exchange, placement=[*range(EXPERTS), *BACKWARDS])
        part = split(tokens, exchange.rank)
        before = mine.run(*part)
        mine.rearrange_tensors([*BACKWARDS, *range(EXPERTS)], **weights())
        np.testing.assert_array_equal(mine.run(*part), before)
        return before

    assert_whole(run, layer().run(*tokens))


def test_too_small_a_capacity_names_the_one_that_is_needed():
    hidden, ids, router_weights = batch(9)

    def run(exchange):
        mine = open_over(exchange, capacity=8)
        text = "capacity: expected at least 9 tokens, which rank 0 has for rank 0, got 8"
        with pytest.raises(ValueError, match=text):
            mine.run(hidden, np.zeros_like(ids), router_weights)
        return mine.run(hidden[:8], ids[:8], router_weights[:8])

    on_two(run)


@pytest.mark.parametrize("over", ["threads", "callbacks"])
def test_nccl_that_a_rank_cannot_have_is_refused_on_all_and_the_exchange_goes_on(over):
    def run(exchange):
        other = exchange.rank == 1
        for device, options, error, text in (
            ("cpu", {}, nv.Unsupported, "rank 0: nccl: expected a device cuda:N, got cpu"),
            ("cuda:x", {}, ValueError, "rank 0: device: expected cpu or cuda:N, got cuda:x"),
            ("cpu" if other else "gpu", {}, ValueError, "rank 0: device: expected cpu or cuda:N, got gpu"),
            ("cpu", {"communicator": 0 if other else 1}, nv.Unsupported, "rank 0: nccl: expected a device"),
            ("cpu", {"communicator": 0}, ValueError, "rank 0: communicator: expected the address of an ncclComm_t"),
            ("cpu", {"library": "libnccl.so.2"}, nv.Unsupported, "rank 0: nccl: expected a device"),
        ):
            with pytest.raises(error, match=text):
                exchange.use_nccl(device, **options)
        for device, error, text in (
            ("cpu", nv.Unsupported, "rank 0: peers: expected a device cuda:N, got cpu"),
            ("cpu" if other else "gpu", ValueError, "rank 0: device: expected cpu or cuda:N, got gpu"),
        ):
            with pytest.raises(error, match=text):
                exchange.use_peers(device)
        return open_over(exchange, combine="all_reduce").run(*batch(4))

    first, second = on_two(run, Mailboxes(2).connect if over == "callbacks" else None)
    np.testing.assert_array_equal(first, second)


def test_use_nccl_takes_no_other_types():
    exchange = nv.ThreadGroup(1).join(0)
    for arguments in ((1,), ("cuda:0", 3), ("cuda:0", None, "handle"), ("cuda:0", None, -1), ()):
        with pytest.raises(TypeError):
            exchange.use_nccl(*arguments)
    for arguments in ((1,), ("cuda:0", None), ()):
        with pytest.raises(TypeError):
            exchange.use_peers(*arguments)


def test_a_proposal_from_the_load_evens_the_ranks_and_keeps_the_bits():
    hidden, ids, router_weights = batch(32)
    ids = ids % 3  # only experts of the first rank
    expected = layer().run(hidden, ids, router_weights)

    def run(exchange):
        first = open_over(exchange)
        mine = split((hidden, ids, router_weights), exchange.rank)
        out = first.run(*mine)
        placement = nv.propose_placement(first.expert_load(), exchange.world, 4)
        second = open_over(exchange, placement=placement)
        again = second.run(*mine)
        np.testing.assert_array_equal(out, again)
        return again, first.status()["intermediate_blocks"], second.status()["intermediate_blocks"]

    (out0, before0, after0), (out1, before1, after1) = on_two(run)
    np.testing.assert_array_equal(np.concatenate([out0, out1]), expected)
    assert before1 == 0 and before0 == after0 + after1
    assert max(after0, after1) <= 0.6 * before0
    with pytest.raises(ValueError, match="slots of a rank: expected 3 to 6"):
        nv.propose_placement([1] * 6, 2, 2)


def test_options_beside_no_exchange_are_refused():
    for options in ({"combine": "all_reduce"}, {"capacity": 4}, {"placement": [0, 1, 2, 3, 4, 5]}):
        with pytest.raises(ValueError, match="expected an exchange beside them"):
            open_over(None, **options)
    with pytest.raises(ValueError, match="expected an nvfp4_moe.Exchange"):
        open_over(object())
    with pytest.raises(nv.Unsupported, match="load: expected a layer over an exchange"):
        layer().expert_load()
    with pytest.raises(ValueError, match="world"):
        nv.ThreadGroup(0)


def assert_same_experts(one, other):
    for local in range(one.expert_count):
        got, expected = one.expert(local), other.expert(local)
        for name in ("gate", "up", "down"):
            np.testing.assert_array_equal(got[name]["codes"], expected[name]["codes"])
            assert got[name]["tensor_scale"] == expected[name]["tensor_scale"]


@pytest.mark.parametrize("kind", ["tensors", "biased tensors", "bf16"])
def test_slots_are_given_other_experts_out_of_arrays(kind):
    tokens, chosen = batch(9), config(expert_biases=kind == "biased tensors")
    arrays = floats() if kind == "bf16" else weights()
    own = {"biases": biases()} if kind == "biased tensors" else {}
    fresh = nv.MoeLayer.from_bf16 if kind == "bf16" else nv.MoeLayer.from_tensors
    short = {**arrays, "up": arrays["up"][:-1] if kind == "bf16" else tuple(part[:-1] for part in arrays["up"])}

    def run(exchange):
        mine = fresh(chosen, **arrays, **own, max_tokens=9, exchange=exchange)
        rearrange = mine.rearrange_bf16 if kind == "bf16" else mine.rearrange_tensors
        before = mine.run(*tokens)
        rearrange(BACKWARDS, **arrays, **own)
        np.testing.assert_array_equal(mine.run(*tokens), before)
        assert_same_experts(mine, fresh(chosen, **arrays, **own, max_tokens=9, exchange=exchange, placement=BACKWARDS))
        is_wrong = exchange.rank == 1
        for placement, wrong, text in (
            (BACKWARDS, short if is_wrong else arrays, "rank 1: .*up, down: expected as many experts in each"),
            ([0, *BACKWARDS[1:-1], 0] if is_wrong else BACKWARDS, arrays, "rank 1: placement"),
            (BACKWARDS[:-1], arrays, "rank 0: placement"),
        ):
            with pytest.raises(ValueError, match=text):
                rearrange(placement, **wrong, **own)
        if own:
            with pytest.raises(ValueError, match=r"rank 0: biases: expected \(gate, up, down\)"):
                rearrange(BACKWARDS, **arrays)
        np.testing.assert_array_equal(mine.run(*tokens), before)

    on_two(run)


def test_a_layer_alone_is_not_rearranged():
    with pytest.raises(nv.Unsupported, match="expected a layer over an exchange"):
        layer().rearrange_tensors(BACKWARDS, **weights())
