"""Tests of barriers: waiting, counting, reductions, and the report of a deadlock."""

import numpy as np
import pytest

from trial.emulator import ORDERS, LaunchError, line_of, ptx

BARRIER = ".shared .align 8 .b8 barrier[8];"


@pytest.mark.parametrize("order", ORDERS)
def test_bar_sync_holds(emulator, order):
    """Each warp's write is read by the warp before it, which runs first."""
    body = """
	mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.u32 %r3, block; add.u32 %r4, %r3, %r2;
	st.shared.u32 [%r4], %r1;
	bar.sync 0;
	add.u32 %r5, %r1, 32; and.b32 %r5, %r5, 127; shl.b32 %r5, %r5, 2; add.u32 %r6, %r3, %r5;
	ld.shared.u32 %r7, [%r6];
	mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd_o, %rd1; st.global.u32 [%rd2], %r7;
"""
    with emulator.order(order):
        got = emulator.run(body, shape=128, shared=".shared .align 4 .b8 block[512];", block=128)
    assert (got == (np.arange(128) + 32) % 128).all()


def test_bar_red(emulator):
    body = """
	mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 5; setp.ne.u32 %p2, %r1, 5;
	bar.red.or.pred %p3, 0, %p1; bar.red.and.pred %p4, 0, %p2; bar.red.popc.u32 %r2, 0, %p2;
	selp.u32 %r3, 1, 0, %p3; selp.u32 %r4, 2, 0, %p4; or.b32 %r3, %r3, %r4;
	mul.wide.u32 %rd1, %r1, 8; add.s64 %rd2, %rd_o, %rd1; st.global.v2.u32 [%rd2], {%r3, %r2};
"""
    assert (emulator.run(body, shape=(64, 2), block=64) == [1, 63]).all()


@pytest.mark.parametrize("sync, arrive", [("bar.sync 3, 64;", "bar.arrive 3, 64;"), ("bar.sync 3;", "exit;")])
def test_a_warp_waits_for_one_that_does_not(emulator, sync, arrive):
    """Warp 1 arrives without waiting, or ends; warp 0 waits for it."""
    body = f"""
	mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; mov.u32 %r2, block;
	@%p1 bra consumer;
	st.shared.u32 [%r2], 99; {arrive} bra done;
consumer:
	{sync} ld.shared.u32 %r3, [%r2]; st.global.u32 [%rd_o], %r3;
done:
"""
    assert emulator.run(body, shared=".shared .align 4 .b8 block[4];", block=64)[0] == 99


MBARRIER = """
	mov.u32 %r1, %tid.x; mov.u32 %r2, barrier; setp.ne.u32 %p1, %r1, 0;
	@%p1 bra ready;
	mbarrier.init.shared::cta.b64 [%r2], 33; // 32 lanes of warp 0, and one arrival that expects bytes
ready:
	bar.sync 0;
	setp.lt.u32 %p2, %r1, 32;
	@%p2 bra arrive;
	setp.ne.u32 %p3, %r1, 32;
	@%p3 bra done;
	mbarrier.arrive.expect_tx.shared::cta.b64 %rd3, [%r2], 16;
	mov.u32 %r3, data;
	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd_a], 16, [%r2];
	bra done;
arrive:
	mbarrier.arrive.shared::cta.b64 %rd4, [%r2];
again:
	mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], 0;
	@!%p4 bra again;
	mov.u32 %r3, data; ld.shared.u32 %r4, [%r3+4];
	mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd_o, %rd1; st.global.u32 [%rd2], %r4;
done:
"""


@pytest.mark.parametrize("order, seed", [("at-once", 1), ("late", 1), *(("random", seed) for seed in range(3))])
def test_mbarrier_waits_for_arrivals_and_bytes(emulator, order, seed):
    shared = ".shared .align 16 .b8 data[16];" + BARRIER
    with emulator.order(order, seed):
        got = emulator.run(MBARRIER, [np.array([1, 20, 3, 4], np.uint32)], 32, shared=shared, block=64)
    assert (got == 20).all()


TEST = "mbarrier.test_wait.parity.shared.b64"
ARRIVE, DROP = "mbarrier.arrive.shared.b64 _, [%r2];", "mbarrier.arrive_drop.shared.b64 _, [%r2];"


