"""Kernels of several host threads that wait for each other: flags, graphs, mapped host memory, time limits."""

import contextlib
import ctypes
import os
import threading
import time

import numpy as np
import pytest

from trial.emulator import LaunchError, ptx
from trial.ranks import SECOND, SPIN, Ranks, together


@contextlib.contextmanager
def patience(seconds):
    os.environ["PTXEMU_PATIENCE"] = str(seconds)
    try:
        yield
    finally:
        del os.environ["PTXEMU_PATIENCE"]


@pytest.mark.parametrize("world, order", [(2, "at-once"), (4, "at-once"), (2, "random"), (4, "random"), (4, "late")])
def test_ranks_exchange(emulator, world, order):
    ranks = Ranks(emulator, world)
    with emulator.order(order):
        together([lambda k=k: ranks.run(k, 25) for k in range(world)])


def test_a_launch_runs_though_its_thread_does_not_wait(emulator):
    """Rank 0 launches and goes on with host work; a thread that waits runs that launch too."""
    ranks, done = Ranks(emulator, 2), threading.Event()

    def first():
        emulator.enqueue(ranks.kernel, ranks.arguments(0))
        assert done.wait(30)
        emulator.finish()

    def second():
        ranks.run(1, 1)
        done.set()

    together([first, second])
    assert ranks.result(0) == ranks.expected(1)


def test_launches_of_two_threads_in_one_stream_follow_each_other(emulator):
    """Neither thread waits before both have launched: x is doubled, then one more."""
    body = ".reg .u32 %r_x; ld.global.u32 %r_x, [%rd_x]; CHANGE st.global.u32 [%rd_x], %r_x;"
    x, stream, launched = emulator.put(np.array([5], np.uint32)), ctypes.c_void_p(), threading.Event()
    emulator.check(emulator.cuda.cudaStreamCreate(ctypes.byref(stream)))
    double, add = (
        emulator.kernel(ptx(body.replace("CHANGE", change), "x"), "test")
        for change in ("shl.b32 %r_x, %r_x, 1;", "add.u32 %r_x, %r_x, 1;")
    )

    def first():
        emulator.enqueue(double, [x], block=1, stream=stream)
        launched.set()

    def second():
        assert launched.wait(30)
        emulator.enqueue(add, [x], block=1, stream=stream)
        emulator.check(emulator.cuda.cudaStreamSynchronize(stream))

    together([first, second])
    assert emulator.get(x, 1, np.uint32)[0] == 11


