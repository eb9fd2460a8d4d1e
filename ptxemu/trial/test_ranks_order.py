"""Tests of the checker of order with launches of several host threads: clean if ordered, reported if not."""

import contextlib
import threading

import numpy as np
import pytest

from trial.emulator import LaunchError, line_of, ptx
from trial.ranks import SIGNAL, SPIN, WAIT, Ranks, together

VOLATILE = "st.volatile.global.u32 [%rd5], %r_n;"
RELAXED = "ld.relaxed.sys.global.u32 %r3, [%rd9];"


@pytest.mark.parametrize(
    "signal, wait",
    [
        (SIGNAL, WAIT),
        ("membar.sys; " + VOLATILE, WAIT),
        ("fence.acq_rel.sys; st.relaxed.sys.global.u32 [%rd5], %r_n;",
         "ld.volatile.global.u32 %r3, [%rd9]; fence.acq_rel.sys;"),
        ("red.release.sys.global.max.u32 [%rd5], %r_n;", WAIT),
    ],
)  # fmt: skip
@pytest.mark.parametrize("world", [2, 3])
def test_ordered_ranks_are_clean(emulator, world, signal, wait):
    ranks = Ranks(emulator, world, signal=signal, wait=wait)
    with emulator.checked():
        together([lambda k=k: ranks.run(k, 8) for k in range(world)])


@pytest.mark.parametrize(
    "signal, wait",
    [
        (SIGNAL.replace("sys", "gpu"), WAIT),
        (SIGNAL, WAIT.replace("sys", "gpu")),
        (VOLATILE, WAIT),
        ("fence.acq_rel.gpu; " + VOLATILE, WAIT),
        (SIGNAL, RELAXED),
        (SIGNAL, RELAXED + " fence.acq_rel.gpu;"),
    ],
)
def test_ranks_without_an_order_are_reported(emulator, signal, wait):
    """Returns whether the report has a rank's write and another's read, by the lines of both."""
    ranks = Ranks(emulator, 2, signal=signal, wait=wait)
    with emulator.checked(), pytest.raises(LaunchError, match="at the scope of the system") as raised:
        together([lambda k=k: ranks.run(k, 1) for k in range(2)])
    said = str(raised.value)
    store, load = line_of(ranks.text, "st.global.u32 [%rd5+4]"), line_of(ranks.text, "ld.global.u32 %r4")
    assert f"PTX line {store}:" in said and f"PTX line {load}:" in said, said


LATER = "\n\tld.global.u32 %r1, [%rd_d]; st.global.u32 [%rd_o], %r1;"
SENDER = """
	st.global.u32 [%rd_d], 9; st.release.sys.global.u32 [%rd_f], 1;
again:
	ld.acquire.sys.global.u32 %r1, [%rd_f+4]; nanosleep.u32 100; setp.eq.u32 %p1, %r1, 0; @%p1 bra again;
"""
WAITER = SPIN.replace("%rd_a", "%rd_f").replace("SLEEP", "nanosleep.u32 100;")
ANSWER = "\n\tst.release.sys.global.u32 [%rd_f+4], 1;"


@pytest.mark.parametrize("acquires", [True, False])
@pytest.mark.parametrize("programmatic", [True, False])
def test_launches_know_what_those_before_acquired(emulator, acquires, programmatic):
    """The next launch reads what the previous one waited for, while the writing rank still runs."""
    wait = WAITER if acquires else WAITER.replace("acquire", "relaxed")
    later = "\n\tgriddepcontrol.wait;" + LATER
    data, flags, out = (emulator.put(np.zeros(4, np.uint32)) for _ in range(3))
    kernels = [emulator.kernel(ptx(body, names), "test") for body, names in ((wait, "f"), (later, "do"), (ANSWER, "f"))]
    sender, enqueued = emulator.kernel(ptx(SENDER, "df"), "test"), threading.Event()

    def first():
        for kernel, arguments in zip(kernels, ([flags], [data, out], [flags]), strict=True):
            emulator.enqueue(kernel, arguments, block=1, programmatic=programmatic)
        enqueued.set()
        emulator.finish()

    def second():
        assert enqueued.wait(10)
        emulator.launch(sender, [data, flags], block=1)

    with emulator.checked(), contextlib.ExitStack() as stack:
        if not acquires:
            stack.enter_context(pytest.raises(LaunchError, match="at the scope of the system"))
        together([first, second])
        assert emulator.get(out, 1, np.uint32)[0] == 9


def test_launches_of_host_threads_in_turn_are_ordered(emulator):
    """Work that had ended before a launch was enqueued counts as ordered by the host."""
    cell = emulator.put(np.zeros(1, np.uint32))
    kernel = emulator.kernel(
        ptx("\n\tld.global.u32 %r1, [%rd_a]; add.u32 %r1, %r1, 1; st.global.u32 [%rd_a], %r1;", "a"), "test"
    )
    with emulator.checked():
        for _ in range(3):
            together([lambda: emulator.launch(kernel, [cell], block=1)])
    assert emulator.get(cell, 1, np.uint32)[0] == 3