@pytest.mark.parametrize(
    "arrivals, first, second",
    [
        ("", False, True),  # the phase before the first counts as over
        (ARRIVE, False, True),
        (ARRIVE + ARRIVE, True, False),
        (DROP + ARRIVE, True, False),
        (DROP + ARRIVE + ARRIVE, False, True),  # of one arrival from now on
    ],
)
def test_phases_of_an_mbarrier(emulator, arrivals, first, second):
    """With two arrivals: whether a wait for parity 0, and one for parity 1, passes."""
    body = f"""
	mov.u32 %r2, barrier; mbarrier.init.shared.b64 [%r2], 2; {arrivals}
	{TEST} %p1, [%r2], 0; {TEST} %p2, [%r2], 1; selp.u32 %r3, 1, 0, %p1; selp.u32 %r4, 1, 0, %p2;
	st.global.v2.u32 [%rd_o], {{%r3, %r4}};
"""
    assert emulator.run(body, shape=2, shared=BARRIER, block=1).tolist() == [first, second]


COMPLETE, EXPECT = (f"mbarrier.{name}_tx.relaxed.cta.shared::cta.b64 [%r2], 16;" for name in ("complete", "expect"))


@pytest.mark.parametrize(
    "steps, first, second",
    [
        (COMPLETE, False, True),  # tx-count is -16
        (COMPLETE + ARRIVE, False, True),  # and keeps the phase open
        (COMPLETE + EXPECT, False, True),
        (COMPLETE + EXPECT + ARRIVE, True, False),
        (COMPLETE + "mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;", True, False),
        (COMPLETE + COMPLETE + EXPECT + ARRIVE, False, True),
        (COMPLETE + COMPLETE + EXPECT + ARRIVE + EXPECT, False, True),  # expect_tx by itself ends no phase
    ],
)
def test_bytes_may_arrive_before_they_are_expected(emulator, steps, first, second):
    """The tx-count goes from -(2^20 - 1) to 2^20 - 1; the phase ends when it and the pending arrivals are 0."""
    body = f"""
	mov.u32 %r2, barrier; mbarrier.init.shared.b64 [%r2], 1; {steps}
	{TEST} %p1, [%r2], 0; {TEST} %p2, [%r2], 1; selp.u32 %r3, 1, 0, %p1; selp.u32 %r4, 1, 0, %p2;
	st.global.v2.u32 [%rd_o], {{%r3, %r4}};
"""
    assert emulator.run(body, shape=2, shared=BARRIER, block=1).tolist() == [first, second]


@pytest.mark.parametrize("order", ORDERS)
def test_a_copy_may_be_issued_before_its_bytes_are_expected(emulator, order):
    body = """
	mov.u32 %r2, barrier; mov.u32 %r3, data; mbarrier.init.shared.b64 [%r2], 1;
	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd_a], 16, [%r2];
	mbarrier.arrive.expect_tx.shared::cta.b64 %rd3, [%r2], 16;
again:
	mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], 0;
	@!%p4 bra again;
	ld.shared.u32 %r4, [%r3+4]; st.global.u32 [%rd_o], %r4;
"""
    shared = ".shared .align 16 .b8 data[16];" + BARRIER
    with emulator.order(order):
        assert emulator.run(body, [np.array([1, 20, 3, 4], np.uint32)], shared=shared, block=1)[0] == 20


def test_a_wait_may_end_without_success(emulator):
    """The thread may then do what the phase waits for."""
    body = """
	mov.u32 %r2, barrier; mbarrier.init.shared.b64 [%r2], 1; mov.u32 %r3, 0;
again:
	mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @%p1 bra done;
	mbarrier.arrive.shared.b64 _, [%r2]; add.u32 %r3, %r3, 1; bra again;
done:
	st.global.u32 [%rd_o], %r3;
"""
    assert emulator.run(body, shared=BARRIER, block=1)[0] == 1