def test_a_rank_that_never_comes_ends_by_the_time(emulator):
    ranks, began = Ranks(emulator, 2, limit=SECOND // 4), time.monotonic()
    emulator.launch(ranks.kernel, ranks.arguments(0))
    assert 0.25 <= time.monotonic() - began < 10
    assert ranks.result(0) == [1000, 1]  # what it sent to itself


def test_a_wait_without_a_limit_ends_by_patience(emulator):
    kernel = emulator.kernel(ptx(SPIN.replace("SLEEP", "nanosleep.u32 100;"), "a"), "test")
    with patience(0.3), pytest.raises(LaunchError, match="nobody has come"):
        emulator.launch(kernel, [emulator.put(np.zeros(1, np.uint32))], block=1)


def test_a_wait_that_never_sleeps_is_stuck_at_once(emulator):
    kernel = emulator.kernel(ptx(SPIN.replace("SLEEP", ""), "a"), "test")
    with pytest.raises(LaunchError, match="no progress"):
        emulator.launch(kernel, [emulator.put(np.zeros(1, np.uint32))], block=1)


def test_a_launch_that_fails_ends_those_that_wait_for_it(emulator):
    ranks, errors = Ranks(emulator, 2, limit=30 * SECOND), []
    bad = emulator.kernel(ptx("\n\ttrap;"), "test")
    cuda, waits = emulator.cuda, threading.Event()

    def first():
        emulator.enqueue(ranks.kernel, ranks.arguments(0))
        waits.set()
        errors.append(cuda.cudaDeviceSynchronize())

    def second():
        assert waits.wait(10)
        emulator.enqueue(bad, [])
        errors.append(cuda.cudaDeviceSynchronize())

    together([first, second])
    cuda.cudaDeviceReset()
    assert errors == [719, 719]


# ---- the host's memory

TALK = """
	ld.global.u32 %r5, [%rd_a];
	st.volatile.global.u32 [%rd_h], 1;
again:
	ld.volatile.global.u32 %r1, [%rd_h+4]; setp.ne.u32 %p1, %r1, 0; @%p1 bra told;
	nanosleep.u32 1000;
	bra again;
told:
	membar.sys; add.u32 %r2, %r1, 1; st.volatile.global.u32 [%rd_h+8], %r2;
	ld.global.u32 %r5, [%rd_a];
"""


def mapped(emulator, words):
    """Pinned memory: an array on the host, and its device pointer."""
    host, on_device = ctypes.c_void_p(), ctypes.c_void_p()
    emulator.check(emulator.cuda.cudaHostAlloc(ctypes.byref(host), ctypes.c_size_t(4 * words), 2))
    emulator.check(emulator.cuda.cudaHostGetDevicePointer(ctypes.byref(on_device), host, 0))
    array = np.ctypeslib.as_array(ctypes.cast(host, ctypes.POINTER(ctypes.c_uint32)), (words,))
    array[:] = 0
    return array, on_device


def until(over):
    end = time.monotonic() + 20
    while not over():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_host_talks_with_a_kernel(emulator):
    """One host thread waits for the kernel, another reads what it stores and tells it to stop."""
    words, pointer = mapped(emulator, 3)
    kernel, other = emulator.kernel(ptx(TALK, "ha"), "test"), emulator.put(np.zeros(1, np.uint32))

    def host():
        until(lambda: words[0] == 1)
        assert words[2] == 0
        words[1] = 41
        until(lambda: words[2] == 42)

    with patience(20):
        together([lambda: emulator.launch(kernel, [pointer, other], block=1), host])


def test_a_thread_asks_and_stops_its_own_kernel(emulator):
    """Does what a thread with a time limit does: it queries an event, which is not ready, and then stops the kernel."""
    words, pointer = mapped(emulator, 3)
    kernel, other = emulator.kernel(ptx(TALK, "ha"), "test"), emulator.put(np.zeros(1, np.uint32))
    cuda, event = emulator.cuda, ctypes.c_void_p()
    emulator.check(cuda.cudaEventCreate(ctypes.byref(event)))
    emulator.enqueue(kernel, [pointer, other], block=1)
    emulator.check(cuda.cudaEventRecord(event, None))
    assert [cuda.cudaEventQuery(event), cuda.cudaStreamQuery(None)] == [600, 600]
    assert words.tolist() == [1, 0, 0]
    words[1] = 7
    until(lambda: cuda.cudaEventQuery(event) == 0)
    assert words[2] == 8


def test_handles_of_memory(emulator):
    """Within the process handles give the memory itself, and only while it is allocated."""
    cuda, handle, opened = emulator.cuda, (ctypes.c_uint8 * 64)(), ctypes.c_void_p()

    class Handle(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_uint8 * 64)]

    def open_it():
        return cuda.cudaIpcOpenMemHandle(ctypes.byref(opened), Handle(handle), 1)

    assert open_it() == 400
    memory = emulator.put(np.arange(8, dtype=np.uint32))
    emulator.check(cuda.cudaIpcGetMemHandle(handle, memory))
    emulator.check(open_it())
    assert emulator.get(opened, 8, np.uint32).tolist() == list(range(8))
    emulator.check(cuda.cudaIpcCloseMemHandle(opened))
    assert cuda.cudaIpcCloseMemHandle(opened) == 1
    emulator.free(memory)
    assert open_it() == 205
    can = ctypes.c_int(7)
    assert [cuda.cudaDeviceCanAccessPeer(ctypes.byref(can), 0, 0), can.value] == [0, 0]
    assert [cuda.cudaDeviceCanAccessPeer(ctypes.byref(can), 0, 1), cuda.cudaDeviceEnablePeerAccess(0, 0)] == [101, 101]
    cuda.cudaGetLastError()


def test_the_hosts_own_memory_is_registered(emulator):
    words, cuda = np.array([5, 0], np.uint32), emulator.cuda
    pointer = ctypes.c_void_p(words.ctypes.data)
    kernel = emulator.kernel(ptx("\n\tld.global.u32 %r1, [%rd_h]; st.global.u32 [%rd_h+4], %r1;", "h"), "test")
    with pytest.raises(LaunchError, match="out of bounds"):
        emulator.launch(kernel, [pointer], block=1)
    emulator.check(cuda.cudaHostRegister(pointer, ctypes.c_size_t(8), 2))
    assert cuda.cudaHostRegister(pointer, ctypes.c_size_t(8), 2) == 712
    emulator.launch(kernel, [pointer], block=1)
    assert words.tolist() == [5, 5]
    emulator.check(cuda.cudaHostUnregister(pointer))
    assert cuda.cudaHostUnregister(pointer) == 713
    cuda.cudaGetLastError()