def test_deadlock_report(emulator):
    """Warp 1 exits without arriving: the report names each waiting warp, its line and what it waits for."""
    body = """
	mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; mov.u32 %r2, barrier;
	@!%p1 bra done;
	mbarrier.init.shared.b64 [%r2], 2;
	mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 64;
again:
	mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], 0;
	@!%p4 bra again;
done:
"""
    text = ptx(body, shared=BARRIER)
    with pytest.raises(LaunchError) as raised:
        emulator.launch(emulator.kernel(text, "test"), [], block=64)
    said = str(raised.value)
    assert "deadlock in kernel test" in said
    line = line_of(text, "mbarrier.try_wait")
    assert f"warp 0 lanes ffffffff: waits for phase 0 of the mbarrier at 0x400, PTX line {line}\n" in said
    assert "warp 1" not in said
    assert "2 of 2 arrivals and 64 bytes pending" in said


@pytest.mark.parametrize("order", ORDERS)
def test_threads_that_arrive_at_a_cluster_and_end(emulator, order):
    """All but one thread of the first cta arrive and end without a wait. The last arrival is that of the second cta's
    last thread, and it comes after that thread's store."""
    body = """
	mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, 0;
	setp.ne.u32 %p1, %r2, 0; setp.eq.u32 %p2, %r1, 63; and.pred %p3, %p1, %p2;
	@!%p3 bra arrive;
	nanosleep.u32 1000; nanosleep.u32 1000; // others run meanwhile
	st.global.u32 [%rd_a], 7;
arrive:
	barrier.cluster.arrive.release;
	setp.ne.u32 %p4, %r1, 0; setp.eq.u32 %p5, %r2, 0; and.pred %p6, %p4, %p5;
	@%p6 bra done;
	barrier.cluster.wait.acquire;
	@%p1 bra done;
	ld.global.u32 %r3, [%rd_a]; st.global.u32 [%rd_o], %r3;
done:
"""
    with emulator.order(order):
        assert emulator.run(body, [np.zeros(1, np.uint32)], grid=2, block=64, cluster=2)[0] == 7


@pytest.mark.parametrize("form", [".relaxed.cluster.shared::cluster", ".shared::cluster.relaxed.cluster"])
def test_bytes_that_a_thread_completes(emulator, form):
    """mbarrier.complete_tx ends the phase with the last of the expected bytes. The second form is CUTLASS's."""
    body = f"""
	mov.u32 %r2, barrier; mbarrier.init.shared.b64 [%r2], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 24;
	mbarrier.complete_tx{form}.b64 [%r2], 8;
	mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 0; selp.u32 %r3, 1, 0, %p1;
	mbarrier.complete_tx{form}.b64 [%r2], 16;
	mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 0; selp.u32 %r4, 1, 0, %p1;
	st.global.v2.u32 [%rd_o], {{%r3, %r4}};
"""
    shared = ".shared .align 8 .b8 barrier[8];"
    assert emulator.run(body, shape=2, shared=shared, block=1).tolist() == [0, 1]


def test_endless_polling_is_reported(emulator):
    body = "\nagain:\n\tld.acquire.gpu.global.u32 %r1, [%rd_a]; setp.eq.u32 %p1, %r1, 0; @%p1 bra again;"
    with pytest.raises(LaunchError, match="only look at memory again"):
        emulator.run(body, [np.zeros(1, np.uint32)])


def test_ctas_that_wait_for_each_other_run_together(emulator):
    """A cta that polls for a later one's flag: the later one is started."""
    body = """
	mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0;
	@%p1 bra last;
again:
	ld.acquire.gpu.global.u32 %r2, [%rd_a]; setp.eq.u32 %p2, %r2, 0; @%p2 bra again;
	st.global.u32 [%rd_o], %r2;
	bra done;
last:
	st.release.gpu.global.u32 [%rd_a], %r1;
done:
"""
    assert emulator.run(body, [np.zeros(1, np.uint32)], grid=4, block=1)[0] in (1, 2, 3)


def test_aligned_instructions_at_two_places(emulator):
    """ldmatrix in both branches of a warp that has split is an error."""
    load = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2];"
    body = f"""
	mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 16; mov.u32 %r2, block;
	@%p1 bra other;
	{load}
	bra done;
other:
	{load}
done:
"""
    with pytest.raises(LaunchError, match="different aligned instructions"):
        emulator.run(body, shared=".shared .align 16 .b8 block[512];")
